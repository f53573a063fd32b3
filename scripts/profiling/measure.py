"""Measure one size: the parts and the whole in interleaved rounds; memory, kernels and traces in runs of their own."""

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
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
from .parts import Step, block_steps, part_steps, run_steps, whole
from .records import Settings
from .trust import busy_shares, system_clocks

Run = Callable[[], object]


def measure(
    size: Size,
    settings: Settings,
    ceilings: Ceilings,
    datasheet: Datasheet | None = None,
    progress: Progress | None = None,
    clock: Clock = clock,
    trace: Path | None = None,
    memory_snapshot: Path | None = None,
) -> dict[str, Any]:
    """Measure one size, and return a point of docs/profile_schema.md, which says so if memory ran out."""
    try:
        with torch.set_grad_enabled(settings.train):
            return _point(
                size,
                settings,
                ceilings,
                datasheet,
                progress or Progress(),
                clock,
                trace,
                memory_snapshot,
            )
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        message = " ".join(str(error).split()) or "out of memory"
    gc.collect()  # outside the except clause, where the error's frames hold no tensors
    if settings.device.type == "cuda":
        torch.cuda.empty_cache()
    return {"status": "out of memory", "error": message, "size": asdict(size)}


def _point(
    size: Size,
    settings: Settings,
    ceilings: Ceilings,
    datasheet: Datasheet | None,
    progress: Progress,
    clock: Clock,
    trace: Path | None,
    memory_snapshot: Path | None,
) -> dict[str, Any]:
    device, compilation = settings.device, None
    progress.start("building")
    torch.manual_seed(settings.seed)
    model, complete = build_whole(size, settings)
    smallest = build_whole(size.smallest(), settings)[1]
    steps, x = block_steps(model), complete.inputs[0]
    parts = part_steps(steps, x, *complete.gradients)
    if settings.compile:
        progress.start("compiling")
        torch.compiler.reset()  # else the second size of a sweep would be compiled for any size
        complete, smallest, *parts = (
            step.compiled() for step in (complete, smallest, *parts)
        )
        compilation = tracing.compile_report(
            complete.train if settings.train else complete.forward
        )
    of_whole, optimizer = runs_of(complete, settings.mode)
    # Backward alone is not timed: it is what "train" takes longer than "forward".
    runs = {("whole", pass_): run for pass_, run in of_whole.items()}
    runs |= {
        ("smallest", pass_): run
        for pass_, run in runs_of(smallest, settings.mode)[0].items()
    }
    runs |= {(part.name, "forward"): part.forward for part in parts}
    runs |= {(part.name, "train"): part.train for part in parts if settings.train}
    if optimizer is not None:
        runs["AdamW", "optimizer"] = optimizer.step
    progress.start("timing", len(runs) * settings.rounds)
    start = system_clocks()
    samples = interleave(runs, settings.rounds, 0.01, 1, progress.advance, clock=clock)
    shares = busy_shares(start, system_clocks())
    gpu = {}
    if device.type == "cuda":
        gpu = {key: [gpu_seconds(run, min(samples[key]))] for key, run in runs.items()}
    point: dict[str, Any] = {"status": "ok", "error": None, "size": asdict(size)}
    point |= analyze(
        samples, gpu, size, settings.mode, settings.dtype, ceilings, datasheet, shares
    )
    point |= {
        "compile": compilation,
        "attention_kernel": attention_kernel(lambda: run_steps(steps, x)),
    }
    progress.start("measuring memory")
    run = of_whole[settings.mode]
    held, known = (
        held_bytes(complete, optimizer, run, device),
        [*model.parameters(), *model.buffers()],
    )
    there = bytes_of([*known, x]) + (held["optimizer_state_bytes"] or 0)
    point["memory"] = held | {
        "peak_bytes": there + (held["peak_added_bytes"] or 0),
        "saved_bytes": SavedBytes(known).of(complete.forward)[1]
        if settings.train
        else None,
        "parts": _memory_of_parts(parts, steps, x, known, device),
    }
    seconds = point["whole"][settings.mode]["seconds"]["median"]
    point["kernels"] = kernel_report(run, device, seconds)
    if trace is not None:
        progress.start("tracing")
        tracing.write_trace([complete, *parts], optimizer, trace)
    if memory_snapshot is not None:
        tracing.write_memory_snapshot(run, memory_snapshot)
    return point


def _memory_of_parts(
    parts: Sequence[Step],
    steps: Sequence[Step],
    x: Tensor,
    known: Iterable[Tensor],
    device: torch.device,
) -> list[dict[str, Any]]:
    """Return the memory of each part; what its eager steps save counts where it is saved first, in one run of all."""
    saved, saved_by_part = SavedBytes(known), Counter[str]()

    def save(step: Step, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        outputs, count = saved.of(lambda: step.run(*inputs))
        saved_by_part[step.name] += count
        return outputs

    run_steps(steps, x, save)
    return [
        {
            "name": part.name,
            "saved_bytes": saved_by_part[part.name] if part.gradients else None,
            "peak_added_bytes": peak_added_bytes(
                part.train if part.gradients else part.forward, device
            ),
        }
        for part in parts
    ]


def build_whole(size: Size, settings: Settings) -> tuple[Block | Transformer, Step]:
    """Return a model of this size, and all of it as one step with an input, and the gradient of the output."""
    model = size.build(settings.device, settings.dtype)
    shape = (size.batch_size, size.seq_len, size.d_model)
    x = (
        torch.randn(shape, device=settings.device)
        .to(settings.dtype)
        .requires_grad_(settings.train)
    )
    return model, whole(model, x, *([torch.randn_like(x)] if settings.train else []))


def runs_of(step: Step, mode: str) -> tuple[dict[str, Run], Optimizer | None]:
    """Return what is timed of a whole, as far as the mode goes, and the AdamW of a step with its moments.

    Its learning rate is 0: that leaves the weights as they are for all the other runs, and takes no kernel away.
    """
    runs: dict[str, Run] = {"forward": step.forward}
    if mode != "forward":
        runs["train"] = step.train
    if mode != "step":
        return runs, None
    optimizer = torch.optim.AdamW(step.weights, lr=0.0)

    def training_step() -> None:
        step.accumulate()
        optimizer.step()

    training_step()  # makes the moments
    return runs | {"step": training_step}, optimizer


def held_bytes(
    step: Step, optimizer: Optimizer | None, run: Run, device: torch.device
) -> dict[str, int | None]:
    """Return the bytes of weights, gradients and AdamW's state, and the most that a run adds, gradients included."""
    if step.gradients:
        step.accumulate()
    gradients = (weight.grad for weight in step.weights if weight.grad is not None)
    states = optimizer.state.values() if optimizer is not None else ()
    moments = (
        value for state in states for value in state.values() if torch.is_tensor(value)
    )
    held = {
        "parameters_bytes": bytes_of(step.weights),
        "gradients_bytes": bytes_of(gradients) if step.gradients else None,
        "optimizer_state_bytes": bytes_of(moments) if optimizer is not None else None,
    }
    step.clear()  # else the gradients of the last run would be there already
    return {**held, "peak_added_bytes": peak_added_bytes(run, device)}
