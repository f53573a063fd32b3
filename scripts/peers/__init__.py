"""What compare_peers.py calls: other layers with the weights of a Block, timed in turns with it, and the report."""
