"""Measure one case: the Block against each peer, after checking that their outputs agree."""

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from lab.kernels import Kernels, kernel_report
from lab.memory import SavedBytes, peak_added_bytes
from lab.sizes import Size
from lab.timing import interleave
from torch import Tensor

from tinyblock import Block

from .candidates import Candidate, Peer, build_block, weights_of
from .cases import Case

OURS = Peer(build_block, "tinyblock")


class Contestant(NamedTuple):
    """A prepared candidate: the function to time, its first output and input gradient, and the bytes that it needs."""

    run: Callable[[], object]
    compared: Mapping[str, Tensor]
    counts: Mapping[str, int]


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
    count: Callable[[Callable[[], object], torch.device, float], Kernels | None] = (
        kernel_report
    )

    def late(self) -> bool:
        return time.monotonic() >= self.deadline

    def measure(self, case: Case) -> dict[str, Any]:
        """Return the result of a case; an error of a peer is reported in its row, and the others continue."""
        rows: list[dict[str, Any]] = []
        result, ours = case.facts() | {"rows": rows}, None
        try:
            if not self.late():
                prepare = self.contestants(case)
                ours = prepare(OURS)
                result |= ours.counts
        except Exception as error:
            return result | {"failure": _one_line(error)}
        for name, peer in self.peers.items():
            if peer.eager_only and case.how != "eager":
                continue
            target = case.targets.get(
                name, case.targets.get("others") if peer.package else None
            )
            row = {
                "peer": name,
                "title": peer.title,
                "version": peer.version(),
                "target": target,
            }
            rows.append(row)
            if ours is None or self.late():
                row |= {"status": "missing", "reason": "no time was left"}
                continue
            self.begin(name)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter(
                        "ignore"
                    )  # of the peers, which this project cannot fix
                    row |= self._take_turns(case, ours, prepare(peer), peer.agrees)
            except Exception as error:
                status = "skipped" if isinstance(error, ImportError) else "failed"
                row |= {"status": status, "reason": _one_line(error)}
        return result

    def _take_turns(
        self, case: Case, ours: Contestant, theirs: Contestant, agrees: bool
    ) -> dict[str, Any]:
        """Return the errors of a contestant and, if they are small enough, its samples and those of the Block."""
        row: dict[str, Any] = dict(theirs.counts)
        if agrees:
            row["errors"] = {
                name: relative_error(theirs.compared[name], ours.compared[name])
                for name in ours.compared
            }
            allowed = tolerance(case.dtype)
            excess = [
                f"{name} by {error:.2g}"
                for name, error in row["errors"].items()
                if not error <= allowed
            ]
            if excess:
                return row | {
                    "status": "disagrees",
                    "reason": f"{', '.join(excess)}: above {allowed:.2g}",
                }
        runs, sample_seconds = (
            {"tinyblock": ours.run, "peer": theirs.run},
            0.002 if self.quick else 0.05,
        )
        with torch.set_grad_enabled(case.trains):
            samples = interleave(
                runs, self.rounds, sample_seconds, warmup_calls=1 if case.trains else 3
            )
        return row | {"status": "measured", "processes": [samples]}

    def count_kernels(self, case: Case, result: dict[str, Any]) -> None:
        """Add the number of kernels of the Block and of each measured peer to a result.

        Call it when everything is timed: once a profiler has run, CUPTI stays attached and slows down every launch.
        """
        prepare = self.contestants(case)
        measured = [
            (row, self.peers[row["peer"]])
            for row in result["rows"]
            if row["status"] == "measured"
        ]
        for counted, peer in [(result, OURS), *measured]:
            with torch.set_grad_enabled(case.trains):
                kernels = self.count(prepare(peer).run, self.device, 1.0)
            counted["kernels"] = kernels.count if kernels else None

    def contestants(self, case: Case) -> Callable[[Peer], Contestant]:
        """Return how to make the contestants of a case: all have the weights of one Block, and its input."""
        if case.how != "eager":
            torch.compiler.reset()  # otherwise later cases reach the limit of recompilations
        block, x = make_block(case.size, case.dtype, self.device, self.seed)
        return lambda peer: contestant_of(
            peer.build(block, case.size), x, case, self.seed
        )


def contestant_of(candidate: Candidate, x: Tensor, case: Case, seed: int) -> Contestant:
    """Prepare a candidate to run: forward, or forward and backward to the input and all of the weights."""
    x, call, graphs = (
        x.clone().requires_grad_(case.trains),
        candidate.call,
        case.how == "graphs",
    )
    if case.positions and "token_positions" in candidate.keywords:
        candidate.keywords["token_positions"] = torch.arange(
            case.size.seq_len, device=x.device
        )
    if case.how != "eager":
        call = torch.compile(
            call, dynamic=False, mode="reduce-overhead" if graphs else None
        )
    for tensor in (x, *candidate.constants()) if graphs else ():
        torch._dynamo.mark_static_address(
            tensor
        )  # otherwise each replay first copies it

    def forward() -> tuple[Tensor, ...]:
        if graphs:
            torch.compiler.cudagraph_mark_step_begin()
        return as_tuple(call(x, **candidate.keywords))

    def train() -> tuple[Tensor, ...]:
        return torch.autograd.grad(
            forward(), [x, *candidate.parameters], output_gradients
        )

    run = train if case.trains else forward
    with torch.set_grad_enabled(case.trains):
        forward()  # compiles, before anything is counted
        output, saved_bytes = SavedBytes(candidate.constants()).of(forward)
        # The same numbers for the same shapes: gradients can be compared between contestants.
        generator = torch.Generator().manual_seed(seed + 1)
        output_gradients = [
            torch.randn(t.shape, generator=generator).to(t) for t in output
        ]
        compared = {
            "outputs": output[0].detach().clone()
        }  # a graph's next replay would overwrite it
        if case.trains:
            compared["gradients"] = train()[0].clone()
        counts = {"saved_bytes": saved_bytes}
        if (
            x.is_cuda and not graphs
        ):  # the memory of a replayed graph is in its pool, where nothing is added
            counts["peak_bytes"] = peak_added_bytes(run, x.device)
    return Contestant(run, compared, counts)


def make_block(
    size: Size, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[Block, Tensor]:
    """Return a Block whose gains are not all 1, and an input for it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        block = size.build("cpu", torch.float32)
        assert isinstance(block, Block)
        for gain in (weights_of(block)[name].data for name in ("ln1", "ln2")):
            gain += 0.1 * torch.randn_like(gain)
        x = torch.randn(size.batch_size, size.seq_len, size.d_model)
    return block.to(device=device, dtype=dtype), x.to(device=device, dtype=dtype)


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
    return " ".join(f"{type(error).__name__}: {error}".split())[:200].rstrip(": ")
