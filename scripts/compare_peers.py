"""Compare the speed of a Block with other projects' layers and with the bare matrix products.

The peers get the weights, the inputs, the dtype and the threads of the Block, whose shape checks are on (the default).
Outputs and input gradients must agree before anything is timed. Then Block and peer take turns in one process. The
report shows the median and the spread of the ratios. A ratio is Block time / peer time; below 1, the Block is faster.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # this checkout's tinyblock, installed or not

import jaxtyping
import torch
from lab.cli import Parser, check_outputs, device_of, positive_int, run, seed
from lab.environment import environment
from lab.files import write_text
from lab.presets import PRESETS
from lab.progress import Progress
from peers import records
from peers.candidates import Peer, block_of
from peers.cases import CUDA_PRESETS, SUFFIXES, Case, all_cases
from peers.measuring import Comparison
from peers.pooling import pool
from peers.projects import PEERS
from peers.report import page, text_of, verdicts

EXAMPLES = """\
examples:
  compare one case with one peer and the bare products:
    python scripts/compare_peers.py --case train-bf16-768 --peers transformers,limit
  run every case in three processes, and write one report:
    for i in 1 2 3; do python scripts/compare_peers.py --threads 1 --json $i.json; done
    python scripts/compare_peers.py --report 1.json 2.json 3.json --write docs/benchmarks.md
  compare a changed Block with the previous one, without and with token positions:
    python scripts/compare_peers.py --threads 1 --case forward,train,one-token --against ../before
    python scripts/compare_peers.py --threads 1 --case forward,train,one-token --against ../before --positions
  measure on a GPU for about five minutes:
    python scripts/compare_peers.py --device cuda --seconds 300 --json gpu.json

peers:
"""


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    cases: list[Case]
    peers: Mapping[str, Peer]
    device: torch.device


# --- Options ---------------------------------------------------------------------------------------------------------


def make_parser() -> Parser:
    lines = [
        f"  {name:16}{peer.title.removeprefix(f'{name}: ')}"
        for name, peer in PEERS.items()
    ]
    parser = Parser(
        "compare_peers.py", (__doc__ or "").strip(), EXAMPLES + "\n".join(lines)
    )
    add_choices(parser)
    add_measurement(parser)
    add_outputs(parser)
    return parser


def add_choices(parser: Parser) -> None:
    group = parser.add_argument_group("what to compare")
    group.add_argument(
        "--case",
        metavar="NAME,...",
        help="names of cases, their beginnings, or patterns such as *bf16* (default: all); runs eager cases first",
    )
    group.add_argument(
        "--peers",
        metavar="NAME,...",
        help="peers, listed below (default: all; with --against: control and against)",
    )
    group.add_argument(
        "--against",
        type=Path,
        metavar="PATH",
        help='a checkout of tinyblock, whose Block becomes the peer "against"',
    )
    group.add_argument(
        "--positions",
        action="store_true",
        help="pass token positions to the Block; peers get precomputed tables",
    )
    group.add_argument(
        "--presets",
        metavar="NAME,...",
        help=f"also measure these models (default: on CUDA {','.join(CUDA_PRESETS)}; otherwise none)",
    )
    group.add_argument(
        "--no-qk-norm",
        action="store_true",
        help="leave out the q/k norm of presets, which some projects lack",
    )


def add_measurement(parser: Parser) -> None:
    group = parser.add_argument_group("how to measure")
    group.add_argument(
        "--device",
        default="cpu",
        metavar="D",
        help="cpu, cuda or cuda:N (default: cpu)",
    )
    group.add_argument(
        "--threads",
        type=positive_int,
        default=torch.get_num_threads(),
        metavar="N",
        help="threads (default: torch's choice)",
    )
    group.add_argument(
        "--rounds",
        type=positive_int,
        default=15,
        metavar="N",
        help="turns per peer (default: 15)",
    )
    group.add_argument(
        "--seconds",
        type=positive_seconds,
        default=float("inf"),
        metavar="S",
        help="start no peer after S seconds (default: no limit)",
    )
    group.add_argument(
        "--seed",
        type=seed,
        default=0,
        metavar="N",
        help="seed of weights and inputs (default: 0)",
    )
    group.add_argument(
        "--quick",
        action="store_true",
        help="use tiny sizes, to test the script; the times mean nothing",
    )


def add_outputs(parser: Parser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help="write the report as Markdown, after each case",
    )
    group.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write every sample as JSON, after each case",
    )
    group.add_argument(
        "--report",
        type=Path,
        nargs="+",
        metavar="JSON",
        help="combine these runs into one report, of all cases or those of --case; measure nothing",
    )


def check_options(parser: Parser, options: argparse.Namespace) -> None:
    """Raise a ValueError for files that cannot be written, and for options without effect."""
    check_outputs(options, "json", "write")
    if options.report is None:
        return
    for name, value in vars(options).items():
        is_set = value != parser.get_default(name)
        if is_set and name not in ("report", "case", "write"):
            option = name.replace("_", "-")
            raise ValueError(f"--report measures nothing: leave out --{option}")


def positive_seconds(text: str) -> float:
    """Return the time that an option gives; raise an error of argparse if it is none."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not found > 0:
        raise argparse.ArgumentTypeError(
            f"must be a number of seconds above 0, got {text!r}"
        )
    return found


def choose(
    what: str, text: str, names: Iterable[str], patterns: bool = False
) -> list[str]:
    """Return the names in a list with commas, each once; with `patterns`, also those that begin so or match."""
    known = list(names)
    chosen: list[str] = []
    for word in map(str.strip, text.split(",")):
        if not word:
            continue
        found = [word] if word in known else []
        if patterns:
            found = [
                name
                for name in known
                if name.startswith(word) or fnmatchcase(name, word)
            ]
        if not found:
            raise ValueError(f"unknown {what} {word!r}; use one of {', '.join(known)}")
        chosen += found
    if not chosen:
        raise ValueError(f"a {what} must be named, got {text!r}: see --help")
    return list(dict.fromkeys(chosen))


def plan_of(options: argparse.Namespace) -> Plan:
    """Return what the options choose."""
    device = device_of(options.device)
    return Plan(cases_of(options, device), peers_of(options), device)


def peers_of(options: argparse.Namespace) -> dict[str, Peer]:
    peers = dict(PEERS)
    chosen = list(peers)
    if options.against is not None:
        peers["against"] = block_of(options.against)
        chosen = ["control", "against"]
    if options.peers is not None:
        chosen = choose("peer", options.peers, peers)
    if options.against is not None and "against" not in chosen:
        raise ValueError("--against has no effect: add against to --peers")
    return {name: peers[name] for name in chosen}


def cases_of(options: argparse.Namespace, device: torch.device) -> list[Case]:
    """Return the chosen cases, eager ones first: compiling takes the most time, and --seconds may end it."""
    presets: Sequence[str] = CUDA_PRESETS if device.type == "cuda" else ()
    if options.presets is not None:
        presets = choose("preset", options.presets, PRESETS)
    known = all_cases(device, presets, qk_norm=not options.no_qk_norm)
    cases = {case.name: case for case in known}
    if options.case is not None:
        chosen = choose("case", options.case, cases, patterns=True)
        cases = {name: cases[name] for name in chosen}
    found = sorted(cases.values(), key=lambda case: list(SUFFIXES).index(case.how))
    if options.positions:
        found = [case.with_positions() for case in found]
    if options.quick:
        found = [case.shrunk() for case in found]
    return found


# --- Measure ---------------------------------------------------------------------------------------------------------


class Output:
    """The record of a run, and the files that it is written to after each case."""

    def __init__(self, run: records.Run, options: argparse.Namespace) -> None:
        self.run = run
        self.json_path = options.json
        self.page_path = options.write

    def save(self) -> None:
        if self.json_path is not None:
            records.write(self.json_path, self.run)
        if self.page_path is not None:
            write_text(self.page_path, page([self.run]))


def measure(plan: Plan, options: argparse.Namespace) -> int:
    """Measure the cases, print and write the results after each, and return the exit code."""
    torch.set_num_threads(options.threads)
    measured = records.Run(
        environment=environment(plan.device, options.seed),
        rounds=options.rounds,
        quick=options.quick,
        shape_checks=not jaxtyping.config.jaxtyping_disable,
    )
    output = Output(measured, options)
    progress = Progress()
    comparison = Comparison(
        peers=plan.peers,
        device=plan.device,
        rounds=options.rounds,
        seed=options.seed,
        quick=options.quick,
        deadline=time.monotonic() + options.seconds,
        begin=progress.start,
    )
    with progress:
        for case in plan.cases:
            progress.prefix = f"{case.name}: "
            measured.cases = (*measured.cases, comparison.measure(case))
            output.save()
            print(text_of(pool([measured])[-1]), end="\n\n", flush=True)
        if plan.device.type == "cuda":
            count_kernels(plan, comparison, measured)
    measured.interrupted = False
    output.save()
    print(verdicts(pool([measured])))
    return exit_code(measured)


def count_kernels(plan: Plan, comparison: Comparison, measured: records.Run) -> None:
    """Count the kernels of each case, after everything is timed, while time is left."""
    for case, result in zip(plan.cases, measured.cases, strict=True):
        if not comparison.late():
            comparison.count_kernels(case, result)


def exit_code(measured: records.Run) -> int:
    """Return 1 if the Block failed, or if a peer disagrees with it."""
    for case in measured.cases:
        if case.failure is not None:
            return 1
        for row in case.rows:
            if row.status == "disagrees":
                return 1
    return 0


# --- Report ----------------------------------------------------------------------------------------------------------


def runs_of(options: argparse.Namespace) -> list[records.Run]:
    """Read the runs of --report, with the cases of --case."""
    runs: list[records.Run] = []
    for path in options.report:
        found = records.read(path)
        if found in runs:
            raise ValueError(f"--report must name each run once: leave out {path}")
        runs.append(found)
    if options.case is not None:
        names = dict.fromkeys(case.name for run in runs for case in run.cases)
        chosen = choose("case", options.case, names, patterns=True)
        for each in runs:
            each.cases = tuple(case for case in each.cases if case.name in chosen)
    return runs


def report(runs: Sequence[records.Run], target: Path | None) -> int:
    """Write and print the page of earlier runs."""
    text = page(runs)
    if target is not None:
        write_text(target, text)
    print(text)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(argv)
    with parser.reporting():
        check_options(parser, options)
        if options.report is None:
            work = partial(measure, plan_of(options), options)
        else:
            work = partial(report, runs_of(options), options.write)
    return run(parser, work)


if __name__ == "__main__":
    sys.exit(main())
