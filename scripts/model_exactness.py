"""Measure a real model for docs/exactness.md: the errors of its logits, and which results depend on their batch."""

import argparse
import statistics
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # this checkout's tinyblock, installed or not

import torch
from lab.cli import Parser, check_outputs, run
from lab.environment import environment, versions
from lab.files import write_text
from lab.progress import Progress
from lab.tables import markdown
from peers.pages import replaced

EPILOG = """\
examples:
  download the model, once, and rewrite the tables of the page:
    make story
    python scripts/model_exactness.py --write docs/exactness.md
  check that everything works, with a single text:
    python scripts/model_exactness.py --quick

The script requires the packages of the examples: pip install -e ".[examples]"
"""
COMMAND = "scripts/model_exactness.py"  # in the marks around its tables


def spread(values: Sequence[float], form: str) -> str:
    """Return the median, and the range if there are several values."""
    middle, low, high = (of(values) for of in (statistics.median, min, max))
    text = format(middle, form)
    if len(values) > 1:
        text += f" ({low:{form}}-{high:{form}})"
    return text


def errors_table(errors: dict[tuple[str, int, str], list[float]]) -> str:
    from peers.real_model import DTYPES, OURS, STARTS, THEIRS

    cases = [(dtype, start) for dtype in DTYPES for start in STARTS]
    header = ["logits", *(f"{dtype}, from {start:,}" for dtype, start in cases)]
    rows = []
    for project in (OURS, THEIRS):
        cells = [spread(errors[*case, project], ".1e") for case in cases]
        rows.append([project, *cells])
    ratios = []
    for case in cases:
        pairs = zip(errors[*case, OURS], errors[*case, THEIRS], strict=True)
        ratios.append(spread([ours / theirs for ours, theirs in pairs], ".2f"))
    rows.append([f"{OURS} / {THEIRS}", *ratios])
    return markdown(header, rows)


def invariance_table(differences: dict[tuple[str, str, str, str], float]) -> str:
    from peers.real_model import CONDITIONS, OURS, THEIRS

    columns = [(project, each) for project in (OURS, THEIRS) for each in CONDITIONS]
    cases = list(dict.fromkeys(key[:2] for key in differences))
    rows = []
    for case in cases:
        values = [differences[*case, *column] for column in columns]
        cells = ["equal" if value == 0 else f"{value:.0e}" for value in values]
        rows.append([", ".join(case), *cells])
    header = [f"{project}, {condition}" for project, condition in columns]
    return markdown(["layer, dtype", *header], rows)


def make_parser() -> Parser:
    parser = Parser("model_exactness.py", (__doc__ or "").strip(), EPILOG)
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FILE",
        help="the GGUF file (default: the one that `make story` downloads)",
    )
    parser.add_argument("--quick", action="store_true", help="measure a single text")
    parser.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help="rewrite the two tables in FILE, such as docs/exactness.md",
    )
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Raise a ValueError before the measurement, which takes minutes, if its result cannot be written."""
    check_outputs(options, "write")
    if not options.model.exists():
        raise ValueError(f"there is no model at {options.model}: run `make story`")
    with options.model.open("rb") as file:
        begins_as_gguf = file.read(4) == b"GGUF"
    if not begins_as_gguf:
        raise ValueError(f"--model must be a GGUF file, got {options.model}")
    if options.write is None:
        return
    if options.quick:
        raise ValueError(
            "--quick measures one text, too few for --write: leave one out"
        )
    replaced(options.write, COMMAND, "")


def measure(model: Path, quick: bool) -> str:
    """Return both tables, and where they were measured."""
    import peers.real_model as measuring

    torch.set_num_threads(1)
    facts = environment(torch.device("cpu"), seed=0)
    count = 1 if quick else len(measuring.MODULES)
    with Progress() as progress, warnings.catch_warnings():
        # transformers warns, which this project cannot mend.
        warnings.simplefilter("ignore")
        tokens = measuring.texts(model, count)
        with measuring.checkpoint(model) as folder:
            errors = measuring.measure_errors(folder, tokens, progress.start)
            differences = measuring.measure_invariance(folder, tokens, progress.start)
    packages = ", ".join(map(" ".join, versions("torch", "transformers").items()))
    python = sys.version.split()[0]
    origin = (
        f"Measured on {facts.device}, one thread, with {packages}, Python {python}, "
        f"at commit {facts.commit}."
    )
    return "\n\n".join([origin, errors_table(errors), invariance_table(differences)])


def measure_and_write(options: argparse.Namespace) -> int:
    text = measure(options.model, options.quick)
    print(text)
    if options.write:
        page = replaced(options.write, COMMAND, text + "\n")
        write_text(options.write, page)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(argv)
    # The first measures with transformers, and the second finds the model that is already downloaded.
    try:
        import peers.real_model  # noqa: F401
        import story
    except ImportError as error:
        parser.error(f"{error}: pip install -e '.[examples]'")
    options.model = options.model or story.cached()
    with parser.reporting():
        check_options(options)
    return run(parser, lambda: measure_and_write(options))


if __name__ == "__main__":
    sys.exit(main())
