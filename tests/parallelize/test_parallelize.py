"""parallelize: four processes against one, collectives, compiled blocks and rejections."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from parallelize import checks
from parallelize.checks import mesh_of, seeded, transformer
from processes import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tinyblock import Block, SwiGLU, Transformer, parallelize


@pytest.fixture(scope="module")
def four_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallelize")
    return run(checks.__file__, folder, processes=4)[1]


@pytest.mark.parametrize("name", checks.CHECKS)
def test_four_processes_agree_that(name, four_processes):
    assert f"passed {name}" in four_processes.splitlines(), four_processes


@pytest.fixture
def fake_processes():
    """Be the first of four processes, of which the others do nothing."""
    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=0, world_size=4
    )
    yield
    torch.distributed.destroy_process_group()


class Collectives(TorchDispatchMode):
    """Count the collectives that DTensor calls."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does to its local tensors comes here again
        if func.namespace == "_c10d_functional":
            self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("fake_processes")
def test_a_block_needs_two_gathers_and_two_scatters_in_each_direction():
    model = parallelize(transformer(), mesh_of("tp"))
    x = torch.randn(2, 8, 16, dtype=torch.float64, requires_grad=True)
    with Collectives() as forward:
        out = model(x)
    with Collectives() as backward:
        out.sum().backward()
    for counted in (forward, backward):
        # One more is for the output, or for the gradient of the input.
        assert counted.calls["all_gather_into_tensor"] == 2 * 2 + 1
        assert counted.calls["reduce_scatter_tensor"] == 2 * 2


@pytest.mark.usefixtures("fake_processes")
@pytest.mark.parametrize(("recompute", "runs"), [(False, 1), (True, 2)])
def test_recompute_runs_each_block_again_in_the_backward_pass(recompute, runs):
    model = parallelize(transformer(), mesh_of("tp"), recompute=recompute)
    calls = Counter()
    for number, block in enumerate(model.layers):
        block.ln1.register_forward_pre_hook(
            lambda *_, number=number: calls.update([number])
        )
    model(torch.randn(2, 8, 16, dtype=torch.float64)).sum().backward()
    assert calls == {0: runs, 1: runs}


@pytest.mark.usefixtures("fake_processes")
def test_gradients_of_gains_are_summed_over_tp_by_one_hook():
    """AdamW and clipping of torch 2.10 to 2.12 take the parts of a sum for the sum."""
    model = parallelize(transformer(), mesh_of("tp"))
    for _ in range(3):
        model(torch.randn(2, 8, 16, dtype=torch.float64)).sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert parameter.grad.placements == (Replicate(),), name
            assert len(parameter._backward_hooks) == 1, name


@pytest.mark.usefixtures("fake_processes")
# Dynamo looks at the .grad of each DTensor.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_blocks_share_one_graph_and_compute_what_eager_ones_do(monkeypatch):
    traced_only = partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", traced_only)
    counters = torch._dynamo.utils.counters
    counters.clear()
    found = []
    x = torch.randn(2, 8, 16, dtype=torch.float64, requires_grad=True)
    for compile in (False, True):
        model = seeded(transformer)
        parallelize(model, mesh_of("dp", "tp"), recompute=True, compile=compile)
        out = model(x)
        out.square().mean().backward()
        gradients = [parameter.grad.to_local() for parameter in model.parameters()]
        found.append([out, *gradients])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    with pytest.raises(ValueError, match=r"a multiple of 2 tokens, got \(2, 7, 16\)"):
        model(x[:, :7])


class FusedGate(nn.Module):
    def __init__(self, d_model, d_ff, **options):
        super().__init__()
        self.w1 = nn.Linear(d_model, 2 * d_ff, **options)
        self.w2 = nn.Linear(d_ff, d_model, **options)


class LowRank(SwiGLU):
    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.w1.lora_a = nn.Parameter(torch.ones(1, 16))


def build(num_heads=8, d_ff=32, **options):
    return Transformer(2, 16, num_heads, d_ff, max_seq_len=8, **options)


def tied():
    model = build()
    model.layers[1].ffn.w3.weight = model.layers[0].ffn.w1.weight
    return model


REJECTED: dict[str, Any] = {
    "other axes": (("data",), build, {}, "mesh must have the axes"),
    "another order": (("tp", "dp"), build, {}, "mesh must have the axes"),
    "heads": (("tp",), partial(build, num_heads=2), {}, "num_heads .* 4 .* got 2"),
    "key heads": (("tp",), partial(build, num_kv_heads=2), {}, "num_kv_heads .* got 2"),
    "d_ff": (("tp",), partial(build, d_ff=6), {}, "d_ff .* got 6"),
    "a fused gate": (("tp",), partial(build, ffn=FusedGate), {}, r"ffn\.w1 .* got 64"),
    "LoRA": (("tp",), partial(build, ffn=LowRank), {}, r"layers\.0\.ffn\.w1\.lora_a"),
    "ties over tp": (("tp",), tied, {}, r"0\.ffn\.w1\.weight and layers\.1\.ffn\.w3"),
    "ties over dp": (("dp",), tied, {}, r"0\.ffn\.w1\.weight and layers\.1\.ffn\.w3"),
    "options over tp": (("tp",), build, {"mp_policy": None}, "'dp' for mp_policy"),
    "an unknown option": (("dp", "tp"), build, {"mp_polcy": None}, "mp_polcy"),
}


@pytest.mark.usefixtures("fake_processes")
@pytest.mark.parametrize("name", REJECTED)
def test_parallelize_rejects_before_it_changes_anything(name):
    axes, build, options, message = REJECTED[name]
    model = build()
    parameters = list(model.parameters())
    shape = {1: (4,), 2: (2, 2)}[len(axes)]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    with pytest.raises((ValueError, TypeError), match=message):
        parallelize(model, mesh, recompute=True, compile=True, **options)
    for parameter, before in zip(model.parameters(), parameters, strict=True):
        assert parameter is before
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert "forward" not in vars(module)


@pytest.mark.usefixtures("fake_processes")
def test_parallelize_accepts_ties_outside_of_blocks_over_dp():
    model = build()
    model.embedding = nn.Embedding(16, 16)
    model.head = nn.Linear(16, 16)
    model.head.weight = model.embedding.weight
    parallelize(model, mesh_of("dp"))
    assert model.head.weight is model.embedding.weight


@pytest.mark.usefixtures("fake_processes")
@pytest.mark.parametrize("shape", [(16,), (0, 7, 16)])
def test_parallel_model_rejects_an_x_without_tokens(shape):
    with pytest.raises(ValueError, match="not empty, got"):
        parallelize(Block(16, 8), mesh_of("tp"))(torch.ones(shape))
