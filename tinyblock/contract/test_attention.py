"""Attention: in each head softmax(Q K^T / sqrt(d_head)) V, over each token and the tokens before it.

Q, K and V are projections of x. Groups of query heads may share heads of K and V. An
RMSNorm over d_head and then RoPE may follow the projections of Q and K. A mask is True
where a query may attend to a key. A query without any key yields zeros.
"""

import math

import pytest
import torch

from .checks import (
    DTYPES,
    EPS,
    HALVES,
    OTHER_WEIGHTS,
    Cases,
    build,
    build_class,
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
    """Return softmax(q k^T / sqrt(d_head)) v over the keys that the mask shows to each query."""
    if mask is None:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    shares = scores.masked_fill(~mask, -math.inf).softmax(dim=-1)
    # For a query without any key, the softmax is NaN.
    shares = shares.masked_fill(~mask, 0)
    return shares @ v


def attend_causally(q, k, v, mask=None):
    """Attend to each token and the tokens before it, unless the mask hides them."""
    length = q.shape[-2]
    shown = torch.ones(length, length, dtype=torch.bool).tril()
    if mask is not None:
        shown = shown & mask
    return attend(q, k, v, shown)


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
    if d_head is None:
        d_head = x.shape[-1] // num_heads
    if num_kv_heads is None:
        num_kv_heads = num_heads
    group = num_heads // num_kv_heads

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
    mask[..., 3:4, :] = False  # a slice, because a mask may have a single row
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
    scale = options.pop("scale", 1.0)
    inputs = take_inputs(options)
    x = randn(*shape) * scale
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


def blend(q, k, v, mask):
    """Stand for attention: depend on all arguments, and take masks of numbers."""
    return 2 * q + mask @ (k - v)


def test_attend_may_be_overridden(attention):
    """The method of a subclass gets normalized and rotated queries and keys, and any mask."""
    base = find(attention, LAYER)
    find(base, "attend")  # skips the test where a copy has no such method
    options = {"rope": ROPE, "qk_norm": True}
    require_options(base, *options)

    class Blended(base):
        def attend(self, q, k, v, mask):
            return blend(q, k, v, mask)

    layer = build_class(Blended, 24, 4, **options)

    def formula(x, weights, token_positions, mask):
        heads = {"num_heads": 4, "attend": blend, **options}
        return self_attention(x, weights, token_positions, mask, **heads)

    x = randn(2, 7, 24)
    mask = randn(7, 7, seed=3)
    inputs = {"token_positions": POSITIONS, "mask": mask}
    check_equation(layer, formula, x, torch.float64, **inputs)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_scores_in_float32_or_wider(attention, dtype):
    """A layer in a half precision must not round its scores to that precision.

    All scores here are about 1024, and they differ by multiples of 1/4. A half cannot
    hold such differences at that size: the layer would weight the values wrongly.
    """
    layer = construct(attention, LAYER, 64, 1).to(dtype)
    # These weights make q = v = x, and k is x with its halves swapped, without rounding.
    identity = torch.eye(64, dtype=torch.float64)
    weights = dict.fromkeys(WEIGHTS, identity)
    weights["k_proj.weight"] = identity.roll(32, 0)
    if layer.state_dict().keys() != weights.keys():
        pytest.skip(OTHER_WEIGHTS)
    layer.load_state_dict(weights)

    # Components of 64 make the scores large, and components of 1 and -1 make them differ.
    large = [0, 32]
    signs = [column for column in range(64) if column not in large]
    x = randn(2, 9, 64, seed=3).sign()
    x[..., large] = 64
    swapped = x.roll(32, -1)
    expected = attend_causally(q=x, k=swapped, v=x)[..., signs]
    result = layer(x.to(dtype))[..., signs]
    check_close("result", result, expected, 4 * torch.finfo(dtype).eps)


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
