"""Usual mistakes, as wrong formulas by what is wrong in them.

`tinyblock verify` compares a wrong result with them, and prints the name of the first
that gives it. A formula may raise an error where a case has not the shapes for it. No
project has a copy of this file.
"""

import functools
import itertools
import math

import torch

from .checks import Weights
from .test_attention import ALL_KEYS, attend, attend_causally, self_attention
from .test_block import block_of, pre_norm
from .test_ffn import feed_forward, gelu, sigmoid, silu, swiglu, swiglu_of_weights
from .test_rmsnorm import of_weights, rms_norm
from .test_rope import angles_of, rope_of_positions, rotate

# RMSNorm: formulas of x, the gains, and eps.


def divided_by(size):
    """Return the norm with another divisor, `size(x, eps)`."""

    def wrong(x, gain, eps):
        return x / size(x, eps) * gain

    return wrong


def mean_square(x, *axes):
    return (x * x).mean(axes or -1, keepdim=True)


NORM = {
    "eps is not the one that is passed, but 1e-5": lambda x, gain, eps: rms_norm(
        x, gain, 1e-5
    ),
    "eps is not the one that is passed, but 1e-6": lambda x, gain, eps: rms_norm(
        x, gain, 1e-6
    ),
    "eps is not the one that is passed, but 1e-8": lambda x, gain, eps: rms_norm(
        x, gain, 1e-8
    ),
    "eps is missing": lambda x, gain, eps: rms_norm(x, gain, 0),
    "eps is added to the root, not below it": divided_by(
        lambda x, eps: mean_square(x).sqrt() + eps
    ),
    "the gains are missing": lambda x, gain, eps: rms_norm(x, 1, eps),
    "the gains are added, not multiplied": lambda x, gain, eps: (
        rms_norm(x, 1, eps) + gain
    ),
    "the gains are 1 + weight in place of weight": lambda x, gain, eps: rms_norm(
        x, 1 + gain, eps
    ),
    "the gains are applied before the mean, too": lambda x, gain, eps: rms_norm(
        x * gain, 1, eps
    ),
    "the mean is subtracted, as in LayerNorm": lambda x, gain, eps: rms_norm(
        x - x.mean(-1, keepdim=True), gain, eps
    ),
    "the norm divides by the standard deviation, as LayerNorm": divided_by(
        lambda x, eps: (x.var(-1, keepdim=True, correction=0) + eps).sqrt()
    ),
    "the norm divides by x.std(), which also subtracts the mean": divided_by(
        lambda x, eps: x.std(-1, keepdim=True) + eps
    ),
    "the sum of squares is not divided by d_model": divided_by(
        lambda x, eps: ((x * x).sum(-1, keepdim=True) + eps).sqrt()
    ),
    "the root is missing": divided_by(lambda x, eps: mean_square(x) + eps),
    "the norm multiplies by the root in place of dividing": divided_by(
        lambda x, eps: 1 / (mean_square(x) + eps).sqrt()
    ),
    "the mean is over absolute values, not over squares": divided_by(
        lambda x, eps: x.abs().mean(-1, keepdim=True) + eps
    ),
    "the mean is over the tokens in place of d_model": divided_by(
        lambda x, eps: (mean_square(x, -2) + eps).sqrt()
    ),
    "the mean is over the first axis in place of d_model": divided_by(
        lambda x, eps: (mean_square(x, 0) + eps).sqrt()
    ),
    "the mean is over tokens and d_model in place of d_model": divided_by(
        lambda x, eps: (mean_square(x, -2, -1) + eps).sqrt()
    ),
    "the mean is over all axes in place of d_model": divided_by(
        lambda x, eps: ((x * x).mean() + eps).sqrt()
    ),
}


# SwiGLU: formulas of x and the weights.


def swiglu_with(gate=silu, value=lambda value: value):
    """Return SwiGLU with another function of the gate, or of the value."""

    def wrong(x, w1, w2, w3):
        return (gate(x @ w1.T) * value(x @ w3.T)) @ w2.T

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
    "the gate has a sigmoid in place of SiLU": swiglu_with(sigmoid),
    "the gate has a GELU in place of SiLU": swiglu_with(gelu),
    "the gate has the GELU with tanh in place of SiLU": swiglu_with(tanh_gelu),
    "the gate has a ReLU in place of SiLU": swiglu_with(torch.relu),
    "the gate has no activation": swiglu_with(lambda gate: gate),
    "SiLU has sigmoid(-x) in place of sigmoid(x)": swiglu_with(
        lambda gate: gate * sigmoid(-gate)
    ),
    "both gate and value have a SiLU": swiglu_with(value=silu),
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


def with_angles(change):
    """Return RoPE with other angles, `change(angles, theta ** (-2 / d_k))`."""

    def wrong(x, at, theta):
        d_k = x.shape[-1]
        return rotate(x, change(angles_of(at, d_k, theta), theta ** (-2 / d_k)))

    return wrong


def with_pairs(rotated):
    """Return RoPE with other components of a pair, `rotated(first, second, cos, sin)`."""

    def wrong(x, at, theta):
        angles = angles_of(at, x.shape[-1], theta)
        pair = rotated(x[..., 0::2], x[..., 1::2], angles.cos(), angles.sin())
        return torch.stack(pair, dim=-1).flatten(-2)

    return wrong


def with_table(table, turned):
    """Return RoPE as x cos(table) + turned(x) sin(table)."""

    def wrong(x, at, theta):
        angles = table(angles_of(at, x.shape[-1], theta))
        return x * angles.cos() + turned(x) * angles.sin()

    return wrong


def neighbors(x):
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def halves(x):
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


ROPE = {
    "positions start at 1": lambda x, at, theta: rope_of_positions(x, at + 1, theta),
    "token_positions are ignored": lambda x, at, theta: rope_of_positions(
        x, None, theta
    ),
    "all sequences get the positions of the first": lambda x, at, theta: (
        rope_of_positions(x, at[:1].squeeze(0), theta)
    ),
    "positions count on from the first token's": lambda x, at, theta: rope_of_positions(
        x, at[..., :1] + torch.arange(at.shape[-1]), theta
    ),
    "theta is not the one that is passed, but 10000": lambda x, at, theta: (
        rope_of_positions(x, at, 1e4)
    ),
    "theta is not the one that is passed": lambda x, at, theta: rope_of_positions(
        x, at, 50.0 if theta != 50 else 5e5
    ),
    "the sine has the wrong sign": lambda x, at, theta: rope_of_positions(
        x, -at, theta
    ),
    "cosine and sine are swapped": with_pairs(
        lambda a, b, cos, sin: (a * sin - b * cos, a * cos + b * sin)
    ),
    "the sines are cosines": with_pairs(
        lambda a, b, cos, sin: (a * cos - b * cos, a * cos + b * cos)
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
    "halves are rotated in place of consecutive pairs": with_table(twice, halves),
    "the table is of halves, the rotation of consecutive pairs": with_table(
        twice, neighbors
    ),
    "the table is of consecutive pairs, the rotation of halves": with_table(
        each_twice, halves
    ),
    "halves of x are paired in place of consecutive components": with_pairs_of_halves,
    "the result has its pairs as halves, not consecutive": with_halves_in_the_result,
    "the exponent is -k/d_k in place of -2k/d_k": lambda x, at, theta: (
        rope_of_positions(x, at, theta**0.5)
    ),
    "the exponent is -4k/d_k in place of -2k/d_k": lambda x, at, theta: (
        rope_of_positions(x, at, theta**2)
    ),
    "the exponent has no minus": lambda x, at, theta: rope_of_positions(
        x, at, 1 / theta
    ),
    "k counts from 1 in place of 0": with_angles(lambda angles, ratio: angles * ratio),
    "all pairs turn by the same angle": with_angles(lambda angles, _: angles[..., :1]),
    "nothing is rotated": lambda x, at, theta: x,
    "RoPE inserts an axis for heads, which the caller's positions have": with_angles(
        lambda angles, _: angles.unsqueeze(-3)
    ),
}


def rope_of_layer(rope):
    def wrong(x, weights, token_positions=None, *, theta, **sizes):
        if token_positions is None:
            token_positions = torch.arange(x.shape[-2])
        return rope(x, token_positions, theta)

    return wrong


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
    "the softmax is over the first axis in place of the keys": with_shares(
        lambda scores, mask: hide(scores, mask).softmax(0)
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
    "hidden scores are +inf in place of -inf": with_shares(
        lambda scores, mask: hide(scores, mask, math.inf).softmax(-1)
    ),
    "the mask is added to the scores as 0 and 1": with_shares(
        lambda scores, mask: (scores + mask).softmax(-1)
    ),
}


# Attention: formulas of the layer.


def causal_with(attend, *, diagonal=0, upper=False):
    """Return the layer with another attention, or another triangle of the mask."""

    def wrong(q, k, v, mask=None):
        shown = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
        shown = shown.triu(diagonal) if upper else shown.tril(diagonal)
        return attend(q, k, v, shown)

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


def with_weights(replaced):
    """Return the layer with other weights, `replaced(weights)` by their names."""

    def wrong(x, weights, **given):
        return self_attention(x, Weights(weights | replaced(weights)), **given)

    return wrong


def with_weights_of(**others):
    """Return the layer with the weights of other projections, such as q_proj="k_proj"."""
    return with_weights(
        lambda weights: {
            f"{name}.weight": weights[f"{other}.weight"]
            for name, other in others.items()
        }
    )


def transposed(*names):
    return with_weights(
        lambda weights: {
            f"{name}.weight": weights[f"{name}.weight"].mT for name in names
        }
    )


def identity(weights):
    d_model = len(weights["output_proj.weight"])
    return {"output_proj.weight": torch.eye(d_model, dtype=torch.float64)}


def split_heads(y, heads):
    return y.unflatten(-1, (heads, -1)).transpose(-3, -2)


def split_last(y, heads):
    return y.unflatten(-1, (-1, heads)).movedim(-1, -3)


def split_without_transpose(y, heads):
    return y.reshape(*y.shape[:-2], heads, y.shape[-2], -1)


def merge_heads(y):
    return y.transpose(-3, -2).flatten(-2)


def merge_last(y):
    return y.movedim(-3, -1).flatten(-2)


def merge_without_transpose(y):
    return y.reshape(*y.shape[:-3], y.shape[-2], -1)


def share(y, group):
    return y.repeat_interleave(group, dim=-3)


def share_in_turn(y, group):
    return torch.cat([y] * group, dim=-3)


def of_all_heads(
    *,
    split=split_heads,
    merge=merge_heads,
    share=share,
    over_d_model=False,
    with_positions_of_heads=False,
):
    """Return the layer in all heads at once, with other steps or another RoPE."""

    def rotate(rope, y, at):
        if rope is None:
            return y
        return rope(y, torch.arange(y.shape[-2]) if at is None else at)

    def wrong(
        x,
        weights,
        token_positions=None,
        mask=None,
        *,
        num_heads,
        num_kv_heads=None,
        rope=None,
        **sizes,
    ):
        num_kv_heads = num_kv_heads or num_heads
        q, k, v = (x @ weights[f"{name}_proj.weight"].T for name in "qkv")
        if over_d_model:
            q = rotate(rope, q, token_positions)
            k = rotate(rope, k, token_positions)
        q, k, v = split(q, num_heads), split(k, num_kv_heads), split(v, num_kv_heads)
        if not over_d_model:
            at = token_positions
            if at is not None and at.ndim > 1 and not with_positions_of_heads:
                at = at.unsqueeze(-2)
            q, k = rotate(rope, q, at), rotate(rope, k, at)
        group = num_heads // num_kv_heads
        out = attend_causally(q, share(k, group), share(v, group))
        return merge(out) @ weights["output_proj.weight"].T

    return wrong


def turn(rope, y, at):
    return rope(y, at)


def keep(rope, y, at):
    return y


def rotated(*, q=turn, k=turn, v=keep):
    """Return the layer with other rotations of q, k and v."""

    def wrong(x, weights, token_positions=None, mask=None, *, rope=None, **given):
        at = torch.arange(x.shape[-2]) if token_positions is None else token_positions

        def attend(queries, keys, values, mask):
            if rope is not None:
                queries, keys = q(rope, queries, at), k(rope, keys, at)
                values = v(rope, values, at)
            return attend_causally(queries, keys, values, mask)

        return self_attention(x, weights, mask=mask, attend=attend, **given)

    return wrong


def with_rope(wrong):
    """Return the layer with a wrong formula of RoPE."""

    def turn(rope, y, at):
        return wrong(y, at, rope.theta)

    return rotated(q=turn, k=turn)


def with_x_rotated(x, weights, token_positions=None, *, rope=None, **given):
    rotated = x if rope is None else rope(x, token_positions)
    return self_attention(rotated, weights, **given)


def with_one_head(x, weights, **given):
    given |= {"num_heads": 1, "num_kv_heads": 1}
    return self_attention(x, weights, **given)


QKV = ("q_proj", "k_proj", "v_proj")
ALL = (*QKV, "output_proj")
# Mistakes in RoPE that give the right attention, or have a name below.
HIDDEN_BY_ATTENTION = (
    "positions start at 1",
    "the result has its pairs as halves, not consecutive",
    "halves of x are paired in place of consecutive components",
    "cosine and sine are swapped",
    "nothing is rotated",
)
# Wrong masks, which have the first names of ATTENTION if the mask is causal.
NAMED_OTHERWISE = (
    "the mask is inverted; True lets a query attend",
    "the mask is ignored",
)
ATTENTION = {
    "each token attends to all tokens": causal_with(lambda q, k, v, _: attend(q, k, v)),
    "each token attends to itself and to later tokens": causal_with(attend, upper=True),
    "each token also attends to the next one": causal_with(attend, diagonal=1),
    "a token does not attend to itself": causal_with(attend_with_nan, diagonal=-1),
    "a token attends to later tokens only": causal_with(
        attend_with_nan, diagonal=1, upper=True
    ),
    **{
        name: causal_with(wrong)
        for name, wrong in FUNCTION.items()
        if name not in NAMED_OTHERWISE
    },
    "the scores are divided by sqrt(d_model) in place of sqrt(d_k)": scaled_by_d_model,
    "the mask that is passed is ignored": with_mask(lambda mask, causal: causal),
    "the mask that is passed is inverted; True lets a query attend": with_mask(
        lambda mask, causal: causal & ~mask
    ),
    "the mask that is passed replaces the causal mask": with_mask(
        lambda mask, causal: mask
    ),
    "heads are reshaped without a transpose, before and after": of_all_heads(
        split=split_without_transpose, merge=merge_without_transpose
    ),
    "heads are split without a transpose": of_all_heads(split=split_without_transpose),
    "heads are merged without a transpose": of_all_heads(merge=merge_without_transpose),
    "the projections are split as (d_k heads), not (heads d_k)": of_all_heads(
        split=split_last
    ),
    "the heads are merged as (d_k heads), not (heads d_k)": of_all_heads(
        merge=merge_last
    ),
    "the projections are split and merged as (d_k heads), not (heads d_k)": of_all_heads(
        split=split_last, merge=merge_last
    ),
    "query head h reads key head h % num_kv_heads, not h // group": of_all_heads(
        share=share_in_turn
    ),
    "there is one head of size d_model": with_one_head,
    "the output projection is missing": with_weights(identity),
    **{
        f"{other} stands in place of {name}": with_weights_of(**{name: other})
        for name, other in itertools.permutations(ALL, 2)
    },
    **{
        f"{first} and {second} are swapped": with_weights_of(
            **{first: second, second: first}
        )
        for first, second in itertools.combinations(ALL, 2)
    },
    **{
        f"{name} is transposed: the layer multiplies by W, not by its transpose": (
            transposed(name)
        )
        for name in ALL
    },
    "q_proj, k_proj and v_proj are transposed": transposed(*QKV),
    "all projections are transposed": transposed(*ALL),
    "x is added: the residual belongs into the block": lambda x, weights, **given: (
        x + self_attention(x, weights, **given)
    ),
    "RoPE is missing": rotated(q=keep, k=keep),
    "RoPE also rotates v": rotated(v=turn),
    "RoPE rotates v in place of k": rotated(k=keep, v=turn),
    "RoPE does not rotate k": rotated(k=keep),
    "RoPE does not rotate q": rotated(q=keep),
    "RoPE is applied twice": with_rope(
        lambda y, at, theta: rope_of_positions(y, 2 * at, theta)
    ),
    "RoPE turns k the other way": rotated(k=lambda rope, y, at: rope(y, -at)),
    "RoPE rotates x before the projections": with_x_rotated,
    "RoPE rotates q and k before they are split into heads": of_all_heads(
        over_d_model=True
    ),
    "positions of a sequence rotate a head; pass token_positions[..., None, :]": (
        of_all_heads(with_positions_of_heads=True)
    ),
    **{
        f"in RoPE, {name}": with_rope(wrong)
        for name, wrong in ROPE.items()
        if name not in HIDDEN_BY_ATTENTION
    },
}


# The block: formulas of x and the functions of its parts.


def of_steps(first, second):
    """Return the block of two steps, each a formula of x, the norm, and the layer."""

    def combine(x, ln1, attn, ln2, ffn):
        return second(first(x, ln1, attn), ln2, ffn)

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
    "ffn comes before attention": block_of(
        lambda x, ln1, attn, ln2, ffn: pre_norm(x, ln2, ffn, ln1, attn)
    ),
    "ffn comes before attention, and the norms are swapped": block_of(
        lambda x, ln1, attn, ln2, ffn: pre_norm(x, ln1, ffn, ln2, attn)
    ),
    "ln1 stands in place of ln2": block_of(
        lambda x, ln1, attn, ln2, ffn: pre_norm(x, ln1, attn, ln1, ffn)
    ),
    "ln2 stands in place of ln1": block_of(
        lambda x, ln1, attn, ln2, ffn: pre_norm(x, ln2, attn, ln2, ffn)
    ),
    "ln1 and ln2 are swapped": block_of(
        lambda x, ln1, attn, ln2, ffn: pre_norm(x, ln2, attn, ln1, ffn)
    ),
    **{
        f"in its norms, {name}": block_of(pre_norm, norm=wrong)
        for name, wrong in NORM.items()
    },
    **{
        f"in its ffn, {name}": block_of(pre_norm, feed_forward=wrong)
        for name, wrong in SWIGLU.items()
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
