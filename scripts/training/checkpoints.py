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
from torch.optim.optimizer import StateDict

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
    optimizer: the state of AdamW.
    """

    path: Path
    settings: Settings
    text_sha256: str
    history: list[StepRecord]
    weights: dict[str, Tensor]
    optimizer: StateDict


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
    path = folder / f"step-{trainer.step:08d}.pt"
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
    """Return what `save` has written, with the types of settings and history checked."""
    if not isinstance(saved, dict) or saved.get("schema") != SCHEMA:
        raise ValueError(f"it has no schema {SCHEMA}")
    history = []
    for index, step in enumerate(saved["history"]):
        record = from_plain(StepRecord, step, f"history[{index}]")
        if record.step != index + 1:
            raise ValueError(f"step {index + 1} is missing")
        history.append(record)
    return Checkpoint(
        path=path,
        settings=from_plain(Settings, saved["settings"], "settings"),
        text_sha256=str(saved["text_sha256"]),
        history=history,
        weights=saved["model"],
        optimizer=saved["optimizer"],
    )


def restore(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Give a new trainer the weights, the optimizer's state and the history of a checkpoint.

    Raises:
        DamagedCheckpoint: they do not fit the model.
    """
    try:
        keys = trainer.model.state_dict().keys()
        weights = {key: checkpoint.weights[key.removeprefix(PREFIX)] for key in keys}
        trainer.model.load_state_dict(weights)
        trainer.optimizer.load_state_dict(checkpoint.optimizer)
        _require_moments(trainer)
    except UNREADABLE as error:
        raise DamagedCheckpoint(checkpoint.path, str(error)) from None
    trainer.history = list(checkpoint.history)


def _require_moments(trainer: Trainer) -> None:
    """Raise a ValueError unless AdamW has both moments of each weight, which torch does not check."""
    for name, weight in trainer.model.named_parameters():
        state = trainer.optimizer.state[weight]
        for moment in ("exp_avg", "exp_avg_sq"):
            if state[moment].shape != weight.shape:
                raise ValueError(f"{moment} of {name} has another shape")
