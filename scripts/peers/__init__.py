"""The parts of compare_peers.py: other layers with the weights of a Block, interleaved timing, and the report."""
