"""Measure the errors of tinyblock's layers and of other projects' layers, for docs/exactness.md."""

import math
import statistics
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout's tinyblock, installed or not

import torch
from lab.cli import Parser, check_outputs, device_of, run
from lab.environment import environment, versions
from lab.files import atomic
from lab.progress import Progress
from lab.tables import markdown, number
from peers.errors import (
    COMPILED,
    DTYPES,
    FORWARD,
    OURS,
    PASSES,
    PROJECTS,
    ROPES,
    ROUNDED,
    SECTIONS,
    SIZE,
    STARTS,
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
PACKAGES = ("transformers", "litgpt", "torchtune", "x-transformers", "rotary-embedding-torch")
ROWS = (ROUNDED, OURS, COMPILED, *(project for project in PROJECTS if project != OURS))


def sections(errors: Errors) -> list[str]:
    """Return the sections of the page; --quick measures fewer."""
    return [section for section in SECTIONS if (section, "float32", OURS, FORWARD) in errors]


def rms(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.median(error for error, _ in pairs)


def cell(pairs: Sequence[tuple[float, float]]) -> str:
    """Return the median root mean square error, its range if that is visible, and the largest error."""
    if math.isinf(max(error for error, _ in pairs)):
        return "not finite"
    low, middle, high = (number(of([error for error, _ in pairs])) for of in (min, statistics.median, max))
    return f"{middle}{f' ({low}-{high})' if low != high else ''}, {number(max(largest for _, largest in pairs))}"


def table(errors: Errors, section: str, dtype: str) -> str:
    """Return the errors of one layer in one dtype, those of a project that is 1% closer than tinyblock in bold."""
    passes = [what for what in PASSES if (section, dtype, OURS, what) in errors]
    rows = []
    for project in (row for row in ROWS if (section, dtype, row, FORWARD) in errors):
        rows.append([project])
        for what in passes:
            pairs, ours = errors[section, dtype, project, what], errors[section, dtype, OURS, what]
            closer = project in PROJECTS and rms(pairs) < 0.99 * rms(ours)
            rows[-1].append(f"**{cell(pairs)}**" if closer else cell(pairs))
    return markdown([dtype, *passes], rows)


def summary(errors: Errors) -> str:
    """Return the ratios of tinyblock's errors to those of each project, from the smallest to the largest."""
    peers, rows = [project for project in PROJECTS if project != OURS], []
    for section in sections(errors):
        rows.append([section])
        for peer in peers:
            pairs = [
                (ours, errors[section, dtype, peer, what])
                for (of, dtype, project, what), ours in errors.items()
                if (of, project) == (section, OURS) and (section, dtype, peer, what) in errors
            ]
            ratios = [rms(ours) / rms(theirs) for ours, theirs in pairs]
            rows[-1].append(f"{min(ratios):.2f}-{max(ratios):.2f}" if ratios else "")
    return markdown(["tinyblock / project", *peers], rows)


def page(errors: Errors, facts: Mapping[str, object]) -> str:
    """Return the generated part of the page."""
    packages = ", ".join(map(" ".join, versions("torch", *PACKAGES).items()))
    where = f"Measured on {facts['device']}, with {packages}, at commit {facts['commit']}."
    parts = [where, summary(errors)]
    for section in sections(errors):
        parts += [f"## {section}", *(table(errors, section, dtype) for dtype in DTYPES)]
    return "\n\n".join(parts) + "\n"


def draw(errors: Errors, facts: Mapping[str, object], path: Path) -> None:
    """Draw RoPE's relative error over the position, one line for each project."""
    from lab.plots import COLORS, MARKERS, new_figure, save

    figure = new_figure("RoPE: relative error over the position", f"{facts['device']}, torch {facts['torch']}")
    for axes, dtype in zip(figure.subplots(1, 2, sharey=True), ("float32", "bfloat16"), strict=True):
        eps = torch.finfo(DTYPES[dtype]).eps
        for index, project in enumerate(row for row in PROJECTS if (ROPES[0], dtype, row, FORWARD) in errors):
            measured = [pairs for rope in ROPES if (pairs := errors.get((rope, dtype, project, FORWARD)))]
            middles = [start + SIZE.seq_len / 2 for start in STARTS[: len(measured)]]
            style = {"color": COLORS[index], "marker": MARKERS[index], "markersize": 12 - 1.2 * index}  # lines coincide
            axes.loglog(middles, [eps * rms(pairs) for pairs in measured], lw=5 - 0.5 * index, label=project, **style)
        axes.set(title=dtype, xlabel="position in tokens", ylabel="relative error, root mean square")
        axes.grid(alpha=0.3)
    figure.axes[0].legend(loc="upper left", frameon=False)
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("exactness.py", (__doc__ or "").strip(), EPILOG)
    parser.add_argument("--device", default="cpu", metavar="D", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument("--quick", action="store_true", help="one seed and fewer positions, never compiled")
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace the tables of this page")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw RoPE's error over the position")
    args = parser.parse_args(argv)
    head = ""
    with parser.reporting():
        check_outputs(args, "write", "plot")
        device = device_of(args.device)
        if args.write and args.quick:
            raise ValueError("--quick measures one seed, too few for --write: leave one of them out")
        if args.write:
            head, mark, _ = (args.write.read_text() if args.write.exists() else "").partition(MARK)
            if not mark:
                raise ValueError(f"--write must be a page with the line {MARK.strip()}, got {args.write}")
            if missing := set(PACKAGES) - set(versions(*PACKAGES)):
                raise ValueError(f"--write requires {', '.join(sorted(missing))}: pip install -e '.[exactness]'")

    def work() -> int:
        facts = environment(device, seed=0)
        with Progress() as progress, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the peers, which this project cannot fix
            errors = measure(device, args.quick, progress.start)
        text = page(errors, facts)
        print(text)
        if args.plot:
            draw(errors, facts, args.plot)
        if args.write:
            with atomic(args.write) as temporary:
                temporary.write_text(head + MARK + "\n" + text)
        return 0

    return run(parser, work)


if __name__ == "__main__":
    sys.exit(main())
