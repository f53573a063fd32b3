"""Comparisons that the papers make, on one text: equal parameters, data, steps and seeds for all variants."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from statistics import mean
from typing import Any

import torch
from lab.environment import environment
from lab.files import write_json
from lab.progress import Progress
from lab.tables import Table, show
from torch import Tensor, nn

from tinyblock import FeedForward, SwiGLU, gelu, silu

from .model import LanguageModel, with_post_norm
from .text import Text, even_windows, order_two_loss
from .trainer import Diverged, Settings, Trainer

COMPARISONS = ("ffn", "norm", "positions", "activations")
VALIDATION_BATCHES = 64
POINTS = 50  # of a curve: each is the mean of as many steps
BINS = 32  # of positions


def variants(kind: str, settings: Settings) -> dict[str, Callable[[Settings], LanguageModel]]:
    """Return how to build the models that are compared; they have as many parameters, except for the gains of norms."""
    if kind == "norm":
        return {
            "pre-norm": Settings.build,
            "post-norm": lambda settings: with_post_norm(settings.build()),
            "no norm": partial(Settings.build, norm=nn.Identity),
        }
    if kind == "positions":
        return {"RoPE": Settings.build, "no positions": partial(Settings.build, theta=None)}
    gated = SwiGLU(settings.d_model, device="meta").d_ff
    plain = {"GELU": gelu, "SiLU": silu, "ReLU": torch.relu}
    of = {name: partial(FeedForward, activation=activation) for name, activation in plain.items()}
    d_ff = gated * 3 // 2  # two matrices of it have as many weights as three of SwiGLU's
    return {
        "SwiGLU": Settings.build,
        **{name: partial(Settings.build, ffn=ffn, d_ff=d_ff) for name, ffn in of.items()},
    }


def compare(args: argparse.Namespace, settings: Settings, text: Text) -> int:
    """Train every variant with every learning rate and seed, and show and write the results; return the exit code."""
    if args.compare == "activations":
        from .plot import plot_activations

        plot_activations(args.plot)
        return 0
    builds = variants(args.compare, settings)
    windows = even_windows(text.validation, VALIDATION_BATCHES * settings.batch_size, settings.seq_len + 1)
    longer = even_windows(text.validation, 128, settings.max_seq_len + 1)  # than the sequences trained on
    runs: list[dict[str, Any]] = []
    document = {
        "compare": args.compare,
        "environment": environment(args.device, settings.seed),
        "settings": asdict(settings) | {"lr": args.lr, "seeds": args.seeds},
        "text": {"files": text.files, "bytes": len(text.training) + len(text.validation), "sha256": text.sha256},
        "order_two_validation": order_two_loss(text.training, windows),
        "runs": runs,
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
                trainer = Trainer(builds[name](chosen).to(args.device), text.training, chosen)
                record = _run(trainer, windows, progress.advance)
                if args.compare == "positions" and record["diverged"] is None:
                    parts = trainer.losses_by_position(longer).chunk(BINS)
                    record["by_position"] = [round(float(part.mean()), 4) for part in parts]
                runs.append({"variant": name, "seed": chosen.seed, "lr": chosen.lr} | record)
                if args.json is not None:
                    write_json(args.json, document)
    finally:
        if runs:
            show(_tables(document))
            if args.plot is not None and any(run["diverged"] is None for run in runs):
                from .plot import plot_comparison

                plot_comparison(args.plot, document)
    return 0


def _run(trainer: Trainer, windows: Tensor, on_step: Callable[[], None]) -> dict[str, Any]:
    """Train one model and return its losses, as means over a fiftieth of the steps."""
    losses: list[float] = []
    model: Any = trainer.model
    counts = {"parameters": sum(map(torch.numel, model.parameters())), "d_ff": model.transformer.layers[0].ffn.d_ff}
    record: dict[str, Any] = counts | {"diverged": None, "validation": None}
    try:
        while trainer.step < trainer.settings.steps:
            losses.append(trainer.advance()["loss"])
            on_step()
        record["validation"] = round(trainer.validate(windows), 5)
    except Diverged:
        record["diverged"] = trainer.step + 1
    each = max(1, trainer.settings.steps // POINTS)
    record["curve"] = [round(mean(losses[at : at + each]), 4) for at in range(0, len(losses), each)]
    return record


def _tables(document: dict[str, Any]) -> list[Table | str]:
    runs: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for run in document["runs"]:
        runs.setdefault((run["variant"], run["lr"]), []).append(run)
    first = document["runs"][0]["variant"]
    columns = ["variant", "lr", "parameters", "d_ff", "seeds", "validation, nats", "range", f"minus {first}", "range"]
    table = Table(f"{document['compare']}: mean and range over the seeds", columns)
    for (name, lr), own in runs.items():
        pairs = [(run["validation"], base["validation"]) for run, base in zip(own, runs[first, lr], strict=False)]
        trained = [run["validation"] for run in own if run["diverged"] is None]
        differences = [loss - other for loss, other in pairs if loss is not None and other is not None]
        seeds = f"{len(trained)} of {len(own)}" if len(trained) < len(own) else str(len(own))
        cells = [name, f"{lr:g}", f"{own[0]['parameters']:,}", str(own[0]["d_ff"]), seeds]
        table.rows.append([*cells, *_mean_and_range(trained), *_mean_and_range(differences)])
    settings = document["settings"]
    trained_on = "{steps} steps of {batch_size} x {seq_len} bytes, {warmup} of them warm-up".format(**settings)
    return [table, f"{trained_on}; order-2 model: {document['order_two_validation']:.4f} nats"]


def _mean_and_range(values: Sequence[float]) -> list[str]:
    return [f"{mean(values):.4f}", f"{min(values):.4f} to {max(values):.4f}"] if values else ["diverged", ""]
