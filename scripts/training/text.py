"""Text as bytes: files one after another, mapped into memory, what is drawn from them, and an order-2 model of them."""

import hashlib
import itertools
import random
import sysconfig
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

SYMBOLS = 256


class Text:
    """Bytes of many files as one text; `ends` are the positions where the files end."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = parts
        self.ends = list(itertools.accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def between(self, start: int, stop: int) -> list[Tensor]:
        """Return views of the bytes from start to stop, one for each file that they lie in."""
        pieces = []
        index = bisect_right(self.ends, start)
        while start < stop:
            begin = self.ends[index] - len(self.parts[index])
            pieces.append(self.parts[index][start - begin : stop - begin])
            start, index = start + len(pieces[-1]), index + 1
        return pieces

    def windows(self, starts: Sequence[int], length: int) -> Tensor:
        """Return the bytes from each start on, as int64 of shape (starts, length)."""
        return torch.stack([torch.cat(self.between(start, start + length)) for start in starts]).long()


def standard_library() -> list[Path]:
    """Return the source files of Python's own standard library, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    installed = {"site-packages", "dist-packages"}
    return sorted(path for path in root.rglob("*.py") if installed.isdisjoint(path.relative_to(root).parts))


def files_in(paths: Sequence[Path]) -> list[Path]:
    """Return these files, and those in these folders, sorted; what is hidden in a folder stays out.

    Raises:
        OSError: one of the paths is not there, or cannot be read.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            below = sorted(path.rglob("*"))
            hidden = [any(part.startswith((".", "__pycache__")) for part in p.relative_to(path).parts) for p in below]
            found += [p for p, skip in zip(below, hidden, strict=True) if p.is_file() and not skip]
        else:
            found.append(path)
    for path in found:
        path.open("rb").close()
    return found


@dataclass(frozen=True)
class TextFiles:
    """The text of many files, split into that for training and that for validation."""

    training: Text
    validation: Text
    files: Sequence[Path]

    @property
    def bytes(self) -> int:
        return len(self.training) + len(self.validation)

    @cached_property
    def sha256(self) -> str:
        """Return the digest of all bytes, in their order."""
        digest = hashlib.sha256()
        for path in self.files:
            with path.open("rb") as file:
                hashlib.file_digest(file, lambda: digest)
        return digest.hexdigest()


def open_text(files: Sequence[Path]) -> TextFiles:
    """Map the files into memory, and keep the last twentieth of them for validation.

    Of fewer than twenty files it is the last twentieth of the bytes.
    """
    sizes = {path: path.stat().st_size for path in files}
    files = [path for path in files if sizes[path]]  # nothing cannot be mapped
    parts = [torch.from_file(str(path), size=sizes[path], dtype=torch.uint8) for path in files]
    text, last = Text(parts), len(parts) // 20
    split = text.ends[-1 - last] if last else len(text) - len(text) // 20
    return TextFiles(Text(text.between(0, split)), Text(text.between(split, len(text))), files)


def batch(text: Text, seed: int, step: int, batch_size: int, seq_len: int, rows: slice) -> Tensor:
    """Return these rows of the batch of a step: seq_len bytes and the one after them, of shape (rows, seq_len + 1).

    They are drawn by seed and step alone: so they are the same after a restart, and on any number of processes.
    """
    draw = random.Random(f"{seed} {step}")
    starts = [draw.randrange(len(text) - seq_len) for _ in range(batch_size)]
    return text.windows(starts[rows], seq_len + 1)


def even_windows(text: Text, count: int, length: int) -> Tensor:
    """Return `count` windows spread evenly over a text, of shape (count, length)."""
    return text.windows([index * (len(text) - length) // max(1, count - 1) for index in range(count)], length)


def order_two_loss(text: Text, windows: Tensor, strength: float = 4.0) -> float:
    """Return the nats per byte of an order-2 model of `text` on the bytes of `windows`, from the third of each on.

    p(c | a b) is the share of c among what followed a b, smoothed by `strength` counts that are spread like p(c | b),
    which is smoothed by p(c) in the same way: MacKay and Peto, "A Hierarchical Dirichlet Language Model" (1995).
    """
    counts = torch.zeros(SYMBOLS**3, dtype=torch.int64)
    for start in range(0, len(text) - 2, 2**24):
        x = torch.cat(text.between(start, min(start + 2**24 + 2, len(text)))).int()
        counts += torch.bincount(x[:-2] << 16 | x[1:-1] << 8 | x[2:], minlength=len(counts))
    triples = counts.view(SYMBOLS, SYMBOLS, SYMBOLS)
    pairs, before = triples.sum(0), triples.sum(2)
    singles = pairs.sum(0)
    p_one = (singles + 1) / (singles.sum() + SYMBOLS)
    p_two = (pairs + strength * p_one) / (pairs.sum(1, keepdim=True) + strength)
    a, b, c = windows[:, :-2], windows[:, 1:-1], windows[:, 2:]
    p_three = (triples[a, b, c] + strength * p_two[b, c]) / (before[a, b] + strength)
    return -p_three.log().mean().item()
