"""Attention beyond its contract: the ropes that it calls, its kernels, and masks when it is compiled."""

import math

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import TypeCheckError

from tinyblock import CausalMultiHeadSelfAttention, RotaryPositionalEmbedding, apply_rope
from tinyblock import scaled_dot_product_attention as attention


def rotate_halves(x, cos, sin):
    """Rotate x[k] with x[k + d_head/2], as Hugging Face does."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def angles_at(token_positions, seq, d_head=6, theta=100.0):
    positions = torch.arange(seq) if token_positions is None else token_positions
    return positions[..., None] * theta ** (-torch.arange(0, d_head, 2, dtype=torch.float64) / d_head)


def halves(x, token_positions):
    angles = angles_at(token_positions, x.shape[-2]).repeat_interleave(2, dim=-1)  # (a, a, b, b, c, c)
    angles = rearrange(angles, "... (half pair) -> ... (pair half)", pair=2)  # (a, b, c, a, b, c)
    return rotate_halves(x, angles.cos(), angles.sin())


def of_transformers(x, token_positions):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    angles = angles_at(token_positions, x.shape[-2])
    angles = torch.cat((angles, angles), dim=-1).reshape(-1, *x.shape[-2:])  # it adds the axis of the heads itself
    return llama.apply_rotary_pos_emb(x, x, angles.cos(), angles.sin())[0]


class Slower(RotaryPositionalEmbedding):
    def frequencies(self):
        return super().frequencies() / 8


def slower(x, token_positions):
    return apply_rope(x, angles_at(token_positions, x.shape[-2]) / 8)


@pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning")  # those of transformers' imports
@pytest.mark.parametrize(
    ("rope", "same"),
    [(halves, halves), (of_transformers, halves), (Slower(100.0, 6, 20), slower)],
    ids=["halves", "transformers", "subclass"],
)
def test_self_attention_calls_any_rope_and_nothing_else_of_it(rope, same):
    module = CausalMultiHeadSelfAttention(24, 4, num_kv_heads=2, rope=rope).double()
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    for token_positions in (None, torch.arange(7) + 3, torch.randint(0, 20, (2, 7))):
        projections = (module.q_proj(x), module.k_proj(x), module.v_proj(x))
        q, k, v = (rearrange(t, "b seq (heads d_head) -> b heads seq d_head", d_head=6) for t in projections)
        per_head = None if token_positions is None else token_positions.unsqueeze(-2)
        q, k, v = same(q, per_head), *(t.repeat_interleave(2, dim=1) for t in (same(k, per_head), v))
        heads = attention(q, k, v, torch.ones(7, 7, dtype=torch.bool).tril())
        expected = module.output_proj(rearrange(heads, "b heads seq d_head -> b seq (heads d_head)"))
        torch.testing.assert_close(module(x, token_positions), expected, rtol=1e-12, atol=1e-12)


def test_rope_of_halves_is_ours_for_permuted_rows():
    ours = CausalMultiHeadSelfAttention(24, 4, rope=RotaryPositionalEmbedding(100.0, 6, 20)).double()
    theirs = CausalMultiHeadSelfAttention(24, 4, rope=halves).double()
    state = ours.state_dict()
    for name in ("q_proj.weight", "k_proj.weight"):
        state[name] = rearrange(state[name], "(heads half pair) d_model -> (heads pair half) d_model", heads=4, pair=2)
    theirs.load_state_dict(state)
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    torch.testing.assert_close(theirs(x), ours(x), rtol=1e-12, atol=1e-12)


def test_a_rope_of_another_head_size_fails_the_shape_checks_when_it_is_assigned_later():
    module = CausalMultiHeadSelfAttention(24, 4)
    module.rope = RotaryPositionalEmbedding(10.0, 4, 8)
    with pytest.raises(TypeCheckError, match=r"RotaryPositionalEmbedding.forward[^!]*x[^!]*d_k=4"):
        module(torch.zeros(1, 3, 24))
    module.rope = RotaryPositionalEmbedding(10.0, 6, 8)
    assert module(torch.zeros(1, 3, 24), torch.arange(3)).shape == (1, 3, 24)


def test_scaled_dot_product_attention_does_not_hide_nan():
    q, k, v = torch.randn(3, 3, 4)
    q[1, 0] = math.nan
    mask = torch.ones(3, 3, dtype=torch.bool).tril()
    for out in (attention(q, k, v, mask), F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]):
        assert out.isnan().all(-1).tolist() == [False, True, False]


def test_self_attention_uses_no_kernel_that_materializes_the_scores():
    module = CausalMultiHeadSelfAttention(24, 4, rope=RotaryPositionalEmbedding(100.0, 6, 16), num_kv_heads=2)
    x = torch.randn(2, 3, 6, 24)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        module(x)
        module(x[0, 0])
    kernels = {event.name for event in profile.events() if "scaled_dot_product" in event.name}
    assert kernels == {"aten::scaled_dot_product_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"}


def test_self_attention_with_its_own_head_size_need_not_divide_d_model():
    module = CausalMultiHeadSelfAttention(24, 5, d_head=4)
    assert module.q_proj.weight.shape == (20, 24)
    assert module(torch.randn(3, 24)).shape == (3, 24)


def test_compiled_self_attention_rejects_an_additive_mask():
    module = torch.compile(CausalMultiHeadSelfAttention(24, 4), backend="eager")
    message = r"mask must be bool .* got torch.float32 of \(5, 5\): .*mask == 0 if additive"
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        module(torch.zeros(2, 5, 24), mask=torch.zeros(5, 5))


def test_self_attention_rejects_a_mask_with_an_axis_for_heads():
    module, mask = CausalMultiHeadSelfAttention(24, 4), torch.ones(2, 1, 5, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"of shape \(2, 5, 5\) or \(2, 1, 5\), got torch.bool of \(2, 1, 5, 5\)"):
        module(torch.zeros(2, 5, 24), mask=mask)


def test_attend_rejects_more_keys_than_queries():
    q, k = torch.randn(1, 4, 1, 6), torch.randn(1, 4, 9, 6)
    with pytest.raises(ValueError, match="as many keys as queries, 1, got 9: override it"):
        CausalMultiHeadSelfAttention(24, 4).attend(q, k, k, None)
