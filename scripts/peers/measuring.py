"""Measure one case: the Block beside each peer in turn, once they agree."""

import copy
import sys
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

from tinyblock import Block, RotaryPositionalEmbedding

from .candidates import Candidate, Peer, build
from .cases import Case, dtype_name
from .projects import PEERS

ACCURACY_SEEDS = 5
Measure = Callable[[Peer], dict[str, Any]]


@dataclass(frozen=True)
class Settings:
    device: torch.device
    threads: int
    rounds: int
    processes: int
    seed: int
    quick: bool

    def apply(self) -> None:
        torch.set_num_threads(self.threads)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # the one that timers synchronize


def measure_case(case: Case, peers: Mapping[str, Peer], settings: Settings, result: dict[str, Any]) -> None:
    """Measure the Block beside each peer; whatever goes wrong with one is its row, and the others go on.

    `result` is filled row by row: a caller who may be interrupted keeps what was measured until then.
    """
    result |= {"case": case.name, "describe": case.describe(), "work": case.work}
    result |= {"dtype": dtype_name(case.dtype), "rows": []}
    if case.how != "eager":
        torch.compiler.reset()  # else too many sizes of one function were compiled at the end
    try:
        if case.work == "accuracy":
            measure, peers = prepare_accuracy(case, settings), {"transformers": PEERS["transformers"]}
        else:
            measure = prepare_turns(case, settings, result)
    except Exception as error:
        result["failure"] = _one_line(error)
        return
    for name, peer in peers.items():
        print(f"  {name}", file=sys.stderr, flush=True)
        row = {"peer": name, "title": peer.title, "version": peer.version(), "target": case.target(name)}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the peers': they are not ours to mend
                row |= measure(peer)
        except ImportError as error:
            row |= {"status": "skipped", "reason": _one_line(error)}
        except Exception as error:
            row |= {"status": "failed", "reason": _one_line(error)}
        result["rows"].append(row)


def prepare_turns(case: Case, settings: Settings, result: dict[str, Any]) -> Measure:
    """Make the Block of a case, add what it saves and computes to `result`, and return what times it with a peer."""
    block, x = make_block(case.size, case.dtype, settings.device, settings.seed)
    positions = {"token_positions": torch.arange(case.size.seq_len, device=x.device)} if case.positions else {}
    ours = Contestant(Candidate.of(block, **positions), x, case, settings.seed)
    cost = case.size.costs(case.work)
    result |= ours.counts()
    result["flops"] = {"causal": cost.matmul_flops, "dense": cost.dense_matmul_flops}

    def measure(peer: Peer) -> dict[str, Any]:
        candidate = build(peer, block, case.size)
        candidate.keywords.update(positions if peer.takes_positions else {})
        theirs = Contestant(candidate, x, case, settings.seed)
        row = theirs.counts()
        if peer.agrees:
            row["errors"] = {name: relative_error(theirs.compared[name], ours.compared[name]) for name in ours.compared}
            allowed = tolerance(case.dtype)
            excess = [f"{name} by {error:.2g}" for name, error in row["errors"].items() if not error <= allowed]
            if excess:
                return row | {"status": "disagrees", "reason": f"{', '.join(excess)}: above {allowed:.2g}"}
        with torch.set_grad_enabled(case.work == "train"):
            samples = interleave(
                {"tinyblock": ours.run, "peer": theirs.run},
                rounds=settings.rounds,
                sample_seconds=0.002 if settings.quick else 0.05,
                warmup_calls=1 if case.work == "train" else 3,
            )
        return row | {"status": "measured", "processes": [samples]}

    return measure


def make_block(size: Size, dtype: torch.dtype, device: torch.device, seed: int) -> tuple[Block, Tensor]:
    """Return a Block whose gains are not all 1, and an input for it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        rope = RotaryPositionalEmbedding(size.theta, size.d_head, size.seq_len)
        heads: dict[str, Any] = {"num_kv_heads": size.num_kv_heads, "d_head": size.d_head}
        block = Block(size.d_model, size.num_heads, size.d_ff, rope=rope, eps=size.eps, **heads)
        for name, parameter in block.named_parameters():
            if name.startswith("ln"):
                parameter.data += 0.1 * torch.randn_like(parameter)
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
            torch._dynamo.mark_static_address(tensor)  # else those of a plain function are copied before each replay
        with torch.set_grad_enabled(train):
            self.forward()  # compiles, before anything is counted
            output, self.saved_bytes = SavedBytes(candidate.constants()).of(lambda: _as_tuple(self.forward()))
        # The same numbers for the same shapes: gradients can be compared between contestants.
        generator = torch.Generator().manual_seed(seed + 1)
        self.output_gradients = [torch.randn(t.shape, generator=generator).to(t) for t in output]
        self.compared = {"outputs": output[0].detach().clone()}  # a graph's next replay would write over it
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
        """Return the bytes that are kept for backward, and on CUDA the most that a run adds, and its kernels."""
        counts: dict[str, Any] = {"saved_bytes": self.saved_bytes}
        if self.x.is_cuda:
            with torch.set_grad_enabled(self.x.requires_grad):
                counts["peak_bytes"] = peak_added_bytes(self.run, self.x.device)
                kernels = kernel_report(self.run, self.x.device, seconds=1.0)
            counts["kernels"] = kernels and kernels["count"]
        return counts


def prepare_accuracy(case: Case, settings: Settings) -> Measure:
    """Return what compares the error of a stack of Blocks with that of a peer's: each against its own float64 run."""

    def error(peer: Peer, blocks: Sequence[Block], x: Tensor) -> float:
        y, exact = x, x.double()
        with torch.no_grad():
            for block in blocks:
                y = _run(build(peer, block, case.size), y)
                exact = _run(build(peer, copy.deepcopy(block).double(), case.size), exact)
        return relative_error(y, exact)

    def measure(peer: Peer) -> dict[str, Any]:
        samples: dict[str, list[float]] = {"tinyblock": [], "peer": []}
        for stack in range(settings.seed, settings.seed + ACCURACY_SEEDS):
            seeds = range(stack * case.size.layers, (stack + 1) * case.size.layers)
            made = [make_block(case.size, case.dtype, settings.device, seed) for seed in seeds]
            for name, candidate in (("tinyblock", PEERS["control"]), ("peer", peer)):
                samples[name].append(error(candidate, [block for block, _ in made], made[0][1]))
        return {"status": "measured", "processes": [samples]}

    return measure


def relative_error(actual: Tensor, expected: Tensor) -> float:
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm())


def tolerance(dtype: torch.dtype) -> float:
    """Return the relative error up to which two layers compute the same function.

    Two roundings in dtype; in float32 the sums, which each layer orders in its way, and a norm without eps weigh more.
    """
    return max(2 * torch.finfo(dtype).eps, 2e-5)


def _run(candidate: Candidate, x: Tensor) -> Tensor:
    return _as_tuple(candidate.call(x, **candidate.keywords))[0]


def _as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."
