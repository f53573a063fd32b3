"""Measure one size: the parts and the whole in interleaved rounds; memory, kernels and traces in runs of their own."""

import gc
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from lab import kernels
from lab.machine import Ceilings, Datasheet
from lab.memory import SavedBytes, bytes_of, is_out_of_memory, peak_added_bytes
from lab.progress import Progress
from lab.sizes import Size
from lab.timing import interleave
from torch.nn.attention import SDPBackend, sdpa_kernel

from tinyblock import Block, Transformer

from . import tracing
from .analysis import analyse
from .collectives import ONE_PROCESS, Mesh
from .parts import Part, accumulate, clear, cut, whole
from .trust import Watch

Result = TypeVar("Result")

MODES = ("forward", "train", "step")
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
_SAMPLE_SECONDS = 0.01


@dataclass(frozen=True)
class Settings:
    """How to measure: `mode` is forward, train (forward and backward) or step (train, and a step of AdamW).

    What `trace`, `memory_snapshot` and `nvtx` ask for is recorded in runs of their own, after the timings.
    """

    device: torch.device
    dtype: torch.dtype
    mode: str
    compile: bool = False
    attention_backend: str | None = None
    rounds: int = 15
    seed: int = 0
    trace: Path | None = None
    memory_snapshot: Path | None = None
    nvtx: bool = False
    mesh: Mesh = ONE_PROCESS

    @property
    def train(self) -> bool:
        return self.mode != "forward"

    def attention(self) -> AbstractContextManager[None]:
        """Return a context in which SDPA uses the chosen backend only."""
        return nullcontext() if self.attention_backend is None else sdpa_kernel(BACKENDS[self.attention_backend])


def require_attention_backend(size: Size, settings: Settings) -> None:
    """Run the block once with the chosen attention backend, on a short sequence.

    Raises:
        RuntimeError: the backend cannot run on this device, in this dtype or with these heads.
    """
    short = replace(size, batch_size=1, seq_len=min(size.seq_len, 64), d_model=8, d_ff=8, num_layers=None)
    with settings.attention(), torch.set_grad_enabled(settings.train), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch explains at length, in one warning for each backend
        _, part = build_whole(short, settings)
        part.train() if settings.train else part.forward()


def measure(
    size: Size, settings: Settings, ceilings: Ceilings, datasheet: Datasheet | None, progress: Progress
) -> dict[str, Any]:
    """Measure one size, and return a point of docs/profile_schema.md.

    Without memory for it, the point says so; without memory for what follows the timings, that alone is null, and a
    note says why. An interruption after the first round gives the point of the rounds until then, with the status
    "interrupted"; an earlier one is raised.
    """
    try:
        with settings.attention(), torch.set_grad_enabled(settings.train):
            return _Measurement(size, settings, progress).point(ceilings, datasheet)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        message = _one_line(error)
    _free(settings.device)
    return {"status": "out of memory", "error": message, "size": asdict(size)}


class _Measurement:
    """One size, built: what is run, and what is asked of it."""

    def __init__(self, size: Size, settings: Settings, progress: Progress) -> None:
        self.size, self.settings, self.progress = size, settings, progress
        progress.start("building")
        torch.manual_seed(settings.seed)
        model, self.whole = build_whole(size, settings)
        self.smallest = self._smallest()
        self.known = [*model.parameters(), *model.buffers()]
        self.parts = cut(model, self.whole.inputs[0], *self.whole.gradients)
        self.compile: dict[str, Any] | None = None
        if settings.compile:
            progress.start("compiling")
            torch.compiler.reset()  # else the second size of a sweep would be compiled for any size
            eager, self.whole = self.whole, self.whole.compiled()
            self.compile = tracing.compile_report(eager, self.whole, settings.train)
            self.smallest = self.smallest and self.smallest.compiled()
            self.parts = [part.compiled() for part in self.parts]
        self.optimizing = Optimizing(self.whole) if settings.mode == "step" else None
        self.notes: list[str] = []

    def _smallest(self) -> Part | None:
        """Return the same calls on one token, None where the chosen attention backend cannot run them."""
        size = self.size.smallest()
        if self.settings.attention_backend is not None:
            try:
                require_attention_backend(size, self.settings)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                return None
        return replace(build_whole(size, self.settings)[1], name="smallest")

    def run(self) -> Callable[[], object]:
        """Return the whole, as far as the mode goes."""
        if self.optimizing is not None:
            return self.optimizing.step
        return self.whole.train if self.settings.train else self.whole.forward

    def _runs(self) -> dict[str, Callable[[], object]]:
        """Return what is timed. Backward alone is not: it is what "train" takes longer than "forward"."""
        runs: dict[str, Callable[[], object]] = {}
        for part in (self.whole, *self.parts, self.smallest):
            if part is not None:
                runs[f"{part.name} forward"] = part.forward
                if self.settings.train:
                    runs[f"{part.name} train"] = part.train
        if self.optimizing is not None:
            runs["whole step"] = self.optimizing.step
            runs["AdamW"] = self.optimizing.update
            if self.smallest is not None:
                runs["smallest step"] = Optimizing(self.smallest).step
        return runs

    def point(self, ceilings: Ceilings, datasheet: Datasheet | None) -> dict[str, Any]:
        settings, watch = self.settings, Watch()
        samples, complete = self._samples()
        status = "ok" if complete else "interrupted"
        point: dict[str, Any] = {"status": status, "error": None, "size": asdict(self.size)}
        point |= analyse(samples, self.size, settings.mode, settings.dtype, ceilings, datasheet, watch.shares())
        point |= {"compile": self.compile, "memory": None, "kernels": None, "notes": self.notes}
        if complete:
            try:
                self.progress.start("measuring memory")
                point["memory"] = self._stage("memory", self._memory)
                seconds = point["whole"][settings.mode]["seconds"]["median"]
                if not settings.nvtx:  # nsys and torch.profiler cannot both listen to the GPU
                    counting = partial(kernels.kernel_report, self.run(), settings.device, seconds)
                    point["kernels"] = self._stage("kernels", counting)
                self._record()
            except KeyboardInterrupt:
                point["status"] = "interrupted"
        return point

    def _stage(self, name: str, run: Callable[[], Result]) -> Result | None:
        """Return what `run` returns; without memory for it None, and leave a note."""
        try:
            return run()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.notes.append(f"{name}: out of memory: {_one_line(error)}")
        _free(self.settings.device)
        return None

    def _samples(self) -> tuple[dict[str, list[float]], bool]:
        """Return the samples, and whether they are all there; an interrupted round does not count."""
        runs, rounds = self._runs(), self.settings.rounds
        self.progress.start("warming up")
        timing = False

        def on_sample(name: str) -> None:
            nonlocal timing
            if not timing:
                self.progress.start("timing", len(runs) * rounds)
            timing = True
            self.progress.advance()

        samples: dict[str, list[float]] = {}
        try:
            return interleave(runs, rounds, _SAMPLE_SECONDS, 1, on_sample, samples), True
        except KeyboardInterrupt:
            complete = min((len(times) for times in samples.values()), default=0)
            if complete == 0:
                raise
            return {name: times[:complete] for name, times in samples.items()}, False

    def _memory(self) -> dict[str, Any]:
        device, train = self.settings.device, self.settings.train
        saved_by_part = self._saved_by_part() if train else {}
        parts = [
            {
                "name": part.name,
                "saved_bytes": saved_by_part.get(part.name),
                "peak_added_bytes": peak_added_bytes(part.train if train else part.forward, device),
            }
            for part in self.parts
        ]
        gradients = bytes_of(self.whole.train()[1:]) if train else None
        saved_by_whole = SavedBytes(self.known).of(self.whole.forward)[1] if train else None
        state = None
        if self.optimizing is not None:
            state = self.optimizing.state_bytes()
            clear(self.whole)  # else the gradients of the last step would be there already
        added = peak_added_bytes(self.run(), device)
        there = bytes_of([*self.known, *self.whole.inputs]) + (state or 0)
        return {
            "parameters_bytes": bytes_of(self.whole.weights),
            "gradients_bytes": gradients,
            "optimizer_state_bytes": state,
            "saved_bytes": saved_by_whole,
            "peak_added_bytes": added,
            "peak_bytes": None if added is None else there + added,
            "parts": parts,
        }

    def _saved_by_part(self) -> dict[str, int]:
        there, saved_by_part = list(self.known), {}
        for part in self.parts:
            saved = SavedBytes(there)  # one for each part, so that what it saves is free again before the next
            outputs, saved_by_part[part.name] = saved.of(part.forward)
            # What one part puts out and saves, and the next one saves as its input, is one storage in the block. The
            # final norm has no next.
            pairs = zip(outputs, part.outputs, strict=False)
            there += [input_of_next for output, input_of_next in pairs if saved.has(output)]
            del saved, outputs
        return saved_by_part

    def _record(self) -> None:
        parts, step = [self.whole, *self.parts], None if self.optimizing is None else self.optimizing.update
        if (trace := self.settings.trace) is not None:
            self.progress.start("tracing")
            self._stage("trace", partial(tracing.write_trace, parts, step, trace))
        if (snapshot := self.settings.memory_snapshot) is not None:
            self._stage("memory snapshot", partial(tracing.write_memory_snapshot, self.run(), snapshot))
        if self.settings.nvtx:
            self._stage("NVTX ranges", partial(tracing.mark_ranges, parts, step))


class Optimizing:
    """A whole training step with AdamW as torch sets it up, but for a learning rate of 0.

    That leaves the weights as they are for all the other runs, and takes no kernel away.
    """

    def __init__(self, part: Part) -> None:
        self.part = part
        self.optimizer = torch.optim.AdamW(part.weights, lr=0.0)
        self.step()  # which makes the moments, and the gradients that `update` needs

    def step(self) -> None:
        accumulate(self.part)
        self.update()

    def update(self) -> None:
        self.optimizer.step()

    def state_bytes(self) -> int:
        states = self.optimizer.state.values()
        return bytes_of(value for state in states for value in state.values() if torch.is_tensor(value))


def build_whole(size: Size, settings: Settings) -> tuple[Block | Transformer, Part]:
    model = size.build(settings.device, settings.dtype)
    shape = (size.batch_size, size.seq_len, size.d_model)
    x = torch.randn(shape, device=settings.device).to(settings.dtype).requires_grad_(settings.train)
    return model, whole(model, x, torch.randn_like(x) if settings.train else None)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or "out of memory"


def _free(device: torch.device) -> None:
    """Give back what an out-of-memory error has left; outside its except clause, where its frames hold no tensors."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
