"""A training run from its start to what it leaves: losses, checkpoints, a picture and a sample of text."""

import argparse
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from .model import spread
from .progress import Progress, bits, flops_per_token
from .run import Processes, Settings, Trainer
from .text import TextFiles, even_windows, order_two_loss

VALIDATION_BATCHES = 8
SAMPLE = 200  # bytes that the model writes at the end


def train(args: argparse.Namespace, settings: Settings, text: TextFiles, path: Path | None, run: dict[str, Any]) -> int:
    """Train from the checkpoint `path`, or from the start, and return the exit code."""
    processes = _processes(args)
    first = processes.rank == 0
    say = partial(print, flush=True) if first else lambda *words: None
    say(f"text: {len(text.files)} files, {text.bytes:,} bytes, SHA-256 {text.sha256}")
    windows = even_windows(text.validation, VALIDATION_BATCHES * settings.batch_size, settings.seq_len + 1)
    floor = order_two_loss(text.training, windows) if first else 0.0
    say(f"order-2 model of the bytes: validation {floor:.3f} nats ({bits(floor):.3f} bits/byte)")

    torch.manual_seed(settings.seed)
    model = settings.build().to(processes.device)
    parameters = sum(map(torch.numel, model.parameters()))
    say(f"model: {parameters:,} parameters on {processes.count} x {processes.device.type}")
    if processes.mesh is not None:
        spread(model, processes.mesh, args.compile)
    elif args.compile:
        model.compile()
    trainer = Trainer(model, text.training, settings, processes)
    if args.checkpoint is not None:
        from . import checkpoints  # torch.distributed.checkpoint takes seconds to import

        if path is not None:
            checkpoints.load(path, trainer)
    if args.resume:
        say(f"resumed after step {trainer.step}" if path else f"no checkpoint in {args.checkpoint}: from the start")

    history: list[dict[str, Any]] = run["history"]
    flops = flops_per_token(settings, model.d_ff)
    progress = Progress(settings, trainer.step, flops, processes.device, processes.count)
    stop = False
    losses = args.json if first and args.json is not None else os.devnull
    with _interrupts(processes) as interrupted, open(losses, "w") as lines:
        lines.writelines(json.dumps(record) + "\n" for record in history)
        try:
            while trainer.step < settings.steps and not stop:
                record = trainer.advance()
                step, last, stop = trainer.step, trainer.step == settings.steps, interrupted()
                if last or step % max(1, settings.steps // 10) == 0:
                    record["validation"] = trainer.validate(windows)
                if first:
                    progress.show(record)
                history.append(record | {"tokens_per_second": round(progress.tokens_per_second(step))})
                print(json.dumps(history[-1]), file=lines, flush=True)
                if args.checkpoint is not None and (last or stop or step % args.every == 0):
                    checkpoints.save(args.checkpoint, trainer, run, args.keep)
        finally:
            if args.plot is not None and history and first:
                from .plot import plot_losses

                plot_losses(args.plot, history, floor, f"{parameters:,} parameters")
    if stop:
        say(f"interrupted after step {trainer.step}")
        return 130
    prompt = text.validation.windows([0], 64)[0]
    with torch.compiler.set_stance("force_eager"):  # each length would be compiled anew
        continued = trainer.continue_text(prompt, SAMPLE)
    sample = (bytes(prompt.tolist()) + b"|" + continued).decode("utf-8", "replace")
    shown = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in sample)
    say(f"the validation text begins, and the model goes on after the bar:\n{shown}")
    return 0


def _processes(args: argparse.Namespace) -> Processes:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        torch.use_deterministic_algorithms(True, warn_only=True)  # so that a resumed run has the same losses
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    axes = {name: size for name, size in (("dp", args.dp), ("tp", args.tp)) if size > 1}
    if not axes:
        return Processes(device)
    mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    dp_rank = mesh["dp"].get_local_rank() if "dp" in axes else 0
    return Processes(device, mesh, dist.get_rank(), dist.get_world_size(), dp_rank, args.dp)


@contextmanager
def _interrupts(processes: Processes) -> Iterator[Callable[[], bool]]:
    """Take Ctrl-C as a wish to stop after this step; yield a function that tells whether any process received it."""
    received = []

    def receive(number: int, frame: object) -> None:
        received.append(number)
        if processes.mesh is None:  # torchrun passes the signal on, so that its processes get it twice
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def any_received() -> bool:
        return bool(processes.mean(torch.tensor(float(len(received)), device=processes.device)) > 0)

    before = signal.signal(signal.SIGINT, receive)
    try:
        yield any_received
    finally:
        signal.signal(signal.SIGINT, before)
