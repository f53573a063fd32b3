"""Usual mistakes, each as a case that is wrong in one place.

`tinyblock verify` compares a wrong result with what these cases give, and prints the name
of the one that gives it. A wrong case may raise an error where the shapes or options of a
case do not fit it. No project has a copy of this file.
"""

import functools
import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import gelu

from .checks import HALVES, Weights, unit_of
from .test_attention import ALL_KEYS, attend_causally, self_attention
from .test_block import block_of
from .test_ffn import sigmoid, silu
from .test_rmsnorm import rms_norm
from .test_rope import angles_of, of_layer, rope_of_positions


def name_mistake(wrong):
    """Return the mistake that gives the first of these wrong results, and most others.

    Return "" if no mistake gives one of them.
    """
    # In half precision, a mistake in eps may equal another one.
    wrong = [each for each in wrong if each.dtype not in HALVES]
    for number, first in enumerate(wrong):
        names = names_of(first)
        if len(names) > 1:
            for other in wrong[number + 1 :]:
                names += names_of(other, among=names)
        if names:
            return max(names, key=names.count)
    return ""


def names_of(wrong, among=None):
    """Return the mistakes that give a wrong result."""
    return [
        name
        for name, case in mistakes_of(wrong)
        if (among is None or name in among) and gives(case, wrong)
    ]


def gives(case, wrong):
    """Return whether a wrong case gives a wrong result."""
    try:
        with torch.no_grad():
            result = case.exact(wrong.module, wrong.x)
    except (Exception, pytest.fail.Exception):
        return False  # such as a mean over tokens, where x has none
    actual = wrong.result.detach().cpu().double()
    if result.shape != actual.shape or (result.isnan() != actual.isnan()).any():
        return False
    error = (actual - result).nan_to_num().norm()
    return bool(error <= unit_of(wrong.dtype) * result.nan_to_num().norm())


def mistakes_of(wrong):
    """Yield the name of each usual mistake, and the case of a wrong result with it."""
    case = wrong.case
    for name, formula in FORMULAS.get(case.name, {}).items():
        yield name, replace(case, formula=formula)
    for name, inputs in wrong_inputs(case.inputs):
        yield name, replace(case, inputs=inputs)
    for name, options in wrong_options(case.options):
        yield name, replace(case, options=case.options | options)
    if case.weights is None:
        for name, others in wrong_weights(wrong.module):
            yield name, replace(case, formula=with_weights(case.formula, others))


def wrong_inputs(inputs):
    for name in inputs:
        others = {other: inputs[other] for other in inputs if other != name}
        yield f"{name} is ignored", others
    if "mask" in inputs:
        inverted = inputs | {"mask": ~inputs["mask"]}
        yield "the mask is inverted; True lets a query attend", inverted


def wrong_options(options):
    yield "eps is missing", {"eps": 0.0}
    for eps in ("1e-5", "1e-6", "1e-8"):
        yield f"eps is not the one that is passed, but {eps}", {"eps": float(eps)}
    yield "there is one head of size d_model", {"num_heads": 1, "num_kv_heads": 1}
    if rope := options.get("rope"):
        yield "RoPE is missing", {"rope": None}
        for name, formula in ROPE.items():
            yield f"in RoPE, {name}", {"rope": replace(rope, formula=formula)}


def wrong_weights(module):
    """Yield usual mistakes as the weights that stand in place of others, by their names."""
    weights = {
        name: weight.detach().cpu().double()
        for name, weight in module.named_parameters()
    }
    for one, other in itertools.combinations(weights, 2):
        if weights[one].shape == weights[other].shape:
            of_other, of_one = {one: weights[other]}, {other: weights[one]}
            yield f"{other} stands in place of {one}", of_other
            yield f"{one} stands in place of {other}", of_one
            yield f"{one} and {other} are swapped", of_one | of_other
    for name, weight in weights.items():
        if weight.ndim == 1:
            yield f"{name} is not used", {name: torch.ones_like(weight)}
            yield f"1 + {name} stands in place of {name}", {name: 1 + weight}
        else:
            yield f"{name} is not used", {name: torch.eye(len(weight)).to(weight)}


def with_weights(formula, others):
    def wrong(x, weights, *inputs, **given):
        return formula(x, Weights(weights | others), *inputs, **given)

    return wrong


# RMSNorm. Its size is what x is divided by.


def with_size(size):
    """Return the norm with another divisor, `size(x * x, eps)`."""

    def wrong(x, weights, d_model, eps):
        return x / size(x * x, eps) * weights["weight"]

    return wrong


def size_over(*axes):
    return with_size(lambda squares, eps: (squares.mean(axes, True) + eps).sqrt())


def with_gains_added(x, weights, d_model, eps):
    return rms_norm(x, 1, eps) + weights["weight"]


def without_mean(x, weights, d_model, eps):
    return rms_norm(x - x.mean(-1, keepdim=True), weights["weight"], eps)


NORM = {
    "eps is added to the root, not below it": with_size(
        lambda squares, eps: squares.mean(-1, True).sqrt() + eps
    ),
    "the root is missing": with_size(lambda squares, eps: squares.mean(-1, True) + eps),
    "the sum of squares is not divided by d_model": with_size(
        lambda squares, eps: (squares.sum(-1, True) + eps).sqrt()
    ),
    "the norm divides by x.std(), which also subtracts the mean": (
        lambda x, weights, d_model, eps: (
            x / (x.std(-1, keepdim=True) + eps) * weights["weight"]
        )
    ),
    "the mean is subtracted, as in LayerNorm": without_mean,
    "the gains are added, not multiplied": with_gains_added,
    "the mean is over the tokens in place of d_model": size_over(-2),
    "the mean is over the first axis in place of d_model": size_over(0),
    "the mean is over tokens and d_model in place of d_model": size_over(-2, -1),
}


# SwiGLU. The gate is x W1^T, and `up` is x W3^T.


def with_hidden(hidden):
    def wrong(x, weights, **sizes):
        w1, w2, w3 = (weights[f"w{number}.weight"] for number in (1, 2, 3))
        return hidden(x @ w1.T, x @ w3.T) @ w2.T

    return wrong


HIDDEN = {
    "w3 is missing": lambda gate, up: silu(gate),
    "the gate has a sigmoid in place of SiLU": lambda gate, up: sigmoid(gate) * up,
    "the gate has a GELU in place of SiLU": lambda gate, up: gelu(gate) * up,
    "the gate has the GELU with tanh in place of SiLU": lambda gate, up: (
        gelu(gate, approximate="tanh") * up
    ),
    "the gate has no activation": lambda gate, up: gate * up,
    "SiLU is applied to the product, not to the gate": lambda gate, up: silu(gate * up),
}
SWIGLU = {name: with_hidden(hidden) for name, hidden in HIDDEN.items()}


# RoPE: formulas of x, the positions, and theta.


def with_positions(change):
    return lambda x, at, theta: rope_of_positions(x, change(at), theta)


def with_power(power):
    return lambda x, at, theta: rope_of_positions(x, at, theta**power)


def with_pairs(turn):
    """Return RoPE with other components of a pair, `turn(first, second, cos, sin)`."""

    def wrong(x, at, theta):
        angles = angles_of(at, x.shape[-1], theta)
        pair = turn(x[..., 0::2], x[..., 1::2], angles.cos(), angles.sin())
        return torch.stack(pair, dim=-1).flatten(-2)

    return wrong


def halves_to_pairs(x):
    return x.unflatten(-1, (2, -1)).mT.flatten(-2)


def pairs_to_halves(x):
    return x.unflatten(-1, (-1, 2)).mT.flatten(-2)


def rotate_halves(x, at, theta):
    return pairs_to_halves(rope_of_positions(halves_to_pairs(x), at, theta))


def with_table_of_halves(x, at, theta):
    angles = angles_of(at, x.shape[-1], theta).repeat(*[1] * at.ndim, 2)
    turned = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    return x * angles.cos() + turned * angles.sin()


ROPE = {
    "positions start at 1": with_positions(lambda at: at + 1),
    "all sequences get the positions of the first": with_positions(
        lambda at: at[:1].squeeze(0)
    ),
    "positions count on from the first token's": with_positions(
        lambda at: at[..., :1] + torch.arange(at.shape[-1])
    ),
    "RoPE inserts an axis for heads, which the caller's positions have": with_positions(
        lambda at: at.unsqueeze(-2)
    ),
    "the sine has the wrong sign": with_positions(lambda at: -at),
    "theta is not the one that is passed, but 10000": (
        lambda x, at, theta: rope_of_positions(x, at, 1e4)
    ),
    "the exponent is -k/d_k in place of -2k/d_k": with_power(0.5),
    "the exponent has no minus": with_power(-1),
    "all pairs turn by the same angle": with_power(0),
    "k counts from 1 in place of 0": lambda x, at, theta: rope_of_positions(
        x, at * theta ** (-2 / x.shape[-1]), theta
    ),
    "cosine and sine are swapped": with_pairs(
        lambda a, b, cos, sin: (a * sin - b * cos, a * cos + b * sin)
    ),
    "both sines are added: the first is subtracted": with_pairs(
        lambda a, b, cos, sin: (a * cos + b * sin, a * sin + b * cos)
    ),
    "the second of a pair is computed from the first after its rotation": with_pairs(
        lambda a, b, cos, sin: (a * cos - b * sin, (a * cos - b * sin) * sin + b * cos)
    ),
    "halves are rotated in place of consecutive pairs": rotate_halves,
    "the table is of halves, the rotation of consecutive pairs": with_table_of_halves,
    "halves of x are paired in place of consecutive components": (
        lambda x, at, theta: rope_of_positions(halves_to_pairs(x), at, theta)
    ),
    "the result has its pairs as halves, not consecutive": (
        lambda x, at, theta: pairs_to_halves(rope_of_positions(x, at, theta))
    ),
    "nothing is rotated": lambda x, at, theta: x,
}


# Attention: formulas of q, k, v and the mask.


def hide(scores, mask, value=-math.inf):
    return scores.masked_fill(~mask, value)


def shares_of(scores, mask):
    return hide(scores, mask).softmax(-1)


def attend_with(shares=shares_of, power=-0.5):
    """Return attention with other weights of the values, or another power of d_k."""

    def wrong(q, k, v, mask=ALL_KEYS):
        return shares(q @ k.mT * q.shape[-1] ** power, mask) @ v

    return wrong


# This is right, but for a query without any key.
attend_or_nan = attend_with()
FUNCTION = {
    "the scores are not divided by sqrt(d_k)": attend_with(power=0),
    "the scores are divided by d_k in place of sqrt(d_k)": attend_with(power=-1),
    "the softmax is over the queries in place of the keys": attend_with(
        lambda scores, mask: hide(scores, mask).softmax(-2)
    ),
    "the mask is applied after the softmax": attend_with(
        lambda scores, mask: hide(scores.softmax(-1), mask, 0)
    ),
    "hidden scores are 0 in place of -inf": attend_with(
        lambda scores, mask: hide(scores, mask, 0).softmax(-1)
    ),
    "the mask is added to the scores as 0 and 1": attend_with(
        lambda scores, mask: (scores + mask).softmax(-1)
    ),
}


# Attention: formulas of the layer.


def showing(shown, attend=attend_or_nan):
    """Return attention to the keys `shown(ones, mask)`, with ones for each query and key."""

    def wrong(q, k, v, mask=None):
        ones = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
        return attend(q, k, v, shown(ones, mask))

    return functools.partial(self_attention, attend=wrong)


def causal(ones, mask):
    return ones.tril()


SHOWN = {
    "each token attends to all tokens": lambda ones, mask: ones,
    "each token attends to itself and to later tokens": lambda ones, mask: ones.triu(),
    "each token also attends to the next one": lambda ones, mask: ones.tril(1),
    "a token does not attend to itself": lambda ones, mask: ones.tril(-1),
    "a token attends to later tokens only": lambda ones, mask: ones.triu(1),
    "the mask is inverted; True lets a query attend": (
        lambda ones, mask: ones.tril() & ~mask
    ),
    "the mask replaces the causal mask": lambda ones, mask: mask,
}


def split_heads(y, heads):
    return y.unflatten(-1, (heads, -1)).transpose(-3, -2)


def merge_heads(y):
    return y.transpose(-3, -2).flatten(-2)


SPLIT = {
    "without a transpose": lambda y, heads: y.reshape(
        *y.shape[:-2], heads, y.shape[-2], -1
    ),
    "as (d_k heads), not (heads d_k)": lambda y, heads: y.unflatten(
        -1, (-1, heads)
    ).movedim(-1, -3),
}
MERGE = {
    "without a transpose": lambda y: y.reshape(*y.shape[:-3], y.shape[-2], -1),
    "as (d_k heads), not (heads d_k)": lambda y: y.movedim(-3, -1).flatten(-2),
}


def rotate_heads(y, split, rope, at):
    return rope(split(y), at.unsqueeze(-2))


def in_all_heads(
    split=split_heads, merge=merge_heads, rotated="qk", rotate=rotate_heads
):
    """Return the layer in all heads at once, with other steps."""

    def wrong(x, weights, token_positions=None, *, d_model, num_heads, rope=None):
        split_y = functools.partial(split, heads=num_heads)
        heads = []
        for name in "qkv":
            y = x @ weights[f"{name}_proj.weight"].T
            if rope and name in rotated:
                heads.append(rotate(y, split_y, rope, token_positions))
            else:
                heads.append(split_y(y))
        return merge(attend_causally(*heads)) @ weights["output_proj.weight"].T

    return wrong


def divided_by_root_of_d_model(x, weights, *inputs, num_heads, **given):
    queries = {"q_proj.weight": weights["q_proj.weight"] / num_heads**0.5}
    formula = with_weights(self_attention, queries)
    return formula(x, weights, *inputs, num_heads=num_heads, **given)


ATTENTION = {
    **{name: showing(shown) for name, shown in SHOWN.items()},
    **{f"in each head, {name}": showing(causal, FUNCTION[name]) for name in FUNCTION},
    "the scores are divided by sqrt(d_model) in place of sqrt(d_k)": (
        divided_by_root_of_d_model
    ),
    **{f"heads are split {how}": in_all_heads(split=SPLIT[how]) for how in SPLIT},
    **{f"heads are merged {how}": in_all_heads(merge=MERGE[how]) for how in MERGE},
    **{
        f"heads are split and merged {how}": in_all_heads(SPLIT[how], MERGE[how])
        for how in SPLIT
    },
    "RoPE also rotates v": in_all_heads(rotated="qkv"),
    "RoPE does not rotate k": in_all_heads(rotated="q"),
    "RoPE does not rotate q": in_all_heads(rotated="k"),
    "RoPE rotates q and k before they are split into heads": in_all_heads(
        rotate=lambda y, split, rope, at: split(rope(y, at))
    ),
    "positions of a sequence rotate a head; pass token_positions[..., None, :]": (
        in_all_heads(rotate=lambda y, split, rope, at: rope(split(y), at))
    ),
}


# The block: formulas of x and the functions of its parts.


def of_steps(first, second):
    """Return the block of two steps, each a formula of x, the norm, and the layer."""
    return block_of(
        lambda x, ln1, attn, ln2, ffn: second(first(x, ln1, attn), ln2, ffn)
    )


def right_step(x, norm, layer):
    return x + layer(norm(x))


STEPS = {
    "the norm is after the addition (post-norm)": lambda x, norm, layer: norm(
        x + layer(x)
    ),
    "the norm is after the layer, not before it": lambda x, norm, layer: (
        x + norm(layer(x))
    ),
    "the norm is missing": lambda x, norm, layer: x + layer(x),
    "the residual adds what is normalized": lambda x, norm, layer: (
        norm(x) + layer(norm(x))
    ),
    "the residual is missing": lambda x, norm, layer: layer(norm(x)),
    "the residual is added twice": lambda x, norm, layer: 2 * x + layer(norm(x)),
}
BLOCK = {
    "the residual of ffn adds x, without the result of attention": block_of(
        lambda x, ln1, attn, ln2, ffn: x + ffn(ln2(x + attn(ln1(x))))
    ),
    "ffn reads x, without the result of attention": block_of(
        lambda x, ln1, attn, ln2, ffn: x + attn(ln1(x)) + ffn(ln2(x))
    ),
}
for name, step in STEPS.items():
    BLOCK[f"around attention and around ffn, {name}"] = of_steps(step, step)
    BLOCK[f"around attention, {name}"] = of_steps(step, right_step)
    BLOCK[f"around ffn, {name}"] = of_steps(right_step, step)

FORMULAS = {
    "RMSNorm": NORM,
    "SwiGLU": SWIGLU,
    "RotaryPositionalEmbedding": {
        name: functools.partial(of_layer, formula=formula)
        for name, formula in ROPE.items()
    },
    "scaled_dot_product_attention": FUNCTION,
    "CausalMultiHeadSelfAttention": ATTENTION,
    "Block": BLOCK,
}
