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
    result: dict[str, Any] = {"case": case.name, "describe": case.describe(), "work": case.work}
    result |= {"dtype": case.dtype_name, "rows": rows}
    try:
        turns = Turns(case, settings) if time.monotonic() < settings.deadline else None
    except Exception as error:
        return result | {"failure": _one_line(error)}
    result |= turns.counts() if turns else {}
    for name, peer in peers.items():
        if peer.eager_only and case.how != "eager":
            continue
        begin(name)
        row = {"peer": name, "title": peer.title, "version": peer.version(), "target": case.target(name)}
        rows.append(row)
        if turns is None or time.monotonic() >= settings.deadline:
            row |= {"status": "missing", "reason": "no time was left"}
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the peers, which this project cannot fix
                row |= turns.measure(peer)
        except ImportError as error:
            row |= {"status": "skipped", "reason": _one_line(error)}
        except Exception as error:
            row |= {"status": "failed", "reason": _one_line(error)}
    return result


def count_kernels(
    case: Case, peers: Mapping[str, Peer], settings: Settings, result: dict[str, Any], count: Count = kernel_report
) -> None:
    """Add the number of kernels of the Block and of each measured peer to a result.

    Call it when everything is timed: once a profiler has run, CUPTI stays attached and slows down every launch.
    """
    measured = [row for row in result["rows"] if row["status"] == "measured"]
    turns = Turns(case, settings)
    runs = [(result, turns.ours), *((row, turns.contestant(peers[row["peer"]])) for row in measured)]
    for counted, contestant in runs:
        with torch.set_grad_enabled(case.work == "train"):
            kernels = count(contestant.run, settings.device, 1.0)
        counted["kernels"] = kernels and kernels["count"]


class Turns:
    """The Block of a case, ready to take turns with its peers."""

    def __init__(self, case: Case, settings: Settings) -> None:
        self.case, self.settings = case, settings
        if case.how != "eager":
            torch.compiler.reset()  # otherwise later cases reach the limit of recompilations
        self.block, self.x = make_block(case.size, case.dtype, settings.device, settings.seed)
        positions = {"token_positions": torch.arange(case.size.seq_len, device=self.x.device)}
        self.positions = positions if case.positions else {}
        block = Candidate.of(self.block, {}, **self.positions)
        self.ours = Contestant(block, self.x, case, settings.seed)

    def counts(self) -> dict[str, Any]:
        """Return the bytes that the Block saves, and its FLOPs, with a causal mask and with every score."""
        cost = self.case.size.costs(self.case.work)
        return self.ours.counts() | {"flops": {"causal": cost.matmul_flops, "dense": cost.dense_matmul_flops}}

    def contestant(self, peer: Peer) -> "Contestant":
        candidate = peer.build(self.block, self.case.size)
        candidate.keywords.update(self.positions if peer.takes_positions else {})
        return Contestant(candidate, self.x, self.case, self.settings.seed)

    def measure(self, peer: Peer) -> dict[str, Any]:
        """Return the errors of a peer and, if they are small enough, its samples and those of the Block."""
        ours, theirs = self.ours, self.contestant(peer)
        row = theirs.counts()
        if peer.agrees:
            row["errors"] = {name: relative_error(theirs.compared[name], ours.compared[name]) for name in ours.compared}
            allowed = tolerance(self.case.dtype)
            excess = [f"{name} by {error:.2g}" for name, error in row["errors"].items() if not error <= allowed]
            if excess:
                return row | {"status": "disagrees", "reason": f"{', '.join(excess)}: above {allowed:.2g}"}
        train = self.case.work == "train"
        with torch.set_grad_enabled(train):
            samples = interleave(
                {"tinyblock": ours.run, "peer": theirs.run},
                rounds=self.settings.rounds,
                sample_seconds=0.002 if self.settings.quick else 0.05,
                warmup_calls=1 if train else 3,
            )
        return row | {"status": "measured", "processes": [samples]}


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
        train = case.work == "train"
        self.x = x.clone().requires_grad_(train)
        self.candidate, self.graphs = candidate, case.how == "graphs"
        self.call = candidate.call
        if case.how != "eager":
            mode = "reduce-overhead" if self.graphs else None
            self.call = torch.compile(candidate.call, dynamic=False, mode=mode)
        for tensor in (self.x, *candidate.constants()) if self.graphs else ():
            torch._dynamo.mark_static_address(tensor)  # otherwise each replay first copies it
        with torch.set_grad_enabled(train):
            self.forward()  # compiles, before anything is counted
            output, self.saved_bytes = SavedBytes(candidate.constants()).of(lambda: _as_tuple(self.forward()))
        # The same numbers for the same shapes: gradients can be compared between contestants.
        generator = torch.Generator().manual_seed(seed + 1)
        self.output_gradients = [torch.randn(t.shape, generator=generator).to(t) for t in output]
        self.compared = {"outputs": output[0].detach().clone()}  # a graph's next replay would overwrite it
        if train:
            self.compared["gradients"] = self.train()[0].clone()
        self.run = self.train if train else self.forward

    def forward(self) -> Any:
        if self.graphs:
            torch.compiler.cudagraph_mark_step_begin()
        return self.call(self.x, **self.candidate.keywords)

    def train(self) -> Sequence[Tensor]:
        inputs = [self.x, *self.candidate.parameters]
        return torch.autograd.grad(_as_tuple(self.forward()), inputs, self.output_gradients)

    def counts(self) -> dict[str, Any]:
        """Return the bytes saved for the backward pass and, on CUDA, the peak that a run adds.

        The memory of a replayed graph is in the pool of that graph, where nothing is added.
        """
        counts: dict[str, Any] = {"saved_bytes": self.saved_bytes}
        if self.x.is_cuda and not self.graphs:
            with torch.set_grad_enabled(self.x.requires_grad):
                counts["peak_bytes"] = peak_added_bytes(self.run, self.x.device)
        return counts


def relative_error(actual: Tensor, expected: Tensor) -> float:
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm())


def tolerance(dtype: torch.dtype) -> float:
    """Return the relative error up to which two layers compute the same function.

    It allows for two roundings in dtype. In float32 the order of sums and a norm without eps matter more.
    """
    return max(2 * torch.finfo(dtype).eps, 2e-5)


def _as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."
