"""What attention promises: softmax(Q K^T / sqrt(d_k)) V, causal, and with RoPE dependent on relative positions only.

What it promises as a layer over a sequence, a block and a stack of blocks promise as well.
"""

import functools
import math
from collections.abc import Iterator
from itertools import product
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from . import harness
from .harness import ALLOWED, WITH_WEIGHTS, Case, Shape, State, Violation, close, given, largest, promises, promises_all
from .rope import POSITIONS, ROPE, TABLE, angles_of, rotate

ATTENTION = "CausalMultiHeadSelfAttention"
DEFINES = (ATTENTION, "scaled_dot_product_attention")


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


def self_attention(
    x: Tensor,
    state: State,
    token_positions: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    heads: int,
    theta: float | None = None,
    factor: float = 1.0,
    eps: float = 1e-5,
) -> Tensor:
    """Attend causally, one head at a time, with the weights of a layer's state dict; factor stands for another rope."""
    causal = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril()
    d_head = state["q_proj.weight"].shape[0] // heads
    group = heads // (state["k_proj.weight"].shape[0] // d_head)
    outputs = []
    for head in range(heads):
        rows = {"q": head, "k": head // group, "v": head // group}
        q, k, v = (x @ state[f"{n}_proj.weight"][row * d_head : (row + 1) * d_head].T for n, row in rows.items())
        if "q_norm.weight" in state:
            q = q / (q.square().mean(-1, keepdim=True) + eps) ** 0.5 * state["q_norm.weight"]
            k = k / (k.square().mean(-1, keepdim=True) + eps) ** 0.5 * state["k_norm.weight"]
        if theta is not None:
            angles = angles_of(torch.arange(x.shape[-2]) if token_positions is None else token_positions, d_head, theta)
            q, k = rotate(q, angles), rotate(k, angles)
        outputs.append(attend(q * factor, k * factor, v, causal if mask is None else causal & mask))
    return torch.cat(outputs, dim=-1) @ state["output_proj.weight"].T


# What every layer over a sequence promises.


def unmasked(cases: list[Case]) -> Iterator[tuple[Case, Any, Tensor, Tensor, float]]:
    """Yield what the checks of a sequence share: case, module, x, result, and the error that is allowed."""
    for case in cases:
        if "mask" not in case.inputs and case.scale == 1:
            with given(case):
                module, x = case.module(), case.x()
                out = module(x, **case.inputs).detach()
            yield case, module, x, out, ALLOWED[torch.float64] * largest(out)


def replaced(x: Tensor, tokens: slice) -> Tensor:
    x = x.clone()
    x[..., tokens, :] = harness.randn(*x[..., tokens, :].shape, seed=7)
    return x


def differs(actual: Tensor, before: Tensor) -> None:
    same = (actual - before).abs().amax(-1) <= 1e-9
    if same.any():
        raise Violation(f"nothing changed at {same.nonzero()[0].tolist()}, expected a change of every token")


def is_causal(cases: list[Case]) -> None:
    for case, module, x, out, allowed in unmasked(cases):
        with given(case, "with other tokens (seed 7) from the 4th on: the first three"):
            close(module(replaced(x, slice(3, None)), **case.inputs)[..., :3, :], out[..., :3, :], allowed)
        with given(case, "with another first token (seed 7)"):
            differs(module(replaced(x, slice(1)), **case.inputs), out)


def prefills(cases: list[Case]) -> None:
    for case in cases:
        with given(case):
            module, x = case.module(), case.x()
            out = module(x, **case.inputs)
            for length in range(1, x.shape[-2]):
                inputs = {
                    name: tensor[..., :length, :length] if name == "mask" else tensor[..., :length]
                    for name, tensor in case.inputs.items()
                }
                with given(f"its first {length} tokens alone"):
                    prefix = module(x[..., :length, :], **inputs)
                    close(prefix, out[..., :length, :], ALLOWED[torch.float64] * largest(out))


def masks(cases: list[Case]) -> None:
    harness.require(cases[0].cls.forward, "mask")
    for case, module, x, out, allowed in unmasked(cases):
        seq = x.shape[-2]
        with given(case, "with a mask that is True everywhere"):
            close(module(x, **case.inputs, mask=torch.ones(seq, seq, dtype=torch.bool)), out, allowed)
        with given(case, "with a mask that hides the first two keys, in a (1, seq) row: the tokens after them"):
            mask = torch.arange(seq)[None] >= 2
            masked = module(x, **case.inputs, mask=mask)[..., 2:, :]
            close(module(replaced(x, slice(2)), **case.inputs, mask=mask)[..., 2:, :], masked, allowed)
            differs(masked, out[..., 2:, :])


def recomputes(cases: list[Case]) -> None:
    """Give the same output and gradients when the activations are computed anew for the backward pass."""

    def results(run: Any, module: nn.Module, x: Tensor, inputs: State) -> list[Tensor]:
        x = x.clone().requires_grad_()
        out = run(x, **inputs)
        return [out, *torch.autograd.grad(out.sum(), [x, *module.parameters()])]

    for case in [case for case in cases if case.inputs] or cases[:1]:
        with given(case, torch.float32, "torch.utils.checkpoint, use_reentrant=False: output or gradients"):
            module, x = case.module(torch.float32), case.x(torch.float32)
            expected = results(module, module, x, case.inputs)
            recomputed = functools.partial(checkpoint, module, use_reentrant=False)
            for actual, wanted in zip(results(recomputed, module, x, case.inputs), expected, strict=True):
                close(actual, wanted, 0)


def is_relative(cases: list[Case]) -> None:
    harness.require(cases[0].cls.forward, "token_positions")
    case, module, x, out, allowed = next(unmasked(cases))
    positions = torch.arange(x.shape[-2])
    with given(case, "with token_positions 150 further on"):
        close(module(x, positions + 150), out, 10 * allowed)
    with given(case, "with token_positions twice as far apart"):
        differs(module(x, 2 * positions)[..., 1:, :], out[..., 1:, :])


def refuses_positions(cases: list[Case]) -> None:
    harness.require(cases[0].cls.forward, "token_positions")
    case, module = cases[0], cases[0].module(torch.float32)
    x, positions = case.x(torch.float32), torch.arange(case.shape[-2])
    for wrong in (positions + TABLE - 3, positions - 1, positions + 2**32):
        where = f"token_positions {wrong.tolist()} in a table of {TABLE}"
        with given(case, where), harness.refused(naming=str(TABLE - 1)):
            module(x, token_positions=wrong)


def takes_any_rope(cls: Any, arguments: tuple[int, ...], formula: Any, **options: Any) -> None:
    """Call a rope as rope(x, token_positions), with the positions as they were given."""
    harness.require(cls, "rope")
    harness.require(cls.forward, "token_positions")
    for factor, positions in product((1.0, 1.5), (POSITIONS, None)):
        received: list[Any] = []

        def rope(x: Tensor, token_positions: Tensor | None, factor: float = factor, to: Any = received) -> Tensor:
            to.append(token_positions)
            return x * factor

        module, x = harness.fill(cls(*arguments, rope=rope, **options).double()), harness.randn(2, 7, 24)
        with given(f"{cls.__name__}{arguments}, rope=lambda x, _: {factor} * x, of x of shape (2, 7, 24), seed 0"):
            exact = formula(x, module.state_dict(), heads=4, factor=factor)
            close(module(x, token_positions=positions), exact, 1e-12 * largest(exact))
            for handed_on in received:
                with given("token_positions as they were handed on"):
                    if positions is not None:
                        close(handed_on.flatten(), positions.flatten(), 0)
                    elif handed_on is not None:
                        raise Violation(f"got {handed_on}, expected None")


SEQUENCE = WITH_WEIGHTS | {
    "causality": is_causal,
    "prefill against one-shot": prefills,
    "mask narrows causality and never lifts it": masks,
    "activation checkpointing": recomputes,
}
ROTARY = SEQUENCE | {
    "relative positions only": is_relative,
    "positions off the table are refused": refuses_positions,
}


# What attention promises besides.

HEADS: list[dict[str, Any]] = [{}, {"num_kv_heads": 2}, {"num_kv_heads": 1}, {"d_head": 10, "qk_norm": True}]
HEADS += [{"qk_norm": True, "num_kv_heads": 2, "eps": 1e-3}]


def mask_of(*shape: int) -> Tensor:
    """Return a mask that is True for about 7 keys in 10, and for none of the fourth query."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(2)) < 0.7
    mask[..., 3:4, :] = False
    return mask


def roundings_of(rope: bool, qk_norm: bool = False, **_: Any) -> int:
    """Count q, k, v, the weights of the softmax, the heads and the output; and q and k again where they are changed."""
    return 6 + 2 * rope + 2 * qk_norm


@promises_all(SEQUENCE)
def attention_cases(attention: ModuleType) -> list[Case]:
    def case(shape: Shape, options: dict[str, Any], heads: int = 4, mask: Tensor | None = None, **about: Any) -> Case:
        formula = functools.partial(self_attention, heads=heads, eps=options.get("eps", 1e-5))
        made = harness.public(attention, ATTENTION), (shape[-1], heads), shape, formula, options
        inputs = {} if mask is None else {"mask": mask}
        return Case(*made, inputs, roundings=roundings_of(rope=False, **options), **about)

    float64: Any = {"dtypes": (torch.float64,)}
    shapes = [(5, 24), (0, 5, 24), (1, 5, 24), (2, 0, 5, 24), (2, 3, 5, 24), (2, 1, 24)]
    return [
        case((2, 7, 24), HEADS[0], compiled=True),
        *(case((2, 7, 24), options) for options in HEADS[1:]),
        *(case(shape, HEADS[1], **float64) for shape in shapes),
        case((2, 7, 24), {}, mask=mask_of(2, 7, 7)),
        case((2, 3, 5, 24), {}, mask=mask_of(3, 1, 5), **float64),
        case((80, 64), {}, heads=1),  # longer than a window or a fixed mask, in a head as wide as in use
        case((2, 7, 24), {}, scale=30.0, **float64),  # scores past where exp overflows
        case((2, 7, 24), {}, mask=mask_of(2, 7, 7), scale=30.0, **float64),
    ]


@promises_all(ROTARY, of="with RoPE")
def rotary_cases(attention: ModuleType, rope: ModuleType) -> list[Case]:
    def case(options: dict[str, Any], shape: Shape = (2, 7, 24), compiled: bool = False, **inputs: Tensor) -> Case:
        table = harness.public(rope, ROPE)(100.0, options.get("d_head", 6), TABLE)
        formula = functools.partial(self_attention, heads=4, theta=100.0, eps=options.get("eps", 1e-5))
        made = harness.public(attention, ATTENTION), (24, 4), shape, formula, {**options, "rope": table}
        return Case(*made, inputs, compiled=compiled, roundings=roundings_of(rope=True, **options))

    return [
        *map(case, HEADS),
        case(HEADS[1], token_positions=POSITIONS, mask=mask_of(2, 7, 7), compiled=True),
        case(HEADS[4], (2, 3, 7, 24), token_positions=POSITIONS[:1]),
        case(HEADS[0], (7, 24), token_positions=POSITIONS[0], mask=mask_of(7, 7)),
        case(HEADS[1], (2, 0, 7, 24), token_positions=POSITIONS[0], mask=mask_of(7, 7)),
    ]


@promises("any callable serves as rope")
def any_rope(attention: ModuleType) -> None:
    takes_any_rope(harness.public(attention, ATTENTION), (24, 4), self_attention)


@promises("scores in float32 or wider")
def keeps_scores(attention: ModuleType) -> None:
    """Attend by scores of about 512 and their 8ths, which a half cannot hold, though all of q, k and v are exact."""
    cls = harness.public(attention, ATTENTION)
    harness.require(cls, "d_head")
    signs = [harness.randn(2, 9, 64, seed=seed).sign() for seed in (3, 4)]
    q, k = (torch.cat((torch.full((2, 9, 1), 64.0), sign[..., 1:]), dim=-1) for sign in signs)
    x, causal = torch.cat((q, k), dim=-1).double(), torch.ones(9, 9, dtype=torch.bool).tril()
    first, second = torch.eye(128, dtype=torch.float64).split(64)
    weights = {"q_proj": first, "k_proj": second, "v_proj": second, "output_proj": first.T}
    exact = attend(q, k, k, causal) @ first
    how = "x of shape (2, 9, 128): [64, signs of seed 3, 64, signs of seed 4]; q is its first half, k and v the second"
    for dtype in harness.HALVES:
        with given(f"{ATTENTION}(128, 1, d_head=64)", how, dtype), torch.no_grad():
            module = cls(128, 1, d_head=64).to(dtype)
            for name, weight in weights.items():
                getattr(module, name).weight.copy_(weight)
            harness.close_on_average(module(x.to(dtype))[..., 1:64], exact[..., 1:64], 2, dtype)


@promises("scaled_dot_product_attention: equation and gradients")
def function(attention: ModuleType) -> None:
    heads: list[Shape] = [(2, 2, 5, 8), (2, 2, 7, 8), (2, 2, 7, 4)]
    calls: list[Any] = [(heads, None), (heads, mask_of(5, 7)), (heads, mask_of(2, 2, 5, 7))]
    calls.append(([(5, 8), (7, 8), (7, 4)], mask_of(5, 7)))
    equation = harness.public(attention, "scaled_dot_product_attention")
    harness.function_follows(equation, attend, calls, rounds_once=True)


@promises("positions without a RoPE are refused")
def refuses_positions_without_rope(attention: ModuleType) -> None:
    with given(f"{ATTENTION}(24, 4), token_positions [0, 1, 2]"), harness.refused():
        harness.public(attention, ATTENTION)(24, 4)(torch.zeros(1, 3, 24), torch.arange(3))


@promises("a RoPE of another head size is refused")
def refuses_rope(attention: ModuleType, rope: ModuleType) -> None:
    table = harness.public(rope, ROPE)(10.0, 4, 8)
    with given(f"{ATTENTION}(24, 4, rope={ROPE}(10.0, 4, 8))"), harness.refused():
        harness.public(attention, ATTENTION)(24, 4, rope=table)


def attention_state(
    num_kv_heads: int = 4, d_head: int = 6, qk_norm: bool = False, eps: float = 0.0, prefix: str = ""
) -> dict[str, Shape]:
    """Return the keys and shapes of attention, of d_model 24 in 4 heads."""
    state: dict[str, Shape] = {"q_proj.weight": (4 * d_head, 24), "output_proj.weight": (24, 4 * d_head)}
    state |= {f"{name}_proj.weight": (num_kv_heads * d_head, 24) for name in ("k", "v")}
    state |= {f"{name}_norm.weight": (d_head,) for name in ("q", "k") if qk_norm}
    return {prefix + key: shape for key, shape in state.items()}


@promises("keys of the state dict")
def keys(attention: ModuleType) -> None:
    cls = harness.public(attention, ATTENTION)
    harness.has_state(cls, (24, 4), attention_state())
    options = harness.accepted(cls, {"num_kv_heads": 2, "d_head": 10, "qk_norm": True})
    harness.has_state(cls, (24, 4), attention_state(**options), **options)


@promises("initial weights")
def weights(attention: ModuleType) -> None:
    harness.draws_weights(harness.public(attention, ATTENTION), 192, 4, num_kv_heads=2, d_head=32, qk_norm=True)


BAD: list[Any] = [(24, 5), (24, 0), (0, 4), (24, -4), (24, 4, {"d_head": 0})]
BAD += [(24, 4, {"num_kv_heads": n}) for n in (3, 0)] + [(24, 4, {"eps": eps}) for eps in (0.0, math.nan, math.inf)]
promises("bad hyperparameters refused")(lambda attention: harness.refuses(harness.public(attention, ATTENTION), *BAD))
