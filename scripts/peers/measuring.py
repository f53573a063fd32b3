"""Measure one case: the Block against each peer, after checking that their outputs agree."""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lab.kernels import kernel_report
from lab.memory import SavedBytes, peak_added_bytes
from lab.sizes import Size
from lab.timing import interleave
from torch import Tensor

from tinyblock import Block

from .candidates import Candidate, Peer, weights_of
from .cases import Case

OURS = Peer(lambda block, size: Candidate(block, list(block.parameters())), "tinyblock", takes_positions=True)
Count = Callable[[Callable[[], object], torch.device, float], dict[str, Any] | None]


@dataclass(frozen=True)
class Settings:
    """The settings of all cases; no peer is started after `deadline`, a time of `time.monotonic`."""

    device: torch.device
    rounds: int
    seed: int
    quick: bool
    deadline: float = float("inf")


def measure_case(
    case: Case, peers: Mapping[str, Peer], settings: Settings, begin: Callable[[str], None] = lambda peer: None
) -> dict[str, Any]:
    """Measure the Block against each peer; an error of a peer is reported in its row, and the others continue.

    `begin` is called with the name of each peer before it is measured, for a progress display.
    """
    rows: list[dict[str, Any]] = []
    cost, ours = case.size.costs(case.work), None
    result: dict[str, Any] = {"case": case.name, "describe": case.describe(), "work": case.work}
    result |= {"flops": {"causal": cost.matmul_flops, "dense": cost.dense_matmul_flops}}
    result |= {"dtype": case.dtype_name, "rows": rows}
    try:
        if time.monotonic() < settings.deadline:
            contestant = contestants_of(case, settings)
            ours = contestant(OURS)
            result |= ours.counts
    except Exception as error:
        return result | {"failure": _one_line(error)}
    for name, peer in peers.items():
        if peer.eager_only and case.how != "eager":
            continue
        target = case.targets.get(name, case.targets.get("others") if peer.package else None)
        row = {"peer": name, "title": peer.title, "version": peer.version(), "target": target}
        rows.append(row)
        if ours is None or time.monotonic() >= settings.deadline:
            row |= {"status": "missing", "reason": "no time was left"}
            continue
        begin(name)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the peers, which this project cannot fix
                row |= _take_turns(ours, contestant(peer), peer.agrees, case, settings)
        except Exception as error:
            row |= {"status": "skipped" if isinstance(error, ImportError) else "failed", "reason": _one_line(error)}
    return result


def _take_turns(
    ours: "Contestant", theirs: "Contestant", agrees: bool, case: Case, settings: Settings
) -> dict[str, Any]:
    """Return the errors of a contestant and, if they are small enough, its samples and those of the Block."""
    row: dict[str, Any] = dict(theirs.counts)
    if agrees:
        row["errors"] = {name: relative_error(theirs.compared[name], ours.compared[name]) for name in ours.compared}
        allowed = tolerance(case.dtype)
        excess = [f"{name} by {error:.2g}" for name, error in row["errors"].items() if not error <= allowed]
        if excess:
            return row | {"status": "disagrees", "reason": f"{', '.join(excess)}: above {allowed:.2g}"}
    with torch.set_grad_enabled(case.trains):
        samples = interleave(
            {"tinyblock": ours.run, "peer": theirs.run},
            rounds=settings.rounds,
            sample_seconds=0.002 if settings.quick else 0.05,
            warmup_calls=1 if case.trains else 3,
        )
    return row | {"status": "measured", "processes": [samples]}


def count_kernels(
    case: Case, peers: Mapping[str, Peer], settings: Settings, result: dict[str, Any], count: Count = kernel_report
) -> None:
    """Add the number of kernels of the Block and of each measured peer to a result.

    Call it when everything is timed: once a profiler has run, CUPTI stays attached and slows down every launch.
    """
    contestant = contestants_of(case, settings)
    measured = [(row, peers[row["peer"]]) for row in result["rows"] if row["status"] == "measured"]
    for counted, peer in [(result, OURS), *measured]:
        with torch.set_grad_enabled(case.trains):
            kernels = count(contestant(peer).run, settings.device, 1.0)
        counted["kernels"] = kernels and kernels["count"]


def contestants_of(case: Case, settings: Settings) -> Callable[[Peer], "Contestant"]:
    """Return how to make the contestants of a case: all have the weights of one Block, and its input."""
    if case.how != "eager":
        torch.compiler.reset()  # otherwise later cases reach the limit of recompilations
    block, x = make_block(case.size, case.dtype, settings.device, settings.seed)
    positions = {"token_positions": torch.arange(case.size.seq_len, device=x.device)} if case.positions else {}
    return lambda peer: Contestant(peer.build(block, case.size, **positions), x, case, settings.seed)


def make_block(size: Size, dtype: torch.dtype, device: torch.device, seed: int) -> tuple[Block, Tensor]:
    """Return a Block whose gains are not all 1, and an input for it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        block = size.build("cpu", torch.float32)
        assert isinstance(block, Block)
        for gain in (weights_of(block)[name].data for name in ("ln1", "ln2")):
            gain += 0.1 * torch.randn_like(gain)
        x = torch.randn(size.batch_size, size.seq_len, size.d_model)
    return block.to(device=device, dtype=dtype), x.to(device=device, dtype=dtype)


class Contestant:
    """A candidate with an input, ready to run: forward, or forward and backward to the input and all of the weights."""

    def __init__(self, candidate: Candidate, x: Tensor, case: Case, seed: int) -> None:
        self.x = x.clone().requires_grad_(case.trains)
        self.candidate, self.graphs = candidate, case.how == "graphs"
        self.call = candidate.call
        if case.how != "eager":
            mode = "reduce-overhead" if self.graphs else None
            self.call = torch.compile(candidate.call, dynamic=False, mode=mode)
        for tensor in (self.x, *candidate.constants()) if self.graphs else ():
            torch._dynamo.mark_static_address(tensor)  # otherwise each replay first copies it
        self.run = self.train if case.trains else self.forward
        with torch.set_grad_enabled(case.trains):
            self.forward()  # compiles, before anything is counted
            output, saved_bytes = SavedBytes(candidate.constants()).of(lambda: as_tuple(self.forward()))
            # The same numbers for the same shapes: gradients can be compared between contestants.
            generator = torch.Generator().manual_seed(seed + 1)
            self.output_gradients = [torch.randn(t.shape, generator=generator).to(t) for t in output]
            self.compared = {"outputs": output[0].detach().clone()}  # a graph's next replay would overwrite it
            if case.trains:
                self.compared["gradients"] = self.train()[0].clone()
            self.counts = {"saved_bytes": saved_bytes}
            if x.is_cuda and not self.graphs:  # the memory of a replayed graph is in its pool, where nothing is added
                self.counts["peak_bytes"] = peak_added_bytes(self.run, x.device)

    def forward(self) -> Any:
        if self.graphs:
            torch.compiler.cudagraph_mark_step_begin()
        return self.call(self.x, **self.candidate.keywords)

    def train(self) -> Sequence[Tensor]:
        inputs = [self.x, *self.candidate.parameters]
        return torch.autograd.grad(as_tuple(self.forward()), inputs, self.output_gradients)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm())


def tolerance(dtype: torch.dtype) -> float:
    """Return the relative error up to which two layers compute the same function.

    It allows for two roundings in dtype. In float32 the order of sums and a norm without eps matter more.
    """
    return max(2 * torch.finfo(dtype).eps, 2e-5)


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."
