"""What cuda_acceptance.sh calls: parts of the acceptance that are no tests, their rows, and the summary."""
