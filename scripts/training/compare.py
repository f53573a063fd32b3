"""Comparisons that the papers make, on one text: equal parameters, data, steps and seeds for all variants."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
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

VALIDATION_BATCHES = 64
POINTS = 50  # of a curve: each is the mean of as many steps
BINS = 32  # of positions


def _ungated(
    activation: Callable[[Tensor], Tensor], settings: Settings
) -> LanguageModel:
    """Build a model whose two feed-forward matrices have as many weights as the three of SwiGLU."""
    d_ff = SwiGLU(settings.d_model, device="meta").d_ff * 3 // 2
    return settings.build(ffn=partial(FeedForward, activation=activation), d_ff=d_ff)


# The variants of a comparison have as many parameters, except for the gains of norms.
VARIANTS: dict[str, dict[str, Callable[[Settings], LanguageModel]]] = {
    "ffn": {
        "SwiGLU": Settings.build,
        "GELU": partial(_ungated, gelu),
        "SiLU": partial(_ungated, silu),
        "ReLU": partial(_ungated, torch.relu),
    },
    "norm": {
        "pre-norm": Settings.build,
        "post-norm": lambda settings: with_post_norm(settings.build()),
        "no norm": partial(Settings.build, norm=nn.Identity),
    },
    "positions": {
        "RoPE": Settings.build,
        "no positions": partial(Settings.build, theta=None),
    },
}


def compare(args: argparse.Namespace, settings: Settings, text: Text) -> int:
    """Train every variant with every learning rate and seed, show and write the results, and return the exit code."""
    if args.compare == "activations":
        from .plot import plot_activations

        plot_activations(args.plot)
        return 0
    windows = even_windows(
        text.validation, VALIDATION_BATCHES * settings.batch_size, settings.seq_len + 1
    )
    longer = even_windows(
        text.validation, 128, settings.max_seq_len + 1
    )  # than the sequences trained on
    runs: list[dict[str, Any]] = []
    document = {
        "compare": args.compare,
        "environment": environment(args.device, settings.seed),
        "settings": asdict(settings) | {"lr": args.lr, "seeds": args.seeds},
        "text": {
            "files": text.files,
            "bytes": len(text.training) + len(text.validation),
            "sha256": text.sha256,
        },
        "order_two_validation": order_two_loss(text.training, windows),
        "runs": runs,
    }
    with Progress() as progress:
        for seed, lr, (name, build) in product(
            range(args.seeds), args.lr, VARIANTS[args.compare].items()
        ):
            chosen = replace(settings, seed=settings.seed + seed, lr=lr)
            progress.start(f"{name}, lr {lr:g}, seed {chosen.seed}", chosen.steps)
            torch.manual_seed(chosen.seed)
            model: Any = build(chosen).to(args.device)
            trainer = Trainer(model, text.training, chosen)
            record: dict[str, Any] = {"variant": name, "seed": chosen.seed, "lr": lr}
            record["parameters"] = sum(map(torch.numel, model.parameters()))
            record |= {
                "d_ff": model.transformer.layers[0].ffn.d_ff,
                "diverged": None,
                "validation": None,
            }
            try:
                while trainer.step < chosen.steps:
                    trainer.advance()
                    progress.advance()
                record["validation"] = round(float(trainer.validate(windows).mean()), 5)
                if args.compare == "positions":
                    parts = trainer.validate(longer).chunk(BINS)
                    record["by_position"] = [
                        round(float(part.mean()), 4) for part in parts
                    ]
            except Diverged:
                record["diverged"] = trainer.step + 1
            losses, each = (
                [step["loss"] for step in trainer.history],
                max(1, chosen.steps // POINTS),
            )
            record["curve"] = [
                round(mean(losses[at : at + each]), 4)
                for at in range(0, len(losses), each)
            ]
            runs.append(record)
            if args.json is not None:
                write_json(args.json, document)
    differences = _minus_first(runs)
    show(_sections(document, differences))
    drawn = differences if args.compare == "ffn" else runs
    if args.plot is not None and any(run["diverged"] is None for run in drawn):
        from .plot import plot_comparison

        plot_comparison(args.plot, document, drawn)
    return 0


def _minus_first(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the runs with their losses minus those of the first variant with the same seed and learning rate."""
    trained = [run for run in runs if run["diverged"] is None]
    firsts = {
        (run["seed"], run["lr"]): run
        for run in trained
        if run["variant"] == runs[0]["variant"]
    }
    differences = []
    for run in trained:
        if first := firsts.get((run["seed"], run["lr"])):
            curve = [a - b for a, b in zip(run["curve"], first["curve"], strict=True)]
            differences.append(
                run
                | {
                    "curve": curve,
                    "validation": run["validation"] - first["validation"],
                }
            )
    return differences


def _sections(
    document: dict[str, Any], differences: Sequence[dict[str, Any]]
) -> list[Table | str]:
    kind, runs, settings = document["compare"], document["runs"], document["settings"]
    columns = [
        "variant",
        "lr",
        "parameters",
        "d_ff",
        "seeds",
        "validation, nats",
        "range",
    ]
    table = Table(
        f"{kind}: mean and range over the seeds",
        [*columns, f"minus {runs[0]['variant']}", "range"],
    )
    for variant, lr in dict.fromkeys((run["variant"], run["lr"]) for run in runs):
        own, paired = (
            [r for r in all_ if (r["variant"], r["lr"]) == (variant, lr)]
            for all_ in (runs, differences)
        )
        losses = [
            [run["validation"] for run in group if run["diverged"] is None]
            for group in (own, paired)
        ]
        seeds = (
            f"{len(losses[0])} of {len(own)}"
            if len(losses[0]) < len(own)
            else str(len(own))
        )
        row = [
            variant,
            f"{lr:g}",
            f"{own[0]['parameters']:,}",
            str(own[0]["d_ff"]),
            seeds,
        ]
        for group in losses:
            row += (
                [f"{mean(group):.4f}", f"{min(group):.4f} to {max(group):.4f}"]
                if group
                else ["diverged", ""]
            )
        table.rows.append(row)
    trained_on = "{steps} steps of {batch_size} x {seq_len} bytes, {warmup} of them warm-up".format(
        **settings
    )
    return [
        table,
        f"{trained_on}; order-2 model: {document['order_two_validation']:.4f} nats",
    ]
