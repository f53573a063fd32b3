"""Test claims of papers on small models: docs/results has its tables.

    pip install tqdm
    python examples/ablations.py ffn
    python examples/ablations.py norm --layers 6 --seq 64 --lrs 1e-3 3e-3 1e-2 3e-2
    python examples/ablations.py positions

Variants differ in one choice. In a row of the table, they share the seed, the batches
and the learning rate. All have the same number of parameters, apart from norm weights.
Losses are in nats per byte, on held-out text. After a few hundred steps, they show how
fast a variant starts, and not what it reaches in the end.
"""

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from language_model import LanguageModel
from torch import Tensor, nn
from tqdm import tqdm
from train import Config, adamw, even_windows, read_text, train, validate

from tinyblock import Block, FeedForward, SwiGLU, gelu, silu

SMALL = Config(steps=200, d_model=48, heads=3)
LONG = 4  # validation of positions uses sequences this many times as long as training
DIVERGED = 20.0  # nats per byte; a guess has 5.5


class PostNormBlock(Block):
    """Vaswani et al. (arXiv 1706.03762): normalize each sum with the residual stream."""

    def forward(self, x: Tensor, token_positions: Any = None, mask: Any = None) -> Any:
        x = self.ln1(x + self.attn(x, token_positions, mask))
        return self.ln2(x + self.ffn(x))


def build(config: Config, **options: Any) -> LanguageModel:
    sizes = config.layers, config.d_model, config.heads
    return LanguageModel(256, *sizes, max_seq_len=LONG * config.seq, **options)


def ungated(config: Config, activation: Callable[[Tensor], Tensor]) -> LanguageModel:
    """Build feed-forward layers whose two matrices have as many weights as SwiGLU."""
    d_ff = SwiGLU(config.d_model, device="meta").d_ff * 3 // 2
    return build(config, d_ff=d_ff, ffn=partial(FeedForward, activation=activation))


def post_norm(config: Config) -> LanguageModel:
    """Build a model whose last post-norm is the final norm."""
    model = build(config, block=PostNormBlock)
    model.transformer.ln_final = nn.Identity()
    return model


VARIANTS: dict[str, dict[str, Callable[[Config], LanguageModel]]] = {
    "ffn": {
        "SwiGLU": build,
        "GELU": partial(ungated, activation=gelu),
        "SiLU": partial(ungated, activation=silu),
        "ReLU": partial(ungated, activation=torch.relu),
    },
    "norm": {
        "pre-norm": build,
        "post-norm": post_norm,
    },
    "positions": {
        "RoPE": build,
        "no positions": partial(build, theta=None),
    },
}


def run(model: nn.Module, config: Config, text: Tensor, windows: Tensor) -> Tensor:
    """Train, and return the validation losses by position; NaN if training diverges."""
    for loss in train(model, adamw(model), text, config, first=0):
        if not loss < DIVERGED:
            return torch.full((windows.shape[1] - 1,), torch.nan)
    return validate(model, windows)


def table(names: Iterable[str], rows: Iterable[tuple[str, Tensor]]) -> str:
    lines = [["", *names]]
    lines.append(["---"] * len(lines[0]))
    for name, losses in rows:
        lines.append([name, *map(cell, losses.tolist())])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(loss: float) -> str:
    return "diverged" if math.isnan(loss) else f"{loss:.3f}"


def parse(arguments: Sequence[str] | None, config: Config) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=VARIANTS, help="vary this choice")
    parser.add_argument(
        "files",
        nargs="*",
        help="train on this text (default: Python's standard library)",
    )
    parser.add_argument(
        "--lrs",
        type=float,
        nargs="+",
        default=[config.lr],
        help=f"train at each of these peak learning rates (default: {config.lr})",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[0, 1, 2],
        help="train with each of these seeds (default: 0 1 2)",
    )
    parser.add_argument(
        "--layers",
        type=int,
        default=config.layers,
        help="build this many blocks (default: %(default)s)",
    )
    parser.add_argument(
        "--seq",
        type=int,
        default=config.seq,
        help="train on sequences of this many bytes (default: %(default)s)",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, config: Config = SMALL) -> None:
    options = parse(arguments, config)
    config = replace(config, layers=options.layers, seq=options.seq)
    variants = VARIANTS[options.what]
    length = options.seq * (LONG if options.what == "positions" else 1)
    text, held_out = read_text(options.files, length)
    windows = even_windows(held_out, 256, length)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    runs = list(product(options.lrs, options.seeds, variants.values()))
    by_run = []
    for lr, seed, build_variant in tqdm(runs, disable=None):
        torch.manual_seed(seed)
        of_run = replace(config, lr=lr, seed=seed)
        model = build_variant(of_run).to(device)
        by_run.append(run(model, of_run, text, windows))

    # The losses of all positions, by rate, seed and variant.
    sizes = len(options.lrs), len(options.seeds), len(variants), length
    losses = torch.stack(by_run).view(sizes)
    short = losses[..., : options.seq].mean(-1)
    rows = []
    for rate, lr in enumerate(options.lrs):
        for seed, loss in zip(options.seeds, short[rate], strict=True):
            rows.append((f"lr {lr:g}, seed {seed}", loss))
        rows.append((f"lr {lr:g}, mean", short[rate].mean(0)))
    print(table(variants, rows))
    if options.what == "positions":
        step = max(options.seq // 2, 1)
        rows = []
        for rate, lr in enumerate(options.lrs):
            parts = losses[rate].mean(0).unfold(-1, step, step).mean(-1)
            for number, loss in enumerate(parts.T, start=1):
                rows.append((f"lr {lr:g}, to byte {step * number}", loss))
        print("\n" + table(variants, rows))


if __name__ == "__main__":
    main()
