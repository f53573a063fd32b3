"""Attention: in each head softmax(Q K^T / sqrt(d_head)) V, over each token and the tokens before it.

Q, K and V are projections of x. Groups of query heads may share heads of K and V. An
RMSNorm over d_head and then RoPE may follow the projections of Q and K. A mask is True
where a query may attend to a key. A query without any key yields zeros.
"""

import math
from itertools import product

import pytest
import torch

from .checks import (
    DTYPES,
    EPS,
    HALVES,
    OTHER_NAMES,
    Cases,
    build,
    check_autocast,
    check_causality,
    check_checkpointing,
    check_close,
    check_compiles,
    check_equation,
    check_function,
    check_function_rounds_once,
    check_initial_weights,
    check_masks,
    check_on_cuda,
    check_placement,
    check_rejects_input,
    check_rejects_option,
    check_relative_positions,
    check_weight_names,
    construct,
    find,
    randn,
    require_options,
)
from .test_rmsnorm import rms_norm
from .test_rope import POSITIONS, rope_of_positions

LAYER = "CausalMultiHeadSelfAttention"


def attend(q, k, v, mask=None):
    """Attend with one softmax for each query, over the keys that it may attend to."""
    shape = (*q.shape[:-1], k.shape[-2])
    mask = torch.ones(shape, dtype=torch.bool) if mask is None else mask.expand(shape)
    rows = [v.new_zeros(0)]  # cat needs a tensor, also for an empty batch
    for query in product(*[range(size) for size in q.shape[:-1]]):
        batch = query[:-1]
        seen = mask[query]
        if not seen.any():
            rows.append(v.new_zeros(v.shape[-1]))
            continue
        scores = k[batch][seen] @ q[query] / math.sqrt(q.shape[-1])
        rows.append(scores.softmax(0) @ v[batch][seen])
    return torch.cat(rows).reshape(*q.shape[:-1], v.shape[-1])


def attend_causally(q, k, v, mask=None):
    causal = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
    return attend(q, k, v, causal if mask is None else causal & mask)


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
    """Return a mask that is True for about 7 keys in 10, and for none of the fourth query."""
    generator = torch.Generator().manual_seed(2)
    mask = torch.rand(*shape, generator=generator) < 0.7
    mask[..., 3:4, :] = False
    return mask


# Options of the layer, and the input. Each case has 4 heads and x of shape (2, 7, 24), unless it says otherwise.
ROPE = rope_of_positions
CASES: Cases = {
    "plain": {},
    "two key heads": {"num_kv_heads": 2},
    "one key head": {"num_kv_heads": 1},
    "another head size": {"d_head": 10},
    "normalized": {"qk_norm": True},
    "normalized, another head size": {"d_head": 10, "qk_norm": True},
    "normalized, another eps": {"qk_norm": True, "num_kv_heads": 2, "eps": 1e-3},
    "masked": {"mask": mask_of(2, 7, 7)},
    "RoPE": {"rope": ROPE},
    "RoPE, two key heads": {"rope": ROPE, "num_kv_heads": 2},
    "RoPE, one key head": {"rope": ROPE, "num_kv_heads": 1},
    "RoPE, normalized": {"rope": ROPE, "d_head": 10, "qk_norm": True},
    "RoPE, positions, mask": {
        "rope": ROPE,
        "num_kv_heads": 2,
        "token_positions": POSITIONS,
        "mask": mask_of(2, 7, 7),
    },
    "RoPE, positions for one of two batch axes": {
        "rope": ROPE,
        "qk_norm": True,
        "num_kv_heads": 2,
        "shape": (2, 3, 7, 24),
        "token_positions": POSITIONS[:1],
    },
    "RoPE, no batch axis": {
        "rope": ROPE,
        "shape": (7, 24),
        "token_positions": POSITIONS[0],
        "mask": mask_of(7, 7),
    },
    "RoPE, an empty axis": {
        "rope": ROPE,
        "shape": (2, 0, 7, 24),
        "token_positions": POSITIONS[0],
        "mask": mask_of(7, 7),
    },
    # Longer than a window or than a fixed mask, in a head as wide as in use.
    "80 tokens": {"num_heads": 1, "shape": (80, 64)},
}
SHAPES = [(5, 24), (0, 5, 24), (1, 5, 24), (2, 0, 5, 24), (2, 3, 5, 24), (2, 1, 24)]
IN_FLOAT64: Cases = {
    # exp overflows for these scores.
    "large scores": {"scale": 30.0},
    "large scores, masked": {"scale": 30.0, "mask": mask_of(2, 7, 7)},
    "mask for one of two batch axes": {
        "shape": (2, 3, 5, 24),
        "mask": mask_of(3, 1, 5),
    },
}
for _shape in SHAPES:
    IN_FLOAT64[f"x of shape {_shape}"] = {"shape": _shape, "num_kv_heads": 2}
ALL_CASES = CASES | IN_FLOAT64


def take_inputs(options):
    """Remove token_positions and mask from a case, and return them."""
    inputs = {}
    for name in ("token_positions", "mask"):
        if name in options:
            inputs[name] = options.pop(name)
    return inputs


def prepare(attention, case):
    """Return a layer, its formula, x, and further inputs."""
    options = {"num_heads": 4, **ALL_CASES[case]}
    shape = options.pop("shape", (2, 7, 24))
    x = randn(*shape) * options.pop("scale", 1.0)
    inputs = take_inputs(options)
    layer = build(attention, LAYER, shape[-1], **options)
    require_options(layer.forward, *inputs)

    def formula(x, weights, token_positions=None, mask=None):
        return self_attention(x, weights, token_positions, mask, **options)

    return layer, formula, x, inputs


def test_is_defined(attention):
    assert hasattr(attention, LAYER), f"the file has no {LAYER}"


WEIGHTS = ["q_proj.weight", "k_proj.weight", "v_proj.weight", "output_proj.weight"]
NORMS = ["q_norm.weight", "k_norm.weight"]


@pytest.mark.parametrize("qk_norm", [False, True])
def test_weight_names(attention, qk_norm):
    options = {"qk_norm": True, "rope": ROPE} if qk_norm else {}
    layer = build(attention, LAYER, 24, 4, **options)
    check_weight_names(layer, *WEIGHTS, *(NORMS if qk_norm else []))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equation(attention, case, dtype):
    layer, formula, x, inputs = prepare(attention, case)
    check_equation(layer, formula, x, dtype, **inputs)


@pytest.mark.parametrize("case", IN_FLOAT64)
def test_equation_in_float64(attention, case):
    layer, formula, x, inputs = prepare(attention, case)
    check_equation(layer, formula, x, torch.float64, **inputs)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equation_on_cuda(attention, case, dtype):
    layer, formula, x, inputs = prepare(attention, case)
    check_on_cuda(layer, formula, x, dtype, **inputs)


@pytest.mark.cuda
@pytest.mark.parametrize("case", IN_FLOAT64)
def test_equation_in_float64_on_cuda(attention, case):
    layer, formula, x, inputs = prepare(attention, case)
    check_on_cuda(layer, formula, x, torch.float64, **inputs)


@pytest.mark.parametrize("case", CASES)
def test_autocast(attention, case):
    layer, formula, x, inputs = prepare(attention, case)
    check_autocast(layer, formula, x, **inputs)


@pytest.mark.parametrize("case", ["plain", "RoPE, positions, mask"])
def test_checkpointing(attention, case):
    layer, formula, x, inputs = prepare(attention, case)
    check_checkpointing(layer, formula, x, **inputs)


@pytest.mark.parametrize("case", ALL_CASES)
def test_causality(attention, case):
    layer, _, x, inputs = prepare(attention, case)
    check_causality(layer, x, **inputs)


@pytest.mark.parametrize(
    "case", [case for case in ALL_CASES if "mask" not in ALL_CASES[case]]
)
def test_masks(attention, case):
    layer, _, x, inputs = prepare(attention, case)
    check_masks(layer, x, **inputs)


def test_relative_positions_only(attention):
    layer, _, x, _ = prepare(attention, "RoPE")
    check_relative_positions(layer, x)


def test_compiles_to_one_graph(attention):
    layer, _, _, _ = prepare(attention, "plain")
    check_compiles(layer, lambda length: {"x": randn(2, length, 24)})


def all_inputs_of(length):
    return {
        "x": randn(2, length, 24),
        "token_positions": torch.arange(length) + 3,
        "mask": (torch.arange(length) != 1).expand(length, length),
    }


def test_compiles_with_positions_and_mask_to_one_graph(attention):
    layer, _, _, _ = prepare(attention, "RoPE, positions, mask")
    check_compiles(layer, all_inputs_of)


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "qk_norm": True}], ids=str)
def test_device_and_dtype(attention, options):
    check_placement(attention, LAYER, 24, 4, **options)


def test_initial_weights(attention):
    check_initial_weights(construct(attention, LAYER, 192, 4))


def test_initial_weights_of_other_heads(attention):
    options = {"num_kv_heads": 2, "d_head": 32, "qk_norm": True}
    check_initial_weights(construct(attention, LAYER, 192, 4, **options))


def test_attend_may_be_overridden(attention):
    """The method gets normalized and rotated queries and keys, and any mask."""
    base = find(attention, LAYER)
    find(base, "attend")
    options = {"rope": ROPE, "qk_norm": True}
    require_options(base, *options)

    def blend(q, k, v, mask):
        return 2 * q + mask @ (k - v)

    class Blended(base):
        def attend(self, q, k, v, mask):
            return blend(q, k, v, mask)

    attention_of_blended = type("layer", (), {LAYER: Blended})
    layer = build(attention_of_blended, LAYER, 24, 4, **options)

    def formula(x, weights, token_positions, mask):
        return self_attention(
            x, weights, token_positions, mask, num_heads=4, attend=blend, **options
        )

    inputs = {"token_positions": POSITIONS, "mask": randn(7, 7, seed=3)}
    check_equation(layer, formula, randn(2, 7, 24), torch.float64, **inputs)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_scores_in_float32_or_wider(attention, dtype):
    """Scores are about 1024, and multiples of 1/4, which a half cannot hold; q, k and v are exact.

    x has random signs, and 64 in columns 0 and 32. q and v are x, and k is x with its
    halves swapped.
    """
    x = randn(2, 9, 64, seed=3).sign()
    x[..., ::32] = 64
    identity = torch.eye(64, dtype=torch.float64)
    weights = dict.fromkeys(WEIGHTS, identity)
    weights["k_proj.weight"] = identity.roll(32, 0)
    exact = attend_causally(x, x.roll(32, -1), x)
    layer = construct(attention, LAYER, 64, 1).to(dtype)
    if layer.state_dict().keys() != weights.keys():
        pytest.skip(OTHER_NAMES)
    layer.load_state_dict(weights)
    signs = [column for column in range(64) if column % 32]
    result = layer(x.to(dtype))[..., signs]
    check_close("result", result, exact[..., signs], 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_rejects_masks_that_are_not_bool(attention, dtype):
    """Also compiled, where no shape check sees them."""
    layer = construct(attention, LAYER, 24, 4)
    inputs = {"x": torch.zeros(1, 5, 24), "mask": torch.zeros(5, 5, dtype=dtype)}
    check_rejects_input(layer, dtype, inputs)


def test_rejects_positions_without_a_rope(attention):
    layer = construct(attention, LAYER, 24, 4)
    inputs = {"x": torch.zeros(1, 5, 24), "token_positions": torch.arange(5)}
    check_rejects_input(layer, "rope", inputs)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("d_model", 0),
        ("num_heads", 5),
        ("num_heads", 0),
        ("num_heads", -4),
        ("num_kv_heads", 3),
        ("num_kv_heads", 0),
        ("d_head", 0),
        ("eps", 0.0),
        ("eps", math.nan),
    ],
)
def test_rejects_hyperparameters(attention, option, value):
    valid = {"d_model": 24, "num_heads": 4}
    check_rejects_option(attention, LAYER, valid, option, value)


class RopeOfHeadSize4:
    """Not the size of a head, which is 6."""

    d_k = 4

    def __call__(self, x, token_positions):
        return x


def test_rejects_a_rope_of_another_head_size(attention):
    valid = {"d_model": 24, "num_heads": 4}
    check_rejects_option(attention, LAYER, valid, "rope", RopeOfHeadSize4())


HEADS = [(2, 2, 5, 8), (2, 2, 7, 8), (2, 2, 7, 4)]
FUNCTION_CASES = {
    "no mask": (HEADS, None),
    "mask": (HEADS, mask_of(5, 7)),
    "mask for each head": (HEADS, mask_of(2, 2, 5, 7)),
    "no batch axis": ([(5, 8), (7, 8), (7, 4)], mask_of(5, 7)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", FUNCTION_CASES)
def test_scaled_dot_product_attention(attention, case, dtype):
    function = find(attention, "scaled_dot_product_attention")
    shapes, mask = FUNCTION_CASES[case]
    check_function(function, attend, shapes, dtype, mask=mask)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", FUNCTION_CASES)
def test_scaled_dot_product_attention_rounds_once(attention, case, dtype):
    function = find(attention, "scaled_dot_product_attention")
    shapes, mask = FUNCTION_CASES[case]
    check_function_rounds_once(function, attend, shapes, dtype, mask=mask)
