"""What the programs share: command line, sizes and costs, timing, machine, memory, kernels, tables, progress, plots."""

import importlib.util

import jaxtyping

# Without beartype the layers run unchecked. tinyblock reads this setting when it is imported, which is later.
if importlib.util.find_spec("beartype") is None:
    jaxtyping.config.update("jaxtyping_disable", True)
