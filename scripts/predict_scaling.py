"""Predict a lower bound on the time of a training step on many devices, from sizes, links and a datasheet.

python scripts/predict_scaling.py dp=512 --preset llama-3.1-8b --vocab 128256 --batch-size 512 --seq-len 8192 \
  --dtype bfloat16 --mode step --ceilings "NVIDIA H100 80GB HBM3" --link 450e9,50e9
python scripts/predict_scaling.py --help

This takes seconds on any machine and allocates no tensors. docs/scaling.md explains the model.
"""

import os
import sys
from pathlib import Path

# Before tinyblock is imported: the shape checks need beartype.
os.environ["JAXTYPING_DISABLE"] = "1"
# This checkout's tinyblock, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from profiling.predict_cli import main

if __name__ == "__main__":
    sys.exit(main())
