"""Measure a model: its parts and the whole in turns; then memory and kernels."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from lab.machine import environment
from lab.timing import Run, Sampler, Spread, clock, interleave, wall_sampler
from torch.optim import AdamW

from .block import record_block
from .kernels import Recording, gpu_sampler, record, write_trace
from .modules import record_modules
from .parts import Call, Part, cut
from .roofline import Rates, ceiling_samplers, datasheet
from .rows import (
    Row,
    Samples,
    limit_of,
    remainder,
    seconds_of,
    varies,
)
from .subject import Subject
from .units import seconds
from .work import Work, kept_bytes, nbytes, total_of, work_of_adamw, works_of

# Names of samples and rows; those of a user's modules have no spaces.
WHOLE = "the whole"
ON_GPU = "the whole on the GPU"
MOST_QUEUED = 1000  # kernels: a stream takes about so many before it blocks the host

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


@dataclass(frozen=True)
class Bench:
    """A model that is ready to run: the whole, its parts, and what is timed of the whole.

    `optimizer` is that of a step, with its moments.
    """

    whole: Part
    parts: list[Part]
    runs: dict[str, Run]
    optimizer: AdamW | None

    def clear(self) -> None:
        """Remove the gradients of a step."""
        for leaf in self.whole.leaves:
            leaf.grad = None


@dataclass(frozen=True)
class Profile:
    """All that was measured, in seconds and bytes.

    is_own: whether the model is this project's.
    took: the time of the whole.
    rows: the parts, what remains, and the whole. On CUDA, parts have the GPU's time.
    memory: the bytes of tensors, and the peak of a run with what was there before it.
    compilation: what compiling the whole took.
    """

    title: str
    is_own: bool
    tokens: int
    environment: dict[str, str]
    settings: Settings
    ceilings: Rates
    datasheet: Rates | None
    took: Spread
    rows: list[Row]
    memory: dict[str, int]
    recording: Recording
    compilation: str | None


def _cut_model(subject: Subject, settings: Settings) -> tuple[Part, list[Part]]:
    """Build the model, run it once, and return it as one part and as its parts."""
    model = subject.build(settings.device, settings.dtype)
    x = torch.randn(subject.shape, device=settings.device, dtype=settings.dtype)
    x.requires_grad_(settings.train)
    run = record_block if subject.is_own else record_modules
    calls, out = run(model, x)
    gradient = torch.randn_like(out) if settings.train else None
    parts = cut(calls, out, gradient)
    call = Call(model, (x,), (out.detach(),), (model,))
    return Part(WHOLE, (call,), () if gradient is None else (gradient,)), parts


def _bench_of(whole: Part, parts: list[Part], mode: str) -> Bench:
    runs: dict[str, Run] = {"forward": whole.forward}
    if mode != "forward":
        runs["train"] = whole.train
    if mode != "step":
        return Bench(whole, parts, runs, None)
    # A learning rate of 0 leaves the weights as they are for the other runs.
    optimizer = AdamW(whole.weights, lr=0.0)
    bench = Bench(whole, parts, runs, optimizer)

    def step() -> None:
        bench.clear()
        torch.autograd.backward(whole.forward(), whole.gradients)
        optimizer.step()

    step()  # which makes the moments
    runs["step"] = step
    return bench


def measure(
    subject: Subject,
    smallest: Subject | None = None,
    *,
    settings: Settings,
    trace: Path | None = None,
) -> Profile:
    """Measure a model in this process, and its overhead on the smallest model.

    Gradients must be enabled in the modes that train. With a path, write a trace.
    """
    torch.manual_seed(0)
    mode = settings.mode
    whole, parts = _cut_model(subject, settings)
    works = works_of(whole, parts, is_own=subject.is_own)
    if mode == "step":
        works["AdamW"] = work_of_adamw(whole)
    works[WHOLE] = total_of(list(works.values()))
    tiny = None if smallest is None else _cut_model(smallest, settings)
    compilation = None
    if settings.compile:
        # Many modules share the code of nn.Linear, which is compiled for each of them.
        torch._dynamo.config.recompile_limit = 1000
        whole, parts = whole.compiled(), [part.compiled() for part in parts]
        compilation = _compile(whole.run)
        tiny = tiny and (tiny[0].compiled(), [])
    bench = _bench_of(whole, parts, mode)
    samplers = _samplers(bench, settings)
    if tiny is not None:
        samplers.update(_overhead_samplers(_bench_of(*tiny, mode), mode))
    samplers.update(ceiling_samplers(settings.device, settings.dtype))
    samples = interleave(samplers, settings.rounds)
    rates = Rates(
        1 / statistics.median(samples["seconds per FLOP"]),
        1 / statistics.median(samples["seconds per byte"]),
    )
    recording, memory = _record(bench, settings)
    rows = _rows(bench, samples, works, rates, recording.launches)
    if trace is not None:
        write_trace(parts, bench.runs[mode], trace)
    return Profile(
        title=subject.title,
        is_own=subject.is_own,
        tokens=whole.inputs[0].shape[:-1].numel(),
        environment=environment(settings.device),
        settings=settings,
        ceilings=rates,
        datasheet=datasheet(settings.device, settings.dtype),
        took=Spread.of(samples[f"{WHOLE} {mode}"]),
        rows=rows,
        memory=memory,
        recording=recording,
        compilation=compilation,
    )


def _samplers(bench: Bench, settings: Settings) -> dict[str, Sampler]:
    """Return samplers of each pass of each part, on CUDA of the GPU's time, and of the whole."""
    on_gpu = settings.device.type == "cuda"
    sampler: Callable[[Run], Sampler] = gpu_sampler if on_gpu else short_sampler
    samplers = {}
    for part in bench.parts:
        samplers[f"{part.name} forward"] = sampler(part.forward)
        if settings.train:
            samplers[f"{part.name} train"] = sampler(part.train)
    if bench.optimizer is not None:
        samplers["AdamW step"] = sampler(bench.optimizer.step)
    for name, run in bench.runs.items():
        samplers[f"{WHOLE} {name}"] = short_sampler(run)
        if on_gpu:
            samplers[f"{ON_GPU} {name}"] = gpu_sampler(run)
    return samplers


def _overhead_samplers(tiny: Bench, mode: str) -> dict[str, Sampler]:
    """Return samplers of the same calls with next to no arithmetic."""
    runs = {part.name: part.run for part in tiny.parts}
    runs[WHOLE] = tiny.runs[mode]
    if tiny.optimizer is not None:
        runs["AdamW"] = tiny.optimizer.step
    return {f"{name} overhead": short_sampler(run) for name, run in runs.items()}


def _rows(
    bench: Bench,
    samples: Samples,
    works: dict[str, Work],
    rates: Rates,
    launches: int,
) -> list[Row]:
    """Return the rows of the parts, of what remains, and of the whole."""
    counts = {part.name: part.count for part in bench.parts}
    if bench.optimizer is not None:
        counts["AdamW"] = 1
    times = {}
    for name, count in counts.items():
        times[name] = seconds_of(samples, name, count)
    on_gpu = f"{ON_GPU} forward" in samples and launches <= MOST_QUEUED
    busy = ON_GPU if on_gpu else WHOLE
    times["rest"] = remainder(samples, busy, list(times.values()))
    if on_gpu:
        times["GPU idle"] = remainder(samples, WHOLE, list(times.values()))
    times[WHOLE] = seconds_of(samples, WHOLE)
    kept = kept_bytes(bench.parts) | kept_bytes([bench.whole])
    kept["rest"] = 2 * kept[WHOLE] - sum(kept.values())
    rows: list[Row] = []
    for name, of_passes in times.items():
        work = works.get(name, Work(0, 0))
        overhead = statistics.median(samples.get(f"{name} overhead", [0.0]))
        overhead *= counts.get(name, 1)
        least = rates.seconds(work)
        if name == WHOLE:  # nothing is fused from one part to the next
            least = sum(row.least_seconds for row in rows)
        rows.append(
            Row(
                name=name,
                seconds=of_passes,
                varies=varies(samples, name),
                work=work,
                overhead=overhead,
                kept_bytes=kept.get(name, 0),
                least_seconds=least,
                limit=limit_of(work, overhead, rates),
            )
        )
    return rows


def _record(bench: Bench, settings: Settings) -> tuple[Recording, dict[str, int]]:
    """Record a run of the mode, and measure its memory."""

    def run() -> None:
        bench.runs[settings.mode]()
        bench.clear()

    on_gpu = settings.device.type == "cuda"
    bench.clear()
    if on_gpu:
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    recording = record(run, with_memory=not on_gpu)
    added = recording.peak_added_bytes
    if on_gpu:
        added = torch.cuda.max_memory_allocated() - held
    weights = bench.whole.weights
    memory = {"parameters": nbytes(weights), "gradients": 0, "AdamW": 0}
    if settings.train:
        memory["gradients"] = nbytes(x for x in weights if x.requires_grad)
    if bench.optimizer is not None:
        memory["AdamW"] = 2 * memory["gradients"]  # two moments of each weight
    before = memory["parameters"] + memory["AdamW"] + nbytes(bench.whole.inputs)
    return recording, {"peak": before + added, **memory}


def _compile(run: Run) -> str:
    """Compile by a first call, and return what that took."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    start = clock()
    run()
    took = seconds(clock() - start)
    breaks = ", ".join(counters["graph_break"]) or "none"
    return f"{took}, graphs: {counters['stats']['unique_graphs']}, breaks: {breaks}"
