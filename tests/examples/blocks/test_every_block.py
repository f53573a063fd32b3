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
from torch.func import functional_call
from windows import WindowAttention, widen

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
    "the delta rule": partial(
        build, attention=GatedDeltaNet, d_head=4, num_key_heads=1
    ),
    "latent attention and experts": partial(
        build,
        attention=partial(LatentAttention, **latent),
        ffn=partial(MixtureOfExperts, num_experts=4),
        rope=half,
    ),
}
each_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
takes_a_mask = pytest.mark.parametrize(
    "name", [name for name in MODELS if name != "the delta rule"]
)


@each_model
def test_each_weight_is_drawn_on_its_own_device(model):
    """As FSDP2's documentation initializes a model that was built on meta."""
    model = model(device="meta")
    for name, weight in model.named_parameters():
        assert weight.is_meta, name
    model.to_empty(device="cpu")
    for walk in (False, True):
        tensors = dict((*model.named_parameters(), *model.named_buffers()))
        for tensor in tensors.values():
            tensor.data.fill_(math.nan)
        for module in model.modules() if walk else [model]:
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        for name, tensor in tensors.items():
            assert tensor.isfinite().all(), name


@each_model
def test_gradients_agree_with_differences_in_float64(model):
    """All weights move at once. What is computed in float32 would be off by 0.1."""
    model = model(dtype=torch.float64)
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
def test_bfloat16_and_autocast_keep_the_result_close(model):
    model = model()
    x = torch.randn(2, 6, 8)
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert (model(x) - expected).norm() < 0.1 * expected.norm()
    model.to(torch.bfloat16)
    for name, weight in model.named_parameters():
        assert weight.dtype == torch.bfloat16, name
    result = model(x.bfloat16())
    assert result.dtype == torch.bfloat16
    assert (result - expected).norm() < 0.1 * expected.norm()


@takes_a_mask
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


@takes_a_mask
def test_a_padding_mask_without_the_axis_of_queries_raises(name):
    """It could be read as a mask of queries where the batch has as many rows."""
    with pytest.raises(ValueError, match="mask must be"):
        MODELS[name]()(torch.randn(6, 6, 8), mask=torch.ones(6, 6, dtype=torch.bool))


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

LOGITS: dict[str, tuple[bool, list[float]]] = {
    "sigmoid": (False, [0.5, -2.0, 1.0, 0.0]),
    "sigmoid, all but 0 in float32": (False, [-94.5, -97.0, -94.0, -95.0]),
    "sigmoid, 0 in float32": (False, [-299.5, -302.0, -299.0, -300.0]),
    "sigmoid, 1 in float32": (False, [20.5, 18.0, 21.0, 20.0]),
    "softmax": (True, [0.5, -2.0, 1.0, 0.0]),
    "softmax, 0 in float32 but for one": (True, [-112.0, -110.0, 0.0, -111.0]),
}


@pytest.mark.parametrize(("is_softmax", "logits"), LOGITS.values(), ids=LOGITS)
def test_choice_and_weights_are_exact_even_where_scores_are_equal_in_float32(
    is_softmax, logits
):
    router = Router(1, num_experts=4, top_k=3, is_softmax=is_softmax)
    router.weight.data = torch.tensor(logits)[:, None]
    with torch.autocast("cpu", torch.bfloat16):
        weights, chosen = router(torch.ones(1, 1))
    weights.sum().backward()
    assert router.weight.grad.isfinite().all()
    exact = torch.tensor(logits, dtype=torch.float64)
    scores = exact.softmax(0) if is_softmax else exact.sigmoid()
    best = scores.topk(3).indices
    assert chosen[0].tolist() == best.tolist()
    expected = (scores[best] / scores[best].sum()).float()
    torch.testing.assert_close(weights[0], expected, rtol=1e-5, atol=0)


def test_the_bias_that_balances_experts_stays_in_float32():
    """DeepSeek-V3 adjusts it by 0.001, which bfloat16 loses where it is added to 1."""
    layer = MixtureOfExperts(8, 12, num_experts=4, dtype=torch.bfloat16)
    bias = torch.tensor([0.1, -0.2, 1.001, 0.3])
    layer.router.bias.copy_(bias)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert torch.equal(layer.to(dtype).router.bias, bias)
    on_meta = MixtureOfExperts(8, 12, num_experts=4, device="meta").bfloat16()
    assert on_meta.router.bias.is_meta
    on_meta.to_empty(device="cpu").router.reset_parameters()
    assert torch.equal(on_meta.router.bias, torch.zeros(4))


def test_a_token_may_have_all_experts_but_no_more():
    router = Router(8, num_experts=4, top_k=4)
    weights, chosen = router(torch.randn(9, 8))
    assert chosen.sort(-1).values.tolist() == [[0, 1, 2, 3]] * 9
    torch.testing.assert_close(weights.sum(-1), torch.ones(9))
    with pytest.raises(ValueError, match=r"top_k must be 1 ... 4, got 5"):
        Router(8, num_experts=4, top_k=5)


# --- Attention ----------------------------------------------------------------------------


def test_a_window_of_one_token_yields_its_value():
    attention = WindowAttention(64, 4, window=1)
    x = torch.randn(2, 9, 64)
    torch.testing.assert_close(attention(x), attention.output_proj(attention.v_proj(x)))
    with pytest.raises(ValueError, match="window must be at least 1, or None, got 0"):
        WindowAttention(64, 4, window=0)


def test_a_window_is_on_the_device_of_x():
    """With tensors of meta, torch takes no mask of the CPU."""
    attention = WindowAttention(64, 4, window=3, device="meta")
    assert attention(torch.empty(2, 9, 64, device="meta")).is_meta


def test_every_second_layer_of_four_attends_to_all_tokens():
    model = Transformer(4, 8, 2, max_seq_len=16, attention=WindowAttention, window=8)
    widen(model, every=2)
    assert [block.attn.window for block in model.layers] == [8, None, 8, None]


def test_a_window_that_would_hide_the_sink_raises():
    message = "SinkAttention must be the last base of Wrong, got WindowAttention"
    with pytest.raises(TypeError, match=message):

        class Wrong(SinkAttention, WindowAttention):
            pass


def test_the_indexer_chooses_all_keys_where_they_are_top_k_or_fewer():
    for top_k in (6, 9):
        attention = SparseAttention(8, 2, rope=half, top_k=top_k, **latent, **indexer)
        chosen = attention.choose(torch.randn(6, 8), None, None)
        assert torch.equal(chosen, torch.ones(6, 6, dtype=torch.bool).tril())


def test_a_model_with_the_delta_rule_cannot_generate():
    model = LanguageModel(50, 1, 8, 2, max_seq_len=9, attention=GatedDeltaNet, d_head=4)
    with pytest.raises(ValueError, match="neither a mask nor a cache"):
        model.generate(torch.tensor([[1, 2, 3]]), 2)
