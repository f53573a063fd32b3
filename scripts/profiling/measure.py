"""Measure one size: the parts and the whole in interleaved rounds; memory, kernels and traces in runs of their own."""

import gc
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lab.kernels import attention_kernel, gpu_seconds, kernel_report
from lab.machine import Ceilings, Datasheet
from lab.memory import SavedBytes, bytes_of, is_out_of_memory, peak_added_bytes
from lab.progress import Progress
from lab.sizes import Size
from lab.timing import Clock, clock, interleave
from torch import Tensor
from torch.optim import Optimizer

from tinyblock import Block, Transformer

from . import tracing
from .analysis import analyze
from .collectives import ONE_PROCESS, Mesh
from .parts import Step, block_steps, part_steps, run_steps, whole
from .trust import busy_shares, system_clocks


@dataclass(frozen=True)
class Settings:
    """How to measure: `mode` is forward, train (forward and backward) or step (train, and a step of AdamW).

    What `trace`, `memory_snapshot` and `nvtx` ask for is recorded in runs of their own, after the timings.
    """

    device: torch.device
    dtype: torch.dtype
    mode: str
    compile: bool = False
    rounds: int = 15
    seed: int = 0
    trace: Path | None = None
    memory_snapshot: Path | None = None
    nvtx: bool = False
    mesh: Mesh = ONE_PROCESS

    @property
    def train(self) -> bool:
        return self.mode != "forward"


def measure(
    size: Size,
    settings: Settings,
    ceilings: Ceilings,
    datasheet: Datasheet | None = None,
    progress: Progress | None = None,
    clock: Clock = clock,
) -> dict[str, Any]:
    """Measure one size, and return a point of docs/profile_schema.md, which says so if memory ran out."""
    try:
        with torch.set_grad_enabled(settings.train):
            return _Measurement(size, settings, progress or Progress()).point(ceilings, datasheet, clock)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        message = " ".join(str(error).split()) or "out of memory"
    gc.collect()  # outside the except clause, where the error's frames hold no tensors
    if settings.device.type == "cuda":
        torch.cuda.empty_cache()
    return {"status": "out of memory", "error": message, "size": asdict(size)}


class _Measurement:
    """One size, built."""

    def __init__(self, size: Size, settings: Settings, progress: Progress) -> None:
        self.size, self.settings, self.progress = size, settings, progress
        progress.start("building")
        torch.manual_seed(settings.seed)
        model, self.whole = build_whole(size, settings)
        self.smallest = replace(build_whole(size.smallest(), settings)[1], name="smallest")
        self.known = [*model.parameters(), *model.buffers()]
        self.steps = block_steps(model)
        self.parts = part_steps(self.steps, self.whole.inputs[0], *self.whole.gradients)
        self.attention_kernel = attention_kernel(lambda: run_steps(self.steps, self.whole.inputs[0]))
        self.compile: dict[str, Any] | None = None
        if settings.compile:
            progress.start("compiling")
            torch.compiler.reset()  # else the second size of a sweep would be compiled for any size
            self.whole = self.whole.compiled()
            self.compile = tracing.compile_report(self.whole.train if settings.train else self.whole.forward)
            self.smallest = self.smallest.compiled()
            self.parts = [part.compiled() for part in self.parts]
        self.optimizer = adamw(self.whole) if settings.mode == "step" else None

    def _runs(self) -> dict[tuple[str, str], Callable[[], object]]:
        """Return what is timed. Backward alone is not: it is what "train" takes longer than "forward"."""
        runs: dict[tuple[str, str], Callable[[], object]] = {}
        for step in (self.whole, *self.parts, self.smallest):
            runs[step.name, "forward"] = step.forward
            if self.settings.train:
                runs[step.name, "train"] = step.train
        if self.optimizer is not None:
            runs["whole", "step"] = partial(training_step, self.whole, self.optimizer)
            runs["AdamW", "optimizer"] = self.optimizer.step
            runs["smallest", "step"] = partial(training_step, self.smallest, adamw(self.smallest))
        return runs

    def point(self, ceilings: Ceilings, datasheet: Datasheet | None, clock: Clock) -> dict[str, Any]:
        size, settings, progress, runs, start = self.size, self.settings, self.progress, self._runs(), system_clocks()
        progress.start("timing", len(runs) * settings.rounds)
        samples = interleave(runs, settings.rounds, 0.01, 1, progress.advance, clock=clock)
        shares = busy_shares(start, system_clocks())
        timed_on_gpu = runs if settings.device.type == "cuda" else {}
        gpu = {key: [gpu_seconds(run, min(samples[key]))] for key, run in timed_on_gpu.items()}
        point: dict[str, Any] = {"status": "ok", "error": None, "size": asdict(size)}
        point |= analyze(samples, gpu, size, settings.mode, settings.dtype, ceilings, datasheet, shares)
        point |= {"compile": self.compile, "attention_kernel": self.attention_kernel}
        progress.start("measuring memory")
        run = runs["whole", settings.mode]
        point["memory"] = self._memory(run)
        seconds = point["whole"][settings.mode]["seconds"]["median"]
        # nsys and torch.profiler cannot both listen to the GPU.
        point["kernels"] = None if settings.nvtx else kernel_report(run, settings.device, seconds)
        recorded = [self.whole, *self.parts], self.optimizer
        if settings.trace is not None:
            progress.start("tracing")
            tracing.write_trace(*recorded, settings.trace)
        if settings.memory_snapshot is not None:
            tracing.write_memory_snapshot(run, settings.memory_snapshot)
        if settings.nvtx:
            tracing.mark_ranges(*recorded)
        return point

    def _memory(self, run: Callable[[], object]) -> dict[str, Any]:
        whole, device, train = self.whole, self.settings.device, self.settings.train
        saved_by_part = self._saved_by_part() if train else {}
        parts = [
            {
                "name": part.name,
                "saved_bytes": saved_by_part.get(part.name),
                "peak_added_bytes": peak_added_bytes(part.train if train else part.forward, device),
            }
            for part in self.parts
        ]
        figures = {
            "parameters_bytes": bytes_of(whole.weights),
            "gradients_bytes": bytes_of(whole.train()[1:]) if train else None,
            "optimizer_state_bytes": self.optimizer and state_bytes(self.optimizer),
            "saved_bytes": SavedBytes(self.known).of(whole.forward)[1] if train else None,
        }
        whole.clear()  # else the gradients of the last step would be there already
        added = peak_added_bytes(run, device)
        there = bytes_of([*self.known, *whole.inputs]) + (figures["optimizer_state_bytes"] or 0)
        return {**figures, "peak_added_bytes": added, "peak_bytes": there + added, "parts": parts}

    def _saved_by_part(self) -> Mapping[str, int]:
        """Return what the eager steps save, in one run of them all: a storage counts where it is saved first."""
        saved, by_part = SavedBytes(self.known), Counter[str]()

        def run(step: Step, inputs: list[Tensor]) -> tuple[Tensor, ...]:
            outputs, count = saved.of(lambda: step.run(*inputs))
            by_part[step.name] += count
            return outputs

        run_steps(self.steps, self.whole.inputs[0], run)
        return by_part


def build_whole(size: Size, settings: Settings) -> tuple[Block | Transformer, Step]:
    """Return a model of this size, and all of it as one step with an input, and the gradient of the output."""
    model = size.build(settings.device, settings.dtype)
    shape = (size.batch_size, size.seq_len, size.d_model)
    x = torch.randn(shape, device=settings.device).to(settings.dtype).requires_grad_(settings.train)
    return model, whole(model, x, torch.randn_like(x) if settings.train else None)


def adamw(model: Step) -> Optimizer:
    """Return AdamW as torch sets it up, after its first step, which makes the moments.

    The learning rate is 0: that leaves the weights as they are for all the other runs, and takes no kernel away.
    """
    optimizer = torch.optim.AdamW(model.weights, lr=0.0)
    training_step(model, optimizer)
    return optimizer


def training_step(model: Step, optimizer: Optimizer) -> None:
    model.accumulate()
    optimizer.step()


def state_bytes(optimizer: Optimizer) -> int:
    states = optimizer.state.values()
    return bytes_of(value for state in states for value in state.values() if torch.is_tensor(value))
