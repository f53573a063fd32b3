"""Compare two profiles of scripts/profile_block.py: the ratio of every time, and the interval in which it may lie.

python scripts/compare_profiles.py OLD.json NEW.json
python scripts/compare_profiles.py --help

Requires only torch, einops and jaxtyping.
"""

import os
import sys
from pathlib import Path

# Set before tinyblock is imported: its shape checks need beartype, and nothing runs here.
os.environ["JAXTYPING_DISABLE"] = "1"
# This checkout's tinyblock, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from profiling.compare_cli import main

if __name__ == "__main__":
    sys.exit(main())
