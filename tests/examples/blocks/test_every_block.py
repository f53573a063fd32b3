"""What holds for each block and layer: weights, gradients, dtypes, causality, one graph."""

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bounded_scores import BoundedAttention
from depth_scaled_residual import DepthScaledTransformer
from experts import MixtureOfExperts
from gated_delta_net import GatedDeltaNet
from gelu_gate import GeGLU
from hyper_connections import HyperTransformer
from indexer import SparseAttention
from joint_qk_norm import JointNormAttention
from kimi_delta_attention import KimiDeltaAttention
from latent_attention import LatentAttention
from norm_without_gain import layer_norm_without_gain, norm_without_gain
from output_gate import GatedAttention
from parallel_branches import ParallelBlock
from partial_rope import PartialRope
from reordered_norm import ReorderedNormBlock
from residual_gate import GatedResidualBlock
from sandwich_norm import SandwichBlock
from scaled_residual import ScaledBlock
from short_convolution import ShortConvolution
from sinks import SinkAttention
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from windows import WindowAttention

from tinyblock import RotaryPositionalEmbedding, Transformer

BLOCKS = Path(__file__).parents[3] / "examples" / "blocks"
build = partial(Transformer, 1, 8, 2, 12, max_seq_len=16)
half = RotaryPositionalEmbedding(1e4, 2, 16)
MODELS: dict[str, Any] = {
    "bounded_scores": partial(build, attention=BoundedAttention, cap=2.0),
    "depth_scaled_residual": partial(DepthScaledTransformer, 2, 8, 2, max_seq_len=16),
    "experts": partial(build, ffn=partial(MixtureOfExperts, num_experts=4)),
    "gated_delta_net": partial(
        build, attention=GatedDeltaNet, d_head=4, num_key_heads=1
    ),
    "gelu_gate": partial(build, ffn=GeGLU),
    "hyper_connections": partial(HyperTransformer, 1, 8, 2, 12, max_seq_len=16),
    "indexer": partial(
        build,
        attention=partial(SparseAttention, d_head=4, q_rank=6, kv_rank=5),
        rope=half,
        top_k=2,
        index_heads=2,
        index_d_head=4,
    ),
    "joint_qk_norm": partial(build, attention=JointNormAttention, num_kv_heads=1),
    "kimi_delta_attention": partial(build, attention=KimiDeltaAttention, d_head=4),
    "latent_attention": partial(
        build,
        attention=partial(LatentAttention, d_head=4, q_rank=6, kv_rank=5),
        rope=half,
    ),
    "output_gate": partial(build, attention=GatedAttention, qk_norm=True),
    "parallel_branches": partial(build, block=ParallelBlock),
    "partial_rope": partial(build, rope=PartialRope(half)),
    "reordered_norm": partial(build, block=ReorderedNormBlock),
    "residual_gate": partial(build, block=GatedResidualBlock),
    "sandwich_norm": partial(build, block=SandwichBlock),
    "scaled_residual": partial(build, block=ScaledBlock, residual_scale=0.5),
    "short_convolution": partial(build, attention=ShortConvolution),
    "sinks": partial(build, attention=SinkAttention, num_kv_heads=1),
    "windows": partial(build, attention=WindowAttention, window=3),
}
# Nothing in these files has weights.
WITHOUT_WEIGHTS = {"delta_rule", "no_positions", "norm_without_gain", "squared_relu"}
each_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
TAKES_NO_MASK = {"gated_delta_net", "kimi_delta_attention", "short_convolution"}


def test_each_file_is_here():
    files = {path.stem for path in BLOCKS.glob("*.py")}
    assert MODELS.keys() | WITHOUT_WEIGHTS == files


@each_model
def test_reset_parameters_fills_a_model_that_was_built_on_meta(model):
    model = model(device="meta")
    for name, weight in model.named_parameters():
        assert weight.is_meta, name
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(math.nan)
    model.reset_parameters()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor.isfinite().all(), name


@each_model
def test_a_walk_over_all_modules_draws_every_weight(model):
    """As FSDP2's documentation initializes a model that was built on meta."""
    model = model()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(math.nan)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor.isfinite().all(), name


class NeverLower(TorchDispatchMode):
    """Fail if float64 is converted to a smaller dtype."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        is_cast = function is torch.ops.aten._to_copy.default
        if is_cast and args[0].dtype == torch.float64 and result.is_floating_point():
            assert result.dtype == torch.float64
        return result


@each_model
def test_float64_is_never_lowered(model):
    model = model(dtype=torch.float64).double()
    with NeverLower():
        model(torch.randn(2, 5, 8, dtype=torch.float64))


@each_model
def test_gradients_of_x_and_of_weights_agree_with_differences(model):
    """All weights move at once. The tolerance is small, so that each of them counts."""
    model = model(dtype=torch.float64).double()
    weights = dict(model.named_parameters())
    directions = {name: torch.randn_like(weight) for name, weight in weights.items()}

    def run(x, step):
        moved = {
            name: weight + step * directions[name] for name, weight in weights.items()
        }
        return functional_call(model, moved, x)

    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    step = torch.zeros((), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        run, (x, step), fast_mode=True, atol=1e-7, rtol=1e-7
    )


@each_model
def test_a_model_in_bfloat16_returns_bfloat16(model):
    model = model(dtype=torch.bfloat16)
    assert model(torch.randn(2, 5, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


@each_model
def test_weights_have_the_dtype_that_is_passed(model):
    """Only weights of residual streams and residual gates stay in float32."""
    for name, weight in model(dtype=torch.bfloat16).named_parameters():
        stays = re.search("_streams|attn_gate|ffn_gate", name)
        assert weight.dtype == (torch.float32 if stays else torch.bfloat16), name


@each_model
def test_a_token_does_not_see_later_tokens(model):
    model = model()
    x = torch.randn(2, 6, 8)
    torch.testing.assert_close(model(x)[:, :4], model(x[:, :4]))


@pytest.mark.parametrize("name", sorted(TAKES_NO_MASK))
def test_layers_without_masks_reject_one(name):
    mask = torch.ones(2, 1, 6, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"must be None in \w+, got tensor"):
        MODELS[name]()(torch.randn(2, 6, 8), mask=mask)


@pytest.mark.parametrize("name", sorted(MODELS.keys() - TAKES_NO_MASK))
def test_a_hidden_token_changes_no_other_token(name):
    model = MODELS[name]()
    x = torch.randn(2, 6, 8, requires_grad=True)
    mask = torch.arange(6) > 0  # so that the first query has no key
    result = model(x, mask=mask.expand(2, 1, 6))
    result[:, 1:].sum().backward()
    assert result.isfinite().all()
    assert x.grad.isfinite().all()
    assert not x.grad[:, 0].any()
    changed = x.detach().clone()
    changed[:, 0] = torch.randn(2, 8)
    found = model(changed, mask=mask.expand(2, 1, 6))
    torch.testing.assert_close(found[:, 1:], result[:, 1:])


@each_model
def test_a_padding_mask_without_the_axis_of_queries_raises(model):
    """It could be read as a mask of queries where the batch has as many rows."""
    with pytest.raises(ValueError, match="mask must be"):
        model()(torch.randn(6, 6, 8), mask=torch.ones(6, 6, dtype=torch.bool))


@each_model
def test_autocast_keeps_the_result_close(model):
    model = model()
    x = torch.randn(2, 6, 8)
    with torch.autocast("cpu", torch.bfloat16):
        result = model(x)
    assert (result - model(x)).norm() < 0.1 * result.norm()


OTHER_NORMS = {
    "layer_norm_without_gain": partial(build, norm=layer_norm_without_gain),
    "norm_without_gain": partial(build, norm=norm_without_gain),
    "two q/k norms": partial(build, attention=JointNormAttention, qk_norm=True),
}


@pytest.mark.parametrize(
    "model",
    [*MODELS.values(), *OTHER_NORMS.values()],
    ids=[*MODELS, *OTHER_NORMS],
)
def test_each_norm_layer_has_the_eps_that_is_passed(model):
    """The indexer's norm of keys has an eps of its own."""
    eps = {
        name: module.eps
        for name, module in model(eps=0.25).named_modules()
        if hasattr(module, "eps") and not name.endswith("indexer.k_norm")
    }
    assert eps, "no norm has an eps"
    assert eps == dict.fromkeys(eps, 0.25)


COMPILED = (
    "bounded_scores",
    "gated_delta_net",
    "hyper_connections",
    "indexer",
    "kimi_delta_attention",
    "output_gate",
    "sinks",
    "windows",
)


@pytest.mark.parametrize("name", COMPILED)
def test_a_model_compiles_to_one_graph(name):
    model = MODELS[name]()
    x = torch.randn(2, 3, 8)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), model(x))
