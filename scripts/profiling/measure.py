"""Measure a model in turns: its parts in the order of the model, the whole, the machine."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import einops
import torch
from lab.machine import environment
from lab.tables import seconds, share, si
from lab.timing import Run, Spread, clock, interleave, wall_sampler
from torch import Tensor, nn
from torch.optim import AdamW

from .kernels import Recording, record_run, run_labeled
from .passes import InOrder
from .record import Stretch, first_tensor, record, record_whole, storages
from .roofline import RATES, Rates, datasheet, rate_samplers
from .work import FlopCounter, bytes_of

Build = Callable[[torch.device, torch.dtype], nn.Module]
Sized = tuple[Build, tuple[int, int, int]]  # a model, and the shape of its input
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

    varies: the range from p20 to p80 of the total, divided by the median.
    overhead: seconds of the same calls on a tiny input; None if unknown.
    kept: bytes that autograd keeps for backward, unless an earlier row keeps them.
    least: seconds of the work at the machine's rates.
    limit: what explains at least half of the time: compute, memory, overhead; or "kernel".
    """

    name: str
    count: int = 1
    forward: float = 0.0
    total: float = 0.0
    varies: float = 0.0
    flops: float = 0.0
    bytes: int = 0
    kept: int = 0
    overhead: float | None = None
    least: float = 0.0
    limit: str = ""

    def compare(self, rates: Rates) -> None:
        """Set the least time and the limit, by the rates of a machine."""
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
    memory: bytes of tensors, and the peak of a run.
    """

    title: str
    machine: str
    settings: Settings
    tokens: int
    rates: Rates
    datasheet: Rates | None
    took: Spread
    rows: list[Row]
    whole: Row
    memory: dict[str, int]
    recording: Recording
    notes: list[str]


class Subject:
    """A model with an input, its stretches, and its runs."""

    def __init__(self, sized: Sized, settings: Settings, notes: list[str]) -> None:
        build, shape = sized
        self.settings = settings
        self.model: Any = build(settings.device, settings.dtype)
        self.x = torch.randn(shape, device=settings.device, dtype=settings.dtype)
        self.x.requires_grad_(settings.train)
        try:
            self.stretches = record(self.model, self.x)
            for stretch in self.stretches:
                stretch.backward(stretch.forward())
        except Exception as error:  # from any model, in any of its operations
            notes.append(f"The model is one part, because a replay fails: {error!r}")
            self.stretches = []  # which frees the memory of the attempt
        if not self.stretches:
            self.stretches = record_whole(self.model, self.x)
        self.parts = parts_of(self.stretches, self.model)
        self.gradient = torch.randn_like(first_tensor(self.model(self.x)))
        self.weights = [each for each in self.model.parameters() if each.requires_grad]
        self.step: Run = lambda: None
        if settings.mode == "step":
            # A learning rate of 0 leaves the weights as they are for the other runs.
            self.step = AdamW(self.weights, lr=0.0).step

    def run(self, train: bool) -> None:
        """Run forward alone, or all passes. AdamW's gradients stay until the next run."""
        if not train:
            self.model(self.x)
            return
        self.clear()
        out = first_tensor(self.model(self.x))
        if out.requires_grad:
            out.backward(self.gradient)
        self.step()
        if self.settings.mode == "train":
            self.clear()

    def clear(self) -> None:
        for leaf in (self.x, *self.weights):
            leaf.grad = None

    def times(self, samples: list[Tensor]) -> dict[str, Tensor]:
        """Return the seconds of each part in each sample, forward and backward."""
        taken = torch.stack(samples)
        times = {
            name: taken[:, :, places].sum(-1) for name, places in self.parts.items()
        }
        if self.settings.mode == "step":
            times["AdamW"] = taken[:, :, -1]
        return times

    def compile(self) -> str:
        """Compile the model by its first call, and say what that took."""
        # Otherwise tracing takes most of the time.
        torch.compiler.allow_in_graph(einops.rearrange)
        counters = torch._dynamo.utils.counters
        counters.clear()
        self.model = torch.compile(self.model, dynamic=False)
        start = clock()
        self.run(self.settings.train)
        took = clock() - start
        breaks = [each.splitlines()[0] for each in counters["graph_break"]]
        graphs = counters["stats"]["unique_graphs"]
        return (
            f"Compilation: {took:.1f} s, graphs: {graphs}, "
            f"breaks: {', '.join(breaks) or 'none'}\n"
            "The parts run in eager mode: below 0, rest is what compiling saves."
        )


def parts_of(stretches: list[Stretch], model: nn.Module) -> dict[str, list[int]]:
    """Return the places of each part's stretches; the last call decides the order.

    The layers of a list are one part.
    """
    lists: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            lists.insert(0, re.escape(name))  # the inner ones first
    parts: dict[str, list[int]] = {}
    for place, stretch in enumerate(stretches):
        label = stretch.name or "sums"
        for name in lists:
            label = re.sub(rf"^({name})\.\d+", r"\1.*", label)
        parts[label] = [*parts.pop(label, []), place]
    return parts


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
    notes: list[str] = []
    subject = Subject(sized, settings, notes)
    rows = add_work(subject, notes)
    if settings.compile:
        notes.append(subject.compile())
    samplers: dict[str, Any] = {
        "parts": InOrder(subject.stretches, subject.step, on_gpu),
        "forward": short_sampler(partial(subject.run, False)),
        "whole": short_sampler(partial(subject.run, settings.train)),
        **rate_samplers(device, settings.dtype),
    }
    if tiny is not None:
        small = Subject(tiny, settings, [])
        # On a GPU, launches overlap with kernels, so a part has no overhead.
        if not on_gpu:
            samplers["overheads"] = InOrder(small.stretches, small.step, on_gpu)
        if settings.compile:
            small.compile()
        samplers["overhead"] = short_sampler(partial(small.run, settings.train))
    samples: dict[str, Any] = interleave(samplers, settings.rounds)

    took = Spread.of(samples["whole"])
    whole = Row("the whole", total=took.median, varies=took.width)
    whole.forward = median(samples["forward"])
    for name, times in subject.times(samples["parts"]).items():
        row = rows[name]
        total = Spread.of(times.sum(-1).tolist())
        row.forward = median(times[:, 0].tolist())
        row.total, row.varies = total.median, total.width
    if tiny is not None:
        whole.overhead = median(samples["overhead"])
    if "overheads" in samples:
        for name, times in small.times(samples["overheads"]).items():
            rows[name].overhead = median(times.sum(-1).tolist())
    notes += noise([*rows.values(), whole], samples)
    recording, memory = record_memory(subject)
    rates = Rates(*(1 / median(samples[name]) for name in RATES))
    add_up(rows, whole, rates, recording)

    def run_parts() -> None:
        run_labeled(subject.stretches, subject.parts)
        subject.step()

    subject.run(settings.train)  # AdamW needs gradients
    covered = record_run(run_parts, trace)
    notes += exceeding(rows["rest"].total / whole.total, recording, covered)
    return Profile(
        title=f"{title}; {settings.describe()}; {recording.attention} attention",
        machine=environment(device),
        settings=settings,
        tokens=subject.x.shape[:-1].numel(),
        rates=rates,
        datasheet=datasheet(device, settings.dtype),
        took=took,
        rows=list(rows.values()),
        whole=whole,
        memory=memory,
        recording=recording,
        notes=notes,
    )


def noise(rows: list[Row], samples: dict[str, Any]) -> list[str]:
    """Name what varies by more than 20%: rates, the whole, and rows above 5% of it."""
    varies = {name: Spread.of(samples[name]).width for name in RATES}
    for row in rows:
        if row.total > 0.05 * rows[-1].total:
            varies[row.name] = row.varies
    noisy = [f"{name} {share(wide)}" for name, wide in varies.items() if wide > 0.2]
    return [f"NOISY: {', '.join(noisy)} vary; close other programs"] if noisy else []


def exceeding(rest: float, whole: Recording, parts: Recording) -> list[str]:
    """Name the operations that take longer in the whole than in its parts.

    `rest` is a share of the whole, and is explained above 5%.
    """
    if rest <= 0.05:
        return []
    more = Counter(whole.operations) - Counter(parts.operations)
    named = [f"{name} {seconds(1e-9 * ns)}" for name, ns in more.most_common(3)]
    named = named or ["no operation"]
    return [f"rest: the whole exceeds its parts in {', '.join(named)}"]


def add_work(subject: Subject, notes: list[str]) -> dict[str, Row]:
    """Return rows with their FLOPs, bytes, and what autograd keeps."""
    rows = {}
    seen = storages([*subject.model.parameters(), *subject.model.buffers()])
    with FlopCounter() as counter:
        for name, places in subject.parts.items():
            stretches = [subject.stretches[place] for place in places]
            rows[name] = row = Row(name, len({each.name for each in stretches}))
            counter.flops = 0
            for stretch in stretches:
                row.bytes += bytes_of(stretch)
                for address in stretch.saved.keys() - seen:
                    row.kept += stretch.saved[address].nbytes()
                seen.update(stretch.saved)
            row.flops = counter.flops
        names = ", ".join(sorted(counter.unknown))
        counter.flops = 0
        subject.run(subject.settings.train)
    if names:
        notes.append(f"FLOPs without {names}: no formula")
    missing = counter.flops - sum(row.flops for row in rows.values())
    if missing > 0:  # for instance the backward pass of a custom autograd.Function
        notes.append(f"FLOPs outside of the parts, not in MFU: {si(missing)}")
    if subject.settings.mode == "step":
        # It reads four values for each weight, and writes three.
        rows["AdamW"] = Row("AdamW", bytes=7 * nbytes(subject.weights))
    return rows


def add_up(
    rows: dict[str, Row], whole: Row, rates: Rates, recording: Recording
) -> None:
    """Add the work of all rows, and a row with what they leave of the whole's time."""
    rest = Row("rest", forward=whole.forward, total=whole.total)
    least = 0.0  # nothing is fused from one part to the next
    for row in rows.values():
        row.compare(rates)
        least += row.least
        whole.flops += row.flops
        whole.bytes += row.bytes
        whole.kept += row.kept
        rest.forward -= row.forward
        rest.total -= row.total
    whole.compare(rates)
    whole.least = least
    rows["rest"] = rest
    if recording.kernels:
        idle = Row("GPU idle", total=whole.total - recording.busy_seconds)
        rows["GPU idle"] = idle
        rest.forward = 0.0  # unknown, because the host's time is in the whole alone
        rest.total -= idle.total


def record_memory(subject: Subject) -> tuple[Recording, dict[str, int]]:
    """Record a run of the mode, and measure its memory."""
    settings = subject.settings
    trained = nbytes(subject.weights)
    memory = {
        "parameters": nbytes(subject.model.parameters()),
        "buffers": nbytes(subject.model.buffers()),
        "gradients": trained if settings.train else 0,
        "AdamW": 2 * trained if settings.mode == "step" else 0,
    }
    held = sum(memory.values()) - memory["gradients"] + subject.x.nbytes

    def run() -> None:
        subject.run(settings.train)
        subject.clear()

    subject.clear()
    on_gpu = settings.device.type == "cuda"
    if on_gpu:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    recording = record_run(run)
    added = recording.peak_added_bytes
    if on_gpu:
        added = torch.cuda.max_memory_allocated() - before
    return recording, {"peak": held + added, **memory}


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
