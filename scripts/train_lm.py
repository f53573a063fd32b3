"""Train a language model of bytes made of tinyblock's layers, and compare the choices that they offer.

python scripts/train_lm.py --help shows examples. It trains on CUDA where there is a GPU. Pictures need matplotlib.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout's tinyblock, installed or not

from training.cli import main

if __name__ == "__main__":
    sys.exit(main())
