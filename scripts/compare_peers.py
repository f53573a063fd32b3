"""Measure a Block beside other projects' layers and beside the bare matrix products, and report the ratios.

The peers get the weights, the inputs, the dtype and the threads of the Block, which keeps its shape checks on, as a
user has it. Outputs and input gradients must agree before anything is timed. Then Block and peer take turns, in one
process, and the ratio of each turn (Block / peer, so below 1 the Block is faster) is what is reported, as a median with
its spread.

    python scripts/compare_peers.py
    python scripts/compare_peers.py --help
"""

import argparse
import copy
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jaxtyping
import torch
from peers.candidates import PEERS, Candidate, Peer, Unavailable, block_of, build
from profiling.costs import part_costs
from profiling.environment import environment
from profiling.files import atomic, require_writable
from profiling.machine import datasheet
from profiling.memory import SavedBytes
from profiling.presets import PRESETS, Size
from profiling.report import Section, Table, number, share, show
from profiling.timing import Spread, interleave, paired_ratio
from torch import Tensor

from tinyblock import Block, RotaryPositionalEmbedding
from tinyblock.vendoring.parser import OneLineParser

SCHEMA = "tinyblock.compare_peers/1"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
ACCURACY = "accuracy-bf16"
CUDA_PRESETS = ("llama-3.2-1b", "llama-3.1-8b")
SAMPLE_SECONDS = 0.05
VERDICTS = {True: "met", False: "missed", None: ""}
MFU = {"causal": "matmul_flops", "dense": "dense_matmul_flops"}

EXAMPLES = """\
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
"""


@dataclass(frozen=True)
class Case:
    """What is run, and the ratios that it must not exceed; a target of None is measured and not judged."""

    name: str
    size: Size
    dtype: torch.dtype
    train: bool
    compiled: bool = False
    positions: bool = False
    to_peers: float | None = None
    to_limit: float | None = None

    def target(self, peer: str) -> float | None:
        return {"limit": self.to_limit, "operations": None, "control": None, "against": None}.get(peer, self.to_peers)

    def describe(self) -> str:
        size = self.size
        work = "forward and backward" if self.train else "forward without gradients"
        how = "compiled" if self.compiled else "eager"
        shape = f"batch {size.batch_size}, sequence {size.seq_len}, d_model {size.d_model}, heads {size.num_heads}"
        positions = ", token positions given" if self.positions else ""
        shared = f", key heads {size.num_kv_heads}" if size.num_kv_heads != size.num_heads else ""
        return f"{work}, {how}, {_name(self.dtype)}, {shape}{shared}, d_ff {size.d_ff}{positions}"


def all_cases(device: torch.device, presets: Iterable[str]) -> list[Case]:
    """Return the cases of every device, and on CUDA those of the presets."""
    bf16, f32 = torch.bfloat16, torch.float32
    small, wide = Size(4, 512, 768, 12, 12, 64, 2048), Size(4, 512, 2048, 32, 32, 64, 5440)
    token = dataclasses.replace(small, batch_size=1, seq_len=1)
    cases = [
        Case("forward-f32-768", small, f32, False),
        Case("forward-bf16-768", small, bf16, False),
        Case("forward-compiled-f32-768", small, f32, False, True),
        Case("forward-compiled-bf16-768", small, bf16, False, True),
        Case("train-bf16-768", small, bf16, True, to_peers=1.03, to_limit=1.10),
        Case("train-f32-768", small, f32, True, to_peers=1.03, to_limit=1.04),
        Case("train-bf16-2048", wide, bf16, True, to_peers=1.03, to_limit=1.04),
        Case("train-compiled-bf16-768", small, bf16, True, True, to_peers=1.03, to_limit=1.03),
        Case("train-compiled-f32-768", small, f32, True, True, to_peers=1.03, to_limit=1.03),
        Case("one-token-f32", token, f32, False, to_peers=1.00, to_limit=1.15),
        Case("one-token-bf16", token, bf16, False, to_peers=1.00, to_limit=1.20),
        Case("one-token-compiled-f32", token, f32, False, True, to_peers=1.00, to_limit=1.15),
        Case("one-token-compiled-bf16", token, bf16, False, True, to_peers=1.00, to_limit=1.15),
    ]
    for name in presets if device.type == "cuda" else ():
        p = PRESETS[name]
        size = Size(4, 2048, p.d_model, p.num_heads, p.num_kv_heads, p.d_head, p.d_ff, theta=p.theta, eps=p.eps)
        cases += [
            Case(
                f"{mode}-{'compiled-' if compiled else ''}bf16-{name}",
                size,
                bf16,
                mode == "train",
                compiled,
                to_peers=1.03,
            )
            for mode in ("forward", "train")
            for compiled in (False, True)
        ]
    return cases


def with_positions(case: Case) -> Case:
    """Return the case with positions 0, 1, 2, ... given to the Block; no target was set for it."""
    return dataclasses.replace(case, name=f"{case.name}-positions", positions=True, to_peers=None, to_limit=None)


def shrink(case: Case) -> Case:
    """Return the case at a size that only shows that everything works: what it measures means nothing."""
    size = dataclasses.replace(
        case.size,
        batch_size=min(2, case.size.batch_size),
        seq_len=min(16, case.size.seq_len),
        d_model=64,
        num_heads=4,
        num_kv_heads=4 * case.size.num_kv_heads // case.size.num_heads,
        d_head=16,
        d_ff=128,
    )
    return dataclasses.replace(case, size=size, to_peers=None, to_limit=None)


# Measuring ------------------------------------------------------------------------------------------------------------


def make_blocks(
    size: Size, dtype: torch.dtype, device: torch.device, seed: int, count: int = 1
) -> tuple[list[Block], Tensor]:
    """Return Blocks that share one rope and whose gains are not all 1, and an input for them."""
    generator = torch.Generator().manual_seed(seed)
    rope = RotaryPositionalEmbedding(size.theta, size.d_head, size.seq_len)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        blocks = [
            Block(
                size.d_model,
                size.num_heads,
                size.d_ff,
                rope=rope,
                num_kv_heads=size.num_kv_heads,
                d_head=size.d_head,
                eps=size.eps,
            )
            for _ in range(count)
        ]
    with torch.no_grad():
        for gain in (norm.weight for block in blocks for norm in (block.ln1, block.ln2)):
            gain.add_(torch.randn(gain.shape, generator=generator), alpha=0.1)
    x = torch.randn(size.batch_size, size.seq_len, size.d_model, generator=generator)
    return [block.to(device=device, dtype=dtype) for block in blocks], x.to(device=device, dtype=dtype)


class Contestant:
    """A candidate with an input, ready to run: forward, or forward and backward to the input and all of the weights."""

    def __init__(self, candidate: Candidate, x: Tensor, case: Case, seed: int, takes_positions: bool = False) -> None:
        self.x = x.clone().requires_grad_(case.train)
        if case.positions and takes_positions:
            positions = {"token_positions": torch.arange(case.size.seq_len, device=x.device)}
            candidate = dataclasses.replace(candidate, keywords=candidate.keywords | positions)
        self.candidate = candidate
        self.call = torch.compile(candidate.call, dynamic=False) if case.compiled else candidate.call
        self.inputs = [self.x, *candidate.parameters]
        with torch.set_grad_enabled(case.train):
            self.forward()  # compiles, before anything is counted
            saved = SavedBytes(candidate.constants())
            self.output, self.saved_bytes = saved.of(lambda: _tuple(self.forward()))
        # The same numbers for the same shapes: gradients can be compared between contestants.
        generator = torch.Generator().manual_seed(seed + 1)
        self.output_gradients = [
            torch.randn(t.shape, generator=generator).to(device=t.device, dtype=t.dtype) for t in self.output
        ]
        self.input_gradient = self.train()[0] if case.train else None
        self.output = tuple(t.detach() for t in self.output)
        self.run: Callable[[], object] = self.train if case.train else self.forward

    def forward(self) -> Any:
        return self.call(self.x, **self.candidate.keywords)

    def train(self) -> Sequence[Tensor]:
        return torch.autograd.grad(_tuple(self.forward()), self.inputs, self.output_gradients)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm())


def tolerance(dtype: torch.dtype) -> float:
    """Return the relative error up to which two layers compute the same function.

    Two roundings in dtype; in float32 the sums, which each layer orders in its way, and a norm without eps weigh more.
    """
    return max(2 * torch.finfo(dtype).eps, 2e-5)


@dataclass(frozen=True)
class Settings:
    device: torch.device
    rounds: int
    sample_seconds: float
    seed: int


def measure_case(
    case: Case,
    peers: Mapping[str, Peer],
    settings: Settings,
    report: Callable[[str], None],
    result: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure the Block beside each peer in turn; whatever goes wrong with one is its row, and the others go on.

    `result` is filled and returned: a caller who may be interrupted keeps the rows until then.
    """
    torch.compiler.reset()
    result = {} if result is None else result
    result |= {"case": case.name, "describe": case.describe(), "train": case.train}
    result |= {"dtype": _name(case.dtype), "rows": []}
    try:
        (block,), x = make_blocks(case.size, case.dtype, settings.device, settings.seed)
        ours = Contestant(Candidate.of(block), x, case, settings.seed, takes_positions=True)
    except Exception as error:
        result["failure"] = one_line(error)
        return result
    result["saved_bytes"] = ours.saved_bytes
    costs = [ahead + back * case.train for ahead, back in part_costs(case.size, case.dtype.itemsize).values()]
    result |= {flops: sum(getattr(cost, flops) for cost in costs) for flops in MFU.values()}
    for name, peer in peers.items():
        row = {"peer": name, "title": peer.title, "version": peer.version(), "target": case.target(name)}
        report(f"{case.name}: {name}")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the peers': they are not ours to mend
                row |= measure_peer(peer, block, ours, x, case, settings)
        except Unavailable as reason:
            row |= {"status": "skipped", "reason": str(reason)}
        except Exception as error:
            row |= {"status": "failed", "reason": one_line(error)}
        result["rows"].append(row)
    return result


def measure_peer(
    peer: Peer, block: Block, ours: Contestant, x: Tensor, case: Case, settings: Settings
) -> dict[str, Any]:
    theirs = Contestant(build(peer, block, case.size.seq_len), x, case, settings.seed, peer.takes_positions)
    row: dict[str, Any] = {"saved_bytes": theirs.saved_bytes}
    if peer.agrees:
        row["error"] = relative_error(theirs.output[0], ours.output[0])
        if theirs.input_gradient is not None and ours.input_gradient is not None:
            row["gradient_error"] = relative_error(theirs.input_gradient, ours.input_gradient)
        worst, allowed = max(row["error"], row.get("gradient_error", 0.0)), tolerance(case.dtype)
        if not worst <= allowed:
            return row | {"status": "disagrees", "reason": f"relative error {worst:.2g}, above {allowed:.2g}"}
    with torch.set_grad_enabled(case.train):
        samples = interleave(
            {"tinyblock": ours.run, "peer": theirs.run},
            rounds=settings.rounds,
            sample_seconds=settings.sample_seconds,
            warmup_calls=1 if case.train else 3,
        )
    return row | {"status": "measured", "processes": [samples]}


def measure_accuracy(settings: Settings, quick: bool, layers: int = 8, seeds: int = 5) -> dict[str, Any]:
    """Compare the bfloat16 error of a stack, against its own float64 run, with that of Hugging Face's same stack."""
    size = Size(1, 16, 64, 4, 4, 16, 128) if quick else Size(1, 128, 768, 12, 12, 64, 2048)
    shape = f"sequence {size.seq_len}, d_model {size.d_model}, {seeds} seeds"
    result: dict[str, Any] = {
        "case": ACCURACY,
        "dtype": "bfloat16",
        "describe": f"relative error of {layers} layers in bfloat16 against their own float64 run, {shape}",
        "target": None if quick else 1.0,
    }

    def error(stack: list[Candidate], exact: list[Candidate], x: Tensor) -> float:
        y, exact_y = x, x.double()
        for layer, exact_layer in zip(stack, exact, strict=True):
            y = _tuple(layer.call(y, **layer.keywords))[0]
            exact_y = _tuple(exact_layer.call(exact_y, **exact_layer.keywords))[0]
        return relative_error(y, exact_y)

    errors: dict[str, list[float]] = {"tinyblock": [], "transformers": []}
    try:
        for seed in range(settings.seed, settings.seed + seeds):
            blocks, x = make_blocks(size, torch.bfloat16, settings.device, seed, layers)
            exact = [copy.deepcopy(block).double() for block in blocks]
            stacks = {
                "tinyblock": tuple([Candidate.of(b) for b in stack] for stack in (blocks, exact)),
                "transformers": tuple(
                    [build(PEERS["transformers"], b, size.seq_len) for b in stack] for stack in (blocks, exact)
                ),
            }
            with torch.no_grad():
                for name, (stack, exact_stack) in stacks.items():
                    errors[name].append(error(stack, exact_stack, x))
    except Unavailable as reason:
        return result | {"status": "skipped", "reason": str(reason)}
    except Exception as failure:
        return result | {"status": "failed", "reason": one_line(failure)}
    return result | {"status": "measured", "errors": errors}


def pool(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the same cases measured in several processes; a row that one process could not measure is not measured."""
    pooled = copy.deepcopy(runs[0])
    for run in runs[1:]:
        cases = {case["case"]: case for case in run["cases"]}
        for case in pooled["cases"]:
            others = {row["peer"]: row for row in cases.get(case["case"], {}).get("rows", [])}
            for row in case["rows"]:
                other = others.get(row["peer"])
                if other is None or row["status"] != "measured":
                    continue
                if other["status"] == "measured":
                    row["processes"] += other["processes"]
                else:
                    row.pop("processes")
                    row.update(other)
    return pooled


def summarize(run: dict[str, Any]) -> dict[str, Any]:
    """Add to a run what follows from its samples: medians, ratios with their spread, and the targets met."""
    peak = datasheet(str(run["environment"]["device"]))
    for case in run["cases"]:
        flops_per_second = peak.flops_per_second(DTYPES[case["dtype"]]) if peak else None
        for row in case.get("rows", []):
            if row["status"] != "measured":
                continue
            ours, theirs = ([s for p in row["processes"] for s in p[name]] for name in ("tinyblock", "peer"))
            row["ratio"] = dataclasses.asdict(paired_ratio(ours, theirs))
            row["process_medians"] = [paired_ratio(p["tinyblock"], p["peer"]).median for p in row["processes"]]
            for name, samples in (("tinyblock", ours), ("peer", theirs)):
                seconds = Spread.of(samples).median
                row[f"{name}_ms"] = 1e3 * seconds
                for kind, flops in MFU.items():
                    if flops_per_second and flops in case:
                        row[f"{name}_mfu_{kind}"] = case[flops] / seconds / flops_per_second
            row["met"] = None if row["target"] is None else row["ratio"]["median"] <= row["target"]
            # Only where something is saved, and by a peer that could not save less without computing it again.
            judged = (
                case["train"]
                and row["peer"] not in ("limit", "operations", "control", "against")
                and row["target"] is not None
            )
            row["saved_met"] = case["saved_bytes"] <= row["saved_bytes"] if judged else None
        if case.get("errors"):
            ours, theirs = case["errors"].values()
            case["ratio"] = dataclasses.asdict(paired_ratio(ours, theirs))
            case["met"] = None if case["target"] is None else case["ratio"]["median"] <= case["target"]
    return run


# Reporting ------------------------------------------------------------------------------------------------------------


def sections(run: dict[str, Any]) -> list[Section]:
    """Return a table for each case of a summarized run, each followed by why rows of it were not measured."""
    return [
        section
        for case in run["cases"]
        for section in (_accuracy_sections(case) if case["case"] == ACCURACY else _case_sections(case))
    ]


def _case_sections(case: dict[str, Any]) -> list[Section]:
    columns = ["peer", "ratio", "p20-p80", "processes", "target", "verdict", "ms", "peer ms", "outputs differ"]
    columns += ["saved MiB", "peer MiB", "saved verdict"] if case["train"] else []
    with_mfu = any("peer_mfu_causal" in row for row in case["rows"])
    columns += ["MFU causal", "peer's", "MFU dense", "peer's"] if with_mfu else []
    table = Table(f"{case['case']}: {case['describe']}", columns)
    reasons = [f"Failed: {case['failure']}"] if "failure" in case else []
    for row in case["rows"]:
        cells = [f"{row['title']} {row['version'] or ''}".strip()]
        if row["status"] == "measured":
            cells += [*_ratio(row), _processes(row["process_medians"]), _target(row), VERDICTS[row["met"]]]
            cells += [number(row["tinyblock_ms"], 4), number(row["peer_ms"], 4)]
            cells += [f"{row['error']:.1e}" if "error" in row else "not compared"]
            if case["train"]:
                cells += [f"{b / 2**20:.1f}" for b in (case["saved_bytes"], row["saved_bytes"])]
                cells += [VERDICTS[row["saved_met"]]]
            if with_mfu:
                cells += [share(row.get(f"{who}_mfu_{kind}")) for kind in MFU for who in ("tinyblock", "peer")]
        else:
            cells += [row["status"], "", "", _target(row)]
            reasons.append(f"{row['title']} {row['status']}: {row['reason']}")
        table.rows.append(cells + [""] * (len(columns) - len(cells)))
    return [table, "\n".join(reasons)] if reasons else [table]


def _accuracy_sections(case: dict[str, Any]) -> list[Section]:
    columns = ["peer", "ratio", "p20-p80", "target", "verdict", "error", "peer's error"]
    table = Table(f"{case['case']}: {case['describe']}", columns)
    if case["status"] != "measured":
        table.rows.append(["transformers", case["status"], "", _target(case), "", "", ""])
        return [table, f"transformers {case['status']}: {case['reason']}"]
    medians = [f"{Spread.of(case['errors'][name]).median:.1e}" for name in ("tinyblock", "transformers")]
    table.rows.append(["transformers", *_ratio(case), _target(case), VERDICTS[case["met"]], *medians])
    return [table]


def _ratio(row: dict[str, Any]) -> list[str]:
    ratio = row["ratio"]
    return [f"{ratio['median']:.3f}", f"{ratio['p20']:.3f}-{ratio['p80']:.3f}"]


def _processes(medians: Sequence[float]) -> str:
    return f"{len(medians)}: {min(medians):.3f}-{max(medians):.3f}" if len(medians) > 1 else "1"


def _target(row: dict[str, Any]) -> str:
    return "" if row["target"] is None else f"<= {row['target']:.2f}"


def verdicts(cases: Iterable[dict[str, Any]]) -> tuple[str, list[str]]:
    """Return how many targets were met, and a line for each that was missed or could not be judged."""
    met, lines = 0, []
    for case in cases:
        if "failure" in case:
            lines.append(f"not judged: {case['case']}, {case['failure']}")
        for row in case.get("rows", [case]):
            what = case["case"] if row is case else f"{case['case']} against {row['peer']}"
            if row["target"] is not None and row["status"] != "measured":
                lines.append(f"not judged: {what}, {row['status']}")
            met += (row.get("met") is True) + (row.get("saved_met") is True)
            if row.get("met") is False:
                lines.append(f"missed: {what}, ratio {row['ratio']['median']:.3f}, target {_target(row)}")
            if row.get("saved_met") is False:
                ours, theirs = (f"{b / 2**20:.1f} MiB" for b in (case["saved_bytes"], row["saved_bytes"]))
                lines.append(f"missed: {what}, saves {ours} for backward, target <= {theirs}")
    judged = met + sum(line.startswith("missed") for line in lines)
    return f"{met} of {judged} targets met" if judged else "Nothing was judged", lines


def markdown(runs: Sequence[dict[str, Any]]) -> str:
    """Return docs/benchmarks.md: everything in it comes from the runs, those of one machine and commit together."""
    lines = [
        "# Benchmarks",
        "",
        "Written by `scripts/compare_peers.py`; changes by hand are lost.",
        "",
        "Each ratio is the time of tinyblock's Block, shape checks included, divided by the peer's: below 1 the Block",
        "is faster. Both have the same weights, inputs, dtype and threads, and take turns in one process; the ratio is",
        "the median of those of single turns, with their 20th and 80th percentile, and over several processes the",
        "range of their medians. Outputs and, in training, input gradients agreed before anything was timed; the table",
        "shows the relative error of the outputs. Training differentiates with respect to the input and all weights.",
        "The limit is the bare matrix products and `scaled_dot_product_attention`; the operations are the Block's own,",
        "one after another, without modules, checks or options; the control is a second copy of the Block,",
        "and shows the noise. Saved MiB are kept for backward, weights not counted, and the Block is to save no more",
        "than any peer. MFU is the share of the datasheet's FLOP/s that the FLOPs of the matrix products make:",
        'those that a causal mask leaves ("causal"), or with every score of the attention ("dense").',
    ]
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault(json.dumps(_machine(run), sort_keys=True), []).append(run)
    for group in groups.values():
        machine = _machine(group[0])
        commit = f", commit {machine['commit']}" if machine["commit"] else ""
        lines += ["", f"## {machine['device']}{commit}", "", "| | |", "|---|---|"]
        lines += [
            f"| {key.replace('_', ' ')} | {_cell(str(fact))} |" for key, fact in machine.items() if fact is not None
        ]
        lines += ["", "| date | command | rounds | processes | seed |", "|---|---|---|---|---|"]
        for run in group:
            env, settings = run["environment"], run["settings"]
            facts = [env["date"], f"`{env['command']}`", settings["rounds"], settings["processes"], env["seed"]]
            lines.append(f"| {' | '.join(_cell(str(fact)) for fact in facts)} |")
        if machine["quick"]:
            lines += ["", "**Tiny sizes, which show that everything works: the times mean nothing.**"]
        if any(run["interrupted"] for run in group):
            lines += ["", "**Interrupted: some of what was asked for is missing.**"]
        summary, failed = verdicts(case for run in group for case in run["cases"])
        lines += ["", f"**{summary}.**", *([""] if failed else [])]
        lines += [f"- **{verdict}**:{text}" for verdict, _, text in (line.partition(":") for line in failed)]
        for section in (section for run in group for section in sections(run)):
            lines += [""]
            if isinstance(section, str):
                lines += [f"- {line}" for line in section.split("\n")]
                continue
            name, _, description = section.title.partition(": ")
            lines += [f"### {name}", "", f"{description[0].upper()}{description[1:]}.", ""]
            rule = ["---", *["--:"] * (len(section.columns) - 1)]
            lines += [f"| {' | '.join(map(_cell, row))} |" for row in (section.columns, rule, *section.rows)]
    return "\n".join(lines) + "\n"


def _machine(run: dict[str, Any]) -> dict[str, Any]:
    """Return what one heading of the report stands for: what remains when date, command and repetitions differ."""
    of_run = ("date", "command", "seed", "rounds", "processes")
    return {key: value for key, value in (run["environment"] | run["settings"]).items() if key not in of_run}


def _cell(text: str) -> str:
    return f"**{text}**" if text == VERDICTS[False] else text.replace("|", "\\|")


# The command line -----------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[Case]]:
    """Return the arguments and the cases that they choose; what cannot work ends the program here, before measuring."""
    names = "\n".join(f"  {name:16}{peer.title}" for name, peer in PEERS.items())
    parser = OneLineParser(
        description=(__doc__ or "").split("\n\n    ")[0],
        epilog=EXAMPLES + names,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--case", default="", metavar="NAME,...", help="cases, or beginnings of their names (default: all)")
    add("--peers", metavar="NAME,...", help="peers, listed below (default: all; with --against, control and it)")
    add("--against", type=Path, metavar="PATH", help="a checkout of another version, whose Block is the peer against")
    add("--positions", action="store_true", help="give the Block token positions, which peers have in their tables")
    add("--dtype", choices=DTYPES, help="only the cases of this dtype")
    add("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    add("--presets", default=",".join(CUDA_PRESETS), metavar="NAME,...", help="models measured on CUDA besides")
    add("--threads", type=int, metavar="N", help="torch's threads (default: its own choice)")
    add("--rounds", type=int, default=15, metavar="N", help="turns of Block and peer (default: 15)")
    add("--processes", type=int, default=1, metavar="N", help="measure in N processes, one after another")
    add("--seed", type=int, default=0, metavar="N", help="of weights and inputs (default: 0)")
    add("--quick", action="store_true", help="tiny sizes, to see that it works; the times mean nothing")
    add("--json", type=Path, metavar="FILE", help="write every sample")
    add("--write", type=Path, metavar="FILE", help="write the report as Markdown, over what is there")
    add("--report", type=Path, nargs="+", metavar="JSON", help="report these earlier runs instead of measuring")
    args = parser.parse_args(argv)

    for name in ("rounds", "processes", "threads"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    if args.report and args.json:
        parser.error("--json writes what was measured, and --report measures nothing")
    for path in filter(None, (args.json, args.write)):
        try:
            require_writable(path)
        except OSError as error:
            parser.error(f"cannot write {path}: {error.strerror or error}")
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

    known = dict(PEERS)
    if args.against:
        if not (args.against / "tinyblock" / "__init__.py").is_file():
            parser.error(f"--against needs a checkout of tinyblock, and {args.against} is none")
        known["against"] = block_of(args.against)
    peers = args.peers or ("control,against" if args.against else ",".join(PEERS))
    args.peers = {name: known[name] for name in chosen(peers, known, "peer")}
    cases = all_cases(args.device, chosen(args.presets, PRESETS, "preset"))
    accuracy = dataclasses.replace(cases[0], name=ACCURACY)
    words = [word.strip() for word in args.case.split(",") if word.strip()]
    for word in words:
        if not any(case.name.startswith(word) for case in (*cases, accuracy)):
            parser.error(f"no case begins with {word!r}; there are {', '.join(c.name for c in (*cases, accuracy))}")
    cases = [case for case in (*cases, accuracy) if not words or case.name.startswith(tuple(words))]
    cases = [case for case in cases if args.dtype is None or case.dtype == DTYPES[args.dtype]]
    if not cases:
        parser.error(f"none of these cases is in {args.dtype}")
    if args.positions:
        cases = [case if case.name == ACCURACY else with_positions(case) for case in cases]
    return args, [shrink(case) for case in cases] if args.quick else cases


def measure(args: argparse.Namespace, cases: Sequence[Case], save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure all cases in this process, or in several; after Ctrl-C return what was measured until then.

    `save` is called with what there is after every case or process: a machine that goes down loses only the last one.
    """
    settings = Settings(args.device, args.rounds, SAMPLE_SECONDS / 25 if args.quick else SAMPLE_SECONDS, args.seed)
    timed = [case for case in cases if case.name != ACCURACY]
    run: dict[str, Any] = {
        "schema": SCHEMA,
        "environment": environment(args.device, args.seed),
        "settings": {
            "rounds": args.rounds,
            "processes": args.processes,
            "quick": args.quick,
            "shape_checks": not jaxtyping.config.jaxtyping_disable,
        },
        "interrupted": True,  # until it is over
        "cases": [],
    }
    try:
        if args.processes > 1 and timed:
            measure_in_processes(args, timed, run, save)
        else:
            for index, case in enumerate(timed, 1):

                def report(text: str, index: int = index) -> None:
                    print(f"[{index}/{len(timed)}] {text}", file=sys.stderr, flush=True)

                run["cases"].append({})
                measure_case(case, args.peers, settings, report, run["cases"][-1])
                save(summarize(run))
        if len(timed) < len(cases):
            print(ACCURACY, file=sys.stderr, flush=True)
            run["cases"].append(measure_accuracy(settings, args.quick))
        run["interrupted"] = False
    except KeyboardInterrupt:
        run["cases"] = [case for case in run["cases"] if case.get("rows", True) or "failure" in case]
    run["cases"] = [case for case in run["cases"] if case]
    save(summarize(run))
    return run


def measure_in_processes(
    args: argparse.Namespace, cases: Sequence[Case], run: dict[str, Any], save: Callable[[dict[str, Any]], None]
) -> None:
    """Run this script once for each process, and pool in `run` what those that came to an end have measured."""
    options = [
        "--case",
        ",".join(case.name.removesuffix("-positions") for case in cases),
        "--peers",
        ",".join(args.peers),
    ]
    options += ["--device", str(args.device), "--presets", args.presets, "--rounds", str(args.rounds)]
    options += ["--seed", str(args.seed), "--threads", str(args.threads or torch.get_num_threads())]
    options += ["--quick"] if args.quick else []
    options += ["--positions"] if args.positions else []
    options += ["--against", str(args.against)] if args.against else []
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # import what is imported here
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for index in range(1, args.processes + 1):
            print(f"process {index} of {args.processes}", file=sys.stderr, flush=True)
            path = Path(folder, f"{index}.json")
            command = [sys.executable, str(Path(__file__).resolve()), *options, "--json", str(path)]
            code, interrupted = run_to_its_end(command, variables)
            if path.exists():
                runs.append(json.loads(path.read_text()))
                run["cases"] = pool(runs)["cases"]
                run["settings"]["processes"] = len(runs)
                save(summarize(run))
            else:
                print(f"process {index} ended with exit code {code} and no result", file=sys.stderr)
            if interrupted or code == 130:
                raise KeyboardInterrupt
    if not runs:
        sys.exit("compare_peers.py: error: no process came to an end")


def run_to_its_end(command: Sequence[str], variables: Mapping[str, str]) -> tuple[int, bool]:
    """Return the exit code of a command, and whether Ctrl-C, which reached it too, made it end early."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=variables) as process:
        try:
            return process.wait(), False
        except KeyboardInterrupt:
            try:
                return process.wait(), True  # it writes what it measured
            except KeyboardInterrupt:
                process.kill()
                raise


def main(argv: Sequence[str] | None = None) -> int:
    args, cases = parse(argv)

    def save(run: dict[str, Any]) -> None:
        if not run["cases"]:
            return  # and leave an earlier report alone
        if args.json:
            with atomic(args.json) as temporary:
                temporary.write_text(json.dumps(run, indent=1) + "\n")
        if args.write:
            with atomic(args.write) as temporary:
                temporary.write_text(markdown([run]))

    if args.report:
        try:
            runs = [load_run(path) for path in args.report]
        except (OSError, ValueError) as error:
            print(f"compare_peers.py: error: {error}", file=sys.stderr)
            return 2
        if args.write:
            with atomic(args.write) as temporary:
                temporary.write_text(markdown(runs))
    else:
        if args.threads is not None:
            torch.set_num_threads(args.threads)
        if args.device.type == "cuda":
            torch.cuda.set_device(args.device)  # the one that timers synchronize
        runs = [measure(args, cases, save)]
    shown: list[Section] = []
    for run in runs:
        summary, failed = verdicts(run["cases"])
        shown += [*sections(run), "\n".join([summary, *failed])]
    try:
        show(shown, sys.stdout)
    except BrokenPipeError:  # whoever read the tables has seen enough; the files are written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if any(run["interrupted"] for run in runs):
        return 130
    disagreed = any(row["status"] == "disagrees" for run in runs for c in run["cases"] for row in c.get("rows", []))
    return 1 if disagreed else 0


def load_run(path: Path) -> dict[str, Any]:
    run = json.loads(path.read_text())
    if not isinstance(run, dict) or run.get("schema") != SCHEMA:
        raise ValueError(f"{path} is not a run of this script, whose schema is {SCHEMA}")
    return summarize(run)


def one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."


def _tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    sys.exit(main())
