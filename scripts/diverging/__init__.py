"""What diverge.py consists of."""
