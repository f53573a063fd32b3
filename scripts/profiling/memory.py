"""How much memory a model holds, and the peak of a run."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from .kernels import Recording, record_run
from .parts import Labels
from .subject import Subject
from .tensors import nbytes, storage_of, stored_in


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


def record(
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
        run = partial(Labels(subject.model).watch, run_and_clear)
    recording = record_run(run, trace)
    added = recording.peak_added_bytes
    if subject.settings.on_gpu:
        added = torch.cuda.max_memory_allocated() - before

    buffers = list(subject.model.buffers())
    states = list(subject.optimizer.state.values())
    held = [subject.weights, buffers, states, subject.x, subject.gradient]
    known = {storage_of(each) for each in stored_in(held)}
    others = sum(read[storage] for storage in read.keys() - known)
    own = nbytes([subject.weights, buffers, states, subject.x]) + others
    return recording, Memory(
        peak_bytes=own + added,
        parameter_bytes=nbytes(subject.weights),
        buffer_bytes=nbytes(buffers),
        other_tensor_bytes=others,
        gradient_bytes=gradients,
        adamw_bytes=nbytes(states),
    )
