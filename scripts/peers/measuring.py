"""Measure one case: the Block against each peer, after checking that their outputs agree."""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lab.kernels import count_kernels
from lab.memory import SavedBytes, peak_added_bytes
from lab.sizes import Size
from lab.timing import interleave
from torch import Tensor

from tinyblock import Block

from .candidates import Candidate, Peer, Unavailable, build_block, weights_of
from .cases import Case
from .records import CaseResult, Measurement, Needs, Row

OURS = Peer(build_block, "tinyblock")

Call = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Contestant:
    """A prepared candidate: the function to time, its first output and input gradient, and what it needs."""

    run: Call
    compared: Mapping[str, Tensor]
    needs: Needs


@dataclass(frozen=True)
class Comparison:
    """Measure the Block against each peer. No peer is started after `deadline`, a time of `time.monotonic`.

    `begin` is called with the name of each peer before it is measured, for a progress display.
    """

    peers: Mapping[str, Peer]
    device: torch.device
    rounds: int
    seed: int
    quick: bool
    deadline: float = float("inf")
    begin: Callable[[str], None] = lambda peer: None
    count: Callable[[Callable[[], object], torch.device], int | None] = count_kernels

    def late(self) -> bool:
        return time.monotonic() >= self.deadline

    def measure(self, case: Case) -> CaseResult:
        """Return the result of a case. A peer that fails gets a row with the reason, and the others continue."""
        result = new_result(case)
        peers = peers_of(case, self.peers)
        result.rows = tuple(new_row(case, name, peer) for name, peer in peers.items())
        if self.late():
            return result
        try:
            prepare = self.contestants(case)
            ours = prepare(OURS)
        except Exception as error:
            result.failure = one_line(error)
            result.rows = ()
            return result
        result.needs = ours.needs
        for row in result.rows:
            if not self.late():
                self.begin(row.peer)
                self._fill(row, case, ours, prepare)
        return result

    def _fill(
        self,
        row: Row,
        case: Case,
        ours: Contestant,
        prepare: Callable[[Peer], Contestant],
    ) -> None:
        """Measure a peer, and write the outcome into its row."""
        peer = self.peers[row.peer]
        row.reason = ""
        try:
            with warnings.catch_warnings():
                # The peers warn, which this project cannot mend.
                warnings.simplefilter("ignore")
                theirs = prepare(peer)
                errors = None
                if peer.must_agree:
                    errors = relative_errors(ours, theirs)
                    row.reason = disagreement(errors, case.dtype)
                if row.reason:
                    row.status = "disagrees"
                    return
                row.measurement = self._take_turns(case, ours, theirs, errors)
                row.status = "measured"
        except Unavailable as error:
            row.status = "skipped"
            row.reason = str(error)
        except ImportError as error:
            row.status = "skipped"
            row.reason = one_line(error)
        except Exception as error:
            row.status = "failed"
            row.reason = one_line(error)

    def _take_turns(
        self,
        case: Case,
        ours: Contestant,
        theirs: Contestant,
        errors: dict[str, float] | None,
    ) -> Measurement:
        """Time the Block and a peer in turns."""
        with torch.set_grad_enabled(case.trains):
            samples = interleave(
                {"block": ours.run, "peer": theirs.run},
                self.rounds,
                sample_seconds=0.002 if self.quick else 0.05,
                warmup_calls=1 if case.trains else 3,
            )
        return Measurement(
            errors=errors,
            needs=theirs.needs,
            block_seconds=tuple(samples["block"]),
            peer_seconds=tuple(samples["peer"]),
        )

    def count_kernels(self, case: Case, result: CaseResult) -> None:
        """Add the number of kernels of the Block and of each measured peer to a result, or why counting failed.

        Call it when everything is timed: once a profiler has run, CUPTI stays attached and slows down every launch.
        """
        if result.needs is None:
            return
        try:
            prepare = self.contestants(case)
        except Exception as error:
            result.needs.kernels_error = one_line(error)
            return
        self._count(result.needs, case, OURS, prepare)
        for row in result.rows:
            if row.measurement is not None:
                peer = self.peers[row.peer]
                self._count(row.measurement.needs, case, peer, prepare)

    def _count(
        self,
        needs: Needs,
        case: Case,
        peer: Peer,
        prepare: Callable[[Peer], Contestant],
    ) -> None:
        try:
            with torch.set_grad_enabled(case.trains):
                needs.kernels = self.count(prepare(peer).run, self.device)
        except Exception as error:  # such as running out of memory: the run goes on
            needs.kernels_error = one_line(error)

    def contestants(self, case: Case) -> Callable[[Peer], Contestant]:
        """Return how to make the contestants of a case: all have the weights of one Block, and its input."""
        if case.how != "eager":
            # Otherwise later cases reach the limit of recompilations.
            torch.compiler.reset()
        block, x = make_block(case.size, case.dtype, self.device, self.seed)

        def prepare(peer: Peer) -> Contestant:
            candidate = peer.build(block, case.size)
            return contestant_of(candidate, x, case, self.seed)

        return prepare


def new_result(case: Case) -> CaseResult:
    """Return the result of a case before anything is measured."""
    cost = case.size.costs(case.work)
    return CaseResult(
        name=case.name,
        summary=case.summary(),
        description=case.description(),
        work=case.work,
        dtype=case.dtype,
        causal_flops=cost.matmul_flops,
        dense_flops=cost.dense_matmul_flops,
    )


def peers_of(case: Case, peers: Mapping[str, Peer]) -> dict[str, Peer]:
    """Return the peers that run in this case."""
    if case.how == "eager":
        return dict(peers)
    return {name: peer for name, peer in peers.items() if not peer.eager_only}


def new_row(case: Case, name: str, peer: Peer) -> Row:
    """Return the row of a peer that was not measured, because no time was left."""
    is_project = peer.package is not None
    default = case.targets.get("others") if is_project else None
    return Row(
        peer=name,
        title=peer.title,
        version=peer.version(),
        project=is_project,
        target=case.targets.get(name, default),
        status="missing",
        reason="no time was left",
    )


def contestant_of(candidate: Candidate, x: Tensor, case: Case, seed: int) -> Contestant:
    """Prepare a candidate to run: forward, or forward and backward to the input and all of the weights."""
    x = x.clone().requires_grad_(case.trains)
    give_positions(candidate, case, x.device)
    forward = forward_of(candidate, x, case.how)
    with torch.set_grad_enabled(case.trains):
        forward()  # compiles, before anything is counted
        outputs, saved_bytes = SavedBytes(candidate.constants()).of(forward)
        # A copy, because the next replay of a CUDA graph overwrites its outputs.
        compared = {"outputs": outputs[0].detach().clone()}
        run = forward
        if case.trains:
            inputs = [x, *candidate.parameters]
            run = training_of(forward, inputs, random_like(outputs, seed + 1))
            compared["gradients"] = run()[0].clone()
        needs = Needs(saved_bytes=saved_bytes)
        # The memory of a replayed graph is in its pool, where nothing is added.
        if x.is_cuda and case.how != "graphs":
            needs.peak_bytes = peak_added_bytes(run, x.device)
    return Contestant(run, compared, needs)


def give_positions(candidate: Candidate, case: Case, device: torch.device) -> None:
    """Pass token positions to a candidate that accepts them, if the case has positions."""
    if case.positions and "token_positions" in candidate.keywords:
        positions = torch.arange(case.size.seq_len, device=device)
        candidate.keywords["token_positions"] = positions


def forward_of(candidate: Candidate, x: Tensor, how: str) -> Call:
    """Return the forward pass of a candidate: eager, compiled, or compiled for CUDA graphs."""
    call = candidate.call
    if how != "eager":
        mode = "reduce-overhead" if how == "graphs" else None
        call = torch.compile(call, dynamic=False, mode=mode)
    if how != "graphs":
        return lambda: as_tuple(call(x, **candidate.keywords))

    # Otherwise each replay first copies them.
    for tensor in (x, *candidate.constants()):
        torch._dynamo.mark_static_address(tensor)

    def replay() -> tuple[Tensor, ...]:
        torch.compiler.cudagraph_mark_step_begin()
        return as_tuple(call(x, **candidate.keywords))

    return replay


def training_of(
    forward: Call, inputs: Sequence[Tensor], output_gradients: Sequence[Tensor]
) -> Call:
    """Return the forward and the backward pass, whose result is the gradients of the inputs."""

    def train() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), inputs, output_gradients)

    return train


def random_like(outputs: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Return random tensors: the same numbers for the same shapes, so that contestants can be compared."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(each.shape, generator=generator).to(each) for each in outputs]


def make_block(
    size: Size, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[Block, Tensor]:
    """Return a Block whose gains are not all 1, and an input for it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        block = size.build("cpu", torch.float32)
        assert isinstance(block, Block)
        for weight in weights_of(block).values():
            if weight.ndim == 1:
                weight.data += 0.1 * torch.randn_like(weight)
        x = torch.randn(size.batch_size, size.seq_len, size.d_model)
    return block.to(device=device, dtype=dtype), x.to(device=device, dtype=dtype)


def relative_errors(ours: Contestant, theirs: Contestant) -> dict[str, float]:
    """Return the errors of a peer's outputs and input gradients."""
    return {
        name: relative_error(theirs.compared[name], expected)
        for name, expected in ours.compared.items()
    }


def relative_error(actual: Tensor, expected: Tensor) -> float:
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm())


def disagreement(errors: Mapping[str, float], dtype: torch.dtype) -> str:
    """Return which errors are too large to be roundings, or not a number; an empty text if none is."""
    allowed = tolerance(dtype)
    excess = [
        f"{name} differ by {error:.2g}"
        for name, error in errors.items()
        if not error <= allowed  # which NaN is not, either
    ]
    if not excess:
        return ""
    return f"{', '.join(excess)} (relative error), more than {allowed:.2g}"


def tolerance(dtype: torch.dtype) -> float:
    """Return the relative error up to which two layers compute the same function.

    It allows for two roundings in dtype. In float32 the order of sums and a norm without eps matter more.
    """
    return max(2 * torch.finfo(dtype).eps, 2e-5)


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def one_line(error: BaseException) -> str:
    """Return the type of an exception and the start of its message."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text[:200].rstrip(": ")
