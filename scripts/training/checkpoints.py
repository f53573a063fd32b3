"""Checkpoints: files such as "step-00000100.pt" for torch.load, each written whole or not at all.

A checkpoint is a dict with the settings, the history of losses, the state of the optimizer, and the weights under the
keys of CS336's reference. The first process writes the state of all processes, and any number can resume from it.
"""

import io
import os
import re
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from lab.files import atomic
from lab.processes import is_first
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from .text import CHECKPOINT
from .trainer import Trainer

PREFIX = "transformer."  # of the weights of the blocks in our model, but not in the reference


def saved_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the latest last."""
    return sorted(path for path in folder.iterdir() if CHECKPOINT.fullmatch(path.name))


def save(folder: Path, trainer: Trainer, settings: dict[str, Any], keep: int) -> None:
    """Write a checkpoint, then remove all but the last `keep`; none is removed if an OSError comes before."""
    gathered = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optimizer = get_state_dict(
        trainer.model, trainer.optimizer, options=gathered
    )
    if not is_first():
        return
    weights = {name.removeprefix(PREFIX): weight for name, weight in model.items()}
    content = io.BytesIO()  # torch.save to a full disk raises a RuntimeError
    state = {
        "settings": settings,
        "history": trainer.history,
        "model": weights,
        "optimizer": optimizer,
    }
    torch.save(state, content)
    with (
        atomic(folder / f"step-{trainer.step:08d}.pt") as temporary,
        temporary.open("wb") as file,
    ):
        file.write(content.getbuffer())
        file.flush()
        os.fsync(file.fileno())
    for old in saved_in(folder)[:-keep]:
        old.unlink(missing_ok=True)  # another run may use the folder


def remove_leftovers(folder: Path) -> None:
    """Remove the partial checkpoints of processes that were killed, but not those of running ones."""
    for leftover in folder.iterdir():
        if named := re.fullmatch(
            rf"\.(\d{{1,9}})\.{CHECKPOINT.pattern}", leftover.name
        ):
            try:
                os.kill(int(named[1]), 0)
            except ProcessLookupError:
                leftover.unlink(missing_ok=True)  # several processes start at once
            except PermissionError:
                continue  # it is running, as another user


def read(path: Path) -> dict[str, Any]:
    """Return a checkpoint; raise ValueError if it is damaged."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        return {
            name: saved[name] for name in ("settings", "history", "model", "optimizer")
        }
    except (
        RuntimeError,
        ValueError,
        LookupError,
        TypeError,
        EOFError,
        UnpicklingError,
    ):
        raise ValueError(
            f"{path}: the checkpoint is damaged: remove it to resume from the one before"
        ) from None


def load(trainer: Trainer, saved: dict[str, Any]) -> None:
    """Restore the trainer from a checkpoint, and remove the states of model and optimizer from it."""
    weights, optimizer = saved.pop("model"), saved.pop("optimizer")
    model = {
        name: weights[name.removeprefix(PREFIX)] for name in trainer.model.state_dict()
    }
    whole = StateDictOptions(full_state_dict=True)
    set_state_dict(
        trainer.model,
        trainer.optimizer,
        model_state_dict=model,
        optim_state_dict=optimizer,
        options=whole,
    )
    trainer.history = saved["history"]
