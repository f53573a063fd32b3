"""What the layers do on a GPU, tested on the CPU.

FakeTensorMode has tensors on CUDA, which have no values. A TorchFunctionMode sees each
call of torch, and may answer it.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode

import tinyblock
from tinyblock import (
    CausalMultiHeadSelfAttention,
    RotaryPositionalEmbedding,
    Transformer,
    causal_multi_head_self_attention,
    scaled_dot_product_attention,
)


def identity(*sizes, **options):
    return nn.Identity()


def build_rope(**options):
    return RotaryPositionalEmbedding(100.0, 6, 40, **options)


def build_transformer(**options):
    """A Transformer without matrices, because torch draws none without values."""
    return Transformer(1, 24, 4, max_seq_len=40, block=identity, **options)


@pytest.mark.parametrize("build", [build_rope, build_transformer])
def test_a_table_is_on_the_device_of_its_layer(build):
    with FakeTensorMode():
        layer = build(device="cuda")
        with torch.device("cuda"):
            on_default_device = build()
    for tensor in (*layer.buffers(), *layer.parameters()):
        assert tensor.is_cuda
    for tensor in (*on_default_device.buffers(), *on_default_device.parameters()):
        assert tensor.is_cuda


X = torch.empty(2, 7, 24, device="meta")
W = torch.empty(24, 24, device="meta")
GAINS = torch.empty(24, device="meta")
ANGLES = torch.empty(7, 12, device="meta")
MASK = torch.empty(7, 7, dtype=torch.bool, device="meta")
EQUATIONS = {
    "rms_norm": (X, GAINS),
    "silu": (X,),
    "gelu": (X,),
    "glu": (X, W, W),
    "swiglu": (X, W, W, W),
    "feed_forward": (X, W, W),
    "apply_rope": (X, ANGLES),
    "scaled_dot_product_attention": (X, X, X, MASK),
    "causal_multi_head_self_attention": (X, W, W, W, W, 4),
}


@pytest.mark.parametrize("name", EQUATIONS)
def test_an_equation_runs_on_the_device_of_x(name):
    assert getattr(tinyblock, name)(*EQUATIONS[name]).is_meta


@pytest.mark.parametrize("positions", [None, torch.empty(7, device="meta").long()])
def test_rope_runs_on_the_device_of_x_in_float64(positions):
    with torch.device("meta"):
        rope = build_rope()
    x = torch.empty(2, 7, 6, dtype=torch.float64, device="meta")
    result = rope(x, positions)
    assert (result.is_meta, result.dtype) == (True, torch.float64)


class Kernel(TorchFunctionMode):
    """Remember the arguments of torch's attention."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            self.heads_of_k = args[1].shape[1]
            self.is_shared = kwargs["enable_gqa"]
        return function(*args, **(kwargs or {}))


# A fast kernel shares heads in half precision, up to d_head 256, without a mask: dtypes,
# d_head and the number of queries, where there are seven keys.
SHARED = [(torch.bfloat16, 256, 7), (torch.float16, 64, 1)]
REPEATED = [
    (torch.float32, 64, 7),
    (torch.bfloat16, 257, 7),
    (torch.bfloat16, 64, 3),  # a mask hides later keys
]


@pytest.mark.parametrize(("dtype", "d_head", "query"), [*SHARED, *REPEATED], ids=str)
def test_heads_are_repeated_where_no_kernel_of_cuda_shares_them(dtype, d_head, query):
    layer = CausalMultiHeadSelfAttention(
        24, 6, num_kv_heads=2, d_head=d_head, device="meta"
    )
    kernel = Kernel()
    with FakeTensorMode():
        q = torch.empty(1, 6, query, d_head, dtype=dtype, device="cuda")
        k = torch.empty(1, 2, 7, d_head, dtype=dtype, device="cuda")
        with kernel:
            out = layer.attend(q, k, k, None)
    assert (out.shape, out.is_cuda) == (q.shape, True)
    is_shared = (dtype, d_head, query) in SHARED
    assert kernel.heads_of_k == (2 if is_shared else 6)
    assert kernel.is_shared == is_shared


class OtherDevice(TorchFunctionMode):
    """Neither a CPU nor a GPU, where a query without keys attends to all of them."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.is_cpu.__get__, torch.Tensor.is_cuda.__get__):
            return False
        if function is F.scaled_dot_product_attention:
            shown = kwargs["attn_mask"]
            kwargs["attn_mask"] = shown | ~shown.any(dim=-1, keepdim=True)
        return function(*args, **(kwargs or {}))


def test_a_query_without_keys_yields_zeros_whatever_the_kernel_gives():
    layer = CausalMultiHeadSelfAttention(24, 4)
    q, k, v = torch.randn(3, 2, 4, 7, 6)
    mask = torch.rand(2, 7, 7) < 0.5
    mask[:, 4] = False
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    with OtherDevice():
        out = layer.attend(q, k, v, mask)
    expected = scaled_dot_product_attention(q, k, v, (mask & causal)[:, None])
    torch.testing.assert_close(out, expected)
    assert not out[:, :, 4].any()


class OnCuda(Kernel):
    """Let tensors on the CPU say that they are on CUDA."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function == torch.Tensor.is_cuda.__get__:  # a new object at each access
            return True
        return super().__torch_function__(function, types, args, kwargs)


def test_repeated_heads_give_the_numbers_of_shared_ones():
    layer = CausalMultiHeadSelfAttention(24, 6, num_kv_heads=2)
    x = torch.randn(2, 7, 24)
    with OnCuda() as on_cuda:
        result = layer(x)
    assert on_cuda.heads_of_k == 6
    wq, wk, wv = layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight
    wo = layer.output_proj.weight
    expected = causal_multi_head_self_attention(x, wq, wk, wv, wo, num_heads=6)
    torch.testing.assert_close(result, expected)
