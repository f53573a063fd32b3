"""Text as bytes: what is read, what is drawn from it, and an order-2 model of it."""

import hashlib
import random
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SYMBOLS = 256
CHECKPOINT = re.compile(r"step-\d{8}\.pt")  # the name of a checkpoint
LEFT_OUT = re.compile(rf"\..*|__pycache__|{CHECKPOINT.pattern}", re.DOTALL)


@dataclass(frozen=True)
class Text:
    """The bytes of files, one after another; the last twentieth is for validation."""

    training: Tensor
    validation: Tensor
    files: int
    sha256: str


def read_text(files: Sequence[Path]) -> Text:
    """Read the files into memory."""
    data = bytearray()
    for path in files:
        data += path.read_bytes()
    everything = (
        torch.frombuffer(data, dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8)
    )
    split = len(data) - len(data) // 20
    return Text(
        everything[:split],
        everything[split:],
        len(files),
        hashlib.sha256(data).hexdigest(),
    )


def standard_library() -> list[Path]:
    """Return the source files of Python's standard library, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    folders = [
        path
        for path in root.iterdir()
        if path.name not in ("site-packages", "dist-packages")
    ]
    return sorted(
        [
            *root.glob("*.py"),
            *(file for folder in folders for file in folder.rglob("*.py")),
        ]
    )


def files_in(paths: Sequence[Path], outputs: Sequence[Path] = ()) -> list[Path]:
    """Return these files and those in these folders, sorted, without outputs, checkpoints and hidden files.

    Raise ValueError for a path without such a file.
    """
    found: list[Path] = []
    for path in paths:
        inner = (
            sorted(path.rglob("*")) if path.is_dir() else [path] if path.stat() else []
        )
        inner = [
            file
            for file in inner
            if not any(map(LEFT_OUT.fullmatch, file.relative_to(path).parts))
        ]
        inner = [
            file
            for file in inner
            if file.is_file()
            and not any(map(file.samefile, filter(Path.exists, outputs)))
        ]
        if not inner:
            raise ValueError(
                f"--data {path} has no text: outputs, checkpoints, hidden and special files are left out"
            )
        found += inner
    return found


def batch(text: Tensor, seed: int, step: int, batch_size: int, seq_len: int) -> Tensor:
    """Return the batch of a step: seq_len bytes and the next one, of shape (batch_size, seq_len + 1).

    Seed and step alone determine the batch, so it is the same after a restart and on any number of processes.
    """
    draw = random.Random(f"{seed} {step}")
    starts = [draw.randrange(len(text) - seq_len) for _ in range(batch_size)]
    return text.unfold(0, seq_len + 1, 1)[starts].long()


def even_windows(text: Tensor, count: int, length: int) -> Tensor:
    """Return `count` windows spread evenly over a text, of shape (count, length)."""
    starts = [
        index * (len(text) - length) // max(1, count - 1) for index in range(count)
    ]
    return text.unfold(0, length, 1)[starts].long()


def order_two_loss(text: Tensor, windows: Tensor, strength: float = 4.0) -> float:
    """Return the nats per byte of an order-2 model of `text` on the bytes of `windows`, from the third of each on.

    p(c | a b) is the share of c among what followed a b, smoothed by `strength` counts that are spread like p(c | b),
    which is smoothed by p(c) in the same way: MacKay and Peto, "A Hierarchical Dirichlet Language Model" (1995).
    """
    counts = torch.zeros(SYMBOLS**3, dtype=torch.int64)
    for start in range(0, len(text) - 2, 2**24):
        x = text[start : start + 2**24 + 2].int()
        counts += torch.bincount(
            x[:-2] << 16 | x[1:-1] << 8 | x[2:], minlength=len(counts)
        )
    triples = counts.view(SYMBOLS, SYMBOLS, SYMBOLS)
    pairs, before = triples.sum(0), triples.sum(2)
    singles = pairs.sum(0)
    p_one = (singles + 1) / (singles.sum() + SYMBOLS)
    p_two = (pairs + strength * p_one) / (pairs.sum(1, keepdim=True) + strength)
    a, b, c = windows[:, :-2], windows[:, 1:-1], windows[:, 2:]
    p_three = (triples[a, b, c] + strength * p_two[b, c]) / (before[a, b] + strength)
    return -p_three.log().mean().item()
