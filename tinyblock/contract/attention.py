"""What attention guarantees: softmax(Q K^T / sqrt(d_k)) V, causal, and with RoPE dependent on relative positions only.

What it guarantees as a layer over a sequence, a block and a stack of blocks guarantee as well.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from itertools import product
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from . import harness
from .harness import (
    WITH_WEIGHTS,
    Case,
    Shape,
    State,
    Violation,
    close,
    context,
    guarantees,
    guarantees_all,
    largest,
    randn,
    rejected,
    require,
    require_parameters,
    supported,
)
from .rmsnorm import rms_norm
from .rope import POSITIONS, ROPE, TABLE, rotary

ATTENTION = "CausalMultiHeadSelfAttention"
DEFINES = (ATTENTION, "scaled_dot_product_attention")
Rope = Callable[[Tensor, Tensor | None], Tensor]


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
    rope: Rope | None = None,
    qk_norm: bool = False,
    eps: float = 1e-5,
    attend: Callable[..., Tensor] = attend_causally,
) -> Tensor:
    """Attend one head at a time, with the weights of a layer's state dict."""
    d_head, group = d_head or x.shape[-1] // heads, heads // (num_kv_heads or heads)
    outputs = []
    for head in range(heads):
        rows = {"q": head, "k": head // group, "v": head // group}
        q, k, v = (x @ state[f"{n}_proj.weight"][row * d_head : (row + 1) * d_head].T for n, row in rows.items())
        if qk_norm:
            q, k = rms_norm(q, state["q_norm.weight"], eps), rms_norm(k, state["k_norm.weight"], eps)
        if rope is not None:
            q, k = rope(q, token_positions), rope(k, token_positions)
        outputs.append(attend(q, k, v, mask))
    return torch.cat(outputs, dim=-1) @ state["output_proj.weight"].T


# Properties of every layer over a sequence.


def unmasked(cases: list[Case]) -> Iterator[tuple[Case, Any, Tensor, Tensor, float]]:
    """Yield what the checks of a sequence share: case, module, x, result, and the allowed error."""
    for case in cases:
        if "mask" not in case.inputs and case.scale == 1:
            with context(case):
                module, x = case.module(), case.x()
                out = module(x, **case.inputs).detach()
            yield case, module, x, out, 1e-12 * largest(out)


def replaced(x: Tensor, tokens: slice) -> Tensor:
    x = x.clone()
    x[..., tokens, :] = randn(*x[..., tokens, :].shape, seed=7)
    return x


def differs(actual: Tensor, before: Tensor) -> None:
    same = (actual - before).abs().amax(-1) <= 1e-9
    if same.any():
        raise Violation(f"nothing changed at {same.nonzero()[0].tolist()}, expected a change of every token")


def is_causal(cases: list[Case]) -> None:
    """Compare each prefix alone with the whole sequence, and see that the first token counts for all others."""
    for case in cases:
        with context(case):
            module, x = case.module(), case.x()
            out = module(x, **case.inputs)
            for length in range(1, x.shape[-2]):
                inputs = {
                    name: tensor[..., :length, :length] if name == "mask" else tensor[..., :length]
                    for name, tensor in case.inputs.items()
                }
                with context(f"its first {length} tokens alone"):
                    prefix = module(x[..., :length, :], **inputs)
                    close(prefix, out[..., :length, :], 1e-12 * largest(out))
    for case, module, x, out, _ in unmasked(cases):
        with context(case, "with another first token (seed 7)"):
            differs(module(replaced(x, slice(1)), **case.inputs), out)


def masks(cases: list[Case]) -> None:
    require_parameters(cases[0].cls.forward, "mask")
    for case, module, x, out, allowed in unmasked(cases):
        seq = x.shape[-2]
        with context(case, "with a mask that is True everywhere"):
            close(module(x, **case.inputs, mask=torch.ones(seq, seq, dtype=torch.bool)), out, allowed)
        with context(case, "with a mask that hides the first two keys, in a (1, seq) row: the tokens after them"):
            mask = torch.arange(seq)[None] >= 2
            masked = module(x, **case.inputs, mask=mask)[..., 2:, :]
            close(module(replaced(x, slice(2)), **case.inputs, mask=mask)[..., 2:, :], masked, allowed)
            differs(masked, out[..., 2:, :])


def recomputes(cases: list[Case]) -> None:
    """Give the same output and gradients when the activations are computed anew for the backward pass."""
    for case in [case for case in cases if case.inputs] or cases[:1]:
        with context(case, torch.float32, "torch.utils.checkpoint, use_reentrant=False: output or gradients"):
            module, x = case.module(torch.float32), case.x(torch.float32).requires_grad_()
            run: Any = functools.partial(checkpoint, module, use_reentrant=False)
            recomputed, usual = (
                harness.with_gradients(out, module, x, torch.float32)
                for out in (run(x, **case.inputs), module(x, **case.inputs))
            )
            for name, tensor in recomputed.items():
                close(tensor, usual[name], 0)


def is_relative(cases: list[Case]) -> None:
    require_parameters(cases[0].cls.forward, "token_positions")
    case, module, x, out, allowed = next(unmasked(cases))
    positions = torch.arange(x.shape[-2])
    with context(case, "with token_positions 150 further on"):
        close(module(x, positions + 150), out, 10 * allowed)
    with context(case, "with token_positions twice as far apart"):
        differs(module(x, 2 * positions)[..., 1:, :], out[..., 1:, :])


SEQUENCE = {
    "causality": is_causal,
    "masks are combined with the causal mask by AND": masks,
    **WITH_WEIGHTS,
    "activation checkpointing": recomputes,
}
ROTARY = {
    "relative positions only": is_relative,
    **SEQUENCE,
}


# Properties of attention alone.

HEADS: list[dict[str, Any]] = [{}, {"num_kv_heads": 2}, {"num_kv_heads": 1}, {"d_head": 10, "qk_norm": True}]
HEADS += [{"qk_norm": True, "num_kv_heads": 2, "eps": 1e-3}]


def mask_of(*shape: int) -> Tensor:
    """Return a mask that is True for about 7 keys in 10, and for none of the fourth query."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(2)) < 0.7
    mask[..., 3:4, :] = False
    return mask


def stretch(x: Tensor, token_positions: Tensor | None) -> Tensor:
    """Stand for any callable as rope: scale by positions, or by 1.5 where there are none."""
    return x * (1.5 if token_positions is None else 1 + token_positions[..., None].to(x.dtype) / TABLE)


def case_of(attention: ModuleType, options: Any, shape: Shape = (2, 7, 24), heads: int = 4, **about: Any) -> Case:
    """Build a case, whose rope is a function or RoPE with theta=100."""
    table = options.get("rope")
    rope = functools.partial(rotary, 100.0) if isinstance(table, nn.Module) else table
    formula = functools.partial(self_attention, heads=heads, **{**options, "rope": rope})
    return Case(require(attention, ATTENTION), (shape[-1], heads), shape, formula, options, **about)


@guarantees_all(SEQUENCE)
def attention_cases(attention: ModuleType) -> list[Case]:
    case = functools.partial(case_of, attention)
    float64: Any = {"dtypes": (torch.float64,)}
    masked: Any = {"inputs": {"mask": mask_of(2, 7, 7)}}
    shapes = [(5, 24), (0, 5, 24), (1, 5, 24), (2, 0, 5, 24), (2, 3, 5, 24), (2, 1, 24)]
    return [
        case({}, compiled=True),
        *map(case, HEADS[1:]),
        *(case(HEADS[1], shape, **float64) for shape in shapes),
        case({}, **masked),
        case({}, (2, 3, 5, 24), inputs={"mask": mask_of(3, 1, 5)}, **float64),
        case({}, (80, 64), heads=1),  # longer than a window or a fixed mask, in a head as wide as in use
        case({}, scale=30.0, **float64),  # scores past where exp overflows
        case({}, scale=30.0, **masked, **float64),
        case({"rope": stretch}),
        case({"rope": stretch}, inputs={"token_positions": POSITIONS}),
    ]


@guarantees_all(ROTARY, of="with RoPE")
def rotary_cases(attention: ModuleType, rope: ModuleType) -> list[Case]:
    def case(options: dict[str, Any], shape: Shape = (2, 7, 24), compiled: bool = False, **inputs: Tensor) -> Case:
        table = require(rope, ROPE)(100.0, options.get("d_head", 6), TABLE)
        return case_of(attention, {**options, "rope": table}, shape, inputs=inputs, compiled=compiled)

    return [
        *map(case, HEADS),
        case(HEADS[1], token_positions=POSITIONS, mask=mask_of(2, 7, 7), compiled=True),
        case(HEADS[4], (2, 3, 7, 24), token_positions=POSITIONS[:1]),
        case(HEADS[0], (7, 24), token_positions=POSITIONS[0], mask=mask_of(7, 7)),
        case(HEADS[1], (2, 0, 7, 24), token_positions=POSITIONS[0], mask=mask_of(7, 7)),
    ]


@guarantees("attend overridden")
def overrides(attention: ModuleType, rope: ModuleType) -> None:
    """Call the method of a subclass with normalized and rotated queries and keys, and with any mask."""

    def blend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return 2 * q + mask @ (k - v)

    base = require(attention, ATTENTION)
    require(base, "attend")
    blended = type("Blended", (base,), {"attend": lambda self, *tensors: blend(*tensors)})
    options = supported(base, {"rope": require(rope, ROPE)(100.0, 6, TABLE), "qk_norm": True})
    case = case_of(attention, options, inputs={"token_positions": POSITIONS, "mask": randn(7, 7, seed=3)})
    formula = functools.partial(case.formula, attend=blend)
    harness.matches_equation([dataclasses.replace(case, cls=blended, formula=formula)], torch.float64)


@guarantees("masks that are not bool rejected")
def rejects_masks(attention: ModuleType) -> None:
    """Reject an additive mask in eager mode and compiled, in which no shape check would see it."""
    module, x = require(attention, ATTENTION)(24, 4), torch.zeros(1, 5, 24)
    require_parameters(module.forward, "mask")
    with harness.compiled(module, fullgraph=False) as (run, _), torch.no_grad():
        for dtype, call in ((torch.float32, module), (torch.int64, module), (torch.float32, run)):
            how = "compiled" if call is run else "eager"
            with context(f"{ATTENTION}(24, 4)", how, f"a (5, 5) mask of {dtype}"), rejected(dtype):
                call(x, mask=torch.zeros(5, 5, dtype=dtype))


@guarantees("scores in float32 or wider")
def keeps_scores(attention: ModuleType) -> None:
    """Attend by scores of about 512 and their 8ths, which a half cannot hold, though all of q, k and v are exact."""
    cls = require(attention, ATTENTION)
    require_parameters(cls, "d_head")
    x = randn(2, 9, 128, seed=3).sign()
    x[..., ::64] = 64
    first, second = torch.eye(128, dtype=torch.float64).split(64)
    weights = {"q_proj": first, "k_proj": second, "v_proj": second, "output_proj": first.T}
    exact = attend_causally(x[..., :64], x[..., 64:], x[..., 64:], None)
    how = "x of shape (2, 9, 128): signs of seed 3, 64 in columns 0 and 64; q is its first half, k and v the second"
    for dtype in harness.HALVES:
        with context(f"{ATTENTION}(128, 1, d_head=64)", how, dtype), torch.no_grad():
            module = cls(128, 1, d_head=64).to(dtype)
            for name, weight in weights.items():
                getattr(module, name).weight.copy_(weight)
            out = module(x.to(dtype))[..., 1:64]
            close(out, exact[..., 1:], 4 * torch.finfo(dtype).eps)


@guarantees("scaled_dot_product_attention: equation and gradients")
def function(attention: ModuleType) -> None:
    heads: list[Shape] = [(2, 2, 5, 8), (2, 2, 7, 8), (2, 2, 7, 4)]
    calls: list[Any] = [(heads, None), (heads, mask_of(5, 7)), (heads, mask_of(2, 2, 5, 7))]
    calls.append(([(5, 8), (7, 8), (7, 4)], mask_of(5, 7)))
    equation = require(attention, "scaled_dot_product_attention")
    harness.function_matches(equation, attend, calls, rounds_once=True)


@guarantees("positions without a RoPE rejected")
def rejects_positions_without_rope(attention: ModuleType) -> None:
    with context(f"{ATTENTION}(24, 4), token_positions [0, 1, 2]"), rejected("rope"):
        require(attention, ATTENTION)(24, 4)(torch.zeros(1, 3, 24), torch.arange(3))


@guarantees("RoPE of another head size rejected")
def rejects_rope(attention: ModuleType, rope: ModuleType) -> None:
    with context(f"{ATTENTION}(24, 4, rope={ROPE}(10.0, 4, 8))"), rejected("d_k=4", "d_k=6"):
        require(attention, ATTENTION)(24, 4, rope=require(rope, ROPE)(10.0, 4, 8))


VALID = {"d_model": 24, "num_heads": 4}
INVALID: Any = {
    "d_model": (0,),
    "num_heads": (5, 0, -4),
    "num_kv_heads": (3, 0),
    "d_head": (0,),
    "eps": (0.0, math.nan),
}
WIDE: Any = {"num_kv_heads": 2, "d_head": 32, "qk_norm": True}
guarantees("initial weights")(lambda attention: harness.draws_weights(require(attention, ATTENTION), 192, 4, **WIDE))
guarantees(harness.REJECTED)(lambda attention: harness.rejects(require(attention, ATTENTION), VALID, **INVALID))
