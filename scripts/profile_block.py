"""Show where the time and memory of a Transformer block go, and how far it is from this machine's limit.

python scripts/profile_block.py
python scripts/profile_block.py --preset llama-3.1-8b --dtype bfloat16 --compile --json profile.json
python scripts/profile_block.py --help

Requires only torch, einops and jaxtyping; rich shows the progress, and matplotlib draws figures.
"""

import os
import sys
from pathlib import Path

# Set before torch and tinyblock are imported. The shape checks cost little, but they need beartype. Kineto, the engine
# of torch.profiler, announces its start and stop on stderr.
os.environ["JAXTYPING_DISABLE"] = "1"
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
# CUPTI, below Kineto, slows launches until it is torn down, which matters to a sweep: there, timings follow a profile.
# Without a sweep it stays: a second profile soon after a teardown sees no kernels (kineto pull request 1554).
if any(argument.startswith("--sweep") for argument in sys.argv):
    os.environ.setdefault("TEARDOWN_CUPTI", "1")
sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # this checkout's tinyblock, installed or not

from profiling.cli import main

if __name__ == "__main__":
    sys.exit(main())
