"""Attention: softmax(Q K^T / sqrt(d_head)) V, over each token and the tokens before it.

Q, K and V are projections of x, split into heads. A group of query heads may share a
head of K and V. RMSNorm over d_head and then RoPE may follow the projections of Q and
K. A mask is True where a query may attend to a key. A query without any key yields 0.
"""

import functools
import itertools
import math
from unittest.mock import Mock

import pytest
import torch
from einops import EinopsError

from .checks import EPS, Case, Rope, Weights, case_of, check_close, randn
from .every_layer import (  # noqa: F401  with the tables of this page
    test_any_strides,
    test_built_on_meta,
    test_built_on_the_default_device,
    test_calls_change_nothing,
    test_compiles_to_one_graph,
    test_equation,
    test_equation_under_autocast,
    test_initial_weights,
    test_later_tokens_change_nothing,
    test_layer_is_defined,
    test_rejects_option,
    test_reset_parameters,
    test_rounds_once,
)
from .target import foreign
from .test_rmsnorm import rms_norm
from .test_rope import OF_FOUR, POSITIONS, rope_of_positions

NAMES_OF_WEIGHTS = [
    "q_proj.weight",
    "k_proj.weight",
    "v_proj.weight",
    "output_proj.weight",
]


ALL_KEYS = torch.tensor(True)


def attend(q, k, v, mask=ALL_KEYS):
    """Return softmax(q k^T / sqrt(d_head)) v over the keys that the mask shows."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    shares = scores.masked_fill(~mask, -math.inf).softmax(dim=-1)
    # For a query without any key, the softmax is NaN.
    return shares.masked_fill(~mask, 0) @ v


def attend_causally(q, k, v, mask=None):
    """Attend from the last tokens among the keys."""
    query, key = q.shape[-2], k.shape[-2]
    shown = torch.ones(query, key, dtype=torch.bool).tril(key - query)
    return attend(q, k, v, shown if mask is None else shown & mask)


def self_attention(
    x,
    weights,
    token_positions=None,
    mask=None,
    *,
    num_heads,
    num_kv_heads=None,
    d_head=None,
    rope=None,
    qk_norm=False,
    eps=EPS,
    attend=attend_causally,
    **sizes,
):
    """Attend in one head at a time, with its rows of the projections."""
    d_head = d_head or x.shape[-1] // num_heads
    group = num_heads // (num_kv_heads or num_heads)

    def project(name, head):
        rows = slice(head * d_head, (head + 1) * d_head)
        return x @ weights[f"{name}.weight"][rows].T

    heads = []
    for head in range(num_heads):
        q = project("q_proj", head)
        k = project("k_proj", head // group)
        v = project("v_proj", head // group)
        if qk_norm:
            q = rms_norm(q, weights["q_norm.weight"], eps)
            k = rms_norm(k, weights["k_norm.weight"], eps)
        if rope is not None:
            q = rope(q, token_positions)
            k = rope(k, token_positions)
        heads.append(attend(q, k, v, mask))
    return torch.cat(heads, dim=-1) @ weights["output_proj.weight"].T


def mask_of(*shape):
    """Show about 7 keys in 10, and none to the fourth query."""
    generator = torch.Generator().manual_seed(2)
    mask = torch.rand(*shape, generator=generator) < 0.7
    mask[..., 3:4, :] = False  # a slice, because a mask may have a single row
    return mask


def scaled_by(exponent):
    """Return attention whose scores have another power of d_head as a factor."""

    def wrong(q, k, v, mask=ALL_KEYS):
        return attend(q * q.shape[-1] ** (exponent + 0.5), k, v, mask)

    return wrong


def attend_over_queries(q, k, v, mask=ALL_KEYS):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(~mask, -math.inf).softmax(dim=-2) @ v


# Wrong formulas of the function.
OF_ATTEND = {
    "the scores are not divided by sqrt(d_k)": scaled_by(0),
    "the scores are divided by d_k in place of sqrt(d_k)": scaled_by(-1),
    "the softmax is over the queries in place of the keys": attend_over_queries,
    "the mask is inverted; True lets a query attend": lambda q, k, v, mask=ALL_KEYS: (
        attend(q, k, v, ~mask)
    ),
    "the mask is ignored": lambda q, k, v, mask=ALL_KEYS: attend(q, k, v),
}


def of_layer(attend, diagonal=0):
    """Return the layer with another attention, to `diagonal` tokens ahead."""

    def wrong(q, k, v, mask=None):
        shown = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(diagonal)
        return attend(q, k, v, shown)

    return functools.partial(self_attention, attend=wrong)


def with_heads_last(*names):
    """Return the layer with the components of these projections as (d_head heads)."""

    def wrong(x, weights, *, num_heads, d_head=None, **given):
        d_head = d_head or x.shape[-1] // num_heads
        changed = Weights(weights)
        for name in names:
            weight = weights[f"{name}.weight"]
            axis = 1 if name == "output_proj" else 0
            order = torch.arange(weight.shape[axis]).view(d_head, -1).T.flatten()
            changed[f"{name}.weight"] = weight.index_select(axis, order)
        return self_attention(x, changed, num_heads=num_heads, d_head=d_head, **given)

    return wrong


def with_rope_on_values(x, weights, token_positions=None, *, rope=None, **given):
    def wrong(q, k, v, mask=None):
        rotated = v if rope is None else rope(v, token_positions)
        return attend_causally(q, k, rotated, mask)

    return self_attention(x, weights, token_positions, rope=rope, attend=wrong, **given)


def with_rope_on_queries(x, weights, token_positions=None, *, rope=None, **given):
    def wrong(q, k, v, mask=None):
        if rope is not None:
            positions = token_positions
            if positions is None:
                positions = torch.arange(x.shape[-2])
            k = rope(k, -positions)  # turns k back
        return attend_causally(q, k, v, mask)

    return self_attention(x, weights, token_positions, rope=rope, attend=wrong, **given)


def with_positions_of_heads(x, weights, token_positions=None, *, rope=None, **given):
    """Use the positions of a sequence for a head, if there are as many."""
    if token_positions is None or len(token_positions) != given["num_heads"]:
        return self_attention(x, weights, token_positions, rope=rope, **given)
    # self_attention rotates q and k of the first head, then of the second, ...
    rows = iter(token_positions.repeat_interleave(2, dim=0))

    def rotate(x, token_positions):
        return rope(x, next(rows))

    return self_attention(x, weights, token_positions, rope=rotate, **given)


def with_weights(**others):
    """Return the layer with other projections, such as q_proj="k_proj"."""

    def wrong(x, weights, **given):
        changed = Weights(weights)
        for name, other in others.items():
            weight = weights[f"{other}.weight"]
            if weight.shape == weights[f"{name}.weight"].shape:
                changed[f"{name}.weight"] = weight
        return self_attention(x, changed, **given)

    return wrong


def without_output_projection(x, weights, **given):
    changed = Weights(weights)
    weight = weights["output_proj.weight"]
    changed["output_proj.weight"] = torch.eye(*weight.shape, dtype=weight.dtype)
    return self_attention(x, changed, **given)


def attend_to_later_tokens(q, k, v, mask=None):
    return attend(q, k, v, torch.ones(q.shape[-2], k.shape[-2]).triu() > 0)


QKV = ("q_proj", "k_proj", "v_proj")
# Wrong formulas of the layer.
MISTAKES = {
    "each token attends to all tokens": of_layer(lambda q, k, v, mask: attend(q, k, v)),
    "each token attends to itself and to later tokens": functools.partial(
        self_attention, attend=attend_to_later_tokens
    ),
    "each token also attends to the next one": of_layer(attend, diagonal=1),
    "the softmax is over the queries in place of the keys": of_layer(
        attend_over_queries
    ),
    "the scores are not divided by sqrt(d_k)": of_layer(scaled_by(0)),
    "the scores are divided by d_k in place of sqrt(d_k)": of_layer(scaled_by(-1)),
    "the projections are split as (d_k heads), not (heads d_k)": with_heads_last(*QKV),
    "the heads are merged as (d_k heads), not (heads d_k)": with_heads_last(
        "output_proj"
    ),
    "the projections are split and merged as (d_k heads), not (heads d_k)": (
        with_heads_last(*QKV, "output_proj")
    ),
    "the output projection is missing": without_output_projection,
    **{
        f"{other} stands in place of {name}": with_weights(**{name: other})
        for name, other in itertools.permutations(QKV, 2)
    },
    "q_proj and k_proj are swapped": with_weights(q_proj="k_proj", k_proj="q_proj"),
    "RoPE is missing": lambda x, weights, token_positions=None, rope=None, **given: (
        self_attention(x, weights, **given)
    ),
    "token_positions are ignored": lambda x, weights, token_positions=None, **given: (
        self_attention(x, weights, **given)
    ),
    "positions of a sequence rotate a head; pass token_positions[..., None, :]": (
        with_positions_of_heads
    ),
    "RoPE also rotates v": with_rope_on_values,
    "RoPE does not rotate k": with_rope_on_queries,
}


case = functools.partial(
    case_of,
    "attention",
    "CausalMultiHeadSelfAttention",
    self_attention,
    num_heads=4,
    mistakes=MISTAKES,
)
of_function = functools.partial(
    Case,
    "attention",
    "scaled_dot_product_attention",
    attend,
    shape=(2, 3, 5, 8),
    weights=[(2, 3, 7, 8), (2, 3, 7, 4)],
    rounds_once=True,
    mistakes=OF_ATTEND,
)


def of_whole_layer(kv_width, **options):
    """The function has the weights of the layer, in its order."""

    def formula(x, *weights, **options):
        named = dict(zip(NAMES_OF_WEIGHTS, weights, strict=True))
        return self_attention(x, named, num_kv_heads=kv_width // 6, **options)

    return Case(
        "attention",
        "causal_multi_head_self_attention",
        formula,
        shape=(2, 7, 24),
        options=options,
        weights=[(24, 24), (kv_width, 24), (kv_width, 24), (24, 24)],
    )


ROPE = {"rope": Rope(rope_of_positions)}
OTHER_THETA = {"rope": Rope(rope_of_positions, theta=1e4)}
# Each query attends to some keys, and to no others.
SOME_KEYS = {"mask": (torch.ones(5, 7).triu(-1) > 0) & (torch.arange(7) < 6)}
OPTIONS = {"num_kv_heads": 2, "d_head": 20, "qk_norm": True, **ROPE}
EACH = {"token_positions": POSITIONS}
BOTH = {"token_positions": POSITIONS, "mask": mask_of(2, 7, 7)}
OF_ONE_SEQUENCE = {"token_positions": POSITIONS[0], "mask": mask_of(7, 7)}
# From plain to special. The first one that fails leads to the cause (docs/verify.md).
CASES = {
    "function, no mask": of_function(),
    "function": of_function(inputs=SOME_KEYS),
    "function, one batch axis": of_function(
        inputs=SOME_KEYS, shape=(2, 5, 8), weights=[(2, 7, 8), (2, 7, 4)]
    ),
    "function, a query without keys": of_function(
        inputs={"mask": mask_of(5, 7)}, is_common=False
    ),
    "one token": case(2, 1, 24, num_heads=2),
    "one head": case(2, 7, 24, num_heads=1),
    "plain": case(2, 7, 24),
    "80 tokens": case(1, 80, 64, num_heads=1),  # longer than a window or a fixed mask
    "positions": case(2, 7, 24, inputs=EACH, **ROPE),
    "another theta": case(2, 7, 24, inputs=EACH, **OTHER_THETA),
    "positions, as many sequences as heads": case(
        4, 7, 24, inputs={"token_positions": OF_FOUR}, **ROPE
    ),
    "RoPE": case(2, 7, 24, is_common=False, **ROPE),
    "one key head, RoPE": case(2, 7, 24, num_kv_heads=1, **ROPE),
    "normalized, another eps": case(2, 7, 24, qk_norm=True, eps=1e-3),
    "all options": case(2, 7, 24, inputs=BOTH, **OPTIONS),
    "mask of one row": case(
        1, 1, 7, 24, inputs={"mask": mask_of(1, 1, 7)}, is_common=False
    ),
    "padding mask, as many sequences": case(
        7, 7, 24, inputs={"mask": mask_of(7, 1, 7)}
    ),
    "no batch axis": case(7, 24, inputs=OF_ONE_SEQUENCE, is_common=False, **ROPE),
    "two batch axes": case(
        2, 3, 7, 24, inputs=OF_ONE_SEQUENCE, is_common=False, **ROPE
    ),
    "empty batch": case(0, 5, 24, num_kv_heads=2, is_common=False),
    "equation": of_whole_layer(24, num_heads=4),
    "equation, two key heads, RoPE": of_whole_layer(12, num_heads=4, **ROPE),
}
TYPICAL = ["plain", "all options"]
REJECTED = {
    "d_model": (0,),
    "num_heads": (5, 0),
    "num_kv_heads": (3, 0),
    "d_head": (0,),
    "eps": (0.0, math.nan, math.inf),
}


@pytest.mark.numbers
def test_positions_are_0_1_2_if_none_are_passed():
    """A layer whose RoPE requires positions may raise an error, but not ignore RoPE."""
    case = CASES["RoPE"]
    layer = case.build(dtype=torch.float32)
    x, _ = case.arguments(dtype=torch.float32)
    try:
        result = layer(x)
    except Exception as error:
        if "attention" not in foreign:
            raise
        pytest.skip(f"the layer requires token_positions: {error}")
    case.check(result, layer, x, torch.float32)


@pytest.mark.numbers
def test_large_scores_do_not_overflow():
    """The softmax subtracts the greatest score before the exponential.

    Scores of hidden keys are -inf. A number such as -1e4 would be above some others.
    """
    for inputs in (SOME_KEYS, {}):
        large = of_function(inputs=inputs, scale=1e6)  # overflows in float64, too
        function = large.build(dtype=torch.float32)
        x, _ = large.arguments(dtype=torch.float32)
        exact = large.exact(function, x)
        check_close("result", function(x, **inputs), exact, 1e-4 * exact.norm())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("query", [1, 2, 3, 7])
def test_attend_takes_queries_of_the_last_tokens(query, masked):
    """So a cache may put earlier keys first. Values may have another width."""
    layer = case(1, 24, num_kv_heads=2, qk_norm=True, **ROPE).build()
    q = randn(2, 3, 4, query, 6, seed=1)
    k = randn(2, 3, 2, 7, 6, seed=2)
    v = randn(2, 3, 2, 7, 5, seed=3)
    mask = mask_of(2, 3, query, 7) if masked else None
    result = layer.attend(q, k, v, mask)
    k = k.repeat_interleave(2, dim=2)
    v = v.repeat_interleave(2, dim=2)
    if masked:
        mask = mask.unsqueeze(2)  # for all heads
    torch.testing.assert_close(result, attend_causally(q, k, v, mask))


def test_attend_rejects_more_queries_than_keys():
    layer = case(1, 24).build()
    k = randn(2, 4, 5, 6)
    with pytest.raises(ValueError, match=r"7.* 5"):
        layer.attend(randn(2, 4, 7, 6), k, k, None)


BOOLS = torch.ones(2, 4, 7, 7) > 0
# For x of shape (2, 7, 24). torch would accept most of them, and read some differently.
WRONG_MASKS = {
    "additive": torch.zeros(2, 7, 7),
    "ones": torch.ones(2, 1, 7).long(),
    "a list": [[True] * 7] * 7,
    "a bool": True,
    "padding without an axis for queries": BOOLS[:, 0, 0],
    "no axis but the keys": BOOLS[0, 0, 0],
    "another batch": BOOLS[0, :3],
    "other queries": BOOLS[0, 0, :3],
    "one key for all": BOOLS[0, 0, :, :1],
    "an axis for heads": BOOLS[:, :1],
    "a row for each head": BOOLS,
}


@pytest.mark.parametrize("name", WRONG_MASKS)
def test_rejects_a_wrong_mask(name):
    with pytest.raises(ValueError, match=r"mask must be bool.*\(2, 7, 7\)"):
        case(7, 24).build()(randn(2, 7, 24), mask=WRONG_MASKS[name])


@pytest.mark.parametrize(
    ("batch", "axes"), [((7,), (7, 7)), ((3, 7), (3, 7, 7)), ((3, 7), (7, 7))], ids=str
)
def test_rejects_a_mask_that_may_be_padding_or_a_row_for_each_query(batch, axes):
    with pytest.raises(ValueError, match="in one way"):
        case(7, 24).build()(randn(*batch, 7, 24), mask=torch.ones(axes) > 0)


def test_rejects_one_position_for_all_tokens():
    """Also where nothing checks shapes. All tokens would have this position."""
    layer = case(2, 7, 24, **ROPE).build()
    with pytest.raises((EinopsError, TypeError)):
        layer.project(randn(2, 7, 24), torch.ones(2, 1).long())


def test_rejects_positions_without_a_rope():
    with pytest.raises(ValueError, match="rope"):
        case(5, 24).build()(randn(5, 24), torch.arange(5))


def test_rejects_a_rope_of_another_head_size():
    with pytest.raises(ValueError, match="d_k=6"):
        case(5, 24).construct(rope=Mock(d_k=4))


@pytest.mark.parametrize("heads", [4, 2], ids=["of queries", "of keys"])
def test_rejects_a_rope_that_changes_the_shape(heads):
    """The result would broadcast to all sequences."""

    def rope(x, token_positions):
        return x[:1] if x.shape[1] == heads else x

    layer = case(5, 24, num_kv_heads=2, rope=rope).build()
    with pytest.raises(ValueError, match=r"rope must return .* got \(1, "):
        layer(randn(2, 5, 24))
