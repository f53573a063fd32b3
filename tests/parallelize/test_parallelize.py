"""parallelize: four processes against one, collectives, compiled blocks and rejections."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from parallelize import checks
from parallelize.checks import mesh_of, one_block, seeded, transformer
from processes import run
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.torch_version import TorchVersion

from tinyblock import Block, SwiGLU, parallelize


@pytest.fixture(scope="module")
def four_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallelize")
    return run(checks.__file__, folder, processes=4)[1]


@pytest.mark.parametrize("name", checks.CHECKS)
def test_four_processes_compute_what_one_computes(name, four_processes):
    assert f"passed {name}" in four_processes.splitlines(), four_processes


@pytest.fixture(autouse=True)
def _fake_processes():
    """Be the first of four processes, of which the others do nothing."""
    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=0, world_size=4
    )
    yield
    torch.distributed.destroy_process_group()


fused = one_block(ffn=SwiGLU)
fused.ffn.w1 = nn.Linear(16, 64)
low_rank = one_block(ffn=SwiGLU)
low_rank.ffn.w1.lora_a = nn.Parameter(torch.ones(1, 16))
tied = one_block(ffn=SwiGLU)
tied.ffn.w3 = tied.ffn.w1
REJECTED: Any = [
    ("data", one_block(), {}, r"axes .*'tp'.* got \('data',\)"),
    ("tp dp", one_block(), {}, r"axes .* got \('tp', 'dp'\)"),
    ("tp", one_block(num_heads=2, num_kv_heads=1, d_head=2), {}, "num_heads .* 4 .* 2"),
    ("tp", one_block(num_kv_heads=2), {}, "num_kv_heads .* got 2"),
    ("tp", one_block(d_ff=6), {}, "d_ff .* got 6"),
    ("tp", fused, {}, r"ffn\.w1 .* 32, got 64"),
    ("tp", low_rank, {}, r"layers\.1\.ffn\.w1\.lora_a"),
    ("tp", tied, {}, r"layers\.1\.ffn\.w1\.weight and layers\.1\.ffn\.w3"),
    ("dp", tied, {}, r"layers\.1\.ffn\.w1\.weight and layers\.1\.ffn\.w3"),
    ("tp", one_block(), {"mp_policy": None}, "'dp' for mp_policy"),
    ("dp tp", one_block(), {"mp_polcy": None}, "mp_polcy"),
]


@pytest.mark.parametrize(("axes", "block", "options", "message"), REJECTED)
def test_parallelize_rejects_before_it_changes_anything(axes, block, options, message):
    model = transformer()
    model.layers[1] = block
    before = dict(model.named_parameters())
    with pytest.raises((ValueError, TypeError), match=message):
        parallelize(model, mesh_of(axes), recompute=True, compile=True, **options)
    for name, parameter in model.named_parameters():
        assert parameter is before[name], name
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert "forward" not in vars(module)


def test_tp_requires_torch_2_13(monkeypatch):
    model = one_block()
    before = dict(model.named_parameters())
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.1"))
    with pytest.raises(ValueError, match=r"2\.13 .* 'tp', got 2\.12\.1: .* only 'dp'"):
        parallelize(model, mesh_of("tp"))
    assert all(
        parameter is before[name] for name, parameter in model.named_parameters()
    )


def test_tp_accepts_an_alpha_of_torch_2_13(monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0a0+1.nv26.06"))
    parallelize(one_block(), mesh_of("tp"))


def test_parallelize_accepts_ties_outside_of_blocks_over_dp():
    model = transformer()
    model.embedding = nn.Embedding(16, 16)
    model.head = nn.Linear(16, 16)
    model.head.weight = model.embedding.weight
    parallelize(model, mesh_of("dp"))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((16,), r"not empty, got .*16"),
        ((0, 7, 16), r"not empty, got .*0, 7, 16"),
        ((7, 16), r"a multiple of 4 tokens, got \(7, 16\)"),
    ],
)
def test_compiled_parallel_model_rejects_an_x_of(shape, message):
    model = parallelize(Block(16, 8), mesh_of("tp"), compile=True)
    with pytest.raises(ValueError, match=message):
        model(torch.ones(shape))


def test_options_reach_fully_shard():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = transformer(dtype=torch.float32)
    parallelize(model, mesh_of("dp tp"), mp_policy=policy)
    assert model(torch.randn(2, 8, 16)).dtype == torch.bfloat16


def test_copies_over_tp_have_their_own_weights(monkeypatch):

    def uncompiled(function, **options):
        return lambda *args: function(*args)  # as torch returns a function

    monkeypatch.setattr(torch, "compile", uncompiled)
    original = parallelize(transformer(), mesh_of("tp"), recompute=True, compile=True)
    x = torch.randn(2, 8, 16, dtype=torch.float64)
    expected = original(x)
    model = copy.deepcopy(original)
    for parameter in original.parameters():
        nn.init.zeros_(parameter)
    assert torch.equal(model(x), expected)


def collectives(recorded):
    """Return how often a profile gathers tokens, and how often it scatters sums."""
    counts = {event.key: event.count for event in recorded.key_averages()}
    gathers = counts.get("_c10d_functional::all_gather_into_tensor")
    return gathers, counts.get("_c10d_functional::reduce_scatter_tensor")


# To recompute stops where the backward pass has all that it needs: before w2's scatter.
@pytest.mark.parametrize(
    ("recompute", "in_backward"), [(False, (5, 4)), (True, (9, 6))]
)
def test_a_block_needs_two_gathers_and_two_scatters_in_each_direction(
    recompute, in_backward
):
    """Two blocks, and one gather for the output or for the gradient of the input."""
    model = parallelize(transformer(), mesh_of("tp"), recompute=recompute)
    x = torch.randn(2, 8, 16, dtype=torch.float64, requires_grad=True)
    with torch.profiler.profile() as forward:
        out = model(x)
    with torch.profiler.profile() as backward:
        out.sum().backward()
    assert collectives(forward) == (5, 4)
    assert collectives(backward) == in_backward


# Dynamo looks at the .grad of each DTensor.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_blocks_share_one_graph_and_compute_what_eager_ones_do(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    counters = torch._dynamo.utils.counters
    counters.clear()
    found = []
    x = torch.randn(2, 8, 16, dtype=torch.float64, requires_grad=True)
    for compile in (False, True):
        model = seeded(transformer)
        parallelize(model, mesh_of("dp tp"), recompute=True, compile=compile)
        out = model(x)
        out.square().mean().backward()
        gradients = [parameter.grad.to_local() for parameter in model.parameters()]
        found.append([out, *gradients])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
