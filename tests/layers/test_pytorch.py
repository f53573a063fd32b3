"""What PyTorch does with the layers, with the shape checks on: compile, export, pickle, meta, FSDP, transforms."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tinyblock import (
    Block,
    CausalMultiHeadSelfAttention,
    FeedForward,
    RMSNorm,
    RotaryPositionalEmbedding,
    Transformer,
    gelu,
)


def model_and_input(layers=2):
    return Transformer(
        layers, 24, 4, max_seq_len=40, num_kv_heads=2, qk_norm=True
    ), torch.randn(2, 7, 24)


def test_layers_show_their_sizes():
    assert repr(RMSNorm(5, 1e-6)) == "RMSNorm(5, eps=1e-06)"
    expected = "RotaryPositionalEmbedding(theta=500000.0, d_k=128, max_seq_len=16)"
    assert repr(RotaryPositionalEmbedding(5e5, 128, 16)) == expected


def test_rms_norm_is_one_operation_of_torch():
    targets = [
        str(node.target)
        for node in torch.export.export(RMSNorm(8), (torch.randn(3, 8),)).graph.nodes
    ]
    assert targets == ["p_weight", "x", "aten.rms_norm.default", "output"]


def test_feed_forward_can_be_pickled_with_its_default_activation():
    layer = FeedForward(4)
    x = torch.linspace(-2, 2, 8).view(2, 4)
    assert layer.activation is gelu
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated"
)  # by inductor's own import
def test_inductor_rotates_like_eager_forward_and_backward_and_rejects_positions():
    """RoPE alone has code of its own for compilers."""
    rope = RotaryPositionalEmbedding(100.0, 6, 40)
    x = torch.randn(2, 7, 6)
    positions = torch.arange(7)
    compiled = torch.compile(rope, fullgraph=True)
    for_eager, for_compiled = (x.bfloat16().requires_grad_() for _ in range(2))
    expected = rope(for_eager, positions + 33)
    actual = compiled(for_compiled, positions + 33)
    torch.testing.assert_close(actual, expected)
    actual.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(for_compiled.grad, for_eager.grad)
    for wrong in (positions + 34, positions - 1):
        with pytest.raises(RuntimeError, match="out of bounds"):
            compiled(for_compiled, wrong)


def test_strict_export_takes_any_length_and_rejects_positions_out_of_range():
    block = Block(24, 4, rope=RotaryPositionalEmbedding(100.0, 6, 40), num_kv_heads=2)
    seq = torch.export.Dim("seq", min=2, max=40)

    def inputs(length):
        return (
            torch.randn(2, length, 24),
            torch.arange(length),
            torch.rand(length, length) < 0.7,
        )

    shapes = {"x": {1: seq}, "token_positions": {0: seq}, "mask": {0: seq, 1: seq}}
    exported = torch.export.export(
        block, inputs(7), dynamic_shapes=shapes, strict=True
    ).module()
    for length in (2, 11, 40):
        x, positions, mask = inputs(length)
        torch.testing.assert_close(
            exported(x, positions, mask),
            block(x, positions, mask),
            rtol=1e-5,
            atol=1e-5,
        )
    for wrong in (positions + 1, positions - 1):
        with pytest.raises(IndexError, match="out of range"):
            exported(x, wrong, mask)


def test_attention_accepts_a_tensor_parallel_share_of_the_heads():
    """Two ranks with half of the heads each, whose outputs are summed, as the standard plan does it."""
    attention = CausalMultiHeadSelfAttention(
        24, 4, rope=RotaryPositionalEmbedding(100.0, 6, 9), num_kv_heads=2
    )
    x = torch.randn(2, 7, 24)
    total = torch.zeros(2, 7, 24)
    for rank in range(2):
        share = copy.deepcopy(attention)
        for name, dim in (
            ("q_proj", 0),
            ("k_proj", 0),
            ("v_proj", 0),
            ("output_proj", 1),
        ):
            linear = share.get_submodule(name)
            linear.weight = torch.nn.Parameter(
                linear.get_parameter("weight").chunk(2, dim)[rank]
            )
        total += share(x)
    torch.testing.assert_close(total, attention(x), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning"
)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_jit_trace_as_tensorboard_does_it():
    model, x = model_and_input()
    torch.testing.assert_close(torch.jit.trace(model, x)(x), model(x))


@pytest.mark.filterwarnings(
    "ignore:DTensor random operators may not have complete support"
)
def test_fsdp2_from_meta_in_mixed_precision():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with torch.device("meta"):
            model = Transformer(2, 24, 4, max_seq_len=40, qk_norm=True)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in (*model.layers, model):
            fully_shard(layer, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
        model.to_empty(device="cpu")
        model.reset_parameters()
        assert len({id(buffer) for buffer in model.buffers()}) == 1
        assert torch.equal(
            model.rope.cos_sin, RotaryPositionalEmbedding(10000.0, 6, 40).cos_sin
        )
        model(torch.randn(2, 7, 24)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings(
    "ignore:There is a performance drop"
)  # torch has no batching rule for this kernel
def test_functional_call_grad_and_vmap():
    model, x = model_and_input()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    gradients = torch.func.grad(loss)(parameters, x)
    model(x).square().mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)
    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(
        parameters, x
    )
    for name, gradient in per_sample.items():
        torch.testing.assert_close(
            gradient.mean(0), gradients[name], rtol=1e-4, atol=1e-6
        )
    torch.testing.assert_close(
        torch.func.vmap(model)(x), model(x), rtol=1e-5, atol=1e-6
    )


def test_meta_and_fake_tensors_have_the_right_shapes():
    model, x = model_and_input()
    positions = torch.arange(7)
    mask = torch.ones(7, 7, dtype=torch.bool)
    on_meta = copy.deepcopy(model).to("meta")
    out = on_meta(x.to("meta"), positions.to("meta"), mask.to("meta"))
    assert out.is_meta
    assert out.shape == x.shape
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out = model(
            mode.from_tensor(x), mode.from_tensor(positions), mode.from_tensor(mask)
        )
        assert isinstance(out, torch._subclasses.FakeTensor)
        assert out.shape == x.shape


@pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="this build of torch has no CUDA"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_on_cuda_has_the_right_shapes_without_a_gpu(dtype):
    model = Transformer(
        2,
        24,
        4,
        max_seq_len=40,
        num_kv_heads=2,
        qk_norm=True,
        device="meta",
        dtype=dtype,
    )
    device = "cuda"
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        # Not built here: since torch 2.14, trunc_normal_ reads values.
        model.to_empty(device=device)
        x = torch.empty(2, 7, 24, device=device, dtype=dtype)
        positions = torch.arange(7, device=device)
        mask = torch.ones(7, 7, dtype=torch.bool, device=device)
        for inputs in ((), (positions,), (positions, mask)):
            out = model(x, *inputs)
            assert (out.device.type, out.dtype, out.shape) == ("cuda", dtype, x.shape)
