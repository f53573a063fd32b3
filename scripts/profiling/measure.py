"""Measure a model in turns: its parts in the order of the model, the whole, the machine."""

import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import einops
import torch
from lab.machine import environment
from lab.timing import Run, Sampler, Spread, clock, interleave, wall_sampler
from torch import Tensor, nn
from torch.optim import AdamW

from .kernels import Recording, exceeding, gpu_sampler, record_run, write_trace
from .passes import InOrder
from .record import Stretch, first_tensor, record, storages, whole_stretch
from .roofline import Rates, datasheet, rate_samplers
from .work import bytes_of, flops_of

Samples = dict[str, list[float]]
MODES = ("forward", "train", "step")
WHOLE = "the whole"
ON_GPU = "the whole on the GPU"
MOST_QUEUED = 1000  # kernels: a stream takes about so many before it blocks the host

Build = Callable[[torch.device, torch.dtype], nn.Module]
short_sampler = partial(wall_sampler, least_seconds=0.01)


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
class Row:
    """A part in all copies of a layer, AdamW, the rest, GPU idle, or the whole.

    varies: the range from p20 to p80 of the total, divided by the median; None if unknown.
    overhead: seconds of the same calls on a tiny input; None if unknown.
    kept: bytes that autograd keeps for backward, unless an earlier part keeps them.
    least: seconds of the work at the machine's rates.
    limit: what explains at least half of the time: compute, memory, overhead; or "kernel".
    """

    name: str
    count: int = 1
    forward: float = 0.0
    backward: float = 0.0
    total: float = 0.0
    varies: float | None = None
    flops: float = 0.0
    bytes: int = 0
    kept: int = 0
    overhead: float | None = None
    least: float = 0.0
    limit: str = ""

    def compare(self, rates: Rates) -> None:
        """Set the least time and the limit."""
        causes = {
            "compute": self.flops / rates.flops,
            "memory": self.bytes / rates.bytes,
            "overhead": self.overhead or 0.0,
        }
        self.least = max(causes["compute"], causes["memory"])
        longest = max(causes, key=lambda cause: causes[cause])
        self.limit = longest if causes[longest] >= self.total / 2 else "kernel"


@dataclass
class Profile:
    """All that was measured, in seconds and bytes.

    took: the time of the whole.
    memory: bytes of tensors, and the peak of a run with what was there before it.
    unknown: operations whose FLOPs are not counted.
    noisy: what varies by more than 20%.
    exceeding: operations that take more time in the whole than in its parts.
    uncut: why the model could not be cut; empty if it was.
    """

    title: str
    tokens: int
    environment: dict[str, str]
    settings: Settings
    rates: Rates
    datasheet: Rates | None
    took: Spread
    rows: list[Row]
    whole: Row
    memory: dict[str, int]
    recording: Recording
    unknown: list[str]
    noisy: dict[str, float]
    exceeding: dict[str, float]
    compilation: str = ""
    uncut: str = ""


@dataclass
class Subject:
    """A model with its input, and its stretches by the names of their rows."""

    model: nn.Module
    x: Tensor
    stretches: list[Stretch]
    labels: list[str]
    uncut: str = ""

    @property
    def rows(self) -> dict[str, Row]:
        """Return empty rows in the order of their last calls, with their counts."""
        last = {label: index for index, label in enumerate(self.labels)}
        rows = {}
        for label in sorted(last, key=lambda name: last[name]):
            pairs = zip(self.stretches, self.labels, strict=True)
            copies = {stretch.name for stretch, name in pairs if name == label}
            rows[label] = Row(label, len(copies))
        return rows


def cut(model: nn.Module, x: Tensor) -> Subject:
    """Cut a model; one that cannot be cut is one part."""
    uncut = ""
    try:
        stretches = record(model, x)
        for stretch in stretches:
            results = stretch.forward()
            if stretch.gradients:
                stretch.backward(results)
    except Exception as error:  # from any model, in any of its operations
        first_line = str(error).strip().split("\n")[0]
        uncut = f"{type(error).__name__}: {first_line}"
        stretches = [whole_stretch(model, x)]
    labels = label_all([stretch.name for stretch in stretches], model)
    return Subject(model, x, stretches, ["model"] if uncut else labels, uncut)


def label_all(names: list[str], model: nn.Module) -> list[str]:
    """Return the names of rows: the layers of a list have one, if they have one type."""
    lists = []
    for name, module in model.named_modules():
        children = dict(module.named_children())
        if len({*map(type, children.values())}) == 1 and all(
            map(str.isdigit, children)
        ):
            lists.append(re.escape(f"{name}." if name else ""))
    labels = []
    for name in names:
        for prefix in sorted(lists, key=len, reverse=True):
            name = re.sub(rf"^({prefix})\d+(?=\.|$)", r"\1*", name)
        labels.append(name or "sums")
    return labels


def measure(
    build: Build,
    shape: tuple[int, int, int],
    title: str,
    settings: Settings,
    tiny: tuple[Build, tuple[int, int, int]] | None = None,
    trace: Path | None = None,
) -> Profile:
    """Measure a model, and its overhead on a tiny one with the same calls.

    Gradients must be enabled in the modes that train. With a path, write a trace.
    """
    torch.manual_seed(0)
    subject = cut(*_prepare(build, shape, settings))
    rows = subject.rows
    unknown = add_work(subject, rows)
    small = None if tiny is None else cut(*_prepare(*tiny, settings))
    compilation = ""
    if settings.compile:
        compilation = compile_subject(subject)
    mode, device = settings.mode, settings.device
    whole = Whole(subject.model, subject.x, mode)
    parts = InOrder(subject.stretches, whole.step_only, device)
    samplers: dict[str, Sampler] = {"parts": parts, **_whole_samplers(whole, device)}
    if small is not None:
        tiny_whole = Whole(small.model, small.x, mode)
        # The host's time: the launches are the overhead.
        overheads = InOrder(small.stretches, tiny_whole.step_only, torch.device("cpu"))
        samplers["overheads"] = overheads
        samplers["overhead"] = short_sampler(tiny_whole.runs[mode])
    samplers |= rate_samplers(device, settings.dtype)
    samples = interleave(samplers, settings.rounds)

    rates = Rates.of(samples)
    add_times(rows, subject.labels, parts)
    if small is not None:
        add_overheads(rows, small.labels, overheads)
    if mode == "step":
        # It reads four values for each weight, and writes three.
        rows["AdamW"].bytes = 7 * whole.trained_bytes
    recording, memory = _record(whole, settings)
    total = whole_row(rows, samples, mode, rates)
    noisy = _noisy(rows, total, samples)
    add_rest(rows, total, samples, recording.launches)
    run = whole.runs[mode]
    more = exceeding(run, parts.one_pass)
    if trace is not None:
        write_trace(subject.stretches, subject.labels, run, trace)
    return Profile(
        title=title,
        tokens=subject.x.shape[:-1].numel(),
        environment=environment(device),
        settings=settings,
        rates=rates,
        datasheet=datasheet(device, settings.dtype),
        took=Spread.of(samples[f"{WHOLE} {mode}"]),
        rows=list(rows.values()),
        whole=total,
        memory=memory,
        recording=recording,
        unknown=sorted(unknown),
        noisy=noisy,
        exceeding=more,
        compilation=compilation,
        uncut=subject.uncut,
    )


def _whole_samplers(whole: "Whole", device: torch.device) -> dict[str, Sampler]:
    samplers = {}
    for name, run in whole.runs.items():
        samplers[f"{WHOLE} {name}"] = short_sampler(run)
        if device.type == "cuda":
            samplers[f"{ON_GPU} {name}"] = gpu_sampler(run)
    return samplers


def _noisy(rows: dict[str, Row], whole: Row, samples: Samples) -> dict[str, float]:
    """Return what varies by more than 20%: the rates, the whole, and rows above 5% of it."""
    widths = {name: Spread.of(samples[name]).width for name in Rates.NAMES}
    for row in (*rows.values(), whole):
        if row.varies is not None and row.total > 0.05 * whole.total:
            widths[row.name] = row.varies
    return {name: width for name, width in widths.items() if width > 0.2}


def _prepare(
    build: Build, shape: tuple[int, int, int], settings: Settings
) -> tuple[nn.Module, Tensor]:
    model = build(settings.device, settings.dtype)
    x = torch.randn(shape, device=settings.device, dtype=settings.dtype)
    return model, x.requires_grad_(settings.train)


def add_work(subject: Subject, rows: dict[str, Row]) -> set[str]:
    """Add FLOPs, bytes and what is kept; return operations whose FLOPs are not counted."""
    unknown: set[str] = set()
    model = subject.model
    seen = storages([*model.parameters(), *model.buffers()])
    for stretch, label in zip(subject.stretches, subject.labels, strict=True):
        row = rows[label]
        flops, names = flops_of(stretch)
        unknown |= names
        row.flops += flops
        row.bytes += bytes_of(stretch)
        for address, storage in stretch.saved.items():
            if address not in seen:
                row.kept += storage.nbytes()
                seen[address] = storage
    return unknown


def compile_subject(subject: Subject) -> str:
    """Compile a model by its first call, and say what that took."""
    torch.compiler.allow_in_graph(einops.rearrange)  # or tracing takes most of the time
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled: Any = torch.compile(subject.model, dynamic=False)
    subject.model = compiled
    start = clock()
    subject.model(subject.x)
    took = clock() - start
    breaks = ", ".join(counters["graph_break"]) or "none"
    graphs = counters["stats"]["unique_graphs"]
    return f"{took:.1f} s, graphs: {graphs}, breaks: {breaks}"


class Whole:
    """The runs of a model: forward, train (and backward), step (and AdamW)."""

    def __init__(self, model: nn.Module, x: Tensor, mode: str) -> None:
        self.model = model
        self.x = x
        self.weights = [each for each in model.parameters() if each.requires_grad]
        self.trained_bytes = sum(each.nbytes for each in self.weights)
        self.runs: dict[str, Run] = {"forward": self.forward}
        self.step_only: Run | None = None
        if mode != "forward":
            self.gradient = torch.randn_like(self.forward())
            self.runs["train"] = self.train
        if mode == "step":
            # A learning rate of 0 leaves the weights as they are for the other runs.
            self.optimizer = AdamW(self.weights, lr=0.0)
            self.step()  # which makes the moments
            self.runs["step"] = self.step
            self.step_only = self.optimizer.step

    def forward(self) -> Tensor:
        return first_tensor(self.model(self.x))

    def train(self) -> object:
        leaves = [self.x, *self.weights]
        out = self.forward()
        return torch.autograd.grad(out, leaves, self.gradient, allow_unused=True)

    def step(self) -> None:
        self.clear()
        torch.autograd.backward(self.forward(), self.gradient)
        self.optimizer.step()

    def clear(self) -> None:
        """Remove the gradients of a step."""
        for leaf in (self.x, *self.weights):
            leaf.grad = None


def add_times(rows: dict[str, Row], labels: list[str], parts: InOrder) -> None:
    """Set the medians of each row, whose stretches add up in each pass."""
    forward: dict[str, list[float]] = {}
    total: dict[str, list[float]] = {}
    for one in parts.taken:
        for times, into in ((one.forward, forward), (one.total, total)):
            sums = dict.fromkeys(labels, 0.0)
            for label, seconds in zip(labels, times, strict=True):
                sums[label] += seconds
            for label, seconds in sums.items():
                into.setdefault(label, []).append(seconds)
        if parts.step is not None:
            total.setdefault("AdamW", []).append(one.step)
    for label, taken in total.items():
        row = rows.setdefault(label, Row(label))
        row.total = statistics.median(taken)
        row.varies = Spread.of(taken).width if row.total else 0.0
        row.forward = statistics.median(forward.get(label, [0.0]))
        row.backward = row.total - row.forward if label in forward else 0.0


def add_overheads(rows: dict[str, Row], labels: list[str], parts: InOrder) -> None:
    small: dict[str, Row] = {}
    add_times(small, labels, parts)
    for name, row in small.items():
        if name in rows:
            rows[name].overhead = row.total


def whole_row(rows: dict[str, Row], samples: Samples, mode: str, rates: Rates) -> Row:
    """Return the row of the whole, and compare all rows with the machine."""
    whole = Row(WHOLE)
    whole.forward = statistics.median(samples[f"{WHOLE} forward"])
    whole.total = statistics.median(samples[f"{WHOLE} {mode}"])
    if mode != "forward":
        whole.backward = statistics.median(samples[f"{WHOLE} train"]) - whole.forward
    whole.varies = Spread.of(samples[f"{WHOLE} {mode}"]).width
    if "overhead" in samples:
        whole.overhead = statistics.median(samples["overhead"])
    for row in rows.values():
        row.compare(rates)
        whole.flops += row.flops
        whole.bytes += row.bytes
        whole.kept += row.kept
    whole.compare(rates)
    # Nothing is fused from one part to the next.
    whole.least = sum(row.least for row in rows.values())
    return whole


def add_rest(rows: dict[str, Row], whole: Row, samples: Samples, launches: int) -> None:
    """Add what the parts leave of the whole, and on CUDA the time without a kernel."""
    on_gpu = f"{ON_GPU} forward" in samples and launches <= MOST_QUEUED
    name = ON_GPU if on_gpu else WHOLE
    modes = [mode for mode in MODES if f"{name} {mode}" in samples]
    busy = statistics.median(samples[f"{name} {modes[-1]}"])
    forward = statistics.median(samples[f"{name} forward"])
    parts = list(rows.values())
    rest = Row("rest", total=busy, forward=forward)
    if "train" in modes:
        rest.backward = statistics.median(samples[f"{name} train"]) - forward
    for row in parts:
        rest.total -= row.total
        rest.forward -= row.forward
        rest.backward -= row.backward
    rows["rest"] = rest
    if on_gpu:
        rows["GPU idle"] = Row("GPU idle", total=whole.total - busy)


def _record(whole: Whole, settings: Settings) -> tuple[Recording, dict[str, int]]:
    """Record a run of the mode, and measure its memory."""

    def run() -> None:
        whole.runs[settings.mode]()
        whole.clear()

    on_gpu = settings.device.type == "cuda"
    whole.clear()
    if on_gpu:
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    recording = record_run(run, with_memory=not on_gpu)
    added = recording.peak_added_bytes
    if on_gpu:
        added = torch.cuda.max_memory_allocated() - held
    memory = {
        "parameters": sum(each.nbytes for each in whole.model.parameters()),
        "buffers": sum(each.nbytes for each in whole.model.buffers()),
        "gradients": whole.trained_bytes if settings.train else 0,
        "AdamW": 2 * whole.trained_bytes if settings.mode == "step" else 0,
    }
    before = sum(memory.values()) - memory["gradients"] + whole.x.nbytes
    return recording, {"peak": before + added, **memory}
