"""What torch's tools do with the layers: compilers, FSDP2, and transforms."""

import math
from types import FunctionType

import einops
import pytest
import torch
import torch.distributed as dist
from torch.autograd import gradcheck, gradgradcheck
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from tinyblock import (
    Block,
    CausalMultiHeadSelfAttention,
    RotaryPositionalEmbedding,
    Transformer,
    attention,
)


def build(**options):
    return Transformer(
        2, 24, 4, max_seq_len=40, num_kv_heads=2, qk_norm=True, **options
    )


def test_one_graph_for_any_length_where_torch_traces_einops(monkeypatch):
    """In other tests it does not, because conftest.py names einops' own functions."""
    original = einops.rearrange
    copied = FunctionType(original.__code__, original.__globals__)
    monkeypatch.setattr(attention, "rearrange", copied)
    rope = RotaryPositionalEmbedding(100.0, 6, 40)
    layer = CausalMultiHeadSelfAttention(24, 4, rope=rope)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
    compiled(torch.randn(2, 4, 24), torch.arange(4))
    x, positions = torch.randn(2, 7, 24), torch.arange(7)
    with torch.compiler.set_stance("fail_on_recompile"):
        torch.testing.assert_close(compiled(x, positions), layer(x, positions))


def test_compiled_rope_rejects_positions_out_of_range():
    rope = RotaryPositionalEmbedding(100.0, 6, 40)
    compiled = torch.compile(rope, fullgraph=True, backend="eager")
    x = torch.randn(2, 7, 6)
    positions = torch.arange(7)
    torch.testing.assert_close(compiled(x, positions + 33), rope(x, positions + 33))
    for wrong in (positions + 34, positions - 1):
        with pytest.raises(IndexError, match="out of range"):
            compiled(x, wrong)


def test_compiled_rope_computes_with_real_numbers():
    """Inductor generates no code for complex ones."""
    dtypes = set()

    def backend(graph, inputs):
        for node in graph.graph.nodes:
            if isinstance(result := node.meta.get("example_value"), torch.Tensor):
                dtypes.add(result.dtype)
        return graph

    rope = RotaryPositionalEmbedding(100.0, 6, 40)
    torch.compile(rope, fullgraph=True, backend=backend)(torch.randn(2, 7, 6))
    assert dtypes == {torch.float32}


@pytest.mark.parametrize("is_masked", [True, False])
def test_exported_attention_takes_any_length(is_masked):
    """Whether it is causal must be a bool, although lengths are symbols."""
    rope = RotaryPositionalEmbedding(100.0, 6, 40)
    layer = CausalMultiHeadSelfAttention(24, 4, rope=rope, num_kv_heads=2)
    seq = torch.export.Dim("seq", min=2, max=40)
    shapes = ({1: seq}, {0: seq}, {1: seq, 2: seq} if is_masked else None)

    def inputs(length):
        mask = torch.rand(1, length, length) < 0.7 if is_masked else None
        return torch.randn(2, length, 24), torch.arange(length), mask

    program = torch.export.export(layer, inputs(7), dynamic_shapes=shapes)
    exported = program.module()
    for length in (2, 40):
        x, positions, mask = inputs(length)
        expected = layer(x, positions, mask)
        found = exported(x, positions, mask)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(IndexError, match="out of range"):
        exported(x, positions + 1, mask)


# Weights are drawn as DTensors.
@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete")
def test_fsdp2_builds_on_meta_and_trains_in_mixed_precision():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = build(device="meta")
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in (*model.layers, model):
            fully_shard(layer, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
        model.to_empty(device="cpu")
        for tensor in model.parameters():
            tensor.data.fill_(math.nan)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        out = model(torch.randn(2, 7, 24))
        out.sum().backward()
        assert out.dtype == torch.bfloat16
        for name, parameter in model.named_parameters():
            assert parameter.grad.dtype == torch.float32, name
            assert parameter.grad.full_tensor().isfinite().all(), name
    finally:
        dist.destroy_process_group()


# torch 2.14 warns of its own use of torch.jit.script.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
def test_forward_mode_and_second_derivatives_need_the_math_kernel():
    rope = RotaryPositionalEmbedding(100.0, 4, 40)
    block = Block(8, 2, rope=rope).double()
    x = torch.randn(1, 3, 8, dtype=torch.float64, requires_grad=True)
    with pytest.raises(NotImplementedError, match="forward AD"):
        torch.func.jvp(block, (x,), (x,))
    with pytest.raises(RuntimeError, match="not implemented"):
        gradgradcheck(block, x)
    with sdpa_kernel(SDPBackend.MATH):
        gradcheck(block, x, check_forward_ad=True)
        gradgradcheck(block, x)


# torch has no batching rule for its attention kernel.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_and_functional_call_give_gradients_per_sample():
    model = build()
    x = torch.randn(2, 7, 24)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    found = per_sample(parameters, x)
    for number, sample in enumerate(x):
        model.zero_grad()
        model(sample).square().mean().backward()
        expected = {name: p.grad for name, p in model.named_parameters()}
        of_sample = {name: gradients[number] for name, gradients in found.items()}
        torch.testing.assert_close(of_sample, expected, rtol=1e-4, atol=1e-6)
