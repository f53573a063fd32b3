"""Checkpoints by torch.distributed.checkpoint: each is a folder that is there whole, or not at all.

A folder "step-00000100" holds what torch writes, and run.json: the settings, the losses so far, and the SHA-256 of the
other files. It is written under a name with a dot in front, and renamed; what has a dot in front is left from a process
that was killed, and goes when the next checkpoint is written.
"""

import errno
import hashlib
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from .run import Trainer


def _state(trainer: Trainer) -> dict[str, Any]:
    return {
        "model": trainer.model.state_dict(),
        "optimizer": get_optimizer_state_dict(trainer.model, trainer.optimizer),
        "schedule": trainer.schedule.state_dict(),
        "random": torch.get_rng_state(),  # all that is random is drawn on the CPU
    }


def saved_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the latest last."""
    return sorted(folder.glob("step-*"))


def save(folder: Path, trainer: Trainer, run: dict[str, Any], keep: int) -> None:
    """Write a checkpoint, and then remove all but the last `keep`.

    Raises:
        OSError: it cannot be written; the checkpoints before it are as they were.
    """
    target, speaks = folder / f"step-{trainer.step:08d}", trainer.processes.rank == 0
    temporary = target.with_name(f".{target.name}")
    if speaks:
        _remove_leftovers(folder)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # so it is, in one process
            save_state(_state(trainer), checkpoint_id=temporary)
        if speaks:
            files = {path.name: _sha256(path) for path in temporary.iterdir()}
            with (temporary / "run.json").open("w") as file:
                json.dump(run | {"step": trainer.step, "files": files}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
            for old in saved_in(folder)[:-keep]:
                old.rename(old.with_name(f".{old.name}"))
    except CheckpointException as error:
        raise _cause(error, folder) from None
    finally:
        if speaks:
            _remove_leftovers(folder)
    if dist.is_initialized():
        dist.barrier()


def read(path: Path) -> dict[str, Any]:
    """Return the run.json of a checkpoint, once its files are found to be as they were written.

    Raises:
        ValueError: they are not.
    """
    try:
        run: dict[str, Any] = json.loads((path / "run.json").read_text())
        damaged = [name for name, digest in run["files"].items() if _sha256(path / name) != digest]
    except (OSError, ValueError, KeyError) as error:
        damaged = [str(error)]
    if damaged:
        raise ValueError(f"the checkpoint {path} is damaged ({damaged[0]}): remove it to resume from the one before")
    return run


def load(path: Path, trainer: Trainer) -> None:
    """Put the trainer where it was when the checkpoint was written, by any number of processes."""
    state = _state(trainer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        load_state(state, checkpoint_id=path)
    trainer.model.load_state_dict(state["model"])
    set_optimizer_state_dict(trainer.model, trainer.optimizer, state["optimizer"])
    trainer.schedule.load_state_dict(state["schedule"])
    torch.set_rng_state(state["random"])
    trainer.step = trainer.schedule.last_epoch


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove_leftovers(folder: Path) -> None:
    for leftover in folder.glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _cause(error: CheckpointException, folder: Path) -> OSError:
    """Return what went wrong in one of the processes; of a full disk, torch only says that a position is unexpected."""
    cause = next(iter(error.failures.values()))[0]
    if isinstance(cause, OSError):
        return cause
    free = shutil.disk_usage(folder).free / 2**20
    return OSError(errno.EIO, f"{free:.1f} MiB are free there ({cause})", str(folder))
