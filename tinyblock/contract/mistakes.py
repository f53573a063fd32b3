"""Usual mistakes, as wrong formulas by what is wrong in them.

`tinyblock verify` compares a wrong result with them, and prints the name of the one that
gives it. A formula may raise an error where a case has not the shapes for it. No project
has a copy of this file.
"""

import dataclasses
import functools
import itertools
import math

import pytest
import torch

from .checks import HALVES, Weights, difference, unit_of
from .test_attention import ALL_KEYS, attend, attend_causally, self_attention
from .test_block import block_of, pre_norm
from .test_ffn import feed_forward, gelu, sigmoid, silu, swiglu, swiglu_of_weights
from .test_rmsnorm import of_weights, rms_norm
from .test_rope import angles_of, rope_of_positions


def name_mistake(failures):
    """Return the mistake that gives the first wrong result, and most others, or ""."""
    results = [getattr(failure, "wrong", None) for failure in failures]
    # In half precision, a mistake in eps may equal another one.
    results = [each for each in results if each and each.dtype not in HALVES]
    for number, result in enumerate(results):
        names = [name for name in mistakes_of(result) if gives(name, result)]
        if names:
            counts = {name: count_given(name, results[number + 1 :]) for name in names}
            return max(counts, key=counts.__getitem__)
    return ""


def count_given(name, results):
    return sum(gives(name, result) for result in results)


def mistakes_of(wrong):
    """Return the usual mistakes of the class or function with a wrong result."""
    return MISTAKES.get(wrong.case.name, {})


def gives(name, wrong):
    """Return whether a mistake gives a wrong result."""
    formula = mistakes_of(wrong).get(name)
    if formula is None:
        return False
    case = dataclasses.replace(wrong.case, formula=formula)
    try:
        with torch.no_grad():
            result = case.exact(wrong.module, wrong.x)
    except (IndexError, RuntimeError, pytest.fail.Exception):
        return False  # such as a mean over tokens, where x has none
    if result.shape != wrong.result.shape:
        return False
    allowed = unit_of(wrong.dtype) * result.nan_to_num().norm()
    return difference(wrong.result, result).norm() <= allowed


# RMSNorm: formulas of x, the gains, and eps.


def divided_by(size):
    """Return the norm with another divisor, `size(x, eps)`."""

    def wrong(x, gain, eps):
        return x / size(x, eps) * gain

    return wrong


def mean_over(*axes):
    """Return the norm with a mean over other axes than the last, or over all."""
    return divided_by(lambda x, eps: ((x * x).mean(axes, keepdim=True) + eps).sqrt())


def with_eps(value):
    def wrong(x, gain, eps):
        return rms_norm(x, gain, value)

    return wrong


NORM = {
    **{
        f"eps is not the one that is passed, but {value}": with_eps(float(value))
        for value in ("1e-5", "1e-6", "1e-8")
    },
    "eps is missing": with_eps(0),
    "eps is added to the root, not below it": divided_by(
        lambda x, eps: (x * x).mean(-1, keepdim=True).sqrt() + eps
    ),
    "the gains are missing": lambda x, gain, eps: rms_norm(x, 1, eps),
    "the gains are added, not multiplied": lambda x, gain, eps: (
        rms_norm(x, 1, eps) + gain
    ),
    "the gains are 1 + weight in place of weight": lambda x, gain, eps: rms_norm(
        x, 1 + gain, eps
    ),
    "the mean is subtracted, as in LayerNorm": lambda x, gain, eps: rms_norm(
        x - x.mean(-1, keepdim=True), gain, eps
    ),
    "the norm divides by x.std(), which also subtracts the mean": divided_by(
        lambda x, eps: x.std(-1, keepdim=True) + eps
    ),
    "the sum of squares is not divided by d_model": divided_by(
        lambda x, eps: ((x * x).sum(-1, keepdim=True) + eps).sqrt()
    ),
    "the root is missing": divided_by(
        lambda x, eps: (x * x).mean(-1, keepdim=True) + eps
    ),
    "the mean is over the tokens in place of d_model": mean_over(-2),
    "the mean is over the first axis in place of d_model": mean_over(0),
    "the mean is over tokens and d_model in place of d_model": mean_over(-2, -1),
    "the mean is over all axes in place of d_model": mean_over(),
}


# SwiGLU: formulas of x and the weights.


def with_gate(activation):
    """Return SwiGLU with another function of the gate."""

    def wrong(x, w1, w2, w3):
        return (activation(x @ w1.T) * (x @ w3.T)) @ w2.T

    return wrong


def tanh_gelu(x):
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return x / 2 * (1 + inner.tanh())


FFN = {
    "w1 and w3 are swapped; the gate is w1": lambda x, w1, w2, w3: swiglu(
        x, w3, w2, w1
    ),
    "w1 is missing; the gate is w1": lambda x, w1, w2, w3: swiglu(x, w3, w2, w3),
    "w1 stands in place of w3": lambda x, w1, w2, w3: swiglu(x, w1, w2, w1),
    "w3 is missing": lambda x, w1, w2, w3: feed_forward(x, w1, w2, silu),
    "w3 is added, not multiplied": lambda x, w1, w2, w3: (
        (silu(x @ w1.T) + x @ w3.T) @ w2.T
    ),
    "the gate has a sigmoid in place of SiLU": with_gate(sigmoid),
    "the gate has a GELU in place of SiLU": with_gate(gelu),
    "the gate has the GELU with tanh in place of SiLU": with_gate(tanh_gelu),
    "the gate has a ReLU in place of SiLU": with_gate(torch.relu),
    "the gate has no activation": with_gate(lambda gate: gate),
    "SiLU is applied to the product, not to the gate": lambda x, w1, w2, w3: (
        silu((x @ w1.T) * (x @ w3.T)) @ w2.T
    ),
    "x is added: the residual belongs into the block": lambda x, w1, w2, w3: (
        x + swiglu(x, w1, w2, w3)
    ),
}
SWIGLU = {
    name: functools.partial(swiglu_of_weights, formula=wrong)
    for name, wrong in FFN.items()
}


# RoPE: formulas of x, the positions, and theta.


def with_pairs(turn):
    """Return RoPE with other components of a pair, `turn(first, second, cos, sin)`."""

    def wrong(x, at, theta):
        angles = angles_of(at, x.shape[-1], theta)
        pair = turn(x[..., 0::2], x[..., 1::2], angles.cos(), angles.sin())
        return torch.stack(pair, dim=-1).flatten(-2)

    return wrong


def with_table(widen, turn):
    """Return RoPE as x cos(widen(angles)) + turn(x) sin(widen(angles))."""

    def wrong(x, at, theta):
        angles = widen(angles_of(at, x.shape[-1], theta))
        return x * angles.cos() + turn(x) * angles.sin()

    return wrong


def turn_neighbors(x):
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def turn_halves(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def twice(angles):
    return torch.cat((angles, angles), dim=-1)


def each_twice(angles):
    return angles.repeat_interleave(2, dim=-1)


def with_pairs_of_halves(x, at, theta):
    return rope_of_positions(torch.stack(x.chunk(2, -1), -1).flatten(-2), at, theta)


def with_halves_in_the_result(x, at, theta):
    result = rope_of_positions(x, at, theta)
    return torch.cat((result[..., 0::2], result[..., 1::2]), dim=-1)


def with_positions(change):
    def wrong(x, at, theta):
        return rope_of_positions(x, change(at), theta)

    return wrong


def with_theta(change):
    def wrong(x, at, theta):
        return rope_of_positions(x, at, change(theta))

    return wrong


ROPE = {
    "positions start at 1": with_positions(lambda at: at + 1),
    "token_positions are ignored": with_positions(
        lambda at: torch.arange(at.shape[-1])
    ),
    "all sequences get the positions of the first": with_positions(
        lambda at: at[:1].squeeze(0)
    ),
    "positions count on from the first token's": with_positions(
        lambda at: at[..., :1] + torch.arange(at.shape[-1])
    ),
    "theta is not the one that is passed, but 10000": with_theta(lambda theta: 1e4),
    "the sine has the wrong sign": with_positions(lambda at: -at),
    "cosine and sine are swapped": with_pairs(
        lambda a, b, cos, sin: (a * sin - b * cos, a * cos + b * sin)
    ),
    "both sines are added: the first is subtracted": with_pairs(
        lambda a, b, cos, sin: (a * cos + b * sin, a * sin + b * cos)
    ),
    "both sines are subtracted: the second is added": with_pairs(
        lambda a, b, cos, sin: (a * cos - b * sin, b * cos - a * sin)
    ),
    "the second of a pair is computed from the first after its rotation": with_pairs(
        lambda a, b, cos, sin: (a * cos - b * sin, (a * cos - b * sin) * sin + b * cos)
    ),
    "halves are rotated in place of consecutive pairs": with_table(twice, turn_halves),
    "the table is of halves, the rotation of consecutive pairs": with_table(
        twice, turn_neighbors
    ),
    "the table is of consecutive pairs, the rotation of halves": with_table(
        each_twice, turn_halves
    ),
    "halves of x are paired in place of consecutive components": with_pairs_of_halves,
    "the result has its pairs as halves, not consecutive": with_halves_in_the_result,
    "the exponent is -k/d_k in place of -2k/d_k": with_theta(lambda theta: theta**0.5),
    "the exponent is -4k/d_k in place of -2k/d_k": with_theta(lambda theta: theta**2),
    "the exponent has no minus": with_theta(lambda theta: 1 / theta),
    "k counts from 1 in place of 0": lambda x, at, theta: rope_of_positions(
        x, at * theta ** (-2 / x.shape[-1]), theta
    ),
    "all pairs turn by the same angle": with_theta(lambda theta: 1),
    "nothing is rotated": lambda x, at, theta: x,
    "RoPE inserts an axis for heads, which the caller's positions have": (
        with_positions(lambda at: at.unsqueeze(-2))
    ),
}


def positions_of(x, token_positions):
    return torch.arange(x.shape[-2]) if token_positions is None else token_positions


def rope_of_layer(wrong):
    def formula(x, weights, token_positions=None, *, theta, **sizes):
        return wrong(x, positions_of(x, token_positions), theta)

    return formula


# Attention: formulas of q, k, v and the mask.


def scaled(factor):
    """Return attention with its scores times `factor(d_head, keys)`."""

    def wrong(q, k, v, mask=ALL_KEYS):
        return attend(q * factor(q.shape[-1], k.shape[-2]), k, v, mask)

    return wrong


def with_shares(shares):
    """Return attention with the weights `shares(scores, mask)` of the values."""

    def wrong(q, k, v, mask=ALL_KEYS):
        return shares(q @ k.mT / math.sqrt(q.shape[-1]), mask) @ v

    return wrong


def hide(scores, mask, value=-math.inf):
    return scores.masked_fill(~mask, value)


# This is right, but for a query without any key.
attend_with_nan = with_shares(lambda scores, mask: hide(scores, mask).softmax(-1))

FUNCTION = {
    "the scores are not divided by sqrt(d_k)": scaled(lambda d_k, keys: d_k**0.5),
    "the scores are divided by d_k in place of sqrt(d_k)": scaled(
        lambda d_k, keys: d_k**-0.5
    ),
    "the scores are multiplied by sqrt(d_k) in place of divided": scaled(
        lambda d_k, keys: d_k
    ),
    "the scores are divided by the root of the number of keys": scaled(
        lambda d_k, keys: (d_k / keys) ** 0.5
    ),
    "the softmax is over the queries in place of the keys": with_shares(
        lambda scores, mask: hide(scores, mask).softmax(-2)
    ),
    "the softmax is missing": with_shares(lambda scores, mask: hide(scores, mask, 0)),
    "the mask is inverted; True lets a query attend": with_shares(
        lambda scores, mask: hide(scores, ~mask).softmax(-1)
    ),
    "the mask is ignored": with_shares(lambda scores, mask: scores.softmax(-1)),
    "the mask is applied after the softmax": with_shares(
        lambda scores, mask: hide(scores.softmax(-1), mask, 0)
    ),
    "hidden scores are 0 in place of -inf": with_shares(
        lambda scores, mask: hide(scores, mask, 0).softmax(-1)
    ),
    "the mask is added to the scores as 0 and 1": with_shares(
        lambda scores, mask: (scores + mask).softmax(-1)
    ),
}


# Attention: formulas of the layer.


def causal_with(wrong_attend, *, diagonal=0, upper=False):
    """Return the layer with another attention, or another triangle of the mask."""

    def wrong(q, k, v, mask=None):
        shown = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
        shown = shown.triu(diagonal) if upper else shown.tril(diagonal)
        return wrong_attend(q, k, v, shown)

    return functools.partial(self_attention, attend=wrong)


def with_mask(combine):
    """Return the layer with `combine(mask, causal)` for the mask that is passed."""

    def wrong(q, k, v, mask=None):
        causal = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
        return attend_with_nan(
            q, k, v, causal if mask is None else combine(mask, causal)
        )

    return functools.partial(self_attention, attend=wrong)


def scaled_by_d_model(x, weights, **given):
    def wrong(q, k, v, mask):
        scale = math.sqrt(q.shape[-1] / x.shape[-1])
        return attend_causally(q * scale, k, v, mask)

    return self_attention(x, weights, attend=wrong, **given)


def with_weights(replace):
    """Return the layer with other weights, `replace(weights, num_heads)` by their names."""

    def wrong(x, weights, *, num_heads, **given):
        replaced = Weights(weights | replace(weights, num_heads))
        return self_attention(x, replaced, num_heads=num_heads, **given)

    return wrong


def with_weights_of(**others):
    """Return the layer with the weights of other projections, such as q_proj="k_proj"."""
    return with_weights(
        lambda weights, num_heads: {
            f"{name}.weight": weights[f"{other}.weight"]
            for name, other in others.items()
        }
    )


def transposed(weights, num_heads):
    return {name: weight.mT for name, weight in weights.items()}


def identity(weights, num_heads):
    d_model = len(weights["output_proj.weight"])
    return {"output_proj.weight": torch.eye(d_model, dtype=torch.float64)}


def transpose_rows(weight, num_heads):
    """Turn rows of (d_k heads) into rows of (heads d_k)."""
    return weight.unflatten(0, (-1, num_heads)).transpose(0, 1).flatten(0, 1)


def split_as_d_k_heads(weights, num_heads):
    names = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
    return {name: transpose_rows(weights[name], num_heads) for name in names}


def merged_as_d_k_heads(weights, num_heads):
    name = "output_proj.weight"
    return {name: transpose_rows(weights[name].T, num_heads).T}


def split_and_merged_as_d_k_heads(weights, num_heads):
    split = split_as_d_k_heads(weights, num_heads)
    return split | merged_as_d_k_heads(weights, num_heads)


def with_key_heads_in_turn(x, weights, *, num_heads, num_kv_heads=None, **given):
    group = num_heads // (num_kv_heads or num_heads)
    repeated = {
        name: weights[name].repeat(group, 1)
        for name in ("k_proj.weight", "v_proj.weight")
    }
    given |= {"num_heads": num_heads, "num_kv_heads": num_heads}
    return self_attention(x, Weights(weights | repeated), **given)


def with_one_head(x, weights, **given):
    given |= {"num_heads": 1, "num_kv_heads": 1}
    return self_attention(x, weights, **given)


def rotated(y, rope, positions):
    return y if rope is None else rope(y, positions)


def split_heads(y, num_heads, rope, positions):
    heads = y.unflatten(-1, (num_heads, -1)).transpose(-3, -2)
    return rotated(heads, rope, positions.unsqueeze(-2))


def split_heads_after_rope(y, num_heads, rope, positions):
    return split_heads(rotated(y, rope, positions), num_heads, None, positions)


def split_heads_for_positions_of_heads(y, num_heads, rope, positions):
    return rotated(split_heads(y, num_heads, None, positions), rope, positions)


def split_without_transpose(y, num_heads, rope, positions):
    heads = y.reshape(*y.shape[:-2], num_heads, y.shape[-2], -1)
    return rotated(heads, rope, positions.unsqueeze(-2))


def merge_heads(y):
    return y.transpose(-3, -2).flatten(-2)


def merge_without_transpose(y):
    return y.reshape(*y.shape[:-3], y.shape[-2], -1)


def of_all_heads(split=split_heads, merge=merge_heads):
    """Return the layer in all heads at once, which are split or merged in another way."""

    def wrong(x, weights, token_positions=None, *, num_heads, rope=None, **others):
        at = positions_of(x, token_positions)
        q, k, v = (x @ weights[f"{name}_proj.weight"].T for name in "qkv")
        q, k = split(q, num_heads, rope, at), split(k, num_heads, rope, at)
        out = attend_causally(q, k, split(v, num_heads, None, at))
        return merge(out) @ weights["output_proj.weight"].T

    return wrong


def with_rope_on(*names):
    """Return the layer with RoPE on these of q, k and v."""

    def wrong(x, weights, token_positions=None, mask=None, *, rope=None, **given):
        def rotate_and_attend(q, k, v, mask):
            heads = {"q": q, "k": k, "v": v}
            for name in names:
                heads[name] = rotated(heads[name], rope, token_positions)
            return attend_causally(*heads.values(), mask)

        return self_attention(x, weights, mask=mask, attend=rotate_and_attend, **given)

    return wrong


def with_rope(wrong):
    """Return the layer with a wrong formula of RoPE."""

    def layer(x, weights, *, rope=None, **given):
        def wrong_rope(y, token_positions):
            return wrong(y, positions_of(y, token_positions), rope.theta)

        return self_attention(x, weights, rope=rope and wrong_rope, **given)

    return layer


QKV = ("q_proj", "k_proj", "v_proj")
ATTENTION = {
    "each token attends to all tokens": causal_with(lambda q, k, v, _: attend(q, k, v)),
    "each token attends to itself and to later tokens": causal_with(attend, upper=True),
    "each token also attends to the next one": causal_with(attend, diagonal=1),
    "a token does not attend to itself": causal_with(attend_with_nan, diagonal=-1),
    "a token attends to later tokens only": causal_with(
        attend_with_nan, diagonal=1, upper=True
    ),
    **{f"in each head, {name}": causal_with(wrong) for name, wrong in FUNCTION.items()},
    "the scores are divided by sqrt(d_model) in place of sqrt(d_k)": scaled_by_d_model,
    "the mask that is passed is ignored": with_mask(lambda mask, causal: causal),
    "the mask that is passed is inverted; True lets a query attend": with_mask(
        lambda mask, causal: causal & ~mask
    ),
    "the mask that is passed replaces the causal mask": with_mask(
        lambda mask, causal: mask
    ),
    "heads are split and merged without a transpose": of_all_heads(
        split_without_transpose, merge_without_transpose
    ),
    "heads are split without a transpose": of_all_heads(split_without_transpose),
    "heads are merged without a transpose": of_all_heads(merge=merge_without_transpose),
    "heads are split as (d_k heads), not (heads d_k)": with_weights(split_as_d_k_heads),
    "heads are merged as (d_k heads), not (heads d_k)": with_weights(
        merged_as_d_k_heads
    ),
    "heads are split and merged as (d_k heads), not (heads d_k)": with_weights(
        split_and_merged_as_d_k_heads
    ),
    "query head h reads key head h % num_kv_heads, not h // group": (
        with_key_heads_in_turn
    ),
    "there is one head of size d_model": with_one_head,
    "the output projection is missing": with_weights(identity),
    **{
        f"{other} stands in place of {name}": with_weights_of(**{name: other})
        for name, other in itertools.permutations(QKV, 2)
    },
    **{
        f"{first} and {second} are swapped": with_weights_of(
            **{first: second, second: first}
        )
        for first, second in itertools.combinations(QKV, 2)
    },
    "the projections multiply by W, not by its transpose": with_weights(transposed),
    "x is added: the residual belongs into the block": lambda x, weights, **given: (
        x + self_attention(x, weights, **given)
    ),
    "RoPE is missing": with_rope_on(),
    "RoPE also rotates v": with_rope_on("q", "k", "v"),
    "RoPE rotates v in place of k": with_rope_on("q", "v"),
    "RoPE does not rotate k": with_rope_on("q"),
    "RoPE does not rotate q": with_rope_on("k"),
    "RoPE is applied twice": with_rope(
        lambda y, at, theta: rope_of_positions(y, 2 * at, theta)
    ),
    "RoPE rotates q and k before they are split into heads": of_all_heads(
        split_heads_after_rope
    ),
    "positions of a sequence rotate a head; pass token_positions[..., None, :]": (
        of_all_heads(split_heads_for_positions_of_heads)
    ),
    **{f"in RoPE, {name}": with_rope(wrong) for name, wrong in ROPE.items()},
}


# The block: formulas of x and the functions of its parts.


def of_steps(first, second):
    """Return the block of two steps, each a formula of x, the norm, and the layer."""

    def combine(x, ln1, attn, ln2, ffn):
        return second(first(x, ln1, attn), ln2, ffn)

    return block_of(combine)


def of_parts(*names):
    """Return the block of these parts, in this order."""

    def combine(x, **parts):
        return pre_norm(x, *(parts[name] for name in names))

    return block_of(combine)


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
    **{
        f"around attention and around ffn, {name}": of_steps(wrong, wrong)
        for name, wrong in STEPS.items()
    },
    **{
        f"around attention, {name}": of_steps(wrong, right_step)
        for name, wrong in STEPS.items()
    },
    **{
        f"around ffn, {name}": of_steps(right_step, wrong)
        for name, wrong in STEPS.items()
    },
    "the residual of ffn adds x, without the result of attention": block_of(
        lambda x, ln1, attn, ln2, ffn: x + ffn(ln2(x + attn(ln1(x))))
    ),
    "ffn reads x, without the result of attention": block_of(
        lambda x, ln1, attn, ln2, ffn: x + attn(ln1(x)) + ffn(ln2(x))
    ),
    "ffn comes before attention": of_parts("ln2", "ffn", "ln1", "attn"),
    "ffn comes before attention, and the norms are swapped": of_parts(
        "ln1", "ffn", "ln2", "attn"
    ),
    "ln1 stands in place of ln2": of_parts("ln1", "attn", "ln1", "ffn"),
    "ln2 stands in place of ln1": of_parts("ln2", "attn", "ln2", "ffn"),
    "ln1 and ln2 are swapped": of_parts("ln2", "attn", "ln1", "ffn"),
    **{
        f"in its norms, {name}": block_of(pre_norm, norm=wrong)
        for name, wrong in NORM.items()
    },
    **{
        f"in its attention, {name}": block_of(pre_norm, attention=wrong)
        for name, wrong in ATTENTION.items()
    },
}


# Of each class or function.
MISTAKES = {
    "RMSNorm": {
        name: functools.partial(of_weights, norm=wrong) for name, wrong in NORM.items()
    },
    "SwiGLU": SWIGLU,
    "RotaryPositionalEmbedding": {
        name: rope_of_layer(wrong) for name, wrong in ROPE.items()
    },
    "scaled_dot_product_attention": FUNCTION,
    "CausalMultiHeadSelfAttention": ATTENTION,
    "Block": BLOCK,
}
