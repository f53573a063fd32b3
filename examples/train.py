"""Train a byte-level language model made of tinyblock's layers, in two minutes on a CPU.

    pip install tqdm
    python examples/train.py                                 Python's standard library
    python examples/train.py notes.txt --steps 5000          a text of your own
    python examples/train.py --checkpoint run.pt             saves every 100 steps
    python examples/train.py --checkpoint run.pt --resume    continues

For other sizes, edit Config. A resumed run takes files and Config from the checkpoint, and
you may pass another number of steps. The text must be the same. On a CPU, its losses equal
the losses of an uninterrupted run to the last bit, because the batch of a step depends only
on the text, the seed and the step.

Losses are in nats per byte. The baseline is zlib, which compresses the held-out text.
"""

import argparse
import hashlib
import math
import os
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from language_model import LanguageModel
from torch import Tensor, nn
from tqdm import tqdm


@dataclass
class Config:
    steps: int = 2000
    batch: int = 8
    seq: int = 128
    d_model: int = 64
    layers: int = 3
    heads: int = 2
    lr: float = 5e-3
    warmup: int = 50
    seed: int = 0
    every: int = 100  # validate and save after so many steps


def standard_library() -> list[str]:
    """Return the source files of Python's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [*root.glob("*.py")]
    for folder in root.iterdir():
        if folder.name not in ("site-packages", "dist-packages"):
            files += folder.rglob("*.py")
    return [str(path) for path in sorted(files)]


def read_text(files: Sequence[str], seq: int) -> tuple[Tensor, Tensor]:
    """Return the bytes of the files for training, and the last 5% for validation.

    Without files, they are the bytes of Python's standard library.

    Raises:
        ValueError: the 5% have no sequence of `seq` bytes and the byte after it.
    """
    data = bytearray()
    for path in files or standard_library():
        data += Path(path).read_bytes()
    held_out = len(data) // 20
    if held_out <= seq:
        raise ValueError(
            f"the last 5% of the files must have more than {seq} bytes, got {held_out}: "
            "pass more text"
        )
    text = torch.frombuffer(data, dtype=torch.uint8)
    return text[:-held_out], text[-held_out:]


def digest(parts: Sequence[Tensor]) -> str:
    """Return a text that tells whether a resumed run has the same bytes."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part.numpy().data)
    return sha.hexdigest()


def zlib_loss(text: Tensor) -> float:
    data = text.numpy().tobytes()
    return math.log(2) * 8 * len(zlib.compress(data)) / len(data)


def windows_at(text: Tensor, starts: Tensor, seq: int) -> Tensor:
    """Return seq + 1 bytes from each start. The last byte is only predicted."""
    return text.unfold(0, seq + 1, 1)[starts].long()


def random_windows(text: Tensor, config: Config, step: int) -> Tensor:
    """Return the batch of a step."""
    generator = torch.Generator().manual_seed(config.seed * 10**9 + step)
    count = len(text) - config.seq
    starts = torch.randint(count, (config.batch,), generator=generator)
    return windows_at(text, starts, config.seq)


def even_windows(text: Tensor, count: int, seq: int) -> Tensor:
    """Return windows that are spread evenly over the text."""
    last = len(text) - seq - 1
    # In whole numbers: torch.linspace rounds to 24 bits, beyond the end of a large text.
    starts = torch.arange(count) * last // (count - 1)
    return windows_at(text, starts, seq)


def losses(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the loss of each byte except the first, (batch, seq)."""
    windows = windows.to(next(model.parameters()).device)
    with torch.autocast("cuda", torch.bfloat16, enabled=windows.is_cuda):
        logits = model(windows[:, :-1])
    by_symbol = logits.float().transpose(1, 2)
    return F.cross_entropy(by_symbol, windows[:, 1:], reduction="none")


@torch.no_grad()
def validate(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean loss at each position, (seq,)."""
    parts = [losses(model, part) for part in windows.split(8)]
    return torch.cat(parts).mean(0).cpu()


def learning_rate(config: Config, step: int) -> float:
    """Return the rate of a linear warm-up, then of a cosine to a tenth of the peak."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    done = (step - config.warmup) / (config.steps - config.warmup)
    return config.lr * (0.55 + 0.45 * math.cos(math.pi * done))


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Return AdamW that decays matrices, but neither norm weights nor single numbers."""
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    text: Tensor,
    config: Config,
    first: int,
) -> Iterator[float]:
    """Train from step `first` on, and yield the loss of each step."""
    for step in range(first, config.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        loss = losses(model, random_windows(text, config, step)).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss.item()


def sample(model: LanguageModel, prompt: Tensor, seq: int) -> str:
    """Continue the bytes of a prompt as far as the model has positions."""
    count = seq + 1 - len(prompt)  # the last byte is not read
    drawn = model.generate(prompt.long()[None], count, temperature=0.8)
    return bytes(drawn[0].tolist()).decode(errors="replace")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files",
        nargs="*",
        help="train on this text (default: Python's standard library)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        help=f"train for this many steps (default: {Config.steps})",
    )
    parser.add_argument(
        "--checkpoint", metavar="FILE", help="save to this file (default: do not)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue from the checkpoint"
    )
    options = parser.parse_args(arguments)
    if options.resume and options.checkpoint is None:
        parser.error("--resume requires --checkpoint FILE")
    return options


def build(config: Config) -> LanguageModel:
    sizes = config.layers, config.d_model, config.heads
    return LanguageModel(256, *sizes, max_seq_len=config.seq)


def read(path: str) -> dict[str, Any]:
    """Return the content of a checkpoint, on the CPU."""
    return torch.load(path, map_location="cpu")


def load(path: str) -> LanguageModel:
    """Return the model of a checkpoint. Its tokens are bytes."""
    saved = read(path)
    model = build(Config(**saved["config"]))
    model.load_state_dict(saved["model"])
    return model


def save(path: str, state: dict[str, Any]) -> None:
    """Write a new file, and replace the old file when the new file is complete."""
    torch.save(state, f"{path}.new")
    os.replace(f"{path}.new", path)


def main(arguments: Sequence[str] | None = None, config: Config | None = None) -> None:
    options = parse(arguments)
    config = config or Config()
    saved = None
    if options.resume:
        saved = read(options.checkpoint)
        config = Config(**saved["config"])
        options.files = options.files or saved["files"]
    if options.steps is not None:
        config = replace(config, steps=options.steps)

    text, held_out = read_text(options.files, config.seq)
    windows = even_windows(held_out, 64, config.seq)
    sha = digest((text, held_out))
    if saved is not None and saved["text"] != sha:
        raise ValueError(
            "a resumed run must have the text of its checkpoint, but the files have "
            "changed: begin a new run"
        )
    print(f"{len(text):,} bytes; zlib: {zlib_loss(held_out):.3f} nats per byte")

    torch.manual_seed(config.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(config).to(device)
    optimizer = adamw(model)
    history: list[float] = []
    validation: dict[int, float] = {}
    if saved is not None:
        history = saved["history"]
        validation = saved["validation"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    first = len(history)
    steps = train(model, optimizer, text, config, first)
    for loss in tqdm(steps, total=config.steps, initial=first, disable=None):
        history.append(loss)
        step = len(history)
        if step % config.every and step < config.steps:
            continue
        validation[step] = validate(model, windows).mean().item()
        tqdm.write(f"step {step}: {loss:.3f}, validation {validation[step]:.3f}")
        if options.checkpoint is not None:
            state = {
                "files": options.files,
                "text": sha,
                "config": asdict(config),
                "history": history,
                "validation": validation,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
            }
            save(options.checkpoint, state)

    prompt = held_out[: config.seq // 4 + 1].to(device)
    print(sample(model, prompt, config.seq))


if __name__ == "__main__":
    main()
