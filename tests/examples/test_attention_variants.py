"""Other attention against formulas in float64, and the masks that each accepts."""

from functools import partial

import attention_variants
import pytest
import torch
from attention_variants import (
    AttentionWithBiases,
    BidirectionalAttention,
    FlexAttention,
    SlidingWindow,
    SoftCappedAttention,
)
from torch.nn.attention.flex_attention import create_block_mask

from tinyblock import RotaryPositionalEmbedding, Transformer

pytestmark = pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile"
)

CAUSAL = torch.ones(40, 40).tril() > 0
NEAR = CAUSAL & (torch.ones(40, 40).triu(-15) > 0)
EVERYWHERE = torch.ones(40, 40) > 0
FLEX = (FlexAttention, SoftCappedAttention)
ALLOWED = {
    SlidingWindow: NEAR,
    BidirectionalAttention: EVERYWHERE,
    AttentionWithBiases: CAUSAL,
    FlexAttention: CAUSAL,
    SoftCappedAttention: CAUSAL,
}


def attention_of(build):
    """Build a layer with shared key heads, whose biases are not zero and whose scores exceed 50."""
    rope = RotaryPositionalEmbedding(10000.0, d_k=16, max_seq_len=40)
    layer = build(64, 4, num_kv_heads=2, rope=rope, dtype=torch.float64)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    return layer


def expected_of(layer, x, allowed, cap=None):
    """Return the attention of x, head by head; a token that may attend to nothing gets zeros."""
    q = layer.q_proj(x)
    k = layer.k_proj(x)
    v = layer.v_proj(x)
    heads = []
    for head in range(4):
        shared = head // 2
        queries = layer.rope(q[..., 16 * head : 16 * head + 16])
        keys = layer.rope(k[..., 16 * shared : 16 * shared + 16])
        scores = queries @ keys.mT / 4
        if cap is not None:
            assert scores.abs().max() > cap
            scores = cap * torch.tanh(scores / cap)
        weights = scores.exp() * allowed
        total = weights.sum(-1, keepdim=True).clamp(min=1e-300)
        heads.append(weights / total @ v[..., 16 * shared : 16 * shared + 16])
    return layer.output_proj(torch.cat(heads, dim=-1))


@torch.no_grad()
@pytest.mark.parametrize("masked", ["no mask", "padding", "a mask of pairs"])
@pytest.mark.parametrize("build", ALLOWED)
def test_attention_equals_its_formula(build, masked):
    layer = attention_of(build)
    x = torch.randn(2, 40, 64, dtype=torch.float64)
    mask = {
        "no mask": None,
        "padding": (torch.arange(40) >= torch.tensor([[3], [0]]))[:, None],
        "a mask of pairs": torch.rand(2, 40, 40) < 0.5,
    }[masked]
    allowed = ALLOWED[build] if mask is None else ALLOWED[build] & mask
    cap = 50 if build is SoftCappedAttention else None
    expected = expected_of(layer, x, allowed, cap)
    torch.testing.assert_close(layer(x, mask=mask), expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("build", [each for each in ALLOWED if each not in FLEX])
def test_attention_accepts_any_number_of_batch_axes(build):
    layer = attention_of(build)
    x = torch.randn(2, 3, 7, 64, dtype=torch.float64)
    mask = torch.rand(2, 3, 7, 7) < 0.5
    out = layer(x, mask=mask)
    for row in range(2):
        for column in range(3):
            alone = layer(x[row, column], mask=mask[row, column])
            torch.testing.assert_close(out[row, column], alone, rtol=1e-12, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("build", FLEX)
@pytest.mark.parametrize(("shape", "count"), [((7, 64), 0), ((2, 3, 7, 64), 2)])
def test_flex_attention_rejects_other_than_one_batch_axis(build, shape, count):
    layer = attention_of(build).float()
    with pytest.raises(ValueError, match=rf"one batch axis .* got {count}: pass x\["):
        layer(torch.randn(shape))


@torch.no_grad()
@pytest.mark.parametrize("build", ALLOWED)
def test_attention_rejects_an_additive_mask(build):
    model = Transformer(1, 64, 4, max_seq_len=40, attention=build)
    additive = torch.zeros(2, 7, 7).masked_fill(torch.rand(2, 7, 7) < 0.5, -1e9)
    with pytest.raises(
        ValueError, match=r"mask must be (a )?bool.*, got torch\.float32"
    ):
        model(torch.randn(2, 7, 64), mask=additive)
    with pytest.raises(ValueError, match=r"mask must be a bool tensor.*, got .*list"):
        model(torch.randn(2, 7, 64), mask=[True] * 7)
    whole_numbers = torch.ones(2, 7, 7, dtype=torch.long)
    with pytest.raises(ValueError, match=r"mask must be (a )?bool.*, got torch\.int64"):
        model(torch.randn(2, 7, 64), mask=whole_numbers)


@torch.no_grad()
@pytest.mark.parametrize("build", ALLOWED)
def test_attention_rejects_a_padding_mask_without_an_axis_for_queries(build):
    model = Transformer(1, 64, 4, max_seq_len=40, attention=build)
    with pytest.raises(ValueError, match=r"mask must .* shape \(.*, got .*\(2, 7\)"):
        model(torch.randn(2, 7, 64), mask=torch.ones(2, 7) > 0)


@torch.no_grad()
def test_flex_attention_with_a_block_mask_equals_the_dense_mask():
    document = torch.arange(256) // 100  # three packed documents

    def causal_in_document(batch, head, query, key):
        return (query >= key) & (document[query] == document[key])

    block_mask = create_block_mask(
        causal_in_document, B=None, H=None, Q_LEN=256, KV_LEN=256, device="cpu"
    )
    build = partial(Transformer, 2, 64, 4, num_kv_heads=2, max_seq_len=256)
    flex = build(attention=FlexAttention, dtype=torch.float64)
    dense = build(dtype=torch.float64)
    dense.load_state_dict(flex.state_dict())
    x = torch.randn(2, 256, 64, dtype=torch.float64)
    same_document = document[:, None] == document
    torch.testing.assert_close(
        flex(x, mask=block_mask), dense(x, mask=same_document), rtol=0, atol=1e-12
    )


def test_biases_get_gradients_and_are_zero_after_a_reset():
    layer = AttentionWithBiases(64, 4, num_kv_heads=2, device="meta")
    layer = layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    layer.reset_parameters()
    biases = [layer.q_proj.bias, layer.k_proj.bias, layer.v_proj.bias]
    assert [len(bias) for bias in biases] == [64, 32, 32]
    assert not any(bias.any() for bias in biases)
    layer(torch.randn(2, 7, 64)).square().sum().backward()
    assert layer.q_proj.bias.grad.any()
    assert layer.v_proj.bias.grad.any()


def test_attention_variants_main(capsys):
    attention_variants.main()
    assert capsys.readouterr().out.splitlines()[1:] == [
        "SlidingWindow           20 to 35",
        "BidirectionalAttention  0 to 63",
        "AttentionWithBiases     20 to 63",
        "FlexAttention           20 to 63",
        "SoftCappedAttention     20 to 63",
    ]
