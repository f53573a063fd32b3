"""A training run from its start to its results: losses, checkpoints, a picture and a sample of text."""

import argparse
import json
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from statistics import mean
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lab.files import require_writable
from lab.processes import is_first, launched, least
from lab.progress import Progress
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tinyblock import parallelize

from . import checkpoints
from .text import Text, even_windows, order_two_loss
from .trainer import Settings, Trainer

VALIDATION_BATCHES = 8
SAMPLE = 200  # bytes that the model writes at the end
UNTIMED = 5  # first steps, in which torch compiles and allocates


def begin(args: argparse.Namespace, settings: Settings, text: Text) -> dict[str, Any]:
    """Return the checkpoint to resume from, or a run that has not begun."""
    new: dict[str, Any] = {
        "settings": asdict(settings) | {"text": text.sha256},
        "history": [],
    }
    del new["settings"]["steps"]  # a resumed run may be longer
    if args.checkpoint is None:
        return new
    if args.resume and not args.checkpoint.is_dir():
        raise ValueError(f"--resume: there is no folder {args.checkpoint}")
    try:
        args.checkpoint.mkdir(parents=True, exist_ok=True)
        require_writable(args.checkpoint / "any")
        checkpoints.remove_leftovers(args.checkpoint)
        saved = checkpoints.saved_in(args.checkpoint)
        if not saved:
            return new
        if not args.resume:
            raise ValueError(
                f"{args.checkpoint} has checkpoints: add --resume, or use another folder"
            )
        run = checkpoints.read(saved[-1])
    except OSError as error:
        raise ValueError(f"--checkpoint {error.filename}: {error.strerror}") from None
    for name, value in new["settings"].items():
        if (theirs := run["settings"].get(name)) != value:
            hint = (
                " (was an output written to a folder of --data?)"
                if name == "text"
                else ""
            )
            raise ValueError(
                f"{saved[-1]} is from another run: its {name} is {theirs}, but here it is {value}{hint}"
            )
    return run


def train(
    args: argparse.Namespace, settings: Settings, text: Text, run: dict[str, Any]
) -> int:
    """Train from where `run` is, and return the exit code."""
    parts = f"{len(text.training):,} bytes for training and {len(text.validation):,} for validation"
    print(f"text: {text.files} files, {parts}, SHA-256 {text.sha256}")
    windows = even_windows(
        text.validation, VALIDATION_BATCHES * settings.batch_size, settings.seq_len + 1
    )
    floor = order_two_loss(text.training, windows) if is_first() else 0.0
    print(f"order-2 model of the bytes: validation {_in_both_units(floor)}")
    trainer = _build(args, settings, text)
    parameters = sum(map(torch.numel, trainer.model.parameters()))
    print(
        f"model: {parameters:,} parameters on {args.tp * args.dp} x {args.device.type}",
        flush=True,
    )
    if run["history"]:
        checkpoints.load(trainer, run)
    if args.resume:
        print(f"{trainer.step} of {settings.steps} steps are done")
    try:
        received = _take_steps(args, trainer, run["settings"], windows)
    finally:
        if args.plot is not None and trainer.history and is_first():
            from .plot import SIZES, plot_losses

            source = (
                ", ".join(path.name for path in args.data)
                if args.data
                else "Python's standard library"
            )
            title = f"A language model of bytes, trained on {source}"
            origin = f"{parameters:,} parameters, {SIZES.format(**asdict(settings))}"
            plot_losses(args.plot, trainer.history, floor, title, origin)
    if received:
        print(f"stopped by {signal.Signals(received).name} after step {trainer.step}")
        return 128 + received
    prompt = bytes(text.validation[:64].tolist())
    with torch.compiler.set_stance(
        "force_eager"
    ):  # otherwise each length would be compiled
        sample = (prompt + b"|" + trainer.continue_text(prompt, SAMPLE)).decode(
            "utf-8", "replace"
        )
    shown = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in sample)
    print(
        f"the start of the validation text, and after the bar what the model writes:\n{shown}",
        flush=True,
    )
    return 0


def _build(args: argparse.Namespace, settings: Settings, text: Text) -> Trainer:
    if (
        args.device.type == "cuda"
    ):  # resumed runs have the same losses; with warn_only=True, gradients differ
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.manual_seed(settings.seed)
    model = settings.build().to(args.device)
    axes = {name: size for name, size in (("dp", args.dp), ("tp", args.tp)) if size > 1}
    if axes:
        mesh = init_device_mesh(
            args.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes)
        )
        parallelize(model.transformer, mesh, compile=args.compile)
    elif args.compile:
        model.compile()
    if args.tp > 1:
        by_vocabulary = {
            "token_embeddings": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tp"], by_vocabulary)
    if args.dp > 1:
        fully_shard(model, mesh=mesh["dp"])
    each = settings.batch_size // args.dp
    first = dist.get_rank() // args.tp * each if axes else 0
    return Trainer(model, text.training, settings, slice(first, first + each))


def _take_steps(
    args: argparse.Namespace,
    trainer: Trainer,
    settings: dict[str, Any],
    windows: Tensor,
) -> int:
    """Train to the last step, or until a signal; return the number of that signal, or 0."""
    first, steps, received = trainer.step, trainer.settings.steps, 0
    recent = deque[float](
        maxlen=100
    )  # seconds of steps, without validation and checkpoints
    losses = args.json if args.json is not None and is_first() else os.devnull
    with _signals() as latest, Progress() as progress, open(losses, "w") as lines:
        lines.writelines(json.dumps(record) + "\n" for record in trainer.history)
        progress.start("training", steps - trainer.step)
        while trainer.step < steps and not received:
            start = time.perf_counter()
            record = (
                trainer.advance()
            )  # the last of the history, which takes what is added below
            if trainer.step > first + UNTIMED:
                recent.append(time.perf_counter() - start)
            rate = (
                round(
                    trainer.settings.batch_size
                    * trainer.settings.seq_len
                    / mean(recent)
                )
                if recent
                else None
            )
            record["tokens_per_second"] = rate
            received, last = latest(), trainer.step == steps
            line = f"step {trainer.step}/{steps}, loss {_in_both_units(record['loss'])}"
            progress.advance(line)
            if last or trainer.step % max(1, steps // 10) == 0:
                record["validation"] = float(trainer.validate(windows).mean())
                validation = _in_both_units(record["validation"])
                progress.print(
                    f"{line}, validation {validation}"
                    + (f", {rate:,} tokens/s" if rate else "")
                )
            print(json.dumps(record), file=lines, flush=True)
            if args.checkpoint and (
                last or received or (args.every and trainer.step % args.every == 0)
            ):
                checkpoints.save(args.checkpoint, trainer, settings, args.keep)
    return received


@contextmanager
def _signals() -> Iterator[Callable[[], int]]:
    """Let Ctrl-C, SIGTERM and SIGHUP end the run after this step; yield a function that returns what was received.

    In one process the second signal has its usual effect. torchrun passes signals on, so its processes get each twice.
    """
    received = [0]
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if launched() == 1:
            signal.signal(number, before[signal.Signals(number)])

    try:
        for number, handler in before.items():
            if handler != signal.SIG_IGN:  # which nohup sets
                signal.signal(number, receive)
        yield (
            lambda: -least(-received[-1])
        )  # the highest number that any process has received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_both_units(nats: float) -> str:
    return f"{nats:.3f} nats ({nats / math.log(2):.3f} bits/byte)"
