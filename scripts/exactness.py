"""Measure the errors of tinyblock's layers and of other projects' layers, for docs/exactness.md."""

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # this checkout's tinyblock, installed or not

import torch
from lab.cli import Parser, check_outputs, device_of, run
from lab.environment import environment, versions
from lab.files import write_text
from lab.progress import Progress
from peers.errors import measure
from peers.errors_report import draw, tables
from peers.pages import replaced

EPILOG = """\
examples:
  rewrite the tables and the picture of docs/exactness.md (requires all projects: pip install -e ".[exactness]"):
    python scripts/exactness.py --write docs/exactness.md --plot docs/exactness.png
  measure the installed projects on a GPU, and rewrite the tables of the GPU:
    python scripts/exactness.py --device cuda --write docs/exactness.md
  check that everything works:
    python scripts/exactness.py --quick
"""
PACKAGES = (
    "transformers",
    "litgpt",
    "torchtune",
    "x-transformers",
    "rotary-embedding-torch",
)


def make_parser() -> Parser:
    parser = Parser("exactness.py", (__doc__ or "").strip(), EPILOG)
    parser.add_argument(
        "--device",
        default="cpu",
        metavar="D",
        help="cpu, cuda or cuda:N (default: cpu)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="measure one seed, small layers and two positions, never compiled",
    )
    parser.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help="rewrite this device's tables in FILE, such as docs/exactness.md",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw RoPE's error versus the position",
    )
    return parser


def command_of(device: torch.device) -> str:
    """Return the command in the marks around the tables of a device."""
    return f"scripts/exactness.py --device {device.type}"


def check_page(options: argparse.Namespace, device: torch.device) -> None:
    """Raise a ValueError before the measurement, which takes minutes, if its tables cannot be written."""
    if options.write is None:
        return
    if options.quick:
        raise ValueError(
            "--quick measures one seed, too few for --write: leave one out"
        )
    replaced(options.write, command_of(device), "")
    missing = set(PACKAGES) - set(versions(*PACKAGES))
    if missing:
        names = ", ".join(sorted(missing))
        raise ValueError(f"--write requires {names}: pip install -e '.[exactness]'")


def measure_and_write(options: argparse.Namespace, device: torch.device) -> int:
    # The tensors are small: a second thread would wait longer than it works.
    torch.set_num_threads(1)
    facts = environment(device, seed=0)
    with Progress() as progress, warnings.catch_warnings():
        # The peers warn, which this project cannot mend.
        warnings.simplefilter("ignore")
        errors = measure(device, options.quick, progress.start)
    packages = ", ".join(map(" ".join, versions("torch", *PACKAGES).items()))
    origin = f"Measured on {facts.device}, with {packages}, at commit {facts.commit}."
    text = f"{origin}\n\n{tables(errors)}\n"
    print(text)
    if options.plot:
        draw(errors, facts, options.plot)
    if options.write:
        page = replaced(options.write, command_of(device), text)
        write_text(options.write, page)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(argv)
    with parser.reporting():
        check_outputs(options, "write", "plot")
        device = device_of(options.device)
        check_page(options, device)
    return run(parser, lambda: measure_and_write(options, device))


if __name__ == "__main__":
    sys.exit(main())
