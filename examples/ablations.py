r"""Test claims of papers on small models: the tables and pictures of docs/ablations.md.

    pip install tqdm numpy matplotlib
    python examples/ablations.py ffn --plot ffn.png
    python examples/ablations.py norm --layers 6 --seq 64 \
        --lrs 1e-3 3e-3 1e-2 3e-2 --plot norm.png
    python examples/ablations.py positions --plot positions.png

Variants differ in one choice. In a row of the table, they share the seed, the batches
and the learning rate. All have the same number of parameters, except for the gains of
norms. Losses are in nats per byte, on held-out text. After a few hundred steps, they
show how fast a variant starts, and not what it reaches in the end.
"""

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from language_model import LanguageModel
from torch import Tensor, nn
from tqdm import tqdm
from train import (
    Config,
    adamw,
    add_settings,
    at_least_one,
    config_of,
    even_windows,
    read_text,
    standard_library,
    train,
    validate,
)

from tinyblock import Block, FeedForward, SwiGLU, gelu, silu

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


def run(
    model: nn.Module, config: Config, text: Tensor, windows: Tensor
) -> tuple[Tensor, Tensor]:
    """Train, and return the losses by step, and the validation losses by position.

    After the step at which training diverges, losses are NaN.
    """
    curve = torch.full((config.steps,), torch.nan)
    for step, loss in enumerate(train(model, adamw(model), text, config)):
        if not loss < DIVERGED:
            return curve, torch.full((windows.shape[1] - 1,), torch.nan)
        curve[step] = loss
    return curve, validate(model, windows)


def table(names: Sequence[str], rows: Iterable[tuple[str, Tensor]]) -> str:
    lines = [["", *names], ["---"] * (len(names) + 1)]
    for name, losses in rows:
        lines.append([name, *map(cell, losses.tolist())])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(loss: float) -> str:
    return "diverged" if math.isnan(loss) else f"{loss:.3f}"


def parts(losses: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Split the last axis into `count` equal parts, and return their ends and means.

    A shorter axis is split into parts of one.
    """
    count = min(count, losses.shape[-1])
    ends = torch.arange(1, count + 1) * losses.shape[-1] // count
    return ends, F.adaptive_avg_pool1d(losses, count)


def draw(axes: Any, name: str, x: Any, losses: Tensor) -> None:
    """Draw the mean over the seeds, the first axis, as a line, and the range as a band."""
    [line] = axes.plot(x, losses.mean(0), label=name)
    low, high = losses.amin(0), losses.amax(0)
    axes.fill_between(x, low, high, color=line.get_color(), alpha=0.2)


def plot(
    path: str, names: Iterable[str], lrs: list[float], curves: Tensor, losses: Tensor
) -> None:
    """Draw training at the middle rate, and validation by rate or by position."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    middle = len(lrs) // 2
    for variant, name in enumerate(names):
        draw(left, name, *parts(curves[middle, :, variant], 50))
        if len(lrs) > 1:
            draw(right, name, lrs, losses[:, :, variant].mean(-1).T)
        else:
            draw(right, name, *parts(losses[0, :, variant], 64))
    # The first steps, at 5.5, are cut off, so that small differences are visible.
    highest = max(3.5, losses.nan_to_num().max().item() + 0.1)
    left.set(xlabel="step", ylabel="nats per byte", ylim=(None, highest))
    left.set(title=f"training, peak learning rate {lrs[middle]:g}")
    right.set(title="validation", xlabel="position of the byte")
    if len(lrs) > 1:
        right.set(xscale="log", xlabel="peak learning rate")
    left.legend(frameon=False)
    figure.savefig(path, dpi=120)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=VARIANTS, help="vary this choice")
    parser.add_argument(
        "--lrs",
        type=float,
        nargs="+",
        default=[Config.lr],
        help=f"train at each of these peak learning rates (default: {Config.lr})",
    )
    parser.add_argument(
        "--seeds",
        type=at_least_one,
        default=3,
        help="train with this many seeds, from --seed on (default: %(default)s)",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the losses into this file")
    add_settings(parser, Config(steps=200, d_model=48, heads=3))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    variants = VARIANTS[options.what]
    lrs = options.lrs
    text, held_out = read_text(standard_library())
    length = options.seq * (LONG if options.what == "positions" else 1)
    windows = even_windows(held_out, 256, length)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    # The losses of all steps, and of all positions, by rate, seed and variant.
    shape = len(lrs), options.seeds, len(variants)
    curves = torch.zeros(*shape, options.steps)
    losses = torch.zeros(*shape, length)
    for index in tqdm(list(product(*map(range, shape))), disable=None):
        rate, number, variant = index
        seed = options.seed + number
        config = replace(config_of(options, lrs[rate]), seed=seed)
        torch.manual_seed(seed)
        model = list(variants.values())[variant](config).to(device)
        curves[index], losses[index] = run(model, config, text, windows)

    short = losses[..., : options.seq].mean(-1)
    rows = []
    for rate, lr in enumerate(lrs):
        for number, loss in enumerate(short[rate]):
            rows.append((f"lr {lr:g}, seed {options.seed + number}", loss))
        rows.append((f"lr {lr:g}, mean", short[rate].mean(0)))
    print(table(list(variants), rows))
    if len(lrs) == 1:
        ends, means = parts(losses[0].mean(0), 8)
        labels = [f"to byte {end}" for end in ends]
        print("\n" + table(list(variants), zip(labels, means.T, strict=True)))
    if options.plot is not None:
        plot(options.plot, variants, lrs, curves, losses)


if __name__ == "__main__":
    main()
