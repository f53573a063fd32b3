"""What profile_block.py consists of."""
