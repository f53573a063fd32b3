"""Train a byte-level language model made of tinyblock's layers, or compare variants of it.

`python scripts/train_lm.py --help` shows examples. It runs on a GPU if there is one. Figures require matplotlib.
"""

import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # this checkout's tinyblock, installed or not

from training.cli import main

if __name__ == "__main__":
    sys.exit(main())
