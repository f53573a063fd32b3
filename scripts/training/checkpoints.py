"""Checkpoints: files such as "step-00000100.pt" for torch.load, each written whole or not at all.

A file has the settings, the history of losses, the state of the optimizer, and the weights under the keys of CS336's
reference.
"""

import io
import os
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from struct import error as StructError
from typing import Any

import torch
from lab.files import atomic
from lab.records import from_plain, to_plain
from torch import Tensor

from .text import CHECKPOINT
from .trainer import Settings, StepRecord, Trainer

SCHEMA = "tinyblock.checkpoint/2"
KEPT = 2  # checkpoints: if the last one is damaged, the one before is there
PREFIX = "transformer."  # of the weights of the blocks in our model, but not in the reference
# What zipfile, pickle and torch raise for bytes that are not those of a checkpoint.
UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    StructError,
    UnpicklingError,
    RuntimeError,
    ValueError,
    OverflowError,
    LookupError,
    TypeError,
    AttributeError,
    EOFError,
)


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to continue.

    path: the file.
    settings: those of the run.
    text_sha256: hash of the text that it reads.
    history: the steps that were taken.
    weights: by their keys in CS336's reference.
    optimizer: the state of AdamW for each weight, without hyperparameters.
    """

    path: Path
    settings: Settings
    text_sha256: str
    history: list[StepRecord]
    weights: dict[str, Tensor]
    optimizer: dict[int, dict[str, Tensor]]


class DamagedCheckpoint(ValueError):
    """The contents of a file are not those of a checkpoint."""

    def __init__(self, path: Path, reason: str) -> None:
        reason = " ".join(reason.split())
        super().__init__(
            f"{path}: the checkpoint is damaged ({reason:.200}): remove it to resume from the one before"
        )


def saved_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the latest last."""
    return sorted(path for path in folder.iterdir() if CHECKPOINT.fullmatch(path.name))


def path_of(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint after a step."""
    return folder / f"step-{step:08d}.pt"


def save(folder: Path, trainer: Trainer, text_sha256: str) -> Path:
    """Write a checkpoint, remove all but the last two, and return its path."""
    weights = trainer.model.state_dict()
    state = {
        "schema": SCHEMA,
        "settings": to_plain(trainer.settings),
        "text_sha256": text_sha256,
        "history": to_plain(trainer.history),
        "model": {key.removeprefix(PREFIX): weights[key] for key in weights},
        "optimizer": trainer.optimizer.state_dict(),
    }
    # Written to a full disk, torch.save raises a RuntimeError; a file raises an OSError.
    content = io.BytesIO()
    torch.save(state, content)
    path = path_of(folder, trainer.step)
    with atomic(path) as temporary, temporary.open("wb") as file:
        file.write(content.getbuffer())
        file.flush()
        os.fsync(file.fileno())
    for old in saved_in(folder)[:-KEPT]:
        old.unlink(missing_ok=True)  # another run may use the folder
    return path


def read(path: Path) -> Checkpoint:
    """Read a checkpoint.

    Raises:
        DamagedCheckpoint: a bit has changed, or something is missing or has another type.
    """
    try:
        with zipfile.ZipFile(path) as file:
            changed = file.testzip()
        if changed is not None:
            raise ValueError(f"the checksum of {changed} differs")
        saved = torch.load(path, map_location="cpu", weights_only=True)
        return _checkpoint(path, saved)
    except UNREADABLE as error:
        raise DamagedCheckpoint(path, str(error)) from None


def _checkpoint(path: Path, saved: Any) -> Checkpoint:
    """Return what `save` has written, with the types of settings and history checked.

    Raises:
        KeyError: something is missing.
        ValueError: the settings or the history are not those of a run, or the name of the file has another step.
    """
    if not isinstance(saved, dict) or saved.get("schema") != SCHEMA:
        raise ValueError(f"it has no schema {SCHEMA}")
    history = _history(saved["history"])
    if path != path_of(path.parent, len(history)):
        raise ValueError(f"its name has another step than its history, {len(history)}")
    return Checkpoint(
        path=path,
        settings=from_plain(Settings, saved["settings"], "settings"),
        text_sha256=str(saved["text_sha256"]),
        history=history,
        weights=saved["model"],
        # The other entry, "param_groups", has hyperparameters: the settings and the trainer give them.
        optimizer=saved["optimizer"]["state"],
    )


def _history(steps: Any) -> list[StepRecord]:
    """Return the records of the steps, whose numbers must be 1, 2, 3 and so on."""
    history = []
    for index, step in enumerate(steps):
        record = from_plain(StepRecord, step, f"history[{index}]")
        if record.step != index + 1:
            raise ValueError(f"step {index + 1} is missing")
        history.append(record)
    return history


def restore(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Give a new trainer the weights, the optimizer's state and the history of a checkpoint.

    Raises:
        DamagedCheckpoint: they do not fit the model.
    """
    trainer.history = list(checkpoint.history)
    try:
        keys = trainer.model.state_dict().keys()
        weights = {key: checkpoint.weights[key.removeprefix(PREFIX)] for key in keys}
        trainer.model.load_state_dict(weights)
        # The hyperparameters are those of the new trainer.
        optimizer = trainer.optimizer.state_dict()
        optimizer["state"] = checkpoint.optimizer
        trainer.optimizer.load_state_dict(optimizer)
        _require_state(trainer)
    except UNREADABLE as error:
        raise DamagedCheckpoint(checkpoint.path, str(error)) from None


def _require_state(trainer: Trainer) -> None:
    """Raise a ValueError unless AdamW has the step and both moments of each weight, which torch does not check."""
    if trainer.step == 0:
        # AdamW has no state before its first step.
        return
    for name, weight in trainer.model.named_parameters():
        state = trainer.optimizer.state[weight]
        step = state["step"]
        if step.shape != () or step.item() != trainer.step:
            raise ValueError(f"the step of {name} must be {trainer.step}, got {step}")
        for moment in ("exp_avg", "exp_avg_sq"):
            found = state[moment].shape
            if found != weight.shape:
                raise ValueError(
                    f"{moment} of {name} must have the shape {list(weight.shape)}, got {list(found)}"
                )
