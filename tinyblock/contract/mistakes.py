"""Usual mistakes, as wrong formulas by what is wrong in them.

`tinyblock verify` compares a wrong result with them, and prints the name of the first
that gives it. No project has a copy of this file.
"""

import functools
import itertools
import math

import torch

from .checks import Weights
from .test_attention import ALL_KEYS, attend, attend_causally, self_attention
from .test_block import block_of, pre_norm
from .test_ffn import feed_forward, gelu, sigmoid, silu, swiglu
from .test_rmsnorm import rms_norm
from .test_rope import angles_of, rope_of_positions

# RMSNorm: formulas of x, the gains, and eps.


def of_norm(x, gain, *, mean_square=None, eps=0.0):
    mean_square = (x * x).mean(-1, keepdim=True) if mean_square is None else mean_square
    return x / (mean_square + eps).sqrt() * gain


def with_eps_outside(x, gain, eps):
    return x / ((x * x).mean(-1, keepdim=True).sqrt() + eps) * gain


def without_a_root(x, gain, eps):
    return x / ((x * x).mean(-1, keepdim=True) + eps) * gain


def with_a_mean_over(*axes):
    """Return the norm with the mean over other axes, of those that x has."""

    def wrong(x, gain, eps):
        known = [axis for axis in axes if -x.ndim <= axis < x.ndim]
        mean_square = (x * x).mean(known, keepdim=True)
        return of_norm(x, gain, mean_square=mean_square, eps=eps)

    return wrong


def with_the_mean_subtracted(x, gain, eps):
    return rms_norm(x - x.mean(-1, keepdim=True), gain, eps)


def as_layer_norm(x, gain, eps):
    """Divide by the standard deviation, and subtract nothing."""
    return of_norm(x, gain, mean_square=x.var(-1, keepdim=True, correction=0), eps=eps)


def with_a_sum(x, gain, eps):
    return of_norm(x, gain, mean_square=(x * x).sum(-1, keepdim=True), eps=eps)


def with_absolute_values(x, gain, eps):
    return x / (x.abs().mean(-1, keepdim=True) + eps) * gain


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
    "eps is added to the root, not below it": with_eps_outside,
    "eps is squared": lambda x, gain, eps: rms_norm(x, gain, eps**2),
    "the gains are missing": lambda x, gain, eps: rms_norm(x, 1, eps),
    "the gains are added, not multiplied": lambda x, gain, eps: (
        rms_norm(x, 1, eps) + gain
    ),
    "the gains are 1 + weight in place of weight": lambda x, gain, eps: rms_norm(
        x, 1 + gain, eps
    ),
    "the result is divided by the gains": lambda x, gain, eps: (
        rms_norm(x, 1, eps) / gain
    ),
    "the gains are applied before the mean, too": lambda x, gain, eps: rms_norm(
        x * gain, 1, eps
    ),
    "the gains are applied twice": lambda x, gain, eps: rms_norm(x, gain**2, eps),
    "the mean is subtracted, as in LayerNorm": with_the_mean_subtracted,
    "the norm divides by the standard deviation, as LayerNorm": as_layer_norm,
    "the sum of squares is not divided by d_model": with_a_sum,
    "the root is missing": without_a_root,
    "the norm multiplies by the root in place of dividing": lambda x, gain, eps: (
        x * ((x * x).mean(-1, keepdim=True) + eps).sqrt() * gain
    ),
    "the mean is over absolute values, not over squares": with_absolute_values,
    "the mean is over the tokens in place of d_model": with_a_mean_over(-2),
    "the mean is over the first axis in place of d_model": with_a_mean_over(0),
    "the mean is over tokens and d_model in place of d_model": with_a_mean_over(-2, -1),
    "the mean is over all axes in place of d_model": with_a_mean_over(-3, -2, -1),
}


def norm_of_layer(norm):
    def wrong(x, weights, d_model, eps):
        return norm(x, weights.get_of("weight", d_model), eps)

    return wrong


# SwiGLU: formulas of x and the weights.


def swiglu_with(gate=silu, value=lambda value: value):
    """Return SwiGLU with another function of the gate, or of the value."""

    def wrong(x, w1, w2, w3):
        return (gate(x @ w1.T) * value(x @ w3.T)) @ w2.T

    return wrong


def tanh_gelu(x):
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return x / 2 * (1 + inner.tanh())


def silu_of_the_product(x, w1, w2, w3):
    return silu((x @ w1.T) * (x @ w3.T)) @ w2.T


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
    "the gate has a tanh in place of SiLU": swiglu_with(torch.tanh),
    "the gate has no activation": swiglu_with(lambda gate: gate),
    "SiLU has sigmoid(-x) in place of sigmoid(x)": swiglu_with(
        lambda gate: gate * sigmoid(-gate)
    ),
    "SiLU is applied twice to the gate": swiglu_with(lambda gate: silu(silu(gate))),
    "both gate and value have a SiLU": swiglu_with(value=silu),
    "the value also has a sigmoid": swiglu_with(value=sigmoid),
    "SiLU is applied to the product, not to the gate": silu_of_the_product,
    "the sign of the gate is wrong": swiglu_with(lambda gate: -silu(gate)),
    "x is added: the residual belongs into the block": lambda x, w1, w2, w3: (
        x + swiglu(x, w1, w2, w3)
    ),
}


def ffn_of_layer(ffn):
    def wrong(x, weights, d_model, d_ff):
        w1 = weights.get_of("w1.weight", d_ff, d_model)
        w2 = weights.get_of("w2.weight", d_model, d_ff)
        w3 = weights.get_of("w3.weight", d_ff, d_model)
        return ffn(x, w1, w2, w3)

    return wrong


# RoPE: formulas of x, the positions, and theta.


def of_halves(*, in_x=False, in_result=False):
    """Return RoPE with pairs x[k], x[k + d_k/2], in x or in the result."""

    def wrong(x, positions, theta):
        if in_x:
            x = torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2)
        result = rope_of_positions(x, positions, theta)
        if in_result:
            result = torch.cat((result[..., 0::2], result[..., 1::2]), dim=-1)
        return result

    return wrong


def rotated_by(first, second, *, turn=lambda angles: angles):
    """Return RoPE with other functions for the cosine and the sine, or other angles."""

    def wrong(x, positions, theta):
        angles = turn(angles_of(positions, x.shape[-1], theta))
        even, odd = x[..., 0::2], x[..., 1::2]
        cos, sin = first(angles), second(angles)
        pairs = (even * cos - odd * sin, even * sin + odd * cos)
        return torch.stack(pairs, dim=-1).flatten(-2)

    return wrong


def with_both_signs(sign_of_first, sign_of_second):
    def wrong(x, positions, theta):
        angles = angles_of(positions, x.shape[-1], theta)
        even, odd = x[..., 0::2], x[..., 1::2]
        cos, sin = angles.cos(), angles.sin()
        first = even * cos + sign_of_first * odd * sin
        second = sign_of_second * even * sin + odd * cos
        return torch.stack((first, second), dim=-1).flatten(-2)

    return wrong


def with_an_axis_of_heads(x, positions, theta):
    angles = angles_of(positions, x.shape[-1], theta)
    return rotated_by(torch.cos, torch.sin, turn=lambda _: angles.unsqueeze(-3))(
        x, positions, theta
    )


def with_one_frequency(x, positions, theta):
    return rotated_by(torch.cos, torch.sin, turn=lambda angles: angles[..., :1])(
        x, positions, theta
    )


def with_pairs_from_1(x, positions, theta):
    d_k = x.shape[-1]
    return rotated_by(
        torch.cos, torch.sin, turn=lambda angles: angles * theta ** (-2 / d_k)
    )(x, positions, theta)


ROPE = {
    "positions start at 1": lambda x, at, theta: rope_of_positions(x, at + 1, theta),
    "token_positions are ignored": lambda x, at, theta: rope_of_positions(
        x, None, theta
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
    "cosine and sine are swapped": rotated_by(torch.sin, torch.cos),
    "the sines are cosines": rotated_by(torch.cos, torch.cos),
    "the cosines are sines": rotated_by(torch.sin, torch.sin),
    "both sines are added: the first is subtracted": with_both_signs(1, 1),
    "both sines are subtracted: the second is added": with_both_signs(-1, -1),
    "halves are rotated in place of consecutive pairs": of_halves(
        in_x=True, in_result=True
    ),
    "halves of x are paired in place of consecutive components": of_halves(in_x=True),
    "the result has its pairs as halves, not consecutive": of_halves(in_result=True),
    "the exponent is -k/d_k in place of -2k/d_k": lambda x, at, theta: (
        rope_of_positions(x, at, theta**0.5)
    ),
    "the exponent is -4k/d_k in place of -2k/d_k": lambda x, at, theta: (
        rope_of_positions(x, at, theta**2)
    ),
    "the exponent has no minus": lambda x, at, theta: rope_of_positions(
        x, at, 1 / theta
    ),
    "k counts from 1 in place of 0": with_pairs_from_1,
    "all pairs turn by the same angle": with_one_frequency,
    "nothing is rotated": lambda x, at, theta: x,
    "RoPE inserts an axis for heads, which the caller's positions have": (
        with_an_axis_of_heads
    ),
}


def rope_of_layer(rope):
    def wrong(x, weights, token_positions=None, *, theta, **sizes):
        if token_positions is None:
            token_positions = torch.arange(x.shape[-2])
        return rope(x, token_positions, theta)

    return wrong


# Attention: formulas of q, k, v and the mask.


def scaled_by(exponent):
    """Return attention whose scores have another power of d_head as a factor."""

    def wrong(q, k, v, mask=ALL_KEYS):
        return attend(q * q.shape[-1] ** (exponent + 0.5), k, v, mask)

    return wrong


def scaled_by_keys(q, k, v, mask=ALL_KEYS):
    return attend(q * math.sqrt(q.shape[-1] / k.shape[-2]), k, v, mask)


def attend_over_queries(q, k, v, mask=ALL_KEYS):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(~mask, -math.inf).softmax(dim=-2) @ v


def attend_over_batch(q, k, v, mask=ALL_KEYS):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(~mask, -math.inf).softmax(dim=0) @ v


def masked_after_the_softmax(q, k, v, mask=ALL_KEYS):
    shares = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(dim=-1)
    return shares.masked_fill(~mask, 0) @ v


def masked_with_0(q, k, v, mask=ALL_KEYS):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(~mask, 0).softmax(dim=-1) @ v


def masked_with_inf(q, k, v, mask=ALL_KEYS):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(~mask, math.inf).softmax(dim=-1) @ v


def masked_by_addition(q, k, v, mask=ALL_KEYS):
    return (q @ k.mT / math.sqrt(q.shape[-1]) + mask).softmax(dim=-1) @ v


def without_a_softmax(q, k, v, mask=ALL_KEYS):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(~mask, 0) @ v


def with_nan_without_keys(q, k, v, mask):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(~mask, -math.inf).softmax(dim=-1) @ v


FUNCTION = {
    "the scores are not divided by sqrt(d_k)": scaled_by(0),
    "the scores are divided by d_k in place of sqrt(d_k)": scaled_by(-1),
    "the scores are multiplied by sqrt(d_k) in place of divided": scaled_by(0.5),
    "the scores are divided by the root of the number of keys": scaled_by_keys,
    "the softmax is over the queries in place of the keys": attend_over_queries,
    "the softmax is over the first axis in place of the keys": attend_over_batch,
    "the softmax is missing": without_a_softmax,
    "the mask is inverted; True lets a query attend": lambda q, k, v, mask=ALL_KEYS: (
        with_nan_without_keys(q, k, v, ~mask)
    ),
    "the mask is ignored": lambda q, k, v, mask=ALL_KEYS: attend(q, k, v),
    "the mask is applied after the softmax": masked_after_the_softmax,
    "hidden scores are 0 in place of -inf": masked_with_0,
    "hidden scores are +inf in place of -inf": masked_with_inf,
    "the mask is added to the scores as 0 and 1": masked_by_addition,
}


# Attention: formulas of the layer.


def causal_with(attend, *, diagonal=0, upper=False):
    """Return the layer with another attention, or another triangle of the mask."""

    def wrong(q, k, v, mask=None):
        shown = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
        shown = shown.triu(diagonal) if upper else shown.tril(diagonal)
        return attend(q, k, v, shown)

    return functools.partial(self_attention, attend=wrong)


def with_weights(change):
    """Return the layer with a change of its weights, given as name and weight."""

    def wrong(x, weights, **given):
        changed = Weights(
            (name, change(name.removesuffix(".weight"), weight, weights))
            for name, weight in weights.items()
        )
        return self_attention(x, changed, **given)

    return wrong


def instead_of(name, other):
    """Return the layer with another projection, if it has the same shape."""

    def change(of_name, weight, weights):
        replacement = weights[f"{other}.weight"]
        is_replaced = of_name == name and replacement.shape == weight.shape
        return replacement if is_replaced else weight

    return with_weights(change)


def swapped(first, second):
    def change(name, weight, weights):
        other = weights[f"{ {first: second, second: first}.get(name, name) }.weight"]
        return other if other.shape == weight.shape else weight

    return with_weights(change)


def transposed(*names):
    def change(name, weight, weights):
        is_square = weight.ndim == 2 and weight.shape[0] == weight.shape[1]
        return weight.mT if name in names and is_square else weight

    return with_weights(change)


def without_output_projection():
    def change(name, weight, weights):
        if name != "output_proj":
            return weight
        return torch.eye(*weight.shape, dtype=weight.dtype)

    return with_weights(change)


def with_heads_last(*names):
    """Return the layer with the components of these projections as (d_head heads)."""

    def wrong(x, weights, *, num_heads, d_head=None, **given):
        d_head = d_head or x.shape[-1] // num_heads

        def change(name, weight, weights):
            if name not in names:
                return weight
            axis = 1 if name == "output_proj" else 0
            order = torch.arange(weight.shape[axis]).view(d_head, -1).T.flatten()
            return weight.index_select(axis, order)

        layer = with_weights(change)
        return layer(x, weights, num_heads=num_heads, d_head=d_head, **given)

    return wrong


def with_shared_heads_in_turn(x, weights, *, num_heads, num_kv_heads=None, **given):
    """Let query head h read key head h % num_kv_heads."""
    num_kv_heads = num_kv_heads or num_heads
    order = torch.arange(num_heads) % num_kv_heads

    def change(name, weight, weights):
        if name not in ("k_proj", "v_proj"):
            return weight
        return weight.view(num_kv_heads, -1, weight.shape[1])[order].flatten(0, 1)

    layer = with_weights(change)
    return layer(x, weights, num_heads=num_heads, **given)


def reshaped_without_a_transpose(*, split=False, merged=False):
    """Return the layer with (seq heads d_head) read as (heads seq d_head), or merged so."""

    def wrong(
        x, weights, token_positions=None, mask=None, *, num_heads, rope=None, **given
    ):
        seq = x.shape[-2]

        def project(name):
            weight = weights[f"{name}.weight"]
            projected = x @ weight.T
            heads = (*x.shape[:-2], num_heads, seq, weight.shape[0] // num_heads)
            if split:
                return projected.reshape(heads)
            return projected.unflatten(-1, (num_heads, -1)).transpose(-3, -2)

        if len(weights["k_proj.weight"]) != len(weights["q_proj.weight"]):
            return self_attention(
                x, weights, num_heads=num_heads, rope=rope, mask=mask,
                token_positions=token_positions, **given,
            )  # fmt: skip
        q, k, v = project("q_proj"), project("k_proj"), project("v_proj")
        if rope is not None:
            at = torch.arange(seq) if token_positions is None else token_positions
            at = at if at.ndim == 1 else at.unsqueeze(-2)
            q, k = rope(q, at), rope(k, at)
        out = attend_causally(q, k, v)
        if not merged:
            out = out.transpose(-3, -2)
        return out.reshape(*x.shape[:-1], -1) @ weights["output_proj.weight"].T

    return wrong


def with_rope(change):
    """Return the layer with RoPE as `change(rope, q, k, v, positions)` returns q, k, v."""

    def wrong(x, weights, token_positions=None, mask=None, *, rope=None, **given):
        def rotate(q, k, v, mask=None):
            positions = token_positions
            if positions is None:
                positions = torch.arange(x.shape[-2])
            if rope is not None:
                q, k, v = change(rope, q, k, v, positions)
            return attend_causally(q, k, v, mask)

        return self_attention(x, weights, mask=mask, attend=rotate, **given)

    return wrong


def with_theta(theta):
    return with_rope(
        lambda rope, q, k, v, at: (
            rope_of_positions(q, at, theta),
            rope_of_positions(k, at, theta),
            v,
        )
    )


def with_positions_of_heads(x, weights, token_positions=None, *, rope=None, **given):
    """Use the positions of a sequence for a head, if there are as many."""
    if token_positions is None or len(token_positions) != given["num_heads"]:
        return self_attention(x, weights, token_positions, rope=rope, **given)
    # self_attention rotates q and k of the first head, then of the second, ...
    rows = iter(token_positions.repeat_interleave(2, dim=0))

    def rotate(x, token_positions):
        return rope(x, next(rows))

    return self_attention(x, weights, token_positions, rope=rotate, **given)


def with_rope_over_d_model(x, weights, token_positions=None, *, rope=None, **given):
    """Rotate x before the projections, or what is projected before it is split."""
    if rope is None:
        return self_attention(x, weights, **given)
    rotated = rope(x, token_positions)
    return self_attention(rotated, weights, **given)


def with_one_head(x, weights, *, num_heads, **given):
    has_its_own_sizes = not given.keys().isdisjoint(
        ("num_kv_heads", "d_head", "qk_norm")
    )
    return self_attention(
        x, weights, num_heads=num_heads if has_its_own_sizes else 1, **given
    )


QKV = ("q_proj", "k_proj", "v_proj")
ALL = (*QKV, "output_proj")
# Mistakes in RoPE that attention shows. Others change q and k in a way that cancels out.
SHOWN_BY_ATTENTION = (
    "the sine has the wrong sign",
    "the sines are cosines",
    "the cosines are sines",
    "both sines are added: the first is subtracted",
    "both sines are subtracted: the second is added",
    "halves are rotated in place of consecutive pairs",
    "the exponent is -k/d_k in place of -2k/d_k",
    "the exponent is -4k/d_k in place of -2k/d_k",
    "the exponent has no minus",
    "k counts from 1 in place of 0",
    "all pairs turn by the same angle",
)
ATTENTION = {
    "each token attends to all tokens": functools.partial(
        self_attention, attend=lambda q, k, v, mask: attend(q, k, v)
    ),
    "each token attends to itself and to later tokens": causal_with(attend, upper=True),
    "each token also attends to the next one": causal_with(attend, diagonal=1),
    "a token does not attend to itself": causal_with(
        with_nan_without_keys, diagonal=-1
    ),
    "a token attends to later tokens only": causal_with(
        with_nan_without_keys, diagonal=1, upper=True
    ),
    **{
        name: causal_with(FUNCTION[name])
        for name in FUNCTION
        if name
        not in (
            "the mask is ignored",
            "the mask is inverted; True lets a query attend",
            "the softmax is over the first axis in place of the keys",
        )
    },
    "the scores are divided by sqrt(d_model) in place of sqrt(d_k)": (
        lambda x, weights, num_heads, **given: self_attention(
            x,
            weights,
            num_heads=num_heads,
            **given,
            attend=lambda q, k, v, mask: attend_causally(
                q / math.sqrt(x.shape[-1] / q.shape[-1]), k, v
            ),
        )
    ),
    "heads are reshaped without a transpose, before and after": (
        reshaped_without_a_transpose(split=True, merged=True)
    ),
    "heads are split without a transpose": reshaped_without_a_transpose(split=True),
    "heads are merged without a transpose": reshaped_without_a_transpose(merged=True),
    "the projections are split as (d_k heads), not (heads d_k)": with_heads_last(*QKV),
    "the heads are merged as (d_k heads), not (heads d_k)": with_heads_last(
        "output_proj"
    ),
    "the projections are split and merged as (d_k heads), not (heads d_k)": (
        with_heads_last(*ALL)
    ),
    "query head h reads key head h % num_kv_heads, not h // group": (
        with_shared_heads_in_turn
    ),
    "there is one head of size d_model": with_one_head,
    "the output projection is missing": without_output_projection(),
    **{
        f"{other} stands in place of {name}": instead_of(name, other)
        for name, other in itertools.permutations(ALL, 2)
    },
    **{
        f"{first} and {second} are swapped": swapped(first, second)
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
    "RoPE is missing": with_rope(lambda rope, q, k, v, at: (q, k, v)),
    "token_positions are ignored": lambda x, weights, token_positions=None, **given: (
        self_attention(x, weights, **given)
    ),
    "theta is not the one that is passed, but 10000": with_theta(1e4),
    "theta is not the one that is passed": with_theta(50.0),
    "positions of a sequence rotate a head; pass token_positions[..., None, :]": (
        with_positions_of_heads
    ),
    "RoPE also rotates v": with_rope(
        lambda rope, q, k, v, at: (rope(q, at), rope(k, at), rope(v, at))
    ),
    "RoPE rotates v in place of k": with_rope(
        lambda rope, q, k, v, at: (rope(q, at), k, rope(v, at))
    ),
    "RoPE does not rotate k": with_rope(lambda rope, q, k, v, at: (rope(q, at), k, v)),
    "RoPE does not rotate q": with_rope(lambda rope, q, k, v, at: (q, rope(k, at), v)),
    "RoPE is applied twice": with_rope(
        lambda rope, q, k, v, at: (rope(rope(q, at), at), rope(rope(k, at), at), v)
    ),
    "RoPE turns k the other way": with_rope(
        lambda rope, q, k, v, at: (rope(q, at), rope(k, -at), v)
    ),
    "RoPE rotates x before the projections": with_rope_over_d_model,
    **{
        f"in RoPE, {name}": with_rope(
            lambda rope, q, k, v, at, wrong=wrong: (
                wrong(q, at, rope.theta),
                wrong(k, at, rope.theta),
                v,
            )
        )
        for name, wrong in ROPE.items()
        if name in SHOWN_BY_ATTENTION
    },
}


# The block: formulas of x and the functions of its parts.


def post_norm(x, ln1, attn, ln2, ffn):
    y = ln1(x + attn(x))
    return ln2(y + ffn(y))


def post_norm_of_attention(x, ln1, attn, ln2, ffn):
    y = ln1(x + attn(x))
    return y + ffn(ln2(y))


def post_norm_of_ffn(x, ln1, attn, ln2, ffn):
    y = x + attn(ln1(x))
    return ln2(y + ffn(y))


def norms_of_results(x, ln1, attn, ln2, ffn):
    y = x + ln1(attn(x))
    return y + ln2(ffn(y))


def without_norms(x, ln1, attn, ln2, ffn):
    y = x + attn(x)
    return y + ffn(y)


def without_ln1(x, ln1, attn, ln2, ffn):
    y = x + attn(x)
    return y + ffn(ln2(y))


def without_ln2(x, ln1, attn, ln2, ffn):
    y = x + attn(ln1(x))
    return y + ffn(y)


def add_normed_to_attention(x, ln1, attn, ln2, ffn):
    x = ln1(x)
    y = x + attn(x)
    return y + ffn(ln2(y))


def add_normed_to_ffn(x, ln1, attn, ln2, ffn):
    y = ln2(x + attn(ln1(x)))
    return y + ffn(y)


def add_normed_to_both(x, ln1, attn, ln2, ffn):
    x = ln1(x)
    y = ln2(x + attn(x))
    return y + ffn(y)


def without_first_residual(x, ln1, attn, ln2, ffn):
    y = attn(ln1(x))
    return y + ffn(ln2(y))


def without_second_residual(x, ln1, attn, ln2, ffn):
    return ffn(ln2(x + attn(ln1(x))))


def without_residuals(x, ln1, attn, ln2, ffn):
    return ffn(ln2(attn(ln1(x))))


def with_x_in_both_residuals(x, ln1, attn, ln2, ffn):
    return x + ffn(ln2(x + attn(ln1(x))))


def with_attention_twice(x, ln1, attn, ln2, ffn):
    y = x + attn(ln1(x))
    return y + attn(ln1(x)) + ffn(ln2(y))


def in_parallel(x, ln1, attn, ln2, ffn):
    return x + attn(ln1(x)) + ffn(ln2(x))


def ffn_first(x, ln1, attn, ln2, ffn):
    y = x + ffn(ln2(x))
    return y + attn(ln1(y))


def ffn_first_with_norms_in_order(x, ln1, attn, ln2, ffn):
    y = x + ffn(ln1(x))
    return y + attn(ln2(y))


BLOCK = {
    "each norm is after its addition (post-norm)": block_of(post_norm),
    "ln1 is after the addition (post-norm)": block_of(post_norm_of_attention),
    "ln2 is after the addition (post-norm)": block_of(post_norm_of_ffn),
    "each norm is after its layer, not before it": block_of(norms_of_results),
    "the norms are missing": block_of(without_norms),
    "ln1 is missing": block_of(without_ln1),
    "ln2 is missing": block_of(without_ln2),
    "the residual of attention adds ln1(x) in place of x": block_of(
        add_normed_to_attention
    ),
    "the residual of ffn adds ln2(y) in place of y": block_of(add_normed_to_ffn),
    "both residuals add what is normalized": block_of(add_normed_to_both),
    "the residual of attention is missing": block_of(without_first_residual),
    "the residual of ffn is missing": block_of(without_second_residual),
    "both residuals are missing": block_of(without_residuals),
    "the residual of ffn adds x, without the result of attention": block_of(
        with_x_in_both_residuals
    ),
    "the result of attention is added twice": block_of(with_attention_twice),
    "ffn reads x, without the result of attention": block_of(in_parallel),
    "ffn comes before attention": block_of(ffn_first),
    "ffn comes before attention, and the norms are swapped": block_of(
        ffn_first_with_norms_in_order
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
        f"in its ffn, {name}": block_of(pre_norm, feed_forward=ffn_of_layer(wrong))
        for name, wrong in FFN.items()
    },
    **{
        f"in its attention, {name}": block_of(pre_norm, attention=wrong)
        for name, wrong in ATTENTION.items()
    },
}


# Of each class or function.
MISTAKES = {
    "RMSNorm": {name: norm_of_layer(wrong) for name, wrong in NORM.items()},
    "SwiGLU": {name: ffn_of_layer(wrong) for name, wrong in FFN.items()},
    "RotaryPositionalEmbedding": {
        name: rope_of_layer(wrong) for name, wrong in ROPE.items()
    },
    "scaled_dot_product_attention": FUNCTION,
    "CausalMultiHeadSelfAttention": ATTENTION,
    "Block": BLOCK,
}
