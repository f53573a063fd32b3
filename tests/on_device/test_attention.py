"""Attention by each of torch's kernels, forward and backward, in half precision, against float64 on the CPU.

The contract's heads have size 6, which no fused kernel takes with a mask: cuDNN and efficient attention need multiples
of 8. cuDNN's gradient of q is NaN at some lengths, 704 among them, if all scores of a row are very low (torch issue
196678); torch 2.11 and later prefer that kernel on Hopper.
"""

import copy
import functools
import warnings

import pytest
import torch
from on_device.comparing import HALVES, assert_close, draw, results
from torch.nn.attention import SDPBackend, sdpa_kernel

from tinyblock import CausalMultiHeadSelfAttention, RotaryPositionalEmbedding

pytestmark = pytest.mark.cuda
FLASH = SDPBackend.FLASH_ATTENTION
EFFICIENT = SDPBackend.EFFICIENT_ATTENTION
MATH = SDPBackend.MATH
KERNELS = {
    "cuDNN": [SDPBackend.CUDNN_ATTENTION],
    "flash": [FLASH],
    "efficient": [EFFICIENT],
    "math": [MATH],
    "any": [SDPBackend.CUDNN_ATTENTION, FLASH, EFFICIENT, MATH],  # torch's choice
    # That of torch.backends.cuda.enable_cudnn_sdp(False).
    "any but cuDNN": [FLASH, EFFICIENT, MATH],
}
# torch's errors contain one of these if a kernel does not take the arguments.
REJECTIONS = ("No available kernel", "No viable backend", "cuDNN")


def must_run(kernel, device, attention, masked):
    """Return whether torch's sources have the kernel for these heads; it may reject others."""
    grouped = attention.num_kv_heads < attention.num_heads
    if device.type == "cpu":
        return kernel not in ("cuDNN", "efficient")
    if kernel == "cuDNN":
        major, _ = torch.cuda.get_device_capability(device)
        return attention.d_head <= 128 and major >= 9
    if kernel == "flash":
        return not masked
    if kernel == "efficient":
        return masked or not grouped
    return True


def mask_with_an_empty_row(seq):
    """Return a mask in which one query may attend to nothing, and all others to themselves and to some keys."""
    random = torch.rand(seq, seq, generator=torch.Generator().manual_seed(3))
    themselves = torch.eye(seq, dtype=torch.bool)
    mask = (random < 0.7) | themselves
    mask[seq // 2] = False
    return mask


@functools.cache
def reference(d_head, grouped, masked, dtype, sizes):
    """Return a layer, its inputs, and its output and gradients in float64 on the CPU."""
    rope = RotaryPositionalEmbedding(1e4, d_head, sizes.uneven)
    options = {
        "num_kv_heads": sizes.kv_heads if grouped else None,
        "d_head": d_head,
        "rope": rope,
        "dtype": dtype,
    }
    attention = CausalMultiHeadSelfAttention(sizes.d_model, sizes.heads, **options)
    x = draw(1, sizes.uneven, sizes.d_model).to(dtype)
    inputs = [None, mask_with_an_empty_row(sizes.uneven)] if masked else []
    exact = results(copy.deepcopy(attention).double(), x.double(), *inputs)
    return attention, x, inputs, exact


def on(device, attention, x, inputs, kernel):
    """Return output and gradients of the kernel on the device, or skip the test where torch rejects the kernel."""
    moved = [it if it is None else it.to(device) for it in inputs]
    try:
        with warnings.catch_warnings(), sdpa_kernel(KERNELS[kernel]):
            # torch explains at length why it has no kernel.
            warnings.simplefilter("ignore")
            return results(copy.deepcopy(attention).to(device), x.to(device), *moved)
    except RuntimeError as error:
        message = str(error)
        rejected = any(text in message for text in REJECTIONS)
        if not rejected or must_run(kernel, device, attention, masked=len(inputs) == 2):
            raise
        first_sentence = message.partition(". ")[0]
        pytest.skip(f"missing: torch has no such kernel here: {first_sentence}")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["", "mask"])
@pytest.mark.parametrize("grouped", [False, True], ids=["", "grouped"])
@pytest.mark.parametrize("d_head", [64, 128, 256])
def test_kernel_is_close_to_float64(
    d_head, grouped, masked, dtype, kernel, device, sizes
):
    attention, x, inputs, exact = reference(d_head, grouped, masked, dtype, sizes)
    assert_close(on(device, attention, x, inputs, kernel), exact, dtype)


@pytest.mark.parametrize("masked", [False, True], ids=["", "mask"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_are_finite_where_all_scores_are_low(kernel, masked, device, sizes):
    """Add -120 to each score, as some trained heads do: exp(-logsumexp) is then infinite in float32."""
    attention = CausalMultiHeadSelfAttention(
        sizes.d_model, sizes.heads, d_head=64, dtype=torch.bfloat16
    )
    x = draw(1, sizes.uneven, sizes.d_model)
    x[..., 0] = 1
    with torch.no_grad():
        for projection, value in ((attention.q_proj, 8), (attention.k_proj, -120)):
            projection.weight[::64] = 0  # the first component of each head
            projection.weight[::64, 0] = value
    inputs = []
    if masked:
        inputs = [None, torch.ones(sizes.uneven, sizes.uneven, dtype=torch.bool)]
    found = on(device, attention, x, inputs, kernel)
    wrong = {name for name, tensor in found.items() if not tensor.isfinite().all()}
    may_be_cudnn = kernel in ("any", "cuDNN")
    known = {"gradient of x", "gradient of q_proj.weight"}
    if may_be_cudnn and wrong and wrong <= known:
        pytest.xfail(
            "torch issue 196678: torch.backends.cuda.enable_cudnn_sdp(False) avoids it"
        )
    assert wrong == set()
