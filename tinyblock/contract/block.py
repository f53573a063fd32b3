"""What the block guarantees: y = x + attention(norm(x)), then y + ffn(norm(y)), in both editions of CS336."""

import dataclasses
import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from . import harness
from .attention import ROTARY, SEQUENCE, mask_of, self_attention
from .ffn import feed_forward, swiglu
from .harness import Case, Shape, State, Violation, context, guarantees, guarantees_all, require, supported
from .rmsnorm import rms_norm
from .rope import POSITIONS, ROPE, TABLE, rotary

DEFINES = ("Block",)
EDITION_2024 = "2024: GELU, no RoPE"
EVERY_OPTION: dict[str, Any] = {"num_kv_heads": 2, "d_head": 8, "qk_norm": True, "eps": 1e-3}


def part(state: State, prefix: str) -> State:
    return {key.removeprefix(prefix): weight for key, weight in state.items() if key.startswith(prefix)}


def normalize(x: Tensor, state: State, eps: float) -> Tensor:
    return rms_norm(x, state["weight"], eps)


def gated(x: Tensor, state: State) -> Tensor:
    return swiglu(x, state["w1.weight"][:40], state["w2.weight"][:, :40], state["w3.weight"][:40])


def not_gated(x: Tensor, state: State) -> Tensor:
    return feed_forward(x, state["w1.weight"][:96], state["w2.weight"][:, :96])


def pre_norm_block(
    x: Tensor,
    state: State,
    *,
    norm: Callable[..., Tensor] = normalize,
    attention: Callable[..., Tensor] = self_attention,
    ffn: Callable[..., Tensor] = gated,
    eps: float = 1e-5,
    **options: Any,
) -> Tensor:
    x = x + attention(norm(x, part(state, "ln1."), eps), part(state, "attn."), eps=eps, **options)
    return x + ffn(norm(x, part(state, "ln2."), eps), part(state, "ffn."))


class Other(nn.Module):
    """Stand for any norm, feed-forward layer or attention: apply a function, without parameters."""

    def __init__(self, function: Callable[[Tensor], Tensor], *_: Any, **__: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.function(x)


def mean_so_far(x: Tensor) -> Tensor:
    return x.cumsum(-2) / torch.arange(1, x.shape[-2] + 1)[:, None]


OTHER_PARTS: dict[str, Any] = {"norm": torch.tanh, "ffn": torch.sin, "attention": mean_so_far}
OTHERS: dict[str, Callable[[list[Case]], None]] = {
    "any callable for norm, ffn and attention": lambda cases: harness.matches_equation(cases, torch.float64)
}


def with_other_parts(case: Case) -> list[Case]:
    """Return the case with another norm, ffn or attention."""
    return [
        dataclasses.replace(
            case,
            formula=functools.partial(case.formula, **{name: Other(function)}),
            options={**case.options, name: functools.partial(Other, function)},
        )
        for name, function in OTHER_PARTS.items()
    ]


@guarantees_all(ROTARY)
def cases(block: ModuleType, rope: ModuleType) -> list[Case]:
    def case(shape: Shape = (2, 7, 24), compiled: bool = False, inputs: Any = None, **options: Any) -> Case:
        table, turn = require(rope, ROPE)(100.0, options.get("d_head", 6), TABLE), functools.partial(rotary, 100.0)
        formula = functools.partial(pre_norm_block, heads=4, rope=turn, **options)
        options = {**options, "rope": table}
        return Case(require(block, "Block"), (24, 4, 40), shape, formula, options, inputs or {}, compiled=compiled)

    options = supported(require(block, "Block"), EVERY_OPTION)
    every = case(inputs={"token_positions": POSITIONS, "mask": mask_of(2, 7, 7)}, compiled=True, **options)
    shapes: list[Shape] = [(5, 24), (0, 5, 24), (2, 1, 3, 24), (2, 1, 24)]
    return [case(), case(**options), every, *map(case, shapes)]


@guarantees_all({name: check for name, check in SEQUENCE.items() if "compiles" not in name}, of=EDITION_2024)
def cases_2024(block: ModuleType, ffn: ModuleType) -> list[Case]:
    formula = functools.partial(pre_norm_block, heads=4, ffn=not_gated)
    return [Case(require(block, "Block"), (24, 4), (2, 7, 24), formula, {"ffn": require(ffn, "FeedForward")})]


@guarantees_all(OTHERS)
def other_cases(block: ModuleType, rope: ModuleType) -> list[Case]:
    return with_other_parts(cases(block, rope)[0])


def sequential(d_model: int, d_ff: int | None, **options: Any) -> nn.Sequential:
    """Build a feed-forward layer that has no reset_parameters of its own."""
    return nn.Sequential(nn.Linear(d_model, 9, **options), nn.ReLU(), nn.Linear(9, d_model, **options))


def resets(cls: Any, *arguments: int, **options: Any) -> None:
    """Reset layers that have reset_parameters, and within layers that have none."""
    options |= supported(cls, {"norm": nn.LayerNorm, "ffn": sequential})
    with context(harness.show_call(cls, arguments, options), "reset_parameters() after NaN in every weight"):
        module = cls(*arguments, **options)
        for parameter in module.parameters():
            parameter.data.fill_(math.nan)
        module.reset_parameters()
        for name, weight in module.state_dict().items():
            if not weight.isfinite().all():
                raise Violation(f"got NaN in {name}")


guarantees("reset_parameters reaches every layer")(lambda block: resets(require(block, "Block"), 24, 4))
