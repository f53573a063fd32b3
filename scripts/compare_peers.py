"""Compare the speed of a Block with other projects' layers and with the bare matrix products.

The peers get the weights, the inputs, the dtype and the threads of the Block, whose shape checks are on, as by default.
Outputs and input gradients must agree before anything is timed. Then Block and peer take turns in one process. The
report shows the median and the spread of the ratios of the turns, Block / peer: below 1 the Block is faster.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # this checkout's tinyblock, installed or not

import jaxtyping
import torch
from lab.cli import Parser, check_outputs, device_of, run
from lab.environment import environment
from lab.files import read_json, write_json, write_text
from lab.presets import PRESETS
from lab.progress import Progress
from peers.candidates import block_of
from peers.cases import CUDA_PRESETS, HOW, Case, all_cases
from peers.measuring import Comparison
from peers.projects import PEERS
from peers.report import SCHEMA, page, summarize, text_of, verdicts

EPILOG = """\
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
""" + "\n".join(
    f"  {name:16}{peer.title.removeprefix(f'{name}: ')}" for name, peer in PEERS.items()
)


def parse(argv: Sequence[str] | None) -> tuple[Parser, argparse.Namespace]:
    """Return the parser, and the options with `device`, `peers`, `cases` and `report` as objects."""
    parser = Parser("compare_peers.py", (__doc__ or "").strip(), EPILOG)
    add = parser.add_argument
    add(
        "--case",
        default="",
        metavar="NAME,...",
        help="cases, or prefixes or patterns such as *bf16* (default: all); eager first",
    )
    add(
        "--peers",
        metavar="NAME,...",
        help="peers, listed below (default: all; with --against, control and against)",
    )
    add(
        "--against",
        type=Path,
        metavar="PATH",
        help='a checkout of tinyblock, whose Block becomes the peer "against"',
    )
    add(
        "--positions",
        action="store_true",
        help="pass token positions to the Block; peers get tables looked up before",
    )
    add(
        "--device",
        default="cpu",
        metavar="D",
        help="cpu, cuda or cuda:N (default: cpu)",
    )
    add(
        "--presets",
        metavar="NAME,...",
        help=f"also measure these models (default: on CUDA {','.join(CUDA_PRESETS)})",
    )
    add(
        "--threads",
        type=int,
        default=torch.get_num_threads(),
        metavar="N",
        help="threads (default: torch's choice)",
    )
    add(
        "--rounds",
        type=int,
        default=15,
        metavar="N",
        help="turns per peer (default: 15)",
    )
    add(
        "--seconds",
        type=float,
        default=float("inf"),
        metavar="S",
        help="start no peer after S seconds (default: inf)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of weights and inputs (default: 0)",
    )
    add(
        "--quick",
        action="store_true",
        help="tiny sizes, to test the script; the times mean nothing",
    )
    add(
        "--write",
        type=Path,
        metavar="FILE",
        help="write the report as Markdown, after each case",
    )
    add = parser.add_mutually_exclusive_group().add_argument
    add("--json", type=Path, metavar="FILE", help="write every sample, after each case")
    add(
        "--report",
        type=Path,
        nargs="+",
        metavar="JSON",
        help="pool and report these runs, without measuring",
    )
    args = parser.parse_args(argv)
    with parser.reporting():
        for name in ("rounds", "threads"):
            if getattr(args, name) < 1:
                raise ValueError(
                    f"--{name} must be at least 1, got {getattr(args, name)}"
                )
        check_outputs(args, "json", "write")
        args.report = [
            read_json(path, SCHEMA, "--report") for path in args.report or ()
        ]
        args.device = device_of(args.device)
        peers = {
            **PEERS,
            **({"against": block_of(args.against)} if args.against else {}),
        }
        args.peers = (
            choose("peer", args.peers or "control,against" * bool(args.against), peers)
            or peers
        )
        args.cases = cases_of(args)
    return parser, args


def choose(
    what: str, words: str, known: Mapping[str, Any], patterns: bool = False
) -> dict[str, Any]:
    """Return the items named in a list, in its order, each once; with `patterns`, all that begin so or match."""
    chosen: dict[str, Any] = {}
    for word in filter(None, (word.strip() for word in words.split(","))):
        begins = [
            name
            for name in known
            if patterns and (name.startswith(word) or fnmatchcase(name, word))
        ]
        found = {
            name: item for name, item in known.items() if name == word or name in begins
        }
        if not found:
            raise ValueError(f"unknown {what} {word!r}; use one of {', '.join(known)}")
        chosen |= found
    return chosen


def cases_of(args: argparse.Namespace) -> list[Case]:
    """Return the chosen cases, eager ones first: compiling takes the most time, and --seconds may end it."""
    presets = (
        args.presets
        if args.presets is not None
        else ",".join(CUDA_PRESETS) * (args.device.type == "cuda")
    )
    known = {
        case.name: case
        for case in all_cases(args.device, choose("preset", presets, PRESETS))
    }
    chosen = (choose("case", args.case, known, patterns=True) or known).values()
    cases = sorted(chosen, key=lambda case: list(HOW).index(case.how))
    cases = [case.with_positions() for case in cases] if args.positions else cases
    return [case.shrunk() for case in cases] if args.quick else cases


def measure(args: argparse.Namespace) -> int:
    """Measure the cases, print and write the results after each, and return the exit code."""
    torch.set_num_threads(args.threads)
    facts = {
        "rounds": args.rounds,
        "quick": args.quick,
        "shape_checks": not jaxtyping.config.jaxtyping_disable,
    }
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "environment": environment(args.device, args.seed),
        "settings": facts,
    }
    document |= {"interrupted": True, "cases": []}  # interrupted until it is over
    progress, deadline = Progress(), time.monotonic() + args.seconds
    comparison = Comparison(
        args.peers,
        args.device,
        args.rounds,
        args.seed,
        args.quick,
        deadline,
        progress.start,
    )

    def save() -> list[dict[str, Any]]:
        document["cases"] = summarize(document)
        if args.json:
            write_json(args.json, document)
        if args.write:
            write_text(args.write, page([document]))
        return document["cases"]

    with progress:
        for case in args.cases:
            progress.prefix = f"{case.name}: "
            document["cases"].append(comparison.measure(case))
            print(text_of(save()[-1]), end="\n\n", flush=True)
        for case, result in zip(args.cases, document["cases"], strict=True):
            if (
                args.device.type == "cuda"
                and "failure" not in result
                and not comparison.late()
            ):
                comparison.count_kernels(case, result)
    document["interrupted"] = False
    print(verdicts(save()))
    return int(
        any(
            row["status"] == "disagrees"
            for case in document["cases"]
            for row in case["rows"]
        )
    )


def report(args: argparse.Namespace) -> int:
    """Write and print the page of earlier runs."""
    text = page(args.report)
    if args.write:
        write_text(args.write, text)
    print(text)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser, args = parse(argv)
    return run(parser, lambda: report(args) if args.report else measure(args))


if __name__ == "__main__":
    sys.exit(main())
