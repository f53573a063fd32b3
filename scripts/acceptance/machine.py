"""Write down the machine, and which packages are missing on it. Exit code 1 without the device that is asked for."""

import importlib.metadata
import sys

import torch
from profiling.environment import environment

from .options import parse
from .rows import Rows

PACKAGES = {  # and what is missing without them
    "beartype": "the shape checks, which are off",
    "transformers": "Hugging Face's layer",
    "liger-kernel": "Liger's layer",
    "litgpt": "litgpt's layer",
    "matplotlib": "the picture",
}


def main() -> int:
    options = parse(__doc__)
    rows = Rows(options.out / "results.jsonl", "machine")
    if options.device == "cuda" and not torch.cuda.is_available():
        rows.add("CUDA", "failed", f"torch {torch.__version__} sees none here: --device cpu walks the same code")
        return 1
    facts = environment(torch.device(options.device), 0)
    cuda = f", CUDA {facts['cuda']}, driver {facts['driver']}" if facts["cuda"] else ""
    rows.add("device", "ok", f"{facts['device']}{cuda}")
    rows.add("software", "ok", f"torch {facts['torch']}, Python {facts['python']}, commit {facts['commit']}")
    for package, absent in PACKAGES.items():
        try:
            rows.add(f"{package} {importlib.metadata.version(package)}", "ok")
        except importlib.metadata.PackageNotFoundError:
            rows.add(absent, "missing", f"{package} is not installed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
