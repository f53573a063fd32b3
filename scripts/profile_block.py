"""Show where the time and the memory of a Transformer block go, and how far it is from this machine's limit.

python scripts/profile_block.py
python scripts/profile_block.py --preset llama-3.1-8b --dtype bfloat16 --compile --json profile.json
python scripts/profile_block.py --help

Needs torch, einops and jaxtyping alone; draws nicer tables with rich, and pictures with matplotlib.
"""

import os
import sys
from pathlib import Path

# Both before torch and tinyblock are imported. The shape checks cost little, but a profile should not have to argue so,
# and they need beartype; Kineto, the engine of torch.profiler, announces its start and stop on stderr.
os.environ["JAXTYPING_DISABLE"] = "1"
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout's tinyblock, installed or not

from profiling.cli import main

if __name__ == "__main__":
    sys.exit(main())
