"""What train_lm.py calls: text, model, training, checkpoints, comparisons and pictures."""
