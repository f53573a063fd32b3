"""Measure a Block beside other projects' layers and beside the bare matrix products, and report the ratios.

The peers get the weights, the inputs, the dtype and the threads of the Block, which keeps its shape checks on, as a
user has it. Outputs and input gradients must agree before anything is timed. Then Block and peer take turns, in one
process, and the ratio of each turn (Block / peer, so below 1 the Block is faster) is what is reported, as a median with
its spread.

    python scripts/compare_peers.py
    python scripts/compare_peers.py --help
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout's tinyblock, installed or not

import torch
from lab.files import atomic, require_writable
from lab.presets import PRESETS
from lab.tables import Section, show
from peers.candidates import block_of
from peers.cases import CUDA_PRESETS, DTYPES, Case, all_cases, shrink, with_positions
from peers.measuring import Settings
from peers.projects import PEERS
from peers.report import markdown, sections, verdicts
from peers.runs import load_run, measure

from tinyblock.vendoring.parser import OneLineParser

EPILOG = """\
examples:
  everything, three times over, into docs/benchmarks.md:
    python scripts/compare_peers.py --threads 1 --processes 3 --write docs/benchmarks.md
  one row of it, against one peer:
    python scripts/compare_peers.py --case train-bf16-768 --peers transformers,limit
  all cases of one token:
    python scripts/compare_peers.py --case one-token --json one-token.json
  a changed Block beside the one before the change, with token positions and without:
    python scripts/compare_peers.py --threads 1 --case forward,train,one-token --against ../before
    python scripts/compare_peers.py --threads 1 --case forward,train,one-token --against ../before --positions
  on a GPU, and then one report of both machines:
    python scripts/compare_peers.py --device cuda --json gpu.json
    python scripts/compare_peers.py --report cpu.json gpu.json --write docs/benchmarks.md

peers:
""" + "\n".join(f"  {name:16}{peer.title}" for name, peer in PEERS.items())


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[Case]]:
    """Return the arguments and the cases that they choose; what cannot work ends the program here, before measuring."""
    parser = OneLineParser(
        description=(__doc__ or "").split("\n\n    ")[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--case",
        default="",
        metavar="NAME,...",
        help="cases, or how their names begin, in order (default: all)",
    )
    add("--peers", metavar="NAME,...", help="peers, listed below (default: all; with --against, control and against)")
    add("--against", type=Path, metavar="PATH", help='a checkout of tinyblock, whose Block becomes the peer "against"')
    add("--positions", action="store_true", help="give the Block token positions, which peers have in their tables")
    add("--dtype", choices=DTYPES, help="only the cases of this dtype")
    add("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    add("--presets", metavar="NAME,...", help=f"models measured besides (default: on CUDA {','.join(CUDA_PRESETS)})")
    add("--threads", type=int, default=torch.get_num_threads(), metavar="N", help="torch's (default: its own choice)")
    add("--rounds", type=int, default=15, metavar="N", help="turns of Block and peer (default: 15)")
    add("--processes", type=int, default=1, metavar="N", help="measure in N processes, one after another")
    add("--seed", type=int, default=0, metavar="N", help="of weights and inputs (default: 0)")
    add("--quick", action="store_true", help="tiny sizes, to see that it works; the times mean nothing")
    add("--json", type=Path, metavar="FILE", help="write every sample")
    add("--write", type=Path, metavar="FILE", help="write the report as Markdown, over what is there")
    add("--report", type=Path, nargs="+", metavar="JSON", help="report these earlier runs instead of measuring")
    args = parser.parse_args(argv)

    for name in ("rounds", "processes", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.report and args.json:
        parser.error("--json writes what was measured, and --report measures nothing")
    for path in filter(None, (args.json, args.write)):
        try:
            require_writable(path)
        except OSError as error:
            parser.error(f"cannot write {path}: {error.strerror or error}")
    try:
        args.report = [load_run(path) for path in args.report or ()]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    try:
        args.device = torch.device(args.device)
    except RuntimeError:
        parser.error(f"no such device: {args.device}")
    if args.device.type not in ("cpu", "cuda"):
        parser.error(f"--device must be cpu or cuda, got {args.device}")
    if args.device.type == "cuda" and (args.device.index or 0) >= torch.cuda.device_count():
        parser.error(f"there is no {args.device} here; {torch.cuda.device_count()} CUDA devices were found")

    def chosen(text: str, known: Iterable[str], what: str) -> list[str]:
        words = [word.strip() for word in text.split(",") if word.strip()]
        for word in words:
            if word not in known:
                parser.error(f"unknown {what} {word!r}; there are {', '.join(known)}")
        return words

    peers = dict(PEERS)
    if args.against:
        if not (args.against / "tinyblock" / "__init__.py").is_file():
            parser.error(f"--against needs a checkout of tinyblock, and {args.against} is none")
        peers["against"] = block_of(args.against)
        args.peers = args.peers or "control,against"
    args.peers = {name: peers[name] for name in chosen(args.peers or ",".join(PEERS), peers, "peer")}
    if args.presets is None:
        args.presets = ",".join(CUDA_PRESETS) if args.device.type == "cuda" else ""
    known_cases = all_cases(args.device, chosen(args.presets, PRESETS, "preset"))
    words = tuple(word.strip() for word in args.case.split(",") if word.strip())
    for word in words:
        if not any(case.name.startswith(word) for case in known_cases):
            parser.error(f"no case begins with {word!r}; there are {', '.join(case.name for case in known_cases)}")
    wanted = (case for word in words or ("",) for case in known_cases if case.name.startswith(word))
    cases = list({case.name: case for case in wanted}.values())  # in the order of the words, each once
    cases = [case for case in cases if args.dtype is None or case.dtype == DTYPES[args.dtype]]
    if not cases:
        parser.error(f"none of these cases is in {args.dtype}")
    if args.positions:
        cases = [case if case.work == "accuracy" else with_positions(case) for case in cases]
    return args, [shrink(case) for case in cases] if args.quick else cases


def main(argv: Sequence[str] | None = None) -> int:
    args, cases = parse(argv)

    def save(run: dict[str, Any]) -> None:
        if args.json:
            with atomic(args.json) as temporary:
                temporary.write_text(json.dumps(run, indent=1) + "\n")
        write([run])

    def write(runs: Sequence[dict[str, Any]]) -> None:
        if args.write:
            with atomic(args.write) as temporary:
                temporary.write_text(markdown(runs))

    runs = args.report
    if runs:
        write(runs)
    else:
        settings = Settings(args.device, args.threads, args.rounds, args.processes, args.seed, args.quick)
        runs = [measure(cases, args.peers, settings, save)]
    shown: list[Section] = []
    for run in runs:
        summary, failed = verdicts(run["cases"])
        shown += [*sections(run), "\n".join([summary, *failed])]
    try:
        show(shown)
    except BrokenPipeError:  # whoever read the tables has seen enough; the files are written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if any(run["interrupted"] for run in runs):
        return 130
    disagreed = any(row["status"] == "disagrees" for run in runs for case in run["cases"] for row in case["rows"])
    return 1 if disagreed else 0


if __name__ == "__main__":
    sys.exit(main())
