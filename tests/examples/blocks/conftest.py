"""The shapes in the annotations of all blocks are checked."""

from importlib import import_module
from pathlib import Path

from tinyblock import typecheck

BLOCKS = Path(__file__).parents[3] / "examples" / "blocks"

for path in sorted(BLOCKS.glob("*.py")):
    typecheck(import_module(path.stem))
