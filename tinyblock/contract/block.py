"""What the block guarantees: y = x + attention(norm(x)), then y + ffn(norm(y)), in both editions of CS336."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import harness
from .attention import RELATIVE, SEQUENCE, mask_of, self_attention
from .ffn import feed_forward, swiglu
from .harness import Call, Case, Layer, Shape, State, guarantees, supported
from .rmsnorm import rms_norm
from .rope import POSITIONS, rotary

OTHERS = {
    "any callable for norm, ffn and attention": SEQUENCE[
        "equation and gradients in float64"
    ]
}
EVERY_OPTION: dict[str, Any] = {
    "num_kv_heads": 2,
    "d_head": 8,
    "qk_norm": True,
    "eps": 1e-3,
}


def part(state: State, prefix: str) -> State:
    return {
        key.removeprefix(prefix): weight
        for key, weight in state.items()
        if key.startswith(prefix)
    }


def normalize(x: Tensor, state: State, eps: float) -> Tensor:
    return rms_norm(x, state["weight"], eps)


def gated(x: Tensor, state: State) -> Tensor:
    return swiglu(
        x, state["w1.weight"][:40], state["w2.weight"][:, :40], state["w3.weight"][:40]
    )


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
    x = x + attention(
        norm(x, part(state, "ln1."), eps), part(state, "attn."), eps=eps, **options
    )
    return x + ffn(norm(x, part(state, "ln2."), eps), part(state, "ffn."))


guarantees(RELATIVE)(lambda block: cases(block)[:1])


@guarantees(SEQUENCE)
def cases(block: Layer) -> list[Case]:
    def case(
        shape: Shape = (2, 7, 24),
        inputs: Any = None,
        main: bool = False,
        **options: Any,
    ) -> Case:
        options = {**options, "rope": rotary}
        formula = functools.partial(pre_norm_block, heads=4, **options)
        return Case(
            block.Block,
            (24, 4, 40),
            shape,
            formula,
            options,
            inputs or {},
            representative=main,
        )

    options = supported(block.Block, EVERY_OPTION)
    every = case(
        inputs={"token_positions": POSITIONS, "mask": mask_of(2, 7, 7)},
        main=True,
        **options,
    )
    shapes: list[Shape] = [(5, 24), (0, 5, 24), (2, 1, 3, 24), (2, 1, 24)]
    return [case(), case(**options), every, *map(case, shapes)]


@guarantees(
    {name: check for name, check in SEQUENCE.items() if "compiles" not in name},
    of="2024: GELU, no RoPE",
)
def cases_2024(block: Layer, ffn: Layer) -> list[Case]:
    formula = functools.partial(pre_norm_block, heads=4, ffn=not_gated)
    return [Case(block.Block, (24, 4), (2, 7, 24), formula, {"ffn": ffn.FeedForward})]


def mean_so_far(x: Tensor) -> Tensor:
    return x.cumsum(-2) / torch.arange(1, x.shape[-2] + 1)[:, None]


def with_other_parts(case: Case) -> list[Case]:
    """Return the case with other callables for norm, feed-forward layer and attention."""

    def built(function: Any) -> Any:
        return lambda *sizes, **options: Call(function, [])

    others = supported(
        case.cls, {"norm": torch.tanh, "ffn": torch.sin, "attention": mean_so_far}
    )
    formula = functools.partial(
        case.formula, **{name: Call(function, []) for name, function in others.items()}
    )
    options = {
        **case.options,
        **{name: built(function) for name, function in others.items()},
    }
    return [dataclasses.replace(case, formula=formula, options=options)]


def resets(cls: Any, ffn: Layer, *sizes: int, **options: Any) -> None:
    """Reset layers that have reset_parameters, also torch's, and within layers that have none."""

    def sequential(*sizes: Any, **options: Any) -> nn.Module:
        return nn.Sequential(ffn.SwiGLU(*sizes, **options))

    harness.draws_weights(cls, *sizes, norm=nn.RMSNorm, ffn=sequential, **options)


guarantees(OTHERS)(lambda block: with_other_parts(cases(block)[0]))
guarantees("reset_parameters reaches every layer")(
    lambda block, ffn: resets(block.Block, ffn, 24, 4)
)
