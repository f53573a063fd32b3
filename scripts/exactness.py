"""Measure the errors of tinyblock's layers and of other projects' layers, for docs/exactness.md."""

import math
import statistics
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # this checkout's tinyblock, installed or not

import torch
from lab.cli import Parser, check_outputs, device_of, run
from lab.environment import environment, versions
from lab.files import write_text
from lab.progress import Progress
from lab.tables import markdown, number
from peers.errors import (
    COMPILED,
    DTYPES,
    FORWARD,
    OURS,
    PROJECTS,
    ROPES,
    ROUNDED,
    SECTIONS,
    Errors,
    measure,
)

EPILOG = """\
examples:
  replace the tables and the picture of the page, which needs all projects: pip install -e ".[exactness]"
    python scripts/exactness.py --write docs/exactness.md --plot docs/exactness.png
  measure the installed projects on a GPU:
    python scripts/exactness.py --device cuda
  check that everything works:
    python scripts/exactness.py --quick
"""
MARK = "<!-- scripts/exactness.py replaces everything below this line. -->\n"
PACKAGES = (
    "transformers",
    "litgpt",
    "torchtune",
    "x-transformers",
    "rotary-embedding-torch",
)
PEERS = [project for project in PROJECTS if project != OURS]
Pairs = Sequence[tuple[float, float]]


def rms(pairs: Pairs) -> float:
    return statistics.median(error for error, _ in pairs)


def cell(project: str, measured: Mapping[str, Pairs]) -> str:
    """Return the median root mean square error, its range if that is visible, and the largest error.

    Those of a project that is 1% closer than tinyblock with every seed are in bold.
    """
    errors, largest = zip(*measured[project], strict=True)
    if math.isinf(max(errors)):
        return "not finite"
    low, middle, high = (number(of(errors)) for of in (min, statistics.median, max))
    text = (
        f"{middle}{f' ({low}-{high})' if low != high else ''}, {number(max(largest))}"
    )
    pairs = zip(errors, (ours for ours, _ in measured[OURS]), strict=True)
    closer = project in PEERS and all(theirs < 0.99 * ours for theirs, ours in pairs)
    return f"**{text}**" if closer else text


def table(errors: Errors, section: str, dtype: str) -> str:
    """Return the errors of one layer in one dtype."""
    columns = {
        what: measured
        for (*key, what), measured in errors.items()
        if key == [section, dtype]
    }
    projects = [
        project
        for project in (ROUNDED, OURS, COMPILED, *PEERS)
        if project in columns[FORWARD]
    ]
    rows = [
        [project, *(cell(project, measured) for measured in columns.values())]
        for project in projects
    ]
    return markdown([dtype, *columns], rows)


def ratios(errors: Errors, section: str, peer: str) -> str:
    """Return the smallest and the largest ratio of tinyblock's error to the project's, if it has this layer."""
    found = [
        rms(of[OURS]) / rms(of[peer])
        for (name, *_), of in errors.items()
        if name == section and peer in of
    ]
    return f"{min(found):.2f}-{max(found):.2f}" if found else ""


def page(errors: Errors, facts: Mapping[str, object]) -> str:
    """Return the generated part of the page."""
    sections = [
        section for section in SECTIONS if (section, "float32", FORWARD) in errors
    ]
    packages = ", ".join(map(" ".join, versions("torch", *PACKAGES).items()))
    parts = [
        f"Measured on {facts['device']}, with {packages}, at commit {facts['commit']}."
    ]
    rows = [
        [section, *(ratios(errors, section, peer) for peer in PEERS)]
        for section in sections
    ]
    parts.append(markdown(["tinyblock / project", *PEERS], rows))
    for section in sections:
        parts += [f"## {section}", *(table(errors, section, dtype) for dtype in DTYPES)]
    return "\n\n".join(parts) + "\n"


def draw(errors: Errors, facts: Mapping[str, object], path: Path) -> None:
    """Draw RoPE's relative error over the position, one line for each project."""
    from lab.plots import COLORS, MARKERS, new_figure, save

    figure = new_figure(
        "RoPE: relative error over the position",
        f"{facts['device']}, torch {facts['torch']}",
    )
    for axes, dtype in zip(
        figure.subplots(1, 2, sharey=True), ("float32", "bfloat16"), strict=True
    ):
        eps, windows = (
            torch.finfo(DTYPES[dtype]).eps,
            [name for name in ROPES if (name, dtype, FORWARD) in errors],
        )
        for index, project in enumerate(
            name for name in PROJECTS if name in errors[windows[0], dtype, FORWARD]
        ):
            style = {
                "color": COLORS[index],
                "marker": MARKERS[index],
                "markersize": 12 - 1.2 * index,
            }  # lines coincide
            measured = [
                eps * rms(errors[name, dtype, FORWARD][project]) for name in windows
            ]
            axes.loglog(
                [ROPES[name] for name in windows],
                measured,
                lw=5 - 0.5 * index,
                label=project,
                **style,
            )
        axes.set(
            title=dtype,
            xlabel="position in tokens",
            ylabel="relative error, root mean square",
        )
        axes.grid(alpha=0.3)
    figure.axes[0].legend(loc="upper left", frameon=False)
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> int:
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
        help="one seed, tiny layers, two positions, never compiled",
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="replace the tables of this page"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw RoPE's error over the position"
    )
    args = parser.parse_args(argv)
    head = ""
    with parser.reporting():
        check_outputs(args, "write", "plot")
        device = device_of(args.device)
        if args.write and args.quick:
            raise ValueError(
                "--quick measures one seed, too few for --write: leave one of them out"
            )
        if args.write:
            head, mark, _ = (
                args.write.read_text() if args.write.exists() else ""
            ).partition(MARK)
            if not mark:
                raise ValueError(
                    f"--write must be a page with the line {MARK.strip()}, got {args.write}"
                )
            if missing := set(PACKAGES) - set(versions(*PACKAGES)):
                raise ValueError(
                    f"--write requires {', '.join(sorted(missing))}: pip install -e '.[exactness]'"
                )

    def work() -> int:
        torch.set_num_threads(
            1
        )  # the tensors are small: a second thread would wait longer than it works
        facts = environment(device, seed=0)
        with Progress() as progress, warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # of the peers, which this project cannot fix
            errors = measure(device, args.quick, progress.start)
        text = page(errors, facts)
        print(text)
        if args.plot:
            draw(errors, facts, args.plot)
        if args.write:
            write_text(args.write, head + MARK + "\n" + text)
        return 0

    return run(parser, work)


if __name__ == "__main__":
    sys.exit(main())
