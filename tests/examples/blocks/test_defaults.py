"""Defaults of options are values of a model, as transformers has them."""

import inspect

import pytest
import torch
from bounded_scores import BoundedAttention
from experts import MixtureOfExperts, Router
from gated_delta_net import GatedDeltaNet
from hyper_connections import HyperTransformer, StreamWeights, doubly_stochastic
from indexer import SparseAttention
from joint_qk_norm import JointNormAttention
from kimi_delta_attention import KimiDeltaAttention
from latent_attention import LatentAttention
from no_positions import drop_positions
from short_convolution import ShortConvolution
from their_models import import_transformers


def their_value(kind, field):
    config = import_transformers().AutoConfig.for_model(kind)
    return getattr(config, field)


@pytest.mark.parametrize(
    ("build", "option", "kind", "field"),
    [
        (BoundedAttention, "cap", "gemma2", "attn_logit_softcapping"),
        (MixtureOfExperts, "num_experts", "mixtral", "num_local_experts"),
        (MixtureOfExperts, "top_k", "mixtral", "num_experts_per_tok"),
        (GatedDeltaNet, "d_head", "qwen3_next", "linear_value_head_dim"),
        (GatedDeltaNet, "width", "qwen3_next", "linear_conv_kernel_dim"),
        (GatedDeltaNet, "eps", "qwen3_next", "rms_norm_eps"),
        (KimiDeltaAttention, "d_head", "kimi_linear", "linear_head_dim"),
        (KimiDeltaAttention, "width", "kimi_linear", "linear_conv_kernel_dim"),
        (KimiDeltaAttention, "eps", "kimi_linear", "rms_norm_eps"),
        (LatentAttention, "d_head", "deepseek_v3", "v_head_dim"),
        (LatentAttention, "q_rank", "deepseek_v3", "q_lora_rank"),
        (LatentAttention, "kv_rank", "deepseek_v3", "kv_lora_rank"),
        (LatentAttention, "eps", "deepseek_v3", "rms_norm_eps"),
        (SparseAttention, "q_rank", "deepseek_v32", "q_lora_rank"),
        (SparseAttention, "top_k", "deepseek_v32", "index_topk"),
        (SparseAttention, "index_heads", "deepseek_v32", "index_n_heads"),
        (SparseAttention, "index_d_head", "deepseek_v32", "index_head_dim"),
        (ShortConvolution, "width", "lfm2", "conv_L_cache"),
        (HyperTransformer, "streams", "deepseek_v4", "hc_mult"),
        (doubly_stochastic, "steps", "deepseek_v4", "hc_sinkhorn_iters"),
        (JointNormAttention, "eps", "olmo2", "rms_norm_eps"),
        (drop_positions, "every", "smollm3", "no_rope_layer_interval"),
    ],
)
def test_a_default_is_the_value_of_a_published_model(build, option, kind, field):
    default = inspect.signature(build).parameters[option].default
    assert default == their_value(kind, field)


def test_a_new_router_has_the_scale_of_mixtral():
    weight = Router(512, num_experts=64, top_k=2).weight
    expected = their_value("mixtral", "initializer_range")
    assert torch.std(weight).item() == pytest.approx(expected, rel=0.05)


def test_new_weights_of_streams_have_the_scale_of_deepseek_v4():
    """The normalized streams of a token have the norm sqrt(4 * 512)."""
    (found,) = StreamWeights(512, counts=[16], streams=4)(torch.randn(4, 300, 512))
    expected = their_value("deepseek_v4", "initializer_range") * (4 * 512) ** 0.5
    assert torch.std(found).item() == pytest.approx(expected, rel=0.05)
    assert found.mean().item() == pytest.approx(0, abs=0.2)
