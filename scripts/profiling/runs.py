"""Run a model, and measure what a run tells: times, kernels, and memory."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from lab.tables import share
from lab.timing import Clock, Run, Sampler, Spread, interleave, wall_sampler
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.optim import AdamW
from torch.profiler import profile, schedule
from torch.utils._pytree import tree_map_only

from .events import nbytes, place_of, stored_in
from .operations import tensors_in
from .parts import Labels, PartTime, Stopwatch, noticing_threads, parts_of, result_in
from .rows import Row, Time

Inputs = tuple[Any, ...] | dict[str, Any]  # by place, or by keyword
Built = nn.Module | tuple[nn.Module, Inputs]
Build = Callable[[torch.device, torch.dtype], Built]
# Returns samplers of a machine's rates, of matmuls in the dtypes.
RateSamplers = Callable[
    [torch.device, Iterable[torch.dtype], Clock], dict[str, Sampler]
]
EAGER_PARTS = (
    "The parts were measured in eager mode. Below 0, rest is what compiling saves."
)
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


@dataclass(frozen=True)
class Batch:
    """What one run takes.

    sizes: of the inputs.
    count: of tokens or, if the inputs are no sequences of tokens, of samples.
    unit: token or sample.
    """

    sizes: str
    count: int
    unit: str


@dataclass
class Subject:
    """A model with its inputs, its runs, and the clock that measures them.

    whole: the model or, if --compile compiles something of it, the compiled model.
    parts: the name of the part of each module.
    threads: the names of Python threads that work in the model.
    changes_inputs: whether the model changes its inputs, so that each run needs a copy.
    gradient: where backward starts.
    """

    model: nn.Module
    whole: Callable[..., object]
    parts: dict[nn.Module, str]
    threads: list[str]
    settings: Settings
    inputs: Inputs
    batch: Batch
    changes_inputs: bool
    gradient: Tensor | None
    weights: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    clock: Clock

    @property
    def is_compiled(self) -> bool:
        return self.whole is not self.model

    def run_parts(self) -> None:
        """Run all passes of the mode in eager mode, so that hooks see the parts."""
        self._run(self.model)

    def run_whole(self) -> None:
        """Run all passes of the mode."""
        self._run(self.whole)

    def _run(self, model: Callable[..., object]) -> None:
        self.clear()
        inputs = copied(self.inputs) if self.changes_inputs else self.inputs
        out = result_in(call(model, inputs))
        if self.settings.train:
            out.backward(self.gradient)
        if self.settings.mode == "step":
            self.optimizer.step()

    def clear(self) -> None:
        """Release all gradients."""
        for leaf in (*tensors_in(self.inputs), *self.weights):
            if leaf.is_leaf:
                leaf.grad = None


def call(model: Callable[..., object], inputs: Inputs) -> object:
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def copied(inputs: Inputs) -> Inputs:
    return tree_map_only(Tensor, Tensor.clone, inputs)


def prepare(
    build: Build, shape: tuple[int, int, int], settings: Settings, clock: Clock
) -> Subject:
    """Build the model, and run it twice.

    Raises:
        ValueError: no tensor of the result has a gradient, in a mode that trains.
        Exception: an error of the model, with a note on how it was called.
    """
    x = torch.randn(shape, device=settings.device, dtype=settings.dtype)
    x.requires_grad_(settings.train)
    built = build(settings.device, settings.dtype)
    inputs: Inputs
    if isinstance(built, tuple):
        model, inputs = built
        note = "profile_block.py called it with the inputs that its builder returned."
        batch = batch_of(inputs)
    else:
        model, inputs = built, (x,)
        note = (
            "profile_block.py called the model with one tensor of shape (batch, seq, "
            f"d_model) = {shape}. --batch-size, --seq-len and --d-model change it."
        )
        sequences, seq, d_model = shape
        sizes = f"{sequences} x {seq} tokens, d_model {d_model}"
        batch = Batch(sizes, sequences * seq, "token")
    if not settings.train:
        model.eval()
    given = copied(inputs)
    try:
        # Compilers have threads of their own.
        with torch.compiler.set_stance("force_eager"), noticing_threads() as threads:
            out = result_in(call(model, given))
    except Exception as error:
        error.add_note(note)
        raise
    if settings.train and not out.requires_grad:
        raise ValueError(
            f"the result of the model must have a gradient in mode {settings.mode}, "
            "got none; use --mode forward"
        )
    weights = list(model.parameters())
    trained = [weight for weight in weights if weight.requires_grad]
    subject = Subject(
        model=model,
        whole=model,
        parts=parts_of(model, bool(threads)),
        threads=sorted(threads),
        settings=settings,
        inputs=inputs,
        batch=batch,
        changes_inputs=any(
            not each.is_inference() and each._version > 0 for each in tensors_in(given)
        ),
        gradient=torch.randn_like(out) if settings.train else None,
        weights=weights,
        # A learning rate of 0 leaves the weights as they are for the other runs.
        optimizer=AdamW(
            [{"params": trained}],
            lr=0.0,
            fused=all(weight.is_floating_point() for weight in trained),
        ),
        clock=clock,
    )
    subject.run_parts()  # allocates AdamW's state
    return subject


def batch_of(inputs: Inputs) -> Batch:
    """Describe inputs. A batch of integers is one of tokens."""
    by_place = [("", value) for value in inputs]
    named = inputs.items() if isinstance(inputs, dict) else by_place
    sizes = ", ".join(
        f"{name} {sizes_of(value)}".strip()
        for name, value in named
        if isinstance(value, Tensor)
    )
    tensors = tensors_in(inputs)
    if not tensors or not tensors[0].ndim:
        return Batch(sizes, 1, "sample")
    first = tensors[0]
    has_integers = not (first.is_floating_point() or first.is_complex())
    if first.ndim == 2 and has_integers:
        return Batch(sizes, first.numel(), "token")
    return Batch(sizes, first.size(0), "sample")


def sizes_of(tensor: Tensor) -> str:
    if tensor.is_nested and tensor.layout == torch.strided:  # it has no shape
        return f"{tensor.size(0)} nested"
    return " x ".join(map(str, tensor.shape))


def compile_whole(subject: Subject) -> str:
    """Compile the whole by its first run; return a note on the graphs."""
    counters.clear()
    subject.whole = torch.compile(subject.model, dynamic=False)
    start = subject.clock.now()
    subject.run_whole()
    took = subject.clock.now() - start
    breaks = [reason.splitlines()[0] for reason in counters["graph_break"]]
    graphs = counters["stats"]["unique_graphs"]
    found = f"graphs: {graphs}, breaks: {', '.join(breaks) or 'none'}"
    if not graphs:
        subject.whole = subject.model
        return f"Compilation: torch compiled nothing, so this is the model in eager mode; {found}"
    return f"Compilation: {took:.1f} s, {found}. {EAGER_PARTS}"


def compiles_itself(subject: Subject) -> bool:
    """Say if something was compiled since the counters were cleared, or will be."""
    in_place = [each for each in subject.model.modules() if each._compiled_call_impl]
    return bool(counters["stats"] or in_place)


@dataclass(frozen=True)
class Times:
    """Samples that were taken in the same rounds.

    whole: seconds of a run, for each round.
    parts: the times of the parts by name, for each round.
    rates: seconds per FLOP, byte and small operation, by name, for each round.
    others: the share of the time of all rounds in which other programs had the processor.
    """

    whole: list[float]
    parts: list[dict[str, PartTime]]
    rates: dict[str, list[float]]
    others: float

    @classmethod
    def take(
        cls,
        subject: Subject,
        of_rates: dict[str, Sampler],
        progress: Callable[[str], None],
    ) -> "Times":
        """Measure the parts, the whole, and the rates of the machine alternately."""
        progress("measuring once, to see how often a sample repeats each run")
        stopwatch = Stopwatch(subject.parts, subject.clock)
        samplers: dict[str, Sampler] = {
            "parts": stopwatch.sampler(subject.run_parts),
            "whole": wall_sampler(subject.run_whole, clock=subject.clock),
            **of_rates,
        }
        clock = subject.clock
        start, worked = clock.now(), clock.worked()
        samples = interleave(samplers, subject.settings.rounds, progress)
        took, worked = clock.now() - start, clock.worked() - worked
        return cls(
            whole=samples["whole"],
            parts=stopwatch.taken,
            rates={name: samples[name] for name in of_rates},
            # A thread that waits for a GPU may sleep.
            others=0.0 if subject.settings.on_gpu or not took else 1 - worked / took,
        )

    def of(self, part: str) -> Time:
        """Return the time of a part."""
        taken = [times[part] for times in self.parts]
        return Time.of([each.total for each in taken], [each.forward for each in taken])

    def differing(self, calls: Mapping[str, int]) -> list[str]:
        """Return the parts that are not called as often, in each run, as they once were."""
        parts = dict.fromkeys(part for times in self.parts for part in times)
        return [
            part
            for part in parts
            if {times[part].calls for times in self.parts} != {calls.get(part, 0)}
        ]

    def rest(self, rows: list[Row]) -> list[float]:
        """Return the time that the rows leave of the whole, for each round."""
        rounds = zip(self.whole, self.parts, strict=True)
        return [
            whole - sum(parts[row.name].total for row in rows)
            for whole, parts in rounds
        ]

    def noise(self, rows: list[Row], whole: Row, rest_varies: float) -> list[str]:
        """Name what varies by more than 20%: rates, large parts, the whole, and the rest.

        A part is large from 5% of the whole. The rest varies in shares of the whole.
        """
        varies = {name: Spread.of(times).width for name, times in self.rates.items()}
        for row in (*rows, whole):
            if row.total_s > 0.05 * whole.total_s:
                varies[row.name] = row.varies
        noisy = [
            f"{name} by {share(wide, 2)}"
            for name, wide in varies.items()
            if wide > NOISE
        ]
        if rest_varies > NOISE:
            noisy.append(f"rest by {share(rest_varies, 2)} of the total")
        if not noisy:
            return []
        return [f"NOISY: {', '.join(noisy)} (p20 to p80); close other programs"]


@dataclass
class Kernel:
    """All launches of one kernel of the GPU in a run."""

    name: str
    launches: int = 0
    total_s: float = 0.0


@dataclass(frozen=True)
class Recording:
    """One run.

    kernels: by their time; none on a CPU.
    peak_added_bytes: the most that the run allocated at a time, on a CPU.
    """

    kernels: list[Kernel]
    peak_added_bytes: int

    @property
    def busy_s(self) -> float:
        return sum(kernel.total_s for kernel in self.kernels)


def record_run(run: Run, clock: Clock, trace: Path | None = None) -> Recording:
    """Profile one run after a warm-up, and write its Chrome trace.

    Call this after all timings: launches stay slower once a profiler has run. A session
    of torch.profiler may lose its first kernels (pytorch issue 192021), so a warm-up runs
    first.
    """
    with profile(
        schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
        profile_memory=True,
        with_stack=trace is not None,  # the trace then names modules
        acc_events=True,  # otherwise torch 2.11 warns that it drops earlier events
    ) as session:
        for _ in range(2):
            run()
            clock.wait()
            session.step()
    if trace is not None:
        session.export_chrome_trace(str(trace))
    memory = [
        (event.start_ns(), event.nbytes())
        for event in session.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    return Recording(kernels_of(session.events() or []), peak_of(memory))


def kernels_of(events: Iterable[Any]) -> list[Kernel]:
    """Return the kernels among the events of torch.profiler, from the longest on."""
    kernels: dict[str, Kernel] = {}
    for event in events:
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            kernel = kernels.setdefault(event.name, Kernel(event.name))
            kernel.launches += 1
            kernel.total_s += 1e-6 * event.time_range.elapsed_us()
    return sorted(kernels.values(), key=lambda kernel: -kernel.total_s)


def peak_of(changes: list[tuple[int, int]]) -> int:
    """Return the peak of the running sum of allocations and releases.

    Each change has its time, and how many bytes it adds. Equal times keep their order.
    """
    changes = sorted(changes, key=itemgetter(0))
    return max(accumulate((size for _, size in changes), initial=0))


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


def record_whole(
    subject: Subject, read: dict[int, int], trace: Path | None, label_parts: bool
) -> tuple[Recording, Memory]:
    """Record a run of the whole model, and measure its memory.

    read: bytes of the storages that existed before a run, and are read in it.
    label_parts: whether the trace names the parts.
    """
    subject.run_whole()
    gradients = nbytes([weight.grad for weight in subject.weights])
    subject.clear()
    before = 0
    if subject.settings.on_gpu:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    def run_and_clear() -> None:
        subject.run_whole()
        subject.clear()

    run = run_and_clear
    if trace and label_parts:
        run = partial(Labels(subject.parts).watch, run_and_clear)
    recording = record_run(run, subject.clock, trace)
    added = recording.peak_added_bytes
    if subject.settings.on_gpu:
        added = torch.cuda.max_memory_allocated() - before

    buffers = list(subject.model.buffers())
    states = list(subject.optimizer.state.values())
    held = [subject.weights, buffers, states, subject.inputs, subject.gradient]
    known = {place_of(each).storage for each in stored_in(held)}
    others = sum(read[storage] for storage in read.keys() - known)
    own = nbytes([subject.weights, buffers, states, subject.inputs]) + others
    return recording, Memory(
        peak_bytes=own + added,
        parameter_bytes=nbytes(subject.weights),
        buffer_bytes=nbytes(buffers),
        other_tensor_bytes=others,
        gradient_bytes=gradients,
        adamw_bytes=nbytes(states),
    )
