"""Comparisons that the papers make, on one text: equal parameters, data, steps and seeds for all variants."""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from statistics import mean
from typing import Any

import torch
from lab.environment import environment
from lab.files import atomic
from lab.progress import Progress
from lab.tables import Table, show
from torch import Tensor, nn

from tinyblock import FeedForward, SwiGLU, gelu, silu

from .model import LanguageModel, with_norm_behind
from .run import Diverged, Processes, Settings, Trainer
from .text import TextFiles, even_windows, order_two_loss

COMPARISONS = ("ffn", "norm", "positions", "activations")
VALIDATION_BATCHES = 64
POINTS = 50  # of a curve: each is the mean of as many steps
BINS = 32  # of positions


def variants(kind: str, settings: Settings) -> dict[str, Callable[[Settings], LanguageModel]]:
    """Return how to build the models that are compared; they have as many parameters, but for the gains of norms."""
    if kind == "norm":
        return {
            "pre": Settings.build,
            "post": lambda settings: with_norm_behind(settings.build()),
            "none": partial(Settings.build, norm=nn.Identity),
        }
    if kind == "positions":
        return {"RoPE": Settings.build, "none": partial(Settings.build, theta=None)}
    gated = SwiGLU(settings.d_model, device="meta").d_ff  # three matrices of it are two of half as much again
    plain = {"GELU": gelu, "SiLU": silu, "ReLU": torch.relu}
    of = {name: partial(FeedForward, activation=activation) for name, activation in plain.items()}
    return {
        "SwiGLU": Settings.build,
        **{name: partial(Settings.build, ffn=ffn, d_ff=gated * 3 // 2) for name, ffn in of.items()},
    }


def compare(args: argparse.Namespace, settings: Settings, text: TextFiles) -> int:
    """Train every variant with every learning rate and seed, show and write what came of it; return the exit code."""
    if args.compare == "activations":
        from .plot import plot_activations

        plot_activations(args.plot)
        return 0
    builds = variants(args.compare, settings)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    windows = even_windows(text.validation, VALIDATION_BATCHES * settings.batch_size, settings.seq_len + 1)
    longer = None  # than the sequences trained on
    if args.compare == "positions":
        longer = even_windows(text.validation, 128, settings.max_seq_len + 1)
    document = {
        "compare": args.compare,
        "environment": environment(device, settings.seed),
        "settings": asdict(settings) | {"lr": args.lr, "seeds": args.seeds},
        "text": {"files": len(text.files), "bytes": text.bytes, "sha256": text.sha256},
        "order_two_validation": order_two_loss(text.training, windows),
        "runs": (runs := []),
    }
    everything = [
        (name, replace(settings, seed=settings.seed + seed, lr=lr))
        for seed in range(args.seeds)  # outermost: what an interruption leaves has all variants
        for lr in args.lr
        for name in builds
    ]
    try:
        with Progress() as progress:
            for index, (name, chosen) in enumerate(everything, 1):
                progress.start(f"{index}/{len(everything)} {name}, lr {chosen.lr:g}, seed {chosen.seed}", chosen.steps)
                torch.manual_seed(chosen.seed)
                model = builds[name](chosen).to(device)
                trainer = Trainer(model, text.training, chosen, Processes(device))
                record = _run(trainer, windows, longer, progress.advance)
                runs.append({"variant": name, "seed": chosen.seed, "lr": chosen.lr} | record)
                if args.json is not None:
                    with atomic(args.json) as temporary:
                        temporary.write_text(json.dumps(document) + "\n")
    finally:
        if runs:
            show(_tables(document))
            if args.plot is not None and any(run["diverged"] is None for run in runs):
                from .plot import plot_comparison

                plot_comparison(args.plot, document)
    return 0


def _run(trainer: Trainer, windows: Tensor, longer: Tensor | None, advanced: Callable[[], None]) -> dict[str, Any]:
    """Train one model; its losses are means of a fiftieth of the steps, and of a part of the positions."""
    losses: list[float] = []
    steps, parameters = trainer.settings.steps, trainer.model.parameters()
    counts = {"parameters": sum(map(torch.numel, parameters)), "d_ff": trainer.model.d_ff}
    record: dict[str, Any] = counts | {"diverged": None, "validation": None}
    try:
        while trainer.step < steps:
            losses.append(trainer.advance()["loss"])
            advanced()
        record["validation"] = round(trainer.validate(windows), 5)
        if longer is not None:
            parts = trainer.losses_by_position(longer).chunk(BINS)
            record["by_position"] = [round(float(part.mean()), 4) for part in parts]
    except Diverged:
        record["diverged"] = trainer.step + 1
    each = max(1, steps // POINTS)
    record["curve"] = [round(mean(losses[at : at + each]), 4) for at in range(0, len(losses), each)]
    return record


def groups(document: dict[str, Any]) -> dict[tuple[str, float], list[dict[str, Any]]]:
    """Return the runs of each variant and learning rate, one for each seed."""
    grouped: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for run in document["runs"]:
        grouped.setdefault((run["variant"], run["lr"]), []).append(run)
    return grouped


def _tables(document: dict[str, Any]) -> list[Table | str]:
    grouped = groups(document)
    (first, _), *_ = grouped
    columns = ["variant", "lr", "parameters", "d_ff", "seeds", "validation, nats", "range", f"minus {first}", "range"]
    table = Table(f"{document['compare']}: mean and range over the seeds", columns)
    for (name, lr), runs in grouped.items():
        base = {run["seed"]: run["validation"] for run in grouped[first, lr]}
        losses = [run["validation"] for run in runs if run["diverged"] is None]
        pairs = [(run["validation"], base.get(run["seed"])) for run in runs]
        above = [loss - other for loss, other in pairs if loss is not None and other is not None]
        ranges = [
            cell
            for values in (losses, above)
            for cell in ([f"{mean(values):.4f}", f"{min(values):.4f} to {max(values):.4f}"] if values else ["", ""])
        ]
        seeds = f"{len(losses)} of {len(runs)}" if len(losses) < len(runs) else str(len(runs))
        table.rows.append([name, f"{lr:g}", f"{runs[0]['parameters']:,}", str(runs[0]["d_ff"]), seeds, *ranges])
    settings = document["settings"]
    trained = "{steps} steps of {batch_size} x {seq_len} bytes, {warmup} of them warm-up".format(**settings)
    return [table, f"{trained}; order-2 model: {document['order_two_validation']:.4f} nats"]
