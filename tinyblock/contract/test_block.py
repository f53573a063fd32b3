"""The pre-norm block: y = x + attention(norm(x)), and the result is y + ffn(norm(y))."""

import pytest
import torch
from torch import nn

from .checks import (
    DTYPES,
    EPS,
    Cases,
    FunctionLayer,
    build,
    check_autocast,
    check_causality,
    check_checkpointing,
    check_compiles,
    check_equation,
    check_initial_weights,
    check_masks,
    check_matrix_sizes,
    check_on_cuda,
    check_placement,
    check_relative_positions,
    check_weight_names,
    construct,
    find,
    randn,
    require_options,
)
from .test_attention import WEIGHTS as ATTENTION_WEIGHTS
from .test_attention import all_inputs_of, mask_of, self_attention, take_inputs
from .test_ffn import feed_forward_of_weights, swiglu_of_weights
from .test_rmsnorm import rms_norm
from .test_rope import POSITIONS, rope_of_positions


def weights_of(part, weights):
    """Return the weights of a part of a layer, by their names in that part."""
    prefix = f"{part}."
    names = [name for name in weights if name.startswith(prefix)]
    return {name.removeprefix(prefix): weights[name] for name in names}


def norm_of_weights(x, weights, eps):
    return rms_norm(x, weights["weight"], eps)


def pre_norm_block(
    x,
    weights,
    token_positions=None,
    mask=None,
    *,
    norm=norm_of_weights,
    attention=self_attention,
    ffn=swiglu_of_weights,
    eps=EPS,
    num_heads=4,
    **heads,
):
    normed = norm(x, weights_of("ln1", weights), eps)
    attended = attention(
        normed,
        weights_of("attn", weights),
        token_positions,
        mask,
        eps=eps,
        num_heads=num_heads,
        **heads,
    )
    y = x + attended
    normed = norm(y, weights_of("ln2", weights), eps)
    return y + ffn(normed, weights_of("ffn", weights))


# Options of the layer, and the input. x has the shape (2, 7, 24), unless a case says otherwise.
ROPE = {"rope": rope_of_positions}
EVERY_OPTION = {"num_kv_heads": 2, "d_head": 8, "qk_norm": True, "eps": 1e-3}
CASES: Cases = {
    "RoPE": ROPE,
    "no RoPE": {},
    "two key heads": {**ROPE, "num_kv_heads": 2},
    "another head size": {**ROPE, "d_head": 8},
    "normalized": {**ROPE, "qk_norm": True},
    "another eps": {**ROPE, "eps": 1e-3},
    "every option": {**ROPE, **EVERY_OPTION},
    "every option, positions, mask": {
        **ROPE,
        **EVERY_OPTION,
        "token_positions": POSITIONS,
        "mask": mask_of(2, 7, 7),
    },
    "positions": {**ROPE, "token_positions": POSITIONS},
    "mask": {"mask": mask_of(2, 7, 7)},
    "no batch axis": {**ROPE, "shape": (5, 24)},
    "empty batch": {**ROPE, "shape": (0, 5, 24)},
    "two batch axes": {**ROPE, "shape": (2, 1, 3, 24)},
    "one token": {**ROPE, "shape": (2, 1, 24)},
    # In the course's edition of 2024 the block has GELU, and no RoPE.
    "2024": {"ffn": "FeedForward"},
}


def prepare(block, ffn, case):
    """Return a layer, its formula, x, and further inputs."""
    options = dict(CASES[case])
    shape = options.pop("shape", (2, 7, 24))
    inputs = take_inputs(options)
    parts = {}
    formulas = {}
    if "ffn" in options:
        parts["ffn"] = find(ffn, options.pop("ffn"))
        formulas["ffn"] = feed_forward_of_weights
    layer = build(block, "Block", 24, 4, 40, **options, **parts)
    require_options(layer.forward, *inputs)

    def formula(x, weights, token_positions=None, mask=None):
        return pre_norm_block(x, weights, token_positions, mask, **options, **formulas)

    return layer, formula, randn(*shape), inputs


def test_is_defined(block):
    assert hasattr(block, "Block"), "the file has no Block"


WEIGHTS = [
    "ln1.weight",
    *(f"attn.{name}" for name in ATTENTION_WEIGHTS),
    "ln2.weight",
    "ffn.w1.weight",
    "ffn.w2.weight",
    "ffn.w3.weight",
]
NORMS = ["attn.q_norm.weight", "attn.k_norm.weight"]


@pytest.mark.parametrize("qk_norm", [False, True])
def test_weight_names(block, qk_norm):
    options = {"qk_norm": True} if qk_norm else {}
    layer = build(block, "Block", 24, 4, 40, **options)
    check_weight_names(layer, *WEIGHTS, *(NORMS if qk_norm else []))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equation(block, ffn, case, dtype):
    layer, formula, x, inputs = prepare(block, ffn, case)
    check_equation(layer, formula, x, dtype, **inputs)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equation_on_cuda(block, ffn, case, dtype):
    layer, formula, x, inputs = prepare(block, ffn, case)
    check_on_cuda(layer, formula, x, dtype, **inputs)


def test_d_ff_is_the_width_of_the_feed_forward_layer(block):
    layer = construct(block, "Block", 24, 4, 40)
    of_attention = 4 * 24 * 24
    of_swiglu = 3 * 24 * 40
    check_matrix_sizes("Block(24, 4, 40)", layer, of_attention + of_swiglu)


@pytest.mark.parametrize("case", CASES)
def test_autocast(block, ffn, case):
    layer, formula, x, inputs = prepare(block, ffn, case)
    check_autocast(layer, formula, x, **inputs)


@pytest.mark.parametrize("case", ["every option, positions, mask", "2024"])
def test_checkpointing(block, ffn, case):
    layer, formula, x, inputs = prepare(block, ffn, case)
    check_checkpointing(layer, formula, x, **inputs)


@pytest.mark.parametrize("case", CASES)
def test_causality(block, ffn, case):
    layer, _, x, inputs = prepare(block, ffn, case)
    check_causality(layer, x, **inputs)


@pytest.mark.parametrize("case", [case for case in CASES if "mask" not in CASES[case]])
def test_masks(block, ffn, case):
    layer, _, x, inputs = prepare(block, ffn, case)
    check_masks(layer, x, **inputs)


def test_relative_positions_only(block, ffn):
    layer, _, x, _ = prepare(block, ffn, "RoPE")
    check_relative_positions(layer, x)


def test_compiles_to_one_graph(block, ffn):
    layer, _, _, _ = prepare(block, ffn, "every option, positions, mask")
    check_compiles(layer, all_inputs_of)


def test_device_and_dtype(block):
    check_placement(block, "Block", 24, 4, 40)


def test_device_and_dtype_of_the_block_of_2024(block, ffn):
    feed_forward = find(ffn, "FeedForward")
    check_placement(block, "Block", 24, 4, ffn=feed_forward)


# Parts without weights, and their formulas.


def mean_so_far(x):
    count = torch.arange(1, x.shape[-2] + 1, device=x.device)
    return x.cumsum(-2) / count[:, None]


PARTS = {"norm": torch.tanh, "ffn": torch.sin, "attention": mean_so_far}
# How the names of their weights begin, after a dot.
PREFIXES = {"norm": "ln", "ffn": "ffn", "attention": "attn"}


def layer_of(function):
    """Return what builds a layer from any sizes and options: one that calls the function."""

    def factory(*sizes, **options):
        return FunctionLayer(function)

    return factory


def formula_of(function):
    def formula(x, *weights_and_inputs, **options):
        return function(x)

    return formula


def check_is_replaced(module, part):
    """Require that a module whose part was replaced has no weights of that part."""
    left = [name for name in module.state_dict() if f".{PREFIXES[part]}" in f".{name}"]
    assert not left, f"{part}= has no effect: the module still has {', '.join(left)}"


@pytest.mark.parametrize("part", PARTS)
def test_takes_any_norm_ffn_and_attention(block, part):
    layer = build(block, "Block", 24, 4, 40, **{part: layer_of(PARTS[part])})
    check_is_replaced(layer, part)

    def formula(x, weights):
        return pre_norm_block(x, weights, **{part: formula_of(PARTS[part])})

    check_equation(layer, formula, randn(2, 7, 24), torch.float64)


def norm_within_a_sequence(d_model, *d_ff, **options):
    """Stand for a feed-forward layer that has no reset_parameters, though its child has one."""
    return nn.Sequential(nn.RMSNorm(d_model, **options))


def test_reset_reaches_every_layer(block):
    check_initial_weights(construct(block, "Block", 24, 4))


def test_reset_reaches_layers_of_torch(block):
    check_initial_weights(construct(block, "Block", 24, 4, norm=nn.RMSNorm))


def test_reset_reaches_layers_within_layers(block):
    parts = {"ffn": norm_within_a_sequence}
    check_initial_weights(construct(block, "Block", 24, 4, **parts))
