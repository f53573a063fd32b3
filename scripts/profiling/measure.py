"""Measure a model in turns: its parts, the total, and the machine."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import einops
import torch
from lab.machine import environment
from lab.tables import share
from lab.timing import Spread, clock, interleave, wall_sampler
from torch import Tensor, nn
from torch.optim import AdamW

from .kernels import Recording, record_run
from .parts import Stopwatch, tensors_in
from .roofline import RATES, Rates, Row, rate_samplers
from .work import Ledger

Build = Callable[[torch.device, torch.dtype], nn.Module]
Sized = tuple[Build, tuple[int, int, int]]  # a model, and the shape of its input


@dataclass(frozen=True)
class Settings:
    """How to measure. `mode` is forward, train (and backward) or step (and AdamW)."""

    device: torch.device
    dtype: torch.dtype
    mode: str = "train"
    compile: bool = False
    rounds: int = 15

    @property
    def train(self) -> bool:
        return self.mode != "forward"

    def describe(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}, {self.mode}, {'compiled' if self.compile else 'eager'}"


@dataclass
class Profile:
    """All that was measured, in seconds and bytes.

    took: the total time.
    memory: bytes of tensors, and the peak of a run.
    """

    title: str
    machine: str
    settings: Settings
    tokens: int
    rates: Rates
    took: Spread
    rows: list[Row]
    whole: Row
    memory: dict[str, int]
    recording: Recording
    notes: list[str]


class Subject:
    """A model with an input, and its runs: `run_whole` may be compiled."""

    def __init__(self, sized: Sized, settings: Settings) -> None:
        build, shape = sized
        self.x = torch.randn(shape, device=settings.device, dtype=settings.dtype)
        self.x.requires_grad_(settings.train)
        try:
            self.model: Any = build(settings.device, settings.dtype)
            out = self.model(self.x)
        except (AssertionError, RuntimeError, TypeError) as error:
            reason = str(error).split("\n")[0]
            raise ValueError(
                f"the model must accept x of shape (batch, seq, d_model) = {shape}, "
                f"got {type(error).__name__}: {reason}"
            ) from error
        self.gradient = torch.randn_like(tensors_in(out)[0])
        self.weights = list(self.model.parameters())
        self.train = settings.train
        self.steps = settings.mode == "step"
        # A learning rate of 0 leaves the weights as they are for the other runs.
        self.optimizer = AdamW([{"params": self.weights}], lr=0.0)
        self.run_parts = partial(self.run, self.model)
        self.run_parts()  # allocates AdamW's state
        self.run_whole = self.run_parts

    def run(self, model: Any) -> None:
        """Run all passes of the mode. The first tensor of the result counts."""
        self.clear()
        out = tensors_in(model(self.x))[0]
        if self.train:
            out.backward(self.gradient)
        if self.steps:
            self.optimizer.step()

    def compile(self) -> str:
        """Compile the model by its first run, and say what that took."""
        # Otherwise tracing takes most of the time.
        torch.compiler.allow_in_graph(einops.rearrange)
        counters = torch._dynamo.utils.counters
        counters.clear()
        self.run_whole = partial(self.run, torch.compile(self.model, dynamic=False))
        start = clock()
        self.run_whole()
        took = clock() - start
        breaks = [each.splitlines()[0] for each in counters["graph_break"]]
        return (
            f"Compilation: {took:.1f} s, graphs: {counters['stats']['unique_graphs']}, "
            f"breaks: {', '.join(breaks) or 'none'}\n"
            "The parts run in eager mode: below 0, rest is what compiling saves."
        )

    def run_and_clear(self) -> None:
        self.run_whole()
        self.clear()

    def clear(self) -> None:
        for leaf in (self.x, *self.weights):
            leaf.grad = None


def measure(
    sized: Sized,
    title: str,
    settings: Settings,
    tiny: Sized | None = None,
    trace: Path | None = None,
) -> Profile:
    """Measure a model, and its overhead on a tiny one with the same calls.

    Gradients must be enabled in the modes that train. With a path, write a trace.
    """
    torch.manual_seed(0)
    device = settings.device
    on_gpu = device.type == "cuda"
    subject = Subject(sized, settings)
    notes = [subject.compile()] if settings.compile else []
    ledger = Ledger(subject.model, subject.run_parts)
    if ledger.unknown:
        names = ", ".join(sorted(ledger.unknown))
        notes.append(f"FLOPs without {names}: no formula")
    samplers: dict[str, Any] = {
        "parts": Stopwatch(subject.model, subject.run_parts, on_gpu),
        "whole": wall_sampler(subject.run_whole),
        **rate_samplers(device, settings.dtype),
    }
    if tiny is not None:
        small = Subject(tiny, settings)
        if settings.compile:
            small.compile()
        samplers["overhead"] = wall_sampler(small.run_whole)
        # On a GPU, launches overlap with kernels, so a part has no overhead.
        if not on_gpu:
            samplers["overheads"] = Stopwatch(small.model, small.run_parts, on_gpu)
    samples: dict[str, Any] = interleave(samplers, settings.rounds)

    rates = Rates(*(1 / median(samples[name]) for name in RATES))
    took = Spread.of(samples["whole"])
    whole = Row("total", total=took.median, varies=took.width)
    if tiny is not None:
        whole.overhead = median(samples["overhead"])
    rows = list(ledger.rows.values())
    for row in rows:
        set_times(row, samples)
    notes += noise([*rows, whole], samples)
    recording, memory = record_memory(subject, settings, trace)
    rows += add_up(rows, whole, rates, recording)
    return Profile(
        title=f"{title}; {settings.describe()}",
        machine=environment(device),
        settings=settings,
        tokens=subject.x.shape[:-1].numel(),
        rates=rates,
        took=took,
        rows=rows,
        whole=whole,
        memory=memory,
        recording=recording,
        notes=notes,
    )


def set_times(row: Row, samples: dict[str, Any]) -> None:
    total = Spread.of([times[row.name] for times in samples["parts"]])
    row.total, row.varies = total.median, total.width
    row.forward = median(times[f"forward of {row.name}"] for times in samples["parts"])
    if "overheads" in samples:
        row.overhead = median(times[row.name] for times in samples["overheads"])


def noise(rows: list[Row], samples: dict[str, Any]) -> list[str]:
    """Name what varies by more than 20%: rates, the total, and rows above 5% of it."""
    varies = {name: Spread.of(samples[name]).width for name in RATES}
    for row in rows:
        if row.total > 0.05 * rows[-1].total:
            varies[row.name] = row.varies
    noisy = [f"{name} {share(wide)}" for name, wide in varies.items() if wide > 0.2]
    return [f"NOISY: {', '.join(noisy)} vary; close other programs"] if noisy else []


def add_up(
    rows: list[Row], whole: Row, rates: Rates, recording: Recording
) -> list[Row]:
    """Add the work of all rows; return rows of what they leave of the total time."""
    rest = Row("rest", total=whole.total)
    for row in rows:
        row.compare(rates)
        whole.forward += row.forward
        whole.flops += row.flops
        whole.bytes += row.bytes
        whole.kept += row.kept
        rest.total -= row.total
    whole.least = sum(row.least for row in rows)  # nothing is fused over parts
    if not recording.kernels:
        return [rest]
    idle = Row("GPU idle", total=whole.total - recording.busy_seconds)
    rest.total -= idle.total
    return [rest, idle]


def record_memory(
    subject: Subject, settings: Settings, trace: Path | None
) -> tuple[Recording, dict[str, int]]:
    """Record a run of the whole model, and measure its memory."""
    subject.run_whole()
    memory = {
        "parameters": nbytes(subject.model.parameters()),
        "buffers": nbytes(subject.model.buffers()),
        "gradients": nbytes(tensors_in([each.grad for each in subject.weights])),
        "AdamW": nbytes(tensors_in(list(subject.optimizer.state.values()))),
    }
    held = sum(memory.values()) - memory["gradients"] + subject.x.nbytes
    subject.clear()
    on_gpu = settings.device.type == "cuda"
    if on_gpu:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    recording = record_run(subject.run_and_clear, trace)
    added = recording.peak_added_bytes
    if on_gpu:
        added = torch.cuda.max_memory_allocated() - before
    return recording, {"peak": held + added, **memory}


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
