"""What of the blocks is no part of the contract in tinyblock/contract.py: what PyTorch does with them."""

import copy
import functools
import statistics
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tinyblock import Block, FeedForward, RotaryPositionalEmbedding, Transformer, silu
from tinyblock.contract import randn


def test_block_accepts_any_callable_for_its_ffn():
    block = Block(24, 4, 32, ffn=functools.partial(FeedForward, activation=silu))
    assert block.ffn.activation is silu
    assert block.ffn.d_ff == 32
    assert Block(24, 4).ffn.d_ff == 64
    assert Block(24, 4, ffn=FeedForward).ffn.d_ff == 96


def test_transformer_is_whole_after_meta_and_reset_parameters():
    with torch.device("meta"):
        model = Transformer(2, 24, 4, max_seq_len=9, qk_norm=True)
    assert len({id(table) for _, table in model.to("meta").named_buffers(remove_duplicate=False)}) == 1
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    model.reset_parameters()
    assert model(randn(1, 9, 24, dtype=torch.float32)).isfinite().all()
    assert torch.equal(model.layers[1].ln2.weight, torch.ones(24))
    assert torch.equal(model.layers[0].attn.q_norm.weight, torch.ones(6))
    model.layers[0].attn.q_proj.weight.data.fill_(torch.nan)
    model.layers[0].reset_parameters()
    assert model(randn(1, 9, 24, dtype=torch.float32)).isfinite().all()


@pytest.mark.parametrize("theta", [100.0, None])
def test_transformer_rejects_a_sequence_longer_than_its_limit(theta):
    model = Transformer(1, 24, 4, max_seq_len=9, theta=theta)
    with pytest.raises(ValueError, match=r"10 tokens .*max_seq_len=9"):
        model(torch.zeros(10, 24))


@pytest.mark.parametrize(
    ("arguments", "options", "named"),
    [
        ((0, 24, 4), {}, "num_layers=0"),
        ((-1, 24, 4), {}, "num_layers=-1"),
        ((1, 24, 4), {"max_seq_len": 0}, "max_seq_len=0"),
        ((1, 24, 5), {}, "num_heads=5"),
        ((1, 30, 4), {}, "num_heads=4"),
        ((1, 24, 0), {}, "'num_heads': 0"),
        ((1, 24, 8), {}, "even.*3"),
        ((1, 24, 4), {"theta": 0.0}, "theta.*0.0"),
        ((1, 24, 4), {"eps": -1.0}, "eps.*-1.0"),
        ((1, 24, 4, 0), {}, "d_ff=0"),
    ],
)
def test_transformer_rejects_bad_hyperparameters(arguments, options, named):
    with pytest.raises(ValueError, match=named):
        Transformer(*arguments, **({"max_seq_len": 9} | options))


@pytest.mark.parametrize("change", ["missing", "misshaped"])
def test_load_state_dict_names_the_key_that_is_wrong(change):
    block = Block(24, 4, 40)
    state = block.state_dict()
    if change == "missing":
        del state["attn.k_proj.weight"]
    else:
        state["attn.k_proj.weight"] = torch.zeros(24, 23)
    with pytest.raises(RuntimeError, match=r"attn\.k_proj\.weight"):
        block.load_state_dict(state)


# What PyTorch does with modules, with the shape checks on.


def model_and_input(layers=2):
    torch.manual_seed(0)
    return Transformer(layers, 24, 4, max_seq_len=40, num_kv_heads=2, qk_norm=True), randn(
        2, 7, 24, dtype=torch.float32
    )


def recompilations():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_compile_with_inductor_matches_eager_and_its_gradients():
    model, x = model_and_input(layers=4)
    compiled = torch.compile(model, fullgraph=True)
    for_eager, for_compiled = x.clone().requires_grad_(), x.clone().requires_grad_()
    model(for_eager).square().sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    compiled(for_compiled).square().sum().backward()
    torch.testing.assert_close(for_compiled.grad, for_eager.grad, rtol=1e-4, atol=1e-4)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-4)
    assert recompilations() == 1


@pytest.mark.parametrize("strict", [True, False])
def test_export_with_a_dynamic_sequence(strict):
    model, x = model_and_input()
    seq = torch.export.Dim("seq", min=2, max=40)
    program = torch.export.export(model, (x,), dynamic_shapes={"x": {1: seq}}, strict=strict)
    for length in (2, 11, 40):
        x = randn(2, length, 24, seed=length, dtype=torch.float32)
        torch.testing.assert_close(program.module()(x), model(x), rtol=1e-5, atol=1e-5)


def test_positions_off_the_table_show_where_they_cannot_be_read():
    """Compiled or exported, with a mask or without, the token itself must come out as NaN, and nothing before it."""
    torch.manual_seed(0)
    block = Block(24, 4, rope=RotaryPositionalEmbedding(100.0, 6, 40), num_kv_heads=2)
    x, positions = randn(2, 7, 24, dtype=torch.float32), torch.arange(7) + 36
    expected = [False] * 4 + [True] * 3
    mask = torch.ones(7, 7, dtype=torch.bool)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    exported = [torch.export.export(block, arguments).module() for arguments in ((x, positions), (x, positions, mask))]
    for out in (compiled(x, positions, mask), exported[0](x, positions), exported[1](x, positions, mask)):
        assert out.isnan().all(-1)[0].tolist() == expected
    with pytest.raises(ValueError, match=r"got 36 \.\.\. 42"):
        block(x, positions, mask)


def test_transformer_reads_positions_once(monkeypatch):
    model, x = model_and_input(layers=3)
    positions, reads, aminmax = torch.arange(7), [], torch.aminmax
    monkeypatch.setattr(torch, "aminmax", lambda tensor: reads.append(tensor) or aminmax(tensor))
    expected = model(x)
    for context in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        with context:
            torch.testing.assert_close(model(x, positions + 0), expected)
            fresh = positions + 0
            for _ in range(2):
                reads.clear()
                model(x, fresh)
            assert reads == []
    model(x, positions + 0)
    assert len(reads) == 1


def test_load_state_dict_into_a_model_on_meta():
    model, x = model_and_input()
    with torch.device("meta"):
        empty = Transformer(2, 24, 4, max_seq_len=40, num_kv_heads=2, qk_norm=True)
    empty.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(empty(x), model(x))


def test_attention_accepts_a_tensor_parallel_share_of_the_heads():
    """Two ranks with half of the heads each, whose outputs are summed, as the standard plan does it."""
    torch.manual_seed(0)
    attention = Block(24, 4, rope=RotaryPositionalEmbedding(100.0, 6, 9), num_kv_heads=2).attn
    x, total = randn(2, 7, 24, dtype=torch.float32), 0
    for rank in range(2):
        share = copy.deepcopy(attention)
        for name, dim in (("q_proj", 0), ("k_proj", 0), ("v_proj", 0), ("output_proj", 1)):
            linear = share.get_submodule(name)
            linear.weight = torch.nn.Parameter(linear.weight.chunk(2, dim)[rank])
        total = total + share(x)
    torch.testing.assert_close(total, attention(x), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_trace_as_tensorboard_does_it():
    model, x = model_and_input()
    torch.testing.assert_close(torch.jit.trace(model, x)(x), model(x))


FSDP = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tinyblock import RotaryPositionalEmbedding, Transformer

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with torch.device("meta"):
    model = Transformer(2, 24, 4, max_seq_len=40, qk_norm=True)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
for layer in (*model.layers, model):
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
model.to_empty(device="cpu")
model.reset_parameters()
assert len({id(buffer) for buffer in model.buffers()}) == 1
assert torch.equal(model.rope.cos_sin, RotaryPositionalEmbedding(10000.0, 6, 40).cos_sin)
model(torch.randn(2, 7, 24)).sum().backward()
assert all(parameter.grad is not None for parameter in model.parameters())
dist.destroy_process_group()
"""


@pytest.mark.skipif(torch.__version__ < "2.7", reason="FSDP2 of torch 2.6 wants an accelerator's streams")
def test_fsdp2_from_meta_in_mixed_precision():
    done = subprocess.run([sys.executable, "-c", FSDP], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch has no batching rule for this kernel
def test_functional_call_grad_and_vmap():
    model, x = model_and_input()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    gradients = torch.func.grad(loss)(parameters, x)
    model(x).square().mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)
    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for name, gradient in per_sample.items():
        torch.testing.assert_close(gradient.mean(0), gradients[name], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(torch.func.vmap(model)(x), model(x), rtol=1e-5, atol=1e-6)


def test_activation_checkpointing_gives_the_same_gradients():
    model, x = model_and_input()
    plain, saved = x.clone().requires_grad_(), x.clone().requires_grad_()
    model(plain).sum().backward()
    checkpoint(model, saved, use_reentrant=False).sum().backward()
    torch.testing.assert_close(saved.grad, plain.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_the_lower_dtype_without_a_warning(dtype):
    model, x = model_and_input()
    with torch.autocast("cpu", dtype):
        out = model(x)
    assert out.dtype == torch.float32  # that of the residual stream
    torch.testing.assert_close(out, model(x), rtol=0.1, atol=0.1)
    assert not torch.equal(out, model(x))


def test_meta_and_fake_tensors_have_the_right_shapes():
    model, x = model_and_input()
    positions, mask = torch.arange(7), torch.ones(7, 7, dtype=torch.bool)
    on_meta = copy.deepcopy(model).to("meta")
    out = on_meta(x.to("meta"), positions.to("meta"), mask.to("meta"))
    assert out.is_meta
    assert out.shape == x.shape
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out = model(mode.from_tensor(x), mode.from_tensor(positions), mode.from_tensor(mask))
        assert isinstance(out, torch._subclasses.FakeTensor)
        assert out.shape == x.shape


def test_bfloat16_stack_is_no_further_from_float64_than_the_cast_order_of_llama():
    """Compare with the same stack whose norms round before the gain, and whose attention is the same."""

    class RoundsTwice(torch.nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

        def forward(self, x):
            wide = x.float()
            return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

    ratios = []
    for seed in range(3):
        torch.manual_seed(seed)
        exact_model = Transformer(4, 96, 4, max_seq_len=32)
        for name, parameter in exact_model.named_parameters():
            if "ln" in name:
                torch.nn.init.uniform_(parameter, 0.5, 2)
        ours = exact_model.to(torch.bfloat16)
        exact_model = copy.deepcopy(ours).double()
        theirs = copy.deepcopy(ours)
        for layer in theirs.layers:
            layer.ln1, layer.ln2 = RoundsTwice(layer.ln1.weight), RoundsTwice(layer.ln2.weight)
        theirs.ln_final = RoundsTwice(theirs.ln_final.weight)
        x = randn(2, 32, 96, seed=seed, dtype=torch.bfloat16)
        exact = exact_model(x.double())
        error, other = ((model(x) - exact).square().mean().item() for model in (ours, theirs))
        ratios.append((error / other) ** 0.5)
    assert statistics.median(ratios) < 1
