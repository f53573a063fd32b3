"""Attention: softmax(Q K^T / sqrt(d_head)) V, over each token and the tokens before it.

Q, K and V are projections of x, split into heads. A group of query heads may share a
head of K and V. RMSNorm over d_head and then RoPE may follow the projections of Q and
K. A mask is True where a query may attend to a key. A query without any key yields 0.
"""

import functools
import math
from unittest.mock import Mock

import pytest
import torch

from .checks import (
    EPS,
    HALVES,
    Case,
    Rope,
    Weights,
    case_of,
    check_close,
    for_each,
    name_of,
    randn,
)
from .every_layer import (
    EveryLayer,
    check_rounds_once,
    numbers,
)
from .target import is_foreign
from .test_rmsnorm import rms_norm
from .test_rope import OF_FOUR, POSITIONS, rope_of_positions

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
    d_model,
    num_heads,
    num_kv_heads=None,
    d_head=None,
    rope=None,
    qk_norm=False,
    eps=EPS,
    attend=attend_causally,
):
    """Attend in one head at a time, with its rows of the projections."""
    d_head = d_head or d_model // num_heads
    num_kv_heads = num_kv_heads or num_heads
    group = num_heads // num_kv_heads
    wq = weights.get_of("q_proj.weight", num_heads * d_head, d_model)
    wk = weights.get_of("k_proj.weight", num_kv_heads * d_head, d_model)
    wv = weights.get_of("v_proj.weight", num_kv_heads * d_head, d_model)
    wo = weights.get_of("output_proj.weight", d_model, num_heads * d_head)
    heads = []
    for head in range(num_heads):
        q = x @ rows_of(wq, head, d_head).T
        k = x @ rows_of(wk, head // group, d_head).T
        v = x @ rows_of(wv, head // group, d_head).T
        if qk_norm:
            q = rms_norm(q, weights.get_of("q_norm.weight", d_head), eps)
            k = rms_norm(k, weights.get_of("k_norm.weight", d_head), eps)
        if rope is not None:
            q = rope(q, token_positions)
            k = rope(k, token_positions)
        heads.append(attend(q, k, v, mask))
    return torch.cat(heads, dim=-1) @ wo.T


def rows_of(weight, head, d_head):
    return weight[head * d_head : (head + 1) * d_head]


def mask_of(*shape):
    """Show about 7 keys in 10, and none to the fourth query."""
    generator = torch.Generator().manual_seed(2)
    mask = torch.rand(*shape, generator=generator) < 0.7
    mask[..., 3:4, :] = False  # a slice, because a mask may have a single row
    return mask


case = functools.partial(
    case_of,
    "attention",
    "CausalMultiHeadSelfAttention",
    self_attention,
    d_model=24,
    num_heads=4,
)
of_function = functools.partial(
    Case,
    "attention",
    "scaled_dot_product_attention",
    attend,
    shape=(2, 3, 5, 11),
    weights=[(2, 3, 7, 11), (2, 3, 7, 4)],
)


def of_whole_layer(x, *weights, **options):
    """Attend with the weights of the layer, in the order of its function."""
    names = ("q_proj", "k_proj", "v_proj", "output_proj")
    named = zip((f"{name}.weight" for name in names), weights, strict=True)
    return self_attention(x, Weights(named), d_model=24, num_kv_heads=2, **options)


ROPE = {"rope": Rope(rope_of_positions)}
OTHER_THETA = {"rope": Rope(rope_of_positions, theta=1e4)}
OPTIONS = {"num_kv_heads": 2, "d_head": 20, "qk_norm": True, "eps": 1e-3, **ROPE}
# Each query attends to some keys, and to no others.
SOME_KEYS = {"mask": (torch.ones(5, 7).triu(-1) > 0) & (torch.arange(7) < 6)}
EACH_ITSELF = mask_of(2, 7, 7) | (torch.eye(7) > 0)


class TestAttention(EveryLayer):
    # From plain to special. The first one that fails leads to the cause (docs/verify.md).
    # No size follows from the others, but for as many sequences as heads, on purpose.
    cases = {
        "function, no mask": of_function(),
        "function": of_function(inputs=SOME_KEYS),
        "function, one batch axis": of_function(
            inputs=SOME_KEYS, shape=(2, 5, 11), weights=[(2, 7, 11), (2, 7, 4)]
        ),
        "function, a query without keys": of_function(
            inputs={"mask": mask_of(5, 7)}, is_common=False
        ),
        "one token": case(axes=(2, 1), num_heads=2),
        "one head": case(axes=(2, 5), num_heads=1),
        "plain": case(axes=(3, 10)),
        "positions": case(positions=POSITIONS, **ROPE),
        "another theta": case(positions=POSITIONS, **OTHER_THETA),
        "positions, as many sequences as heads": case(
            axes=(4, 7), positions=OF_FOUR, **ROPE
        ),
        "RoPE": case(is_common=False, **ROPE),
        "two key heads": case(num_kv_heads=2),
        "heads of size 1": case(d_head=1, is_common=False),
        "all options": case(positions=POSITIONS, mask=mask_of(2, 7, 7), **OPTIONS),
        "mask": case(mask=EACH_ITSELF),
        "padding mask, as many sequences": case(
            axes=(7, 7), mask=mask_of(7, 1, 7), is_common=False
        ),
        "no batch axis": case(
            axes=(7,),
            positions=POSITIONS[0],
            mask=mask_of(7, 7),
            is_common=False,
            **ROPE,
        ),
        "two batch axes, a mask of one row": case(
            axes=(2, 3, 7),
            positions=POSITIONS[0],
            mask=mask_of(1, 1, 7),
            is_common=False,
            **ROPE,
        ),
        "empty batch": case(axes=(0, 7), num_kv_heads=2, is_common=False),
        "equation": Case(
            "attention",
            "causal_multi_head_self_attention",
            of_whole_layer,
            shape=(2, 7, 24),
            options={"num_heads": 4, **ROPE},
            weights=[(24, 24), (12, 24), (12, 24), (24, 24)],
        ),
    }
    typical = ["plain", "all options"]
    rejected = {
        "d_model": (0,),
        "num_heads": (5, 0),
        "num_kv_heads": (3, 0),
        "eps": (0.0, math.nan, math.inf),
    }

    @pytest.mark.parametrize("half", HALVES, ids=name_of)
    def test_rounds_once(self, half, device):
        """The function alone, because a layer rounds after each projection."""
        names = ("function, no mask", "function", "function, a query without keys")
        functions = {name: self.cases[name] for name in names}
        for_each(functions, lambda case: check_rounds_once(case, half, device))

    @numbers
    def test_positions_are_0_1_2_if_none_are_passed(self):
        """A layer whose RoPE requires positions may raise an error, but not ignore RoPE."""

        def check(case):
            try:
                ran = case.run()
            except Exception as error:
                if not is_foreign("attention"):
                    raise
                pytest.skip(f"the layer requires token_positions: {error}")
            case.check(*ran, torch.float32)

        for_each({"RoPE": self.cases["RoPE"]}, check)

    @numbers
    def test_long_sequence(self):
        """Longer than a window, or than a mask of fixed size."""
        cases = {"1,100 tokens": case(axes=(1, 1100), d_model=8, num_heads=1)}
        for_each(cases, lambda case: case.check(*case.run(), torch.float32))

    @numbers
    def test_large_scores_do_not_overflow(self):
        """The softmax subtracts the greatest score before the exponential.

        Scores of hidden keys are -inf. A number such as -1e4 would be above some others.
        """

        def check(case):
            result, function, x = case.run()
            exact = case.exact(function, x)
            check_close("result", result, exact, 1e-4 * exact.norm())

        # They overflow in float64, too.
        some_keys = of_function(inputs=SOME_KEYS, x_scale=1e6)
        for_each({"mask": some_keys, "no mask": of_function(x_scale=1e6)}, check)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("query", [1, 2, 3, 7])
def test_attend_takes_queries_of_the_last_tokens(query, masked):
    """So a cache may put earlier keys first. Values may have another width."""
    layer = case(num_kv_heads=2).build()
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
    layer = case().build()
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
        case().build()(randn(2, 7, 24), mask=WRONG_MASKS[name])


@pytest.mark.parametrize(
    ("batch", "axes"), [((7,), (7, 7)), ((3, 7), (3, 7, 7)), ((3, 7), (7, 7))], ids=str
)
def test_rejects_a_mask_that_may_be_padding_or_a_row_for_each_query(batch, axes):
    with pytest.raises(ValueError, match="in one way"):
        case().build()(randn(*batch, 7, 24), mask=torch.ones(axes) > 0)


def test_rejects_one_position_for_all_tokens():
    """Also where nothing checks shapes. All tokens would have this position."""
    layer = case(**ROPE).build()
    with pytest.raises((RuntimeError, TypeError)):  # of einops, or of the shape check
        layer.project(randn(2, 7, 24), torch.ones(2, 1).long())


def test_rejects_positions_without_a_rope():
    with pytest.raises(ValueError, match="rope"):
        case().build()(randn(5, 24), torch.arange(5))


@pytest.mark.parametrize("d_k", [4, 8])
def test_rejects_a_rope_of_another_head_size(d_k):
    with pytest.raises(ValueError, match="d_k=6"):
        case().construct(rope=Mock(d_k=d_k))


@pytest.mark.parametrize("heads", [4, 2], ids=["of queries", "of keys"])
def test_rejects_a_rope_that_changes_the_shape(heads):
    """The result would broadcast to all sequences."""

    def rope(x, token_positions):
        return x[:1] if x.shape[1] == heads else x

    layer = case(num_kv_heads=2, rope=rope).build()
    with pytest.raises(ValueError, match=r"rope must return .* got .*\(1, "):
        layer(randn(2, 5, 24))
