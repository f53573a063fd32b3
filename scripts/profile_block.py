"""Show where the time and the memory of a Transformer block go, and how far it is from this machine's limit.

python scripts/profile_block.py
python scripts/profile_block.py --preset llama-3.1-8b --dtype bfloat16 --compile --json profile.json
python scripts/profile_block.py --help
"""

import os
import sys

# Both before torch and tinyblock are imported. The shape checks cost little, but a profile should not have to argue so;
# Kineto, the engine of torch.profiler, announces its start and stop on stderr.
os.environ["JAXTYPING_DISABLE"] = "1"
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

from profiling.cli import main

if __name__ == "__main__":
    sys.exit(main())
