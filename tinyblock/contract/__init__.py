"""What each layer guarantees, as tests: `tinyblock verify DIR`, or pytest on this folder.

test_every_layer.py has what holds for every layer. A file such as test_rope.py has a
layer's equation as a formula, its cases, and what this layer alone guarantees.
"""
