"""Checkpoints by torch.distributed.checkpoint: each is a folder that is there whole, or not at all.

A folder "step-00000100" holds what torch writes, and run.json with the settings and the losses so far. It is written
under a hidden name and then renamed. A killed process leaves the hidden folder; the next checkpoint removes it.
"""

import errno
import fcntl
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lab.processes import is_first
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from .text import CHECKPOINT
from .trainer import Trainer


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder, on file systems that have locks; raise BlockingIOError if one uses it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        found = "another run uses this folder: wait for it, or use another --checkpoint"
        raise BlockingIOError(error.errno, found, str(folder)) from None
    except OSError:
        pass  # a network file system that has no locks
    try:
        yield
    finally:
        os.close(descriptor)


def saved_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the latest last."""
    return sorted(path for path in folder.glob("step-*") if CHECKPOINT.fullmatch(path.name))


def save(folder: Path, trainer: Trainer, run: dict[str, Any], keep: int) -> None:
    """Write a checkpoint, then remove all but the last `keep`; none is removed if an OSError comes before."""
    target = folder / f"step-{trainer.step:08d}"
    temporary = target.with_name(f".{target.name}")
    _remove_leftovers(folder)
    try:
        save_state(_state(trainer), checkpoint_id=temporary)
        if is_first():
            with (temporary / "run.json").open("w") as file:
                json.dump(run | {"step": trainer.step}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
            for old in saved_in(folder)[:-keep]:
                old.rename(old.with_name(f".{old.name}"))
    except (CheckpointException, OSError) as error:
        free = shutil.disk_usage(folder).free / 2**20  # torch reports a full disk as an unexpected position
        reason = f"the checkpoint cannot be written, {free:.1f} MiB are free there ({_cause(error)})"
        raise OSError(errno.EIO, reason, str(target)) from None
    finally:
        _remove_leftovers(folder)
    if dist.is_initialized():
        dist.barrier()


def read(path: Path) -> dict[str, Any]:
    """Return the run.json of a checkpoint, or raise OSError if it is damaged."""
    try:
        run = json.loads((path / "run.json").read_text())
        return {"settings": dict(run["settings"]), "history": list(run["history"]), "step": int(run["step"])}
    except (OSError, ValueError, KeyError, TypeError):
        raise _damaged(path, "run.json") from None


def load(path: Path, trainer: Trainer, run: dict[str, Any]) -> None:
    """Put the trainer where it was at a checkpoint of any number of processes; raise OSError if it is damaged."""
    state = _state(trainer)
    try:
        load_state(state, checkpoint_id=path)
    except CheckpointException as error:
        raise _damaged(path, str(_cause(error))) from None
    trainer.model.load_state_dict(state["model"])
    set_optimizer_state_dict(trainer.model, trainer.optimizer, state["optimizer"])
    trainer.step = run["step"]


def _state(trainer: Trainer) -> dict[str, Any]:
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # so it is, in one process
    model = trainer.model.state_dict()  # first: it shards what FSDP gathered, and the optimizer has the shards
    return {"model": model, "optimizer": get_optimizer_state_dict(trainer.model, trainer.optimizer)}


def _damaged(path: Path, where: str) -> OSError:
    reason = f"the checkpoint is damaged ({where}): remove it to resume from the one before"
    return OSError(errno.EIO, reason, str(path))


def _remove_leftovers(folder: Path) -> None:
    for leftover in folder.glob(".step-*") if is_first() else ():
        if CHECKPOINT.fullmatch(leftover.name[1:]):
            shutil.rmtree(leftover, ignore_errors=True)


def _cause(error: BaseException) -> BaseException:
    """Return the exception that torch wraps, of the first process that failed; raise it if it is Ctrl-C."""
    cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
    if isinstance(cause, KeyboardInterrupt):
        raise cause
    return cause
