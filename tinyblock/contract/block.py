"""What the block promises: y = x + attention(norm(x)), then y + ffn(norm(y)), in both editions of CS336."""

import functools
import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from . import harness
from .attention import ROTARY, SEQUENCE, attention_state, mask_of, roundings_of, self_attention, takes_any_rope
from .ffn import FEED_FORWARD_ROUNDINGS, SWIGLU_ROUNDINGS, feed_forward, swiglu
from .harness import Case, Shape, State, Violation, accepted, given, promises, promises_all, public, randn, require
from .rmsnorm import rms_norm
from .rope import POSITIONS, ROPE, TABLE

DEFINES = ("Block",)
EDITION_2024 = "2024: GELU, no RoPE"
EVERY_OPTION: dict[str, Any] = {"num_kv_heads": 2, "d_head": 8, "qk_norm": True, "eps": 1e-3}
NORM_AND_SUM = 2  # roundings around each layer


def part(state: State, prefix: str) -> State:
    return {key.removeprefix(prefix): weight for key, weight in state.items() if key.startswith(prefix)}


def pre_norm_block(x: Tensor, state: State, *, eps: float = 1e-5, **options: Any) -> Tensor:
    """Apply a block: with SwiGLU where the state has a w3, with the GELU layer of CS336 2024 where it has none."""
    x = x + self_attention(rms_norm(x, state["ln1.weight"], eps), part(state, "attn."), eps=eps, **options)
    weights: list[Any] = [state[key] for key in ("ffn.w1.weight", "ffn.w2.weight", "ffn.w3.weight") if key in state]
    return x + (swiglu if len(weights) == 3 else feed_forward)(rms_norm(x, state["ln2.weight"], eps), *weights)


@promises_all(ROTARY)
def cases(block: ModuleType, rope: ModuleType) -> list[Case]:
    def case(shape: Shape = (2, 7, 24), compiled: bool = False, inputs: Any = None, **options: Any) -> Case:
        table = public(rope, ROPE)(100.0, options.get("d_head", 6), TABLE)
        formula = functools.partial(pre_norm_block, heads=4, theta=100.0, eps=options.get("eps", 1e-5))
        made = public(block, "Block"), (24, 4, 40), shape, formula, {**options, "rope": table}, inputs or {}
        roundings = roundings_of(rope=True, **options) + SWIGLU_ROUNDINGS + 2 * NORM_AND_SUM
        return Case(*made, compiled=compiled, roundings=roundings)

    options = accepted(public(block, "Block"), EVERY_OPTION)
    every = case(inputs={"token_positions": POSITIONS, "mask": mask_of(2, 7, 7)}, compiled=True, **options)
    return [case(), case(**options), every, *map(case, [(5, 24), (0, 5, 24), (2, 1, 3, 24), (2, 1, 24)])]


@promises_all({name: check for name, check in SEQUENCE.items() if "compiles" not in name}, of=EDITION_2024)
def cases_2024(block: ModuleType, ffn: ModuleType) -> list[Case]:
    formula, options = functools.partial(pre_norm_block, heads=4), {"ffn": public(ffn, "FeedForward")}
    roundings = roundings_of(rope=False) + FEED_FORWARD_ROUNDINGS + 2 * NORM_AND_SUM
    made = public(block, "Block"), (24, 4, 40), (2, 7, 24), formula, options
    return [Case(*made, roundings=roundings)]


def block_state(d_ff: int, prefix: str = "", inner: tuple[str, ...] = ("w1", "w3"), **options: Any) -> dict[str, Shape]:
    """Return the keys and shapes of the reference block of CS336, of d_model 24, or of one with options."""
    state = attention_state(**options, prefix="attn.")
    state |= {"ln1.weight": (24,), "ln2.weight": (24,), "ffn.w2.weight": (24, d_ff)}
    return {prefix + key: shape for key, shape in (state | {f"ffn.{n}.weight": (d_ff, 24) for n in inner}).items()}


@promises("keys of the state dict")
def keys(block: ModuleType) -> None:
    harness.has_state(public(block, "Block"), (24, 4, 40), block_state(40))
    options = accepted(public(block, "Block"), EVERY_OPTION)
    harness.has_state(public(block, "Block"), (24, 4), block_state(64, **options), **options)


@promises(f"keys of the state dict ({EDITION_2024})")
def keys_2024(block: ModuleType, ffn: ModuleType) -> None:
    state = block_state(96, inner=("w1",))
    harness.has_state(public(block, "Block"), (24, 4), state, ffn=public(ffn, "FeedForward"))


def sequential(d_model: int, d_ff: int | None, **options: Any) -> nn.Sequential:
    """Make a feed-forward layer that has no reset_parameters of its own."""
    return nn.Sequential(nn.Linear(d_model, 9, **options), nn.ReLU(), nn.Linear(9, d_model, **options))


def takes_any_layers(cls: Any, arguments: tuple[int, ...], **options: Any) -> None:
    """Use the norm and the ffn that are given, and reset what can be reset."""
    require(cls, "norm", "ffn")
    with given(f"{cls.__name__}{arguments}, norm=nn.LayerNorm, ffn=one that makes an nn.Sequential"):
        module = cls(*arguments, norm=nn.LayerNorm, ffn=sequential, **options)
        expected: dict[str, Any] = dict.fromkeys(("ln1", "ln2", "ln_final"), nn.LayerNorm) | {"ffn": nn.Sequential}
        for name, part in module.named_modules():
            if not isinstance(part, wanted := expected.get(name.rpartition(".")[2], nn.Module)):
                raise Violation(f"{name} is a {type(part).__name__}, expected {wanted.__name__}")
        for parameter in module.parameters():
            parameter.data.fill_(math.nan)
        module.reset_parameters()
        with given("after NaN in every weight and reset_parameters()"):
            if not module(randn(2, 3, 24, dtype=torch.float32)).isfinite().all():
                raise Violation("got NaN")


@promises("initial weights")
def weights(block: ModuleType) -> None:
    harness.draws_weights(public(block, "Block"), 96, 4, 160, num_kv_heads=2, qk_norm=True)


BAD = (24, 5), (24, 0), (0, 4), (24, 4, 0), (24, 4, {"eps": -1.0})
promises("any norm and any ffn serve")(lambda block: takes_any_layers(public(block, "Block"), (24, 4)))
promises("any callable serves as rope")(lambda block: takes_any_rope(public(block, "Block"), (24, 4), pre_norm_block))
promises("bad hyperparameters refused")(lambda block: harness.refuses(public(block, "Block"), *BAD))
