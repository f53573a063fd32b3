"""What attention guarantees: softmax(Q K^T / sqrt(d_k)) V, causal, and with RoPE dependent on relative positions only.

What it guarantees as a layer over a sequence, a block and a stack of blocks guarantee as well.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor

from . import harness
from .harness import (
    EVERY_LAYER,
    HALVES,
    Case,
    Layer,
    Shape,
    State,
    close,
    context,
    guarantees,
    randn,
)
from .rmsnorm import rms_norm
from .rope import POSITIONS, rotary

Inputs = Mapping[str, Tensor]  # token_positions, mask


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attend with one softmax per query; a query that may attend to no key yields zeros."""
    shape = (*q.shape[:-1], k.shape[-2])
    mask = torch.ones(shape, dtype=torch.bool) if mask is None else mask.expand(shape)
    out = [v.new_zeros(0)]
    for index in product(*map(range, q.shape[:-1])):
        batch, keys = index[:-1], mask[index]
        weights = (k[batch][keys] @ q[index] / math.sqrt(q.shape[-1])).softmax(0)
        out.append(weights @ v[batch][keys] if keys.any() else v.new_zeros(v.shape[-1]))
    return torch.cat(out).reshape(*q.shape[:-1], v.shape[-1])


def attend_causally(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    causal = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
    return attend(q, k, v, causal if mask is None else causal & mask)


def self_attention(
    x: Tensor,
    state: State,
    token_positions: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    heads: int,
    num_kv_heads: int | None = None,
    d_head: int | None = None,
    rope: Callable[[Tensor, Tensor | None], Tensor] | None = None,
    qk_norm: bool = False,
    eps: float = 1e-5,
    attend: Callable[..., Tensor] = attend_causally,
) -> Tensor:
    """Attend one head at a time, with the weights of a layer's state dict."""
    d_head, group = d_head or x.shape[-1] // heads, heads // (num_kv_heads or heads)
    outputs = []
    for head in range(heads):
        rows = {"q": head, "k": head // group, "v": head // group}
        q, k, v = (
            x @ state[f"{n}_proj.weight"][row * d_head : (row + 1) * d_head].T
            for n, row in rows.items()
        )
        if qk_norm:
            q, k = (
                rms_norm(q, state["q_norm.weight"], eps),
                rms_norm(k, state["k_norm.weight"], eps),
            )
        if rope is not None:
            q, k = rope(q, token_positions), rope(k, token_positions)
        outputs.append(attend(q, k, v, mask))
    return torch.cat(outputs, dim=-1) @ state["output_proj.weight"].T


# Properties of every layer over a sequence.


Calls = Iterator[tuple[str, slice, tuple[Tensor, Inputs], tuple[Tensor, Inputs]]]


def invariant(pairs: Callable[[Tensor, Inputs], Calls]) -> harness.Check:
    """Make a check of pairs of calls that give the same output for some tokens."""

    def check(cases: list[Case]) -> None:
        for case in cases:
            module = case.module()
            for what, tokens, *calls in pairs(case.x(), case.inputs):
                harness.require_parameters(case.cls.forward, *calls[1][1])
                with context(case, what):
                    expected, actual = (
                        module(x, **inputs)[..., tokens, :] for x, inputs in calls
                    )
                    close(actual, expected, 1e-11 * harness.largest(expected))

    return check


@invariant
def is_causal(x: Tensor, inputs: Inputs) -> Calls:
    for length in range(1, x.shape[-2]):
        first = slice(length)
        shown = {"mask": (..., first, first), "token_positions": (..., first)}
        prefix = (
            x[..., first, :],
            {name: tensor[shown[name]] for name, tensor in inputs.items()},
        )
        yield f"its first {length} tokens alone", first, (x, inputs), prefix


@invariant
def masks(x: Tensor, inputs: Inputs) -> Calls:
    if "mask" not in inputs:
        seq = x.shape[-2]
        everything = {**inputs, "mask": torch.ones(seq, seq, dtype=torch.bool)}
        yield (
            "with a mask that is True everywhere",
            slice(None),
            (x, inputs),
            (x, everything),
        )
        hidden = {**inputs, "mask": torch.arange(seq)[None] >= 2}
        other = torch.cat((randn(*x[..., :2, :].shape, seed=7), x[..., 2:, :]), dim=-2)
        yield (
            "with a (1, seq) mask that hides two other first keys",
            slice(2, None),
            (x, hidden),
            (other, hidden),
        )


@invariant
def is_relative(x: Tensor, inputs: Inputs) -> Calls:
    positions = torch.arange(x.shape[-2]) + 150
    yield (
        "with token_positions 150 further on",
        slice(None),
        (x, inputs),
        (x, {"token_positions": positions}),
    )


SEQUENCE = {
    "causality": is_causal,
    "masks are combined with the causal mask by AND": masks,
    **EVERY_LAYER,
}
RELATIVE = {"relative positions only": is_relative}


# Properties of attention alone.

HEADS: list[dict[str, Any]] = [
    {},
    {"num_kv_heads": 2},
    {"num_kv_heads": 1},
    {"d_head": 10, "qk_norm": True},
]
HEADS += [{"qk_norm": True, "num_kv_heads": 2, "eps": 1e-3}]


def mask_of(*shape: int) -> Tensor:
    """Return a mask that is True for about 7 keys in 10, and for none of the fourth query."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(2)) < 0.7
    mask[..., 3:4, :] = False
    return mask


def case_of(
    attention: Layer,
    options: Any,
    shape: Shape = (2, 7, 24),
    heads: int = 4,
    **about: Any,
) -> Case:
    formula = functools.partial(self_attention, heads=heads, **options)
    return Case(
        attention.CausalMultiHeadSelfAttention,
        (shape[-1], heads),
        shape,
        formula,
        options,
        **about,
    )


guarantees(RELATIVE)(lambda attention: [case_of(attention, {"rope": rotary})])


@guarantees(SEQUENCE)
def cases(attention: Layer) -> list[Case]:
    def rotated(
        options: dict[str, Any],
        shape: Shape = (2, 7, 24),
        about: Any = None,
        **inputs: Tensor,
    ) -> Case:
        return case_of(
            attention,
            {**options, "rope": rotary},
            shape,
            inputs=inputs,
            **(about or {}),
        )

    case = functools.partial(case_of, attention)
    float64: Any = {"dtypes": (torch.float64,)}
    masked: Any = {"inputs": {"mask": mask_of(2, 7, 7)}}
    shapes = [(5, 24), (0, 5, 24), (1, 5, 24), (2, 0, 5, 24), (2, 3, 5, 24), (2, 1, 24)]
    return [
        case({}, representative=True),
        *map(case, HEADS[1:]),
        *(case(HEADS[1], shape, **float64) for shape in shapes),
        case({}, **masked),
        case({}, (2, 3, 5, 24), inputs={"mask": mask_of(3, 1, 5)}, **float64),
        case(
            {}, (80, 64), heads=1
        ),  # longer than a window or a fixed mask, in a head as wide as in use
        case({}, scale=30.0, **float64),  # scores past where exp overflows
        case({}, scale=30.0, **masked, **float64),
        *map(rotated, HEADS),
        rotated(
            HEADS[1],
            about={"representative": True},
            token_positions=POSITIONS,
            mask=mask_of(2, 7, 7),
        ),
        rotated(HEADS[4], (2, 3, 7, 24), token_positions=POSITIONS[:1]),
        rotated(HEADS[0], (7, 24), token_positions=POSITIONS[0], mask=mask_of(7, 7)),
        rotated(
            HEADS[1], (2, 0, 7, 24), token_positions=POSITIONS[0], mask=mask_of(7, 7)
        ),
    ]


@guarantees("attend overridden")
def overrides(attention: Layer) -> None:
    """Call the method of a subclass with normalized and rotated queries and keys, and with any mask."""

    def blend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return 2 * q + mask @ (k - v)

    base = attention.CausalMultiHeadSelfAttention
    members = {Layer(base).attend.__name__: lambda self, *tensors: blend(*tensors)}
    options = harness.supported(base, {"rope": rotary, "qk_norm": True})
    case = case_of(
        attention,
        options,
        inputs={"token_positions": POSITIONS, "mask": randn(7, 7, seed=3)},
    )
    blended, formula = (
        type("Blended", (base,), members),
        functools.partial(case.formula, attend=blend),
    )
    harness.matches_equation(
        [dataclasses.replace(case, cls=blended, formula=formula)], torch.float64
    )


@guarantees("scores in float32 or wider")
def keeps_scores(attention: Layer) -> None:
    """Attend by scores of about 1024 and their 4ths, which a half cannot hold, though all of q, k and v are exact."""
    x = randn(2, 9, 64, seed=3).sign()
    x[..., ::32] = 64
    one = torch.eye(64, dtype=torch.float64)
    weights = {
        f"{name}_proj.weight": one.roll(32, 0) if name == "k" else one
        for name in ("q", "k", "v", "output")
    }
    exact = attend_causally(x, x.roll(32, -1), x, None)
    how = "x of shape (2, 9, 64): signs of seed 3, 64 in columns 0 and 32; q and v are x, and k is its halves swapped"
    for dtype in HALVES:
        with (
            context("CausalMultiHeadSelfAttention(64, 1)", how, dtype),
            torch.no_grad(),
        ):
            module = attention.CausalMultiHeadSelfAttention(64, 1).to(dtype)
            module.load_state_dict(weights)
            signs = [column for column in range(64) if column % 32]
            close(
                module(x.to(dtype))[..., signs],
                exact[..., signs],
                4 * torch.finfo(dtype).eps,
            )


@guarantees("invalid inputs rejected")
def rejects_inputs(attention: Layer) -> None:
    """Reject additive masks in eager mode and compiled, in which no shape check would see them."""
    module, x = attention.CausalMultiHeadSelfAttention(24, 4), torch.zeros(1, 5, 24)
    for dtype in (torch.float32, torch.int64):
        harness.rejects_inputs(
            module, dtype, x, {"mask": torch.zeros(5, 5, dtype=dtype)}
        )
    harness.rejects_inputs(module, "rope", x, {"token_positions": torch.arange(5)})


heads: list[Shape] = [(2, 2, 5, 8), (2, 2, 7, 8), (2, 2, 7, 4)]
calls: list[Any] = [(heads, None), (heads, mask_of(5, 7)), (heads, mask_of(2, 2, 5, 7))]
calls.append(([(5, 8), (7, 8), (7, 4)], mask_of(5, 7)))
harness.guarantees_function(
    "attention", "scaled_dot_product_attention", attend, *calls, rounds_once=True
)


@guarantees("initial weights")
def initial(attention: Layer) -> None:
    options: Any = {"num_kv_heads": 2, "d_head": 32, "qk_norm": True}
    harness.draws_weights(attention.CausalMultiHeadSelfAttention, 192, 4, **options)


@guarantees(harness.REJECTED)
def rejects(attention: Layer, rope: Layer) -> None:
    invalid: Any = {
        "num_heads": (5, 0, -4),
        "num_kv_heads": (3, 0),
        "d_head": (0,),
        "eps": (0.0, math.nan),
    }
    invalid |= {"d_model": (0,), "rope": (rope.RotaryPositionalEmbedding(10.0, 4, 8),)}
    harness.rejects(
        attention.CausalMultiHeadSelfAttention,
        {"d_model": 24, "num_heads": 4},
        **invalid,
    )
