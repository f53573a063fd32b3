"""What holds for the mechanisms of blocks/, and what no model of transformers can show."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from experts import MixtureOfExperts, Router
from gated_delta_net import GatedDeltaNet
from indexer import SparseAttention
from language_model import LanguageModel
from latent_attention import LatentAttention
from output_gate import GatedAttention
from parallel_branches import ParallelBlock
from partial_rope import PartialRope
from sandwich_norm import SandwichBlock
from sinks import SinkAttention
from windows import WindowAttention

from tinyblock import RotaryPositionalEmbedding, Transformer


class WindowGateAndSink(WindowAttention, GatedAttention, SinkAttention):
    pass


build = partial(Transformer, 1, 8, 2, 12, max_seq_len=16)
half = RotaryPositionalEmbedding(1e4, 2, 16)
latent: dict[str, Any] = {"d_head": 4, "q_rank": 6, "kv_rank": 5}
indexer: dict[str, Any] = {"index_heads": 2, "index_d_head": 4}
# Each mechanism is in one of these models.
MODELS: dict[str, Any] = {
    "a window, a gate, sinks, a part of RoPE, and a sandwich": partial(
        build,
        block=SandwichBlock,
        attention=WindowGateAndSink,
        window=3,
        num_kv_heads=1,
        qk_norm=True,
        rope=PartialRope(half),
    ),
    "an indexer and parallel branches": partial(
        build,
        block=ParallelBlock,
        attention=partial(SparseAttention, top_k=2, **latent, **indexer),
        rope=half,
    ),
    "latent attention and experts": partial(
        build,
        attention=partial(LatentAttention, **latent),
        ffn=partial(MixtureOfExperts, num_experts=4),
        rope=half,
    ),
    "the delta rule": partial(
        build, attention=GatedDeltaNet, d_head=4, num_key_heads=1
    ),
}
each_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
# All but the delta rule, which takes no mask.
each_with_masks = pytest.mark.parametrize(
    "model", list(MODELS.values())[:3], ids=list(MODELS)[:3]
)


@each_model
def test_a_walk_fills_all_weights_of_a_model_that_was_built_on_meta(model):
    """As FSDP2's documentation shows."""
    model = model(device="meta")
    assert all(weight.is_meta for weight in model.parameters())
    model.to_empty(device="cpu")
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    for tensor in tensors.values():
        tensor.data.fill_(math.nan)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for name, tensor in tensors.items():
        assert tensor.isfinite().all(), name


@each_model
def test_gradients_agree_with_differences_in_float64(model):
    """They are compared with differences of results, to 1e-7."""
    model = model(dtype=torch.float64)
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(model, x, fast_mode=True, atol=1e-7, rtol=1e-7)


@each_model
def test_bfloat16_and_autocast_keep_the_result_close(model):
    model = model()
    x = torch.randn(2, 6, 8)
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert (model(x) - expected).norm() < 0.1 * expected.norm()
    result = model.bfloat16()(x.bfloat16())
    assert result.dtype == torch.bfloat16
    assert (result - expected).norm() < 0.1 * expected.norm()


@each_with_masks
def test_a_hidden_token_changes_no_other_token(model):
    model = model()
    x = torch.randn(2, 6, 8, requires_grad=True)
    mask = (torch.arange(6) > 0).expand(2, 1, 6)  # so that the first query has no key
    result = model(x, mask=mask)
    result.sum().backward()
    assert x.grad.isfinite().all()
    changed = x.detach().clone()
    changed[:, 0] = torch.randn(2, 8)
    torch.testing.assert_close(model(changed, mask=mask)[:, 1:], result[:, 1:])


@each_with_masks
def test_a_padding_mask_without_the_axis_of_queries_raises(model):
    """With as many sequences as tokens, it could be a mask of queries and keys."""
    with pytest.raises(ValueError, match="mask must be"):
        model()(torch.randn(6, 6, 8), mask=torch.ones(6, 6, dtype=torch.bool))


@each_model
def test_each_norm_has_the_eps_that_is_passed(model):
    """The indexer's norm of keys has an eps of its own."""
    eps = {
        module.eps
        for name, module in model(eps=0.25).named_modules()
        if hasattr(module, "eps") and not name.endswith("indexer.k_norm")
    }
    assert eps == {0.25}


def test_a_model_compiles_to_one_graph():
    """The sizes of experts depend on values, so a model with experts does not."""
    model = MODELS["a window, a gate, sinks, a part of RoPE, and a sandwich"]()
    x = torch.randn(2, 6, 8)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), model(x))


# --- Experts ------------------------------------------------------------------------------

SPREAD = torch.tensor([0.5, -2.0, 1.0, 0.0])
LOGITS = {
    "sigmoid": SPREAD,
    "sigmoid, subnormal in float32": SPREAD - 95,
    "sigmoid, 0 in float32": SPREAD - 300,
    "sigmoid, 1 in float32": SPREAD + 20,
    "softmax": SPREAD,
    "softmax, 0 in float32 but for one": torch.tensor([-112.0, -110.0, 0.0, -111.0]),
}


@pytest.mark.parametrize("title", LOGITS)
def test_choice_and_weights_are_exact_even_where_scores_are_equal_in_float32(title):
    is_softmax = title.startswith("softmax")
    router = Router(1, num_experts=4, top_k=3, is_softmax=is_softmax)
    router.weight.data = LOGITS[title][:, None]
    with torch.autocast("cpu", torch.bfloat16):
        weights, chosen = router(torch.ones(1, 1))
    exact = LOGITS[title].double()
    scores = exact.softmax(0) if is_softmax else exact.sigmoid()
    best = scores.topk(3).indices
    assert chosen[0].tolist() == best.tolist()
    expected = (scores[best] / scores[best].sum()).float()
    torch.testing.assert_close(weights[0], expected, rtol=1e-5, atol=0)
    weights.sum().backward()
    assert router.weight.grad.isfinite().all()


def test_the_bias_that_balances_experts_stays_in_float32():
    """DeepSeek-V3 adjusts it by 0.001, which bfloat16 loses where it is added to 1."""
    router = Router(8, num_experts=2, top_k=1, device="meta").bfloat16()
    assert router.bias.is_meta
    router.to_empty(device="cpu").reset_parameters()
    router.bias += torch.tensor([0.1, 1.001])
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(router.to(dtype).bias, torch.tensor([0.1, 1.001]))


def test_no_more_experts_are_chosen_than_there_are():
    assert Router(8, num_experts=4, top_k=4)(torch.randn(9, 8))[1].shape == (9, 4)
    with pytest.raises(ValueError, match=r"top_k must be 1 ... 4, got 5"):
        Router(8, num_experts=4, top_k=5)


# --- Attention ----------------------------------------------------------------------------


def test_a_window_has_at_least_one_token():
    with pytest.raises(ValueError, match="window must be at least 1, or None, got 0"):
        WindowAttention(64, 4, window=0)


def test_a_window_is_on_the_device_of_x():
    """With tensors of meta, torch takes no mask of the CPU."""
    attention = WindowAttention(64, 4, window=3, device="meta")
    assert attention(torch.empty(2, 9, 64, device="meta")).is_meta


def test_the_sink_must_be_the_last_base_because_a_window_would_hide_it():
    message = "SinkAttention must be the last base of Wrong, got WindowAttention"
    with pytest.raises(TypeError, match=message):

        class Wrong(SinkAttention, WindowAttention):
            pass


def test_the_indexer_chooses_all_keys_where_they_are_fewer_than_top_k():
    attention = SparseAttention(8, 2, rope=half, top_k=9, **latent, **indexer)
    chosen = attention.choose(torch.randn(6, 8), None, None)
    assert torch.equal(chosen, torch.ones(6, 6, dtype=torch.bool).tril())


def test_a_model_with_the_delta_rule_cannot_generate():
    model = LanguageModel(50, 1, 8, 2, max_seq_len=9, attention=GatedDeltaNet, d_head=4)
    with pytest.raises(ValueError, match="neither a mask nor a cache"):
        model.generate(torch.tensor([[1, 2, 3]]), 2)
