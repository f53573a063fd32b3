"""What the programs share: command line, sizes and costs, timing, machine, memory, kernels, tables, progress, plots."""

import importlib.util
import os

# Without beartype the layers run unchecked. This package is imported before jaxtyping and tinyblock, which read it.
if importlib.util.find_spec("beartype") is None:
    os.environ.setdefault("JAXTYPING_DISABLE", "1")
