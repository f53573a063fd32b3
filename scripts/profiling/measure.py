"""Measure a model in turns: its parts, the total, and the machine."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import einops
import torch
from lab.machine import environment
from lab.tables import share
from lab.timing import Run, Sampler, Spread, clock, interleave, wall_sampler
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.optim import AdamW

from .kernels import Recording, record_run
from .parts import GPU_IDLE, REST, TOTAL, Labels, PartTime, Stopwatch
from .roofline import Operation, Rates, Row, rate_samplers
from .tensors import nbytes, result_in, storage_of, stored_in
from .work import Ledger, ledgers_of, rows_of

Build = Callable[[torch.device, torch.dtype], nn.Module]

EAGER_PARTS = (
    "The parts were measured in eager mode. Below 0, rest is what compiling saves."
)
LEDGERS = 3  # runs in which each operation is timed
SHOWN = 0.01  # of the total: parts without operations that take less are not shown
NOISE = 0.2  # what varies by more is named


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

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def describe(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}, {self.mode}, {'compiled' if self.compile else 'eager'}"


@dataclass(frozen=True)
class Memory:
    """Bytes of tensors, and the peak of a run.

    other_tensors: what the model reads besides, such as tables in plain attributes.
    """

    peak_bytes: int
    parameter_bytes: int
    buffer_bytes: int
    other_tensor_bytes: int
    gradient_bytes: int
    adamw_bytes: int


@dataclass
class Profile:
    """All that was measured.

    parts_are_eager: the total is compiled, at least partly, and the parts are not.
    took_s: the total time.
    rest_varies: the range from p20 to p80 of the row `rest`, divided by the total time.
    mfu: the time of the FLOPs at the measured matmul rates, divided by the total time.
    """

    title: str
    machine: str
    settings: Settings
    parts_are_eager: bool
    tokens: int
    tokens_per_s: float
    took_s: Spread
    mfu: float
    rates: Rates
    rows: list[Row]
    whole: Row
    rest_varies: float
    memory: Memory
    recording: Recording
    notes: list[str]


@dataclass
class Subject:
    """A model with an input, and its runs."""

    model: nn.Module
    x: Tensor
    changes_x: bool
    gradient: Tensor | None
    settings: Settings
    weights: list[nn.Parameter]
    optimizer: torch.optim.Optimizer

    def run(self, model: Callable[[Tensor], object]) -> None:
        """Run all passes of the mode."""
        self.clear()
        # A model that changes its input gets a new one.
        out = result_in(model(self.x.clone() if self.changes_x else self.x))
        if self.settings.train:
            out.backward(self.gradient)
        if self.settings.mode == "step":
            self.optimizer.step()

    def clear(self) -> None:
        for leaf in (self.x, *self.weights):
            leaf.grad = None


def prepare(build: Build, shape: tuple[int, int, int], settings: Settings) -> Subject:
    """Build the model, and run it twice.

    Raises:
        ValueError: no tensor of the result has a gradient, in a mode that trains.
        Exception: an error of the model, with a note on how it was called.
    """
    x = torch.randn(shape, device=settings.device, dtype=settings.dtype)
    x.requires_grad_(settings.train)
    model = build(settings.device, settings.dtype)
    if not settings.train:
        model.eval()
    given = x.clone()
    try:
        out = result_in(model(given))
    except Exception as error:
        error.add_note(
            "profile_block.py called the model with one tensor of shape (batch, seq, "
            f"d_model) = {shape}. --batch-size, --seq-len and --d-model change it."
        )
        raise
    if settings.train and not out.requires_grad:
        raise ValueError(
            f"the result of the model must have a gradient in mode {settings.mode}, "
            "got none; use --mode forward"
        )
    weights = list(model.parameters())
    subject = Subject(
        model=model,
        x=x,
        changes_x=not given.is_inference() and given._version > 0,
        gradient=torch.randn_like(out) if settings.train else None,
        settings=settings,
        weights=weights,
        # A learning rate of 0 leaves the weights as they are for the other runs.
        optimizer=AdamW([{"params": weights}], lr=0.0),
    )
    subject.run(model)  # allocates AdamW's state
    return subject


def compiled(model: nn.Module, subject: Subject) -> tuple[Run, str]:
    """Compile the model by its first run; return the run, and a note on the graphs."""
    # Otherwise tracing takes most of the time.
    torch.compiler.allow_in_graph(einops.rearrange)
    counters.clear()
    run = partial(subject.run, torch.compile(model, dynamic=False))
    start = clock()
    run()
    took = clock() - start
    breaks = [reason.splitlines()[0] for reason in counters["graph_break"]]
    note = (
        f"Compilation: {took:.1f} s, graphs: {counters['stats']['unique_graphs']}, "
        f"breaks: {', '.join(breaks) or 'none'}"
    )
    return run, note


def compiles_itself(model: nn.Module) -> bool:
    """Say if something was compiled since the counters were cleared, or will be."""
    in_place = [each for each in model.modules() if each._compiled_call_impl]
    return bool(counters["stats"] or in_place)


def measure(
    build: Build,
    shape: tuple[int, int, int],
    title: str,
    settings: Settings,
    trace: Path | None = None,
) -> Profile:
    """Measure a model. With a path, write a trace.

    Gradients must be enabled in the modes that train.
    """
    torch.manual_seed(0)
    counters.clear()
    subject = prepare(build, shape, settings)
    model = subject.model
    run_parts: Run = partial(subject.run, model)
    run_whole = run_parts
    parts_are_eager = settings.compile or compiles_itself(model)
    notes = []
    if settings.compile:
        run_whole, note = compiled(model, subject)
        notes.append(f"{note}. {EAGER_PARTS}")
    elif parts_are_eager:
        notes.append(f"The model compiles some of its parts. {EAGER_PARTS}")

    ledgers = ledgers_of(model, subject.x, run_parts, LEDGERS)
    if not ledgers[0].sees_kept:
        notes.append("Kept bytes are unknown, because torch.func.grad hides them.")
    rows = rows_of(ledgers)
    used = {dtype for row in rows for dtype in row.flops}
    dtypes = {settings.dtype, *(getattr(torch, name) for name in used)}
    stopwatch = Stopwatch(model, settings.on_gpu)
    of_rates = rate_samplers(settings.device, dtypes)
    samplers: dict[str, Sampler] = {
        "parts": stopwatch.sampler(run_parts),
        "whole": wall_sampler(run_whole),
        **of_rates,
    }
    samples = interleave(samplers, settings.rounds)

    rates = Rates.of({name: samples[name] for name in of_rates})
    took = Spread.of(samples["whole"])
    for row in rows:
        set_times(row, stopwatch.taken)
        row.compare(rates, settings.on_gpu)
    whole = add_up(rows, took, rates, subject)
    rows = [row for row in rows if is_shown(row, took.median)]
    if parts_are_eager:  # compiling fuses parts, and removes operations
        whole.forward_s = whole.of_roofline = whole.overhead_s = None
    left = rests(rows, samples["whole"], stopwatch.taken)
    rest_varies = Spread.of(left).range / took.median
    notes += noise([*rows, whole], rest_varies, samples, of_rates)
    recording, memory = record(subject, ledgers[0], run_whole, trace, parts_are_eager)
    rows += left_over(rows, whole, recording, rest_varies)
    tokens = subject.x.shape[:-1].numel()
    return Profile(
        title=f"{title}; {settings.describe()}, {built_mode(model)} mode",
        machine=environment(settings.device),
        settings=settings,
        parts_are_eager=parts_are_eager,
        tokens=tokens,
        tokens_per_s=tokens / took.median,
        took_s=took,
        mfu=whole.compute_s / whole.total_s,
        rates=rates,
        rows=rows,
        whole=whole,
        rest_varies=rest_varies,
        memory=memory,
        recording=recording,
        notes=notes,
    )


def is_shown(row: Row, total_s: float) -> bool:
    """Say if a part does more than to call others."""
    works = bool(row.operations or row.kept_bytes)
    return works or row.total_s > SHOWN * total_s


def built_mode(model: nn.Module) -> str:
    return "training" if model.training else "eval"


def set_times(row: Row, taken: list[dict[str, PartTime]]) -> None:
    total = Spread.of([times[row.name].total for times in taken])
    row.total_s, row.p20_s, row.varies = total.median, total.p20, total.width
    row.forward_s = median([times[row.name].forward for times in taken])


def add_up(rows: list[Row], took: Spread, rates: Rates, subject: Subject) -> Row:
    """Return the total: the time of the whole, and the work of all parts."""
    whole = Row(TOTAL, total_s=took.median, p20_s=took.p20, varies=took.width)
    whole.parameters = sum(weight.numel() for weight in subject.weights)
    operations: dict[str, Operation] = {}
    forward = 0.0
    for row in rows:
        whole.calls += row.calls
        for each in row.operations:
            operations.setdefault(each.name, Operation(each.name)).add(each)
        for dtype, count in row.flops.items():
            whole.flops[dtype] = whole.flops.get(dtype, 0) + count
        whole.unknown += [name for name in row.unknown if name not in whole.unknown]
        whole.moved_bytes += row.moved_bytes
        if row.kept_bytes is None or whole.kept_bytes is None:
            whole.kept_bytes = None
        else:
            whole.kept_bytes += row.kept_bytes
        forward += row.forward_s or 0.0
    whole.operations = sorted(operations.values(), key=lambda each: -each.total_s)
    # The parts and the whole are measured in separate runs.
    train = subject.settings.train
    whole.forward_s = min(forward, took.median) if train else took.median
    whole.compare(rates, subject.settings.on_gpu)
    whole.overhead_s = whole.computations / rates.small_operations_per_s
    whole.least_s = sum(row.least_s for row in rows)  # nothing is fused over parts
    whole.of_roofline = whole.least_s / whole.total_s
    whole.limit = ""
    return whole


def rests(
    rows: list[Row], whole: list[float], taken: list[dict[str, PartTime]]
) -> list[float]:
    """Return, for each round, the time that the rows leave of the whole."""
    left = []
    for seconds, times in zip(whole, taken, strict=True):
        left.append(seconds - sum(times[row.name].total for row in rows))
    return left


def noise(
    rows: list[Row],
    rest_varies: float,
    samples: dict[str, list[float]],
    names_of_rates: Iterable[str],
) -> list[str]:
    """Name what varies by more than 20%: rates, rows above 5% of the total, and the rest.

    The last row is the total.
    """
    varies = {name: Spread.of(samples[name]).width for name in names_of_rates}
    for row in rows:
        if row.total_s > 0.05 * rows[-1].total_s:
            varies[row.name] = row.varies
    noisy = [
        f"{name} by {share(wide, 2)}" for name, wide in varies.items() if wide > NOISE
    ]
    if rest_varies > NOISE:
        noisy.append(f"rest by {share(rest_varies, 2)} of the total")
    if not noisy:
        return []
    return [f"NOISY: {', '.join(noisy)} (p20 to p80); close other programs"]


def left_over(
    rows: list[Row], whole: Row, recording: Recording, rest_varies: float
) -> list[Row]:
    """Return the rest of the total time and, on a GPU, the time without a kernel."""
    left = whole.total_s - sum(row.total_s for row in rows)
    idle = []
    if recording.kernels:
        idle = [Row(GPU_IDLE, total_s=whole.total_s - recording.busy_s)]
        left -= idle[0].total_s
    rest = Row(REST, total_s=left)
    if left:
        rest.varies = rest_varies * whole.total_s / abs(left)
    return [rest, *idle]


def record(
    subject: Subject,
    ledger: Ledger,
    run: Run,
    trace: Path | None,
    parts_are_eager: bool,
) -> tuple[Recording, Memory]:
    """Record a run of the whole model, and measure its memory."""
    run()
    model, optimizer = subject.model, subject.optimizer
    states = list(optimizer.state.values())
    held = [*subject.weights, *model.buffers(), states, subject.x, subject.gradient]
    known = {storage_of(each) for each in stored_in(held)}
    others = [ledger.read[storage] for storage in ledger.read.keys() - known]
    gradients = nbytes([weight.grad for weight in subject.weights])
    subject.clear()
    before = 0
    if subject.settings.on_gpu:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    def run_and_clear() -> None:
        run()
        subject.clear()

    # Labels need hooks of modules, which compiled code does not run.
    labels = Labels(model) if trace and not parts_are_eager else None
    recording = record_run(
        partial(labels.watch, run_and_clear) if labels else run_and_clear, trace
    )
    added = recording.peak_added_bytes
    if subject.settings.on_gpu:
        added = torch.cuda.max_memory_allocated() - before
    parameters, buffers = nbytes(subject.weights), nbytes(list(model.buffers()))
    states_bytes = nbytes(states)
    own = parameters + buffers + sum(others) + states_bytes + nbytes(subject.x)
    return recording, Memory(
        peak_bytes=own + added,
        parameter_bytes=parameters,
        buffer_bytes=buffers,
        other_tensor_bytes=sum(others),
        gradient_bytes=gradients,
        adamw_bytes=states_bytes,
    )
