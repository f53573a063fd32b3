"""What of attention is no part of the contract in tinyblock/contract.py."""

import pytest
import torch
import torch.nn.functional as F

from tinyblock import CausalMultiHeadSelfAttention, RotaryPositionalEmbedding
from tinyblock import scaled_dot_product_attention as attention
from tinyblock.contract import randn


def test_scaled_dot_product_attention_does_not_hide_nan():
    q, k, v = (randn(3, 4, seed=seed) for seed in range(3))
    q[1, 0] = torch.nan
    mask = torch.ones(3, 3, dtype=torch.bool).tril()
    for out in (attention(q, k, v, mask), F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]):
        assert out.isnan().all(-1).tolist() == [False, True, False]


@pytest.mark.skipif(torch.__version__ < "2.9", reason="older CPU flash kernels cannot share key heads")
def test_self_attention_uses_no_kernel_that_materializes_the_scores():
    rope = RotaryPositionalEmbedding(100.0, 6, 16)
    module = CausalMultiHeadSelfAttention(24, 4, rope=rope, num_kv_heads=2)
    x = randn(2, 3, 6, 24, dtype=torch.float32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        module(x)
        module(x[0, 0])
    kernels = {event.name for event in profile.events() if "scaled_dot_product" in event.name}
    assert kernels == {"aten::scaled_dot_product_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"}


@pytest.mark.parametrize(
    ("sizes", "options", "named"),
    [
        ((24, 5), {}, "d_model=24.*num_heads=5"),
        ((24, 4), {"num_kv_heads": 3}, "num_heads=4.*num_kv_heads=3"),
        ((24, 0), {}, "'num_heads': 0"),
        ((0, 4), {}, "'d_model': 0"),
        ((24, -4), {}, "'num_heads': -4"),
        ((24, 4), {"num_kv_heads": 0}, "'num_kv_heads': 0"),
        ((24, 4), {"d_head": 0}, "'d_head': 0"),
        ((24, 4), {"eps": 0.0}, "eps.*0.0"),
        ((24, 4), {"eps": float("nan")}, "eps.*nan"),
        ((24, 4), {"rope": RotaryPositionalEmbedding(10.0, 4, 8)}, "d_k=4.*6"),
        ((24, 4), {"rope": RotaryPositionalEmbedding(10.0, 6, 8), "d_head": 8}, "d_k=6.*8"),
    ],
)
def test_self_attention_rejects_bad_hyperparameters(sizes, options, named):
    with pytest.raises(ValueError, match=named):
        CausalMultiHeadSelfAttention(*sizes, **options)


def test_self_attention_with_its_own_head_size_need_not_divide_d_model():
    module = CausalMultiHeadSelfAttention(24, 5, d_head=4)
    assert module.q_proj.weight.shape == (20, 24)
    assert module(torch.randn(3, 24)).shape == (3, 24)


def test_self_attention_rejects_positions_that_it_cannot_apply():
    with pytest.raises(ValueError, match="no rope"):
        CausalMultiHeadSelfAttention(24, 4)(torch.zeros(1, 3, 24), torch.arange(3))


def test_attention_keeps_no_copies_for_backward_when_compiled():
    rope = RotaryPositionalEmbedding(10000.0, 8, 12)
    module = CausalMultiHeadSelfAttention(32, 4, rope=rope)
    x = randn(2, 12, 32, dtype=torch.float32).requires_grad_()

    def kept_by(call):
        storages = {}

        def keep(tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            call(x)
        return sum(storage.nbytes() == x.nbytes for storage in storages.values())

    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    compiled(x)
    assert kept_by(module) == kept_by(compiled) == 5  # the input, q, k, v and the heads attended to
