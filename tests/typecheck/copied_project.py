"""The lines of docs/shape_checks.md in a project that has a copy of typecheck.py alone.

test_processes.py runs this beside the lines, as lines.py, and my_module.py.
"""

import lines  # type: ignore[import-not-found]
import my_module  # type: ignore[import-not-found]
import torch
from jaxtyping import TypeCheckError

x = torch.ones(2, 3, 8)
width = lines.Scale(8)
right = [
    lambda: lines.scores(x, x),
    lambda: width(x),
    lambda: my_module.scale(x, x[0, 0]),
]
wrong = [
    lambda: lines.scores(x, x[..., :7]),
    lambda: width(x[..., :7]),
    lambda: my_module.scale(x, x),
]

for call in right:
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    assert torch.equal(compiled(), call())
for call in wrong:
    try:
        call()
    except TypeCheckError:
        continue
    raise SystemExit("a wrong call was not checked")
