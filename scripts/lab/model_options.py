"""The options that choose a model and what runs of it: sizes, passes and dtype."""

import argparse
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch

from tinyblock import Block

from .cli import Parser, positive_int
from .presets import PRESETS
from .sizes import PASSES, Size

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
SWEEPS = ("seq-len", "batch-size", "d-model")

# None: follows from the other values.
_DEFAULTS = {
    "batch_size": 1,
    "seq_len": 128,
    "d_model": 512,
    "num_heads": 8,
    "num_kv_heads": None,
    "d_head": None,
    "d_ff": None,
    "qk_norm": False,
    "theta": 10000.0,
    "eps": 1e-5,
    "num_layers": None,
    "vocab": 0,
}

# The names of sizes in messages that are options here, too. theta and eps come from the preset.
_OPTIONS = (
    "batch_size",
    "seq_len",
    "d_model",
    "num_heads",
    "num_kv_heads",
    "d_head",
    "d_ff",
    "num_layers",
)


@dataclass(frozen=True)
class Sweep:
    """The axis of a sweep, as in --sweep, and its values."""

    axis: str
    values: tuple[int, ...]


def add_size_options(parser: Parser, preset_help: str, layers_help: str) -> None:
    """Add the options of a model's size. The programs differ in what a preset and --num-layers mean."""
    group = parser.add_argument_group("size of the model")
    group.add_argument(
        "--preset",
        choices=PRESETS,
        metavar="NAME",
        help=f"{preset_help}: {', '.join(PRESETS)}",
    )

    def add_count(option: str, help: str) -> None:
        group.add_argument(option, type=positive_int, metavar="N", help=help)

    add_count("--batch-size", "sequences in the batch (default: 1)")
    add_count("--seq-len", "tokens in each sequence (default: 128)")
    add_count("--d-model", "width (default: 512, or the preset's)")
    add_count("--num-heads", "query heads (default: 8, or the preset's)")
    add_count("--num-kv-heads", "key and value heads (default: --num-heads)")
    add_count("--d-head", "head size (default: --d-model / --num-heads)")
    add_count("--d-ff", "inner width of SwiGLU (default: 8/3 --d-model)")
    add_count("--num-layers", layers_help)
    group.add_argument(
        "--qk-norm",
        action=argparse.BooleanOptionalAction,
        help="normalize queries and keys, or not (default: not, or the preset's)",
    )
    group.add_argument(
        "--sweep",
        type=_sweep,
        metavar="AXIS=A,B,...",
        help=f"several sizes; AXIS is one of {', '.join(SWEEPS)}",
    )


def add_mode(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--mode",
        choices=PASSES,
        default="train",
        help="passes: forward, train (forward and backward) or step (train and AdamW) (default: train)",
    )


def add_dtype(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="dtype of weights and inputs (default: float32)",
    )


def _sweep(text: str) -> Sweep:
    axis, _, numbers = text.partition("=")
    if axis not in SWEEPS:
        raise argparse.ArgumentTypeError(
            f"must name one of {', '.join(SWEEPS)}, as in seq-len=128,256, got {text!r}"
        )
    values = tuple(positive_int(number) for number in numbers.split(","))
    if len(set(values)) < len(values):
        raise argparse.ArgumentTypeError(f"must name each value once, got {text!r}")
    return Sweep(axis, values)


def sizes_of(arguments: argparse.Namespace) -> list[Size]:
    """Return the sizes of a sweep, or the one size without it; raise a ValueError for a size that cannot be built."""
    if arguments.sweep is None:
        return [_size(arguments, {})]
    name = arguments.sweep.axis.replace("-", "_")
    return [_size(arguments, {name: value}) for value in arguments.sweep.values]


@contextmanager
def naming_options() -> Iterator[None]:
    """In the message of a ValueError, replace the names of sizes by the options that the user typed."""
    try:
        yield
    except ValueError as error:
        message = str(error)
        for name in _OPTIONS:
            option = f"--{name.replace('_', '-')}"
            message = re.sub(rf"\b{name}=", f"{option} ", message)
            message = re.sub(rf"\b{name}\b", option, message)
        raise ValueError(message) from None


def _size(arguments: argparse.Namespace, swept: Mapping[str, int]) -> Size:
    """Return the size of the options, with the value of a sweep in place of the option's."""
    chosen = _chosen(arguments, swept)
    for name, value in vars(chosen).items():
        if isinstance(value, int) and value >= 2**63:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} must be below 2**63, got {value}")
    try:
        with naming_options():
            size = _completed(chosen)
            _build_without_memory(size)
    except (RuntimeError, OverflowError, TypeError) as error:
        first_sentence = str(error).strip().split("\n")[0].split(". ")[0].rstrip(".")
        raise ValueError(f"impossible size: {first_sentence}") from None
    return size


def _chosen(
    arguments: argparse.Namespace, swept: Mapping[str, int]
) -> argparse.Namespace:
    """Return the value of each option: as typed, or else the preset's, or else the default."""
    typed = dict(swept)
    for name in _DEFAULTS:
        value = getattr(arguments, name, None)
        if value is not None:
            typed.setdefault(name, value)
    chosen = argparse.Namespace(**_DEFAULTS)
    if arguments.preset is not None:
        block = PRESETS[arguments.preset].block(batch_size=1, seq_len=128)
        chosen = argparse.Namespace(**asdict(block))
    if "d_model" in typed:
        # Those of the preset belong to another width.
        chosen.d_ff = chosen.d_head = None
    if "num_heads" in typed:
        chosen.num_kv_heads = chosen.d_head = None
    for name, value in typed.items():
        setattr(chosen, name, value)
    return chosen


def _completed(chosen: argparse.Namespace) -> Size:
    """Return the size with what the layers choose by default."""
    block = Block(
        chosen.d_model,
        chosen.num_heads,
        chosen.d_ff,
        num_kv_heads=chosen.num_kv_heads,
        d_head=chosen.d_head,
        device="meta",
    )
    chosen.num_kv_heads = block.attn.num_kv_heads
    chosen.d_head = block.attn.d_head
    chosen.d_ff = block.ffn.d_ff
    if chosen.d_head % 2:
        raise ValueError(
            f"d_head must be even for RoPE, got {chosen.d_head}: change d_head, or d_model and num_heads"
        )
    return Size(**vars(chosen))


def _build_without_memory(size: Size) -> None:
    """Raise what the layers, or torch, raise for this size, without allocating anything."""
    if size.num_layers is not None:
        # All layers are alike.
        size = replace(size, num_layers=1)
    size.build("meta", torch.float32)
    torch.empty(size.batch_size, size.seq_len, size.d_model, device="meta")
