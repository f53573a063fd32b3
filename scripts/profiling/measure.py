"""Measure one size: the parts and the whole in interleaved rounds; memory, kernels and traces in runs of their own."""

import gc
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from lab.kernels import attention_kernel, gpu_seconds, kernel_report
from lab.memory import SavedBytes, bytes_of, is_out_of_memory, peak_added_bytes
from lab.progress import Progress
from lab.sizes import Size
from lab.timing import Clock, clock, interleave
from torch import Tensor
from torch.optim import Optimizer

from tinyblock import Block, Transformer

from . import tracing
from .outputs import Outputs
from .parts import (
    Step,
    TimedPart,
    block_steps,
    run_steps,
    run_steps_with,
    timed_parts,
    whole,
)
from .records import (
    Compilation,
    HeldMemory,
    Memory,
    OutOfMemory,
    PartMemory,
    Point,
    Settings,
)
from .samples import (
    Key,
    Samples,
    optimizer_record,
    overhead_of,
    part_records,
    sums_of_parts,
    whole_record,
    with_backward,
)
from .trust import BusyShares, busy_shares, system_clocks, trust

Run = Callable[[], object]


@dataclass(frozen=True)
class Subject:
    """A size, built and ready to run.

    steps: the steps of its first block, never compiled.
    whole: the model in one call.
    smallest: a model of the same depth with next to no arithmetic, in one call.
    parts: what is timed of the block.
    """

    model: Block | Transformer
    steps: list[Step]
    whole: TimedPart
    smallest: TimedPart
    parts: list[TimedPart]

    @property
    def x(self) -> Tensor:
        return self.whole.inputs[0]

    @property
    def tensors_of_model(self) -> list[Tensor]:
        """Return weights and tables, which are there before and after a run."""
        return [*self.model.parameters(), *self.model.buffers()]

    def compiled(self) -> "Subject":
        return replace(
            self,
            whole=self.whole.compiled(),
            smallest=self.smallest.compiled(),
            parts=[part.compiled() for part in self.parts],
        )


def measure(
    size: Size,
    settings: Settings,
    outputs: Outputs | None = None,
    progress: Progress | None = None,
    clock: Clock = clock,
) -> Point | OutOfMemory:
    """Measure one size in this process."""
    outputs = outputs or Outputs()
    progress = progress or Progress()
    try:
        with torch.set_grad_enabled(settings.train):
            return _measure(size, settings, outputs, progress, clock)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        message = " ".join(str(error).split()) or "out of memory"
    # Outside of the except clause, where the frames of the error would still hold tensors.
    gc.collect()
    if settings.device.type == "cuda":
        torch.cuda.empty_cache()
    return OutOfMemory(size, message)


def _measure(
    size: Size,
    settings: Settings,
    outputs: Outputs,
    progress: Progress,
    clock: Clock,
) -> Point:
    progress.start("building")
    subject = _build(size, settings)
    compilation = None
    if settings.compile:
        progress.start("compiling")
        subject, compilation = _compile(subject, settings)
    passes_of_whole, optimizer = passes_of(subject.whole, settings.mode)
    run_whole = passes_of_whole[settings.mode]
    to_time = _everything_to_time(subject, passes_of_whole, optimizer, settings)
    samples, busy = _time(to_time, settings, progress, clock)
    element_size = settings.dtype.itemsize
    parts = part_records(samples, size, element_size)
    whole = whole_record(samples, size, element_size)
    seconds = whole.passes[settings.mode].seconds.median
    point = Point(
        size=size,
        parts=parts,
        whole=whole,
        optimizer=optimizer_record(samples, size, element_size),
        sum_of_parts=sums_of_parts(samples, parts),
        overhead=overhead_of(samples),
        compilation=compilation,
        attention_kernel=attention_kernel(lambda: run_steps(subject.steps, subject.x)),
        memory=_memory(subject, optimizer, run_whole, settings, progress),
        kernels=kernel_report(run_whole, settings.device, seconds),
        trust=trust(samples.seconds["whole", settings.mode], busy),
    )
    _write_trace(subject, optimizer, outputs, progress)
    _write_memory_snapshot(run_whole, outputs)
    return point


def _build(size: Size, settings: Settings) -> Subject:
    torch.manual_seed(settings.seed)
    model, complete = build_whole(size, settings)
    _, smallest = build_whole(size.smallest(), settings)
    steps = block_steps(model)
    parts = timed_parts(steps, complete.inputs[0], *complete.gradients)
    return Subject(model, steps, complete, smallest, parts)


def build_whole(
    size: Size, settings: Settings
) -> tuple[Block | Transformer, TimedPart]:
    """Return a model of this size, and all of it as one part with an input and the gradient of the output."""
    model = size.build(settings.device, settings.dtype)
    shape = (size.batch_size, size.seq_len, size.d_model)
    x = torch.randn(shape, device=settings.device).to(settings.dtype)
    if not settings.train:
        return model, whole(model, x)
    x.requires_grad_()
    return model, whole(model, x, torch.randn_like(x))


def _compile(subject: Subject, settings: Settings) -> tuple[Subject, Compilation]:
    """Compile the whole and each part, and run the whole once."""
    # Otherwise, the second size of a sweep would be compiled for any size.
    torch.compiler.reset()
    subject = subject.compiled()
    first_run = subject.whole.train if settings.train else subject.whole.forward
    return subject, tracing.compile_report(first_run)


def passes_of(
    complete: TimedPart, mode: str
) -> tuple[dict[str, Run], Optimizer | None]:
    """Return what is timed of a whole, as far as the mode goes, and the AdamW of a step with its moments.

    Its learning rate is 0: this leaves the weights as they are for all other runs, and takes no kernel away.
    """
    runs: dict[str, Run] = {"forward": complete.forward}
    if mode == "forward":
        return runs, None
    runs["train"] = complete.train
    if mode == "train":
        return runs, None
    optimizer = torch.optim.AdamW(complete.weights, lr=0.0)

    def training_step() -> None:
        complete.accumulate()
        optimizer.step()

    # The first step makes the moments.
    training_step()
    runs["step"] = training_step
    return runs, optimizer


def _everything_to_time(
    subject: Subject,
    passes_of_whole: dict[str, Run],
    optimizer: Optimizer | None,
    settings: Settings,
) -> dict[Key, Run]:
    """Return what is timed, by part and pass.

    Backward is not timed alone: it is what "train" takes longer than "forward".
    """
    runs: dict[Key, Run] = {}
    for name, run in passes_of_whole.items():
        runs["whole", name] = run
    of_smallest, _ = passes_of(subject.smallest, settings.mode)
    for name, run in of_smallest.items():
        runs["smallest", name] = run
    for part in subject.parts:
        runs[part.name, "forward"] = part.forward
        if settings.train:
            runs[part.name, "train"] = part.train
    if optimizer is not None:
        runs["AdamW", "optimizer"] = optimizer.step
    return runs


def _time(
    runs: dict[Key, Run], settings: Settings, progress: Progress, clock: Clock
) -> tuple[Samples, BusyShares]:
    """Time all runs, and return their samples and how busy the machine was meanwhile."""
    progress.start("timing samples", len(runs) * settings.rounds)
    start = system_clocks()
    seconds = interleave(runs, settings.rounds, 0.01, 1, progress.advance, clock=clock)
    shares = busy_shares(start, system_clocks())
    on_gpu: dict[Key, list[float]] = {}
    if settings.device.type == "cuda":
        for key, run in runs.items():
            samples = gpu_seconds(run, min(seconds[key]))
            if samples is not None:
                on_gpu[key] = samples
    return Samples(with_backward(seconds), with_backward(on_gpu)), shares


def _memory(
    subject: Subject,
    optimizer: Optimizer | None,
    run: Run,
    settings: Settings,
    progress: Progress,
) -> Memory:
    """Return the memory of the mode's whole, and that of each part."""
    progress.start("measuring memory")
    device = settings.device
    held = held_memory(subject.whole, optimizer, run, device)
    known = subject.tensors_of_model
    before_run = bytes_of([*known, subject.x]) + (held.optimizer_state_bytes or 0)
    kept = None
    if settings.train:
        _, kept = SavedBytes(known).of(subject.whole.forward)
    return Memory(
        held=held,
        peak_bytes=before_run + held.peak_added_bytes,
        kept_bytes=kept,
        parts=_memory_of_parts(subject, known, settings),
    )


def held_memory(
    complete: TimedPart, optimizer: Optimizer | None, run: Run, device: torch.device
) -> HeldMemory:
    """Return the bytes of weights, gradients and AdamW's state, and the most that a run adds, gradients included."""
    gradients = None
    if complete.gradients:
        complete.accumulate()
        gradients = bytes_of(
            weight.grad for weight in complete.weights if weight.grad is not None
        )
    moments = None
    if optimizer is not None:
        moments = bytes_of(_tensors_of(optimizer))
    # Otherwise, the gradients of the last run would be there before the next one.
    complete.clear()
    return HeldMemory(
        parameters_bytes=bytes_of(complete.weights),
        gradients_bytes=gradients,
        optimizer_state_bytes=moments,
        peak_added_bytes=peak_added_bytes(run, device),
    )


def _tensors_of(optimizer: Optimizer) -> Iterable[Tensor]:
    """Yield the tensors of an optimizer's state."""
    for state in optimizer.state.values():
        for value in state.values():
            if torch.is_tensor(value):
                yield value


def _memory_of_parts(
    subject: Subject, known: list[Tensor], settings: Settings
) -> tuple[PartMemory, ...]:
    """Return the memory of each part; what its steps keep counts for the first part that keeps it."""
    kept = _kept_by_part(subject, known)
    records = []
    for part in subject.parts:
        run = part.train if settings.train else part.forward
        record = PartMemory(
            name=part.name,
            kept_bytes=kept[part.name] if settings.train else None,
            peak_added_bytes=peak_added_bytes(run, settings.device),
        )
        records.append(record)
    return tuple(records)


def _kept_by_part(subject: Subject, known: list[Tensor]) -> Counter[str]:
    """Return the bytes that each part keeps for backward, in one run of all steps."""
    saved = SavedBytes(known)
    kept = Counter[str]()

    def run(step: Step, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        outputs, count = saved.of(lambda: step.run(*inputs))
        kept[step.part] += count
        return outputs

    run_steps_with(run, subject.steps, subject.x)
    return kept


def _write_trace(
    subject: Subject,
    optimizer: Optimizer | None,
    outputs: Outputs,
    progress: Progress,
) -> None:
    """Trace the whole and each part in runs of their own, if an option names a file for it."""
    if outputs.trace is None:
        return
    progress.start("tracing")
    labeled = [subject.whole, *subject.parts]
    with outputs.writing(outputs.trace):
        tracing.write_trace(labeled, optimizer, outputs.trace)


def _write_memory_snapshot(run_whole: Run, outputs: Outputs) -> None:
    """Record the allocations of a run of its own, if an option names a file for it."""
    if outputs.memory_snapshot is None:
        return
    with outputs.writing(outputs.memory_snapshot):
        tracing.write_memory_snapshot(run_whole, outputs.memory_snapshot)
