"""What each layer guarantees, as tests: `tinyblock verify DIR`, or pytest on this folder.

A page such as test_rope.py is about one layer. It has the layer's equation as a formula,
a table of cases, and what this layer alone guarantees. By an import, it takes the tests
of every_layer.py, which run with the page's cases.

checks.py has the comparison with the formula. target.py finds the layers, conftest.py
passes them to the tests, and report.py prints what `tinyblock verify` says.
"""
