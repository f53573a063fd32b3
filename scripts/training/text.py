"""Text as bytes: what is read, what is drawn from it, and a trigram model of it."""

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
CHUNK = 2**24  # bytes that are counted at a time


@dataclass(frozen=True)
class Found:
    """The files that are read, and the number of binary files in folders, which are skipped."""

    files: list[Path]
    binary: int


@dataclass(frozen=True)
class Text:
    """The bytes of files, one after another; the last 5% are held out for validation."""

    training: Tensor
    validation: Tensor
    files: int
    sha256: str


def read_text(files: Sequence[Path]) -> Text:
    """Read the files into memory."""
    data = bytearray()
    for path in files:
        data += path.read_bytes()
    # torch.frombuffer rejects an empty buffer.
    everything = torch.empty(0, dtype=torch.uint8)
    if data:
        everything = torch.frombuffer(data, dtype=torch.uint8)
    split = len(data) - len(data) // 20
    sha256 = hashlib.sha256(data).hexdigest()
    return Text(everything[:split], everything[split:], len(files), sha256)


def standard_library() -> list[Path]:
    """Return the source files of Python's standard library, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    files = list(root.glob("*.py"))
    for folder in root.iterdir():
        if folder.name not in ("site-packages", "dist-packages"):
            files += folder.rglob("*.py")
    return sorted(files)


def files_in(paths: Sequence[Path], outputs: Sequence[Path] = ()) -> Found:
    """Find these files and those in these folders, sorted, without outputs, checkpoints and hidden files.

    A binary file is skipped in a folder. One of `paths` is read: the model takes any bytes.

    Raises:
        ValueError: a path does not exist, or has no such file, or a file is found twice.
    """
    found: list[Path] = []
    binary = 0
    for path in paths:
        if not path.exists():
            raise ValueError(f"--data: cannot read {path}: No such file or directory")
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        kept = [file for file in inside if _is_kept(file, path, outputs)]
        texts = kept
        if path.is_dir():
            texts = [file for file in kept if not _is_binary(file)]
        if not texts:
            raise ValueError(
                f"--data {path} has no text: outputs, checkpoints, hidden, special and binary files are left out"
            )
        found += texts
        binary += len(kept) - len(texts)
    _require_once(found)
    return Found(found, binary)


def _require_once(files: Sequence[Path]) -> None:
    """Raise a ValueError for a file that is there twice: the model could read the validation text in training."""
    names: dict[Path, Path] = {}
    for file in files:
        # Two paths, such as a symbolic link and its target, may lead to one file.
        resolved = file.resolve()
        if resolved in names:
            raise ValueError(
                f"--data must name each file once, got {names[resolved]} and {file}, which are the same file: "
                "remove a path"
            )
        names[resolved] = file


def _is_kept(file: Path, root: Path, outputs: Sequence[Path]) -> bool:
    """Return whether a file below `root` is regular, not hidden, and not written by this program."""
    for name in file.relative_to(root).parts:
        if LEFT_OUT.fullmatch(name):
            return False
    if not file.is_file():
        return False
    return not any(output.exists() and file.samefile(output) for output in outputs)


def _is_binary(file: Path) -> bool:
    """Return whether a file has NUL bytes, or is not UTF-8."""
    content = file.read_bytes()
    if b"\0" in content:
        return True
    try:
        content.decode()
    except UnicodeDecodeError:
        return True
    return False


def batch(text: Tensor, seed: int, step: int, batch_size: int, seq_len: int) -> Tensor:
    """Return the batch of a step: seq_len bytes and the next one, of shape (batch_size, seq_len + 1).

    It depends only on seed and step, so it is the same after a restart.
    """
    draw = random.Random(f"{seed} {step}")
    starts = [draw.randrange(len(text) - seq_len) for _ in range(batch_size)]
    return text.unfold(0, seq_len + 1, 1)[starts].long()


def even_windows(text: Tensor, count: int, length: int) -> Tensor:
    """Return `count` windows spread evenly over a text, of shape (count, length)."""
    last = len(text) - length
    gaps = max(1, count - 1)
    starts = [index * last // gaps for index in range(count)]
    return text.unfold(0, length, 1)[starts].long()


def trigram_loss(text: Tensor, windows: Tensor, strength: float = 4.0) -> float:
    """Return the loss of a trigram model of `text` on the bytes of `windows`, from the third of each on.

    The model predicts each byte from the two before it: p(c | a b) is the share of c among the bytes that followed a b
    in the text. It is smoothed by `strength` counts that are spread like p(c | b), which is smoothed by p(c) in the
    same way: MacKay and Peto, "A Hierarchical Dirichlet Language Model" (1995).

    Returns:
        the mean, in nats per byte.
    """
    triples = _count_triples(text)
    pairs = triples.sum(0)
    singles = pairs.sum(0)
    # How often a b, and how often b, came before any byte.
    before_triples = triples.sum(2)
    before_pairs = pairs.sum(1, keepdim=True)
    p_single = (singles + 1) / (singles.sum() + SYMBOLS)
    p_pair = (pairs + strength * p_single) / (before_pairs + strength)
    a = windows[:, :-2]
    b = windows[:, 1:-1]
    c = windows[:, 2:]
    smoothed = triples[a, b, c] + strength * p_pair[b, c]
    p_triple = smoothed / (before_triples[a, b] + strength)
    return -p_triple.log().mean().item()


def _count_triples(text: Tensor) -> Tensor:
    """Return how often each three bytes follow one another, of shape (256, 256, 256)."""
    counts = torch.zeros(SYMBOLS**3, dtype=torch.int64)
    for start in range(0, len(text) - 2, CHUNK):
        # CHUNK triples need two bytes more.
        chunk = text[start : start + CHUNK + 2].int()
        first = chunk[:-2]
        second = chunk[1:-1]
        third = chunk[2:]
        triples = (first * SYMBOLS + second) * SYMBOLS + third
        counts += torch.bincount(triples, minlength=len(counts))
    return counts.view(SYMBOLS, SYMBOLS, SYMBOLS)
