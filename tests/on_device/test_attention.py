"""Attention is exact, and runs in a fused kernel of torch, which stores no scores."""

from functools import partial

import pytest
import torch
from on_device.comparing import Operations, assert_close, draw, results

from tinyblock import CausalMultiHeadSelfAttention

pytestmark = pytest.mark.cuda


def attend(kv_heads, d_head, mask):
    """Return the attention of two heads as a function of q, k and v, without weights."""
    layer = CausalMultiHeadSelfAttention(
        2 * d_head, 2, num_kv_heads=kv_heads, device="meta"
    )
    return partial(layer.attend, mask=mask)


def heads(query, key, kv_heads, d_head):
    """Return queries, keys and values in float64."""
    q = draw(1, 2, query, d_head)
    k, v = draw(2, 1, kv_heads, key, d_head, seed=1)
    return {"q": q, "k": k, "v": v}


def moved(tensors, *device_and_dtype):
    return {name: tensor.to(*device_and_dtype) for name, tensor in tensors.items()}


@pytest.fixture(params=["", "no cuDNN"])
def cudnn(request):
    """Let torch choose the kernel of cuDNN, which it prefers on an H100, or not."""
    torch.backends.cuda.enable_cudnn_sdp(request.param == "")
    yield
    torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.mark.parametrize("d_head", [64, 128, 256])
@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("is_masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("is_one_token", [False, True], ids=["", "one token"])
@pytest.mark.usefixtures("cudnn")
def test_attention_is_exact_in_a_fused_kernel(
    is_one_token, is_masked, dtype, kv_heads, d_head, device, seq, mask
):
    query = 1 if is_one_token else seq
    mask = mask[-query:] if is_masked else None
    inputs = heads(query, seq, kv_heads, d_head)
    with Operations() as operations:
        call = attend(kv_heads, d_head, mask)
        actual = results(call, moved(inputs, device, dtype))
    # Otherwise, torch runs a matmul and a softmax.
    assert any("_scaled_dot_product" in str(each) for each in operations.seen)
    call = attend(kv_heads, d_head, mask.cpu() if is_masked else None)
    assert_close(actual, results(call, inputs), dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.usefixtures("cudnn")
def test_a_query_without_keys_yields_zeros(dtype, device, seq, mask):
    """Its gradient is zero, too."""
    mask[5] = False
    inputs = moved(heads(seq, seq, 2, 64), device, dtype)
    found = results(attend(2, 64, mask), inputs)
    for name in ("result", "q"):
        without_keys = found[name][..., [0, 5], :]  # 0 by the fixture
        assert not without_keys.any(), name  # NaN is no zero


BUG = pytest.mark.xfail(reason="pytorch issue 196678: see docs/layers.md", strict=False)


@pytest.mark.usefixtures("cudnn")
def test_gradients_are_finite_where_all_scores_are_low(device, request):
    """Each score has -120 added to it, so that exp(-logsumexp) overflows float32."""
    if torch.backends.cuda.cudnn_sdp_enabled():
        request.applymarker(BUG)
    seq = 704  # the bug occurs 64 above a multiple of 128
    inputs = heads(seq, seq, 2, 64)
    inputs["q"][..., 0] = 8  # times -120 / sqrt(64)
    inputs["k"][..., 0] = -120
    mask = torch.ones(seq, seq, dtype=torch.bool, device=device)
    mask[0] = False  # one row without keys, for which it could be NaN, too
    found = results(attend(2, 64, mask), moved(inputs, device, torch.bfloat16))
    assert [name for name, x in found.items() if not x.isfinite().all()] == []
