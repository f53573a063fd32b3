"""parallelize: four processes against one, what a process calls, and what it rejects."""

import operator
import re
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from lab.sizes import Size
from parallelize import cases
from parallelize.cases import mesh_of, seeded
from parallelize.counting import Collectives
from processes import run_as_torchrun
from profiling.collectives import Collective, Mesh, collectives_of
from profiling.distributed import build_distributed
from profiling.records import Settings
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tinyblock import Block, FeedForward, Transformer, parallelize

TP = ("tp",)
DP_TP = ("dp", "tp")
GATHER = Collective("all-gather", "tp", 2 * 8 * 16)
SCATTER = Collective("reduce-scatter", "tp", 2 * 8 * 16)
SIZE = Size(
    batch_size=2,
    seq_len=8,
    d_model=16,
    num_heads=8,
    num_kv_heads=4,
    d_head=4,
    d_ff=32,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Run all cases in one launch of four processes, and return the folder that they wrote to."""
    folder = tmp_path_factory.mktemp("processes")
    (folder / "passed").touch()
    run_as_torchrun(
        "from parallelize import cases; cases.run_cases()", cases.PROCESSES, folder
    )
    return folder


@pytest.mark.parametrize("name", cases.CASES)
def test_processes_agree_that(name, folder):
    passed = (folder / "passed").read_text().splitlines()
    assert name in passed, [path.read_text() for path in folder.glob("*.err")]


@pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized"
)
def test_checkpoint_resumes_without_a_process_group(folder):
    losses = cases.resume(None, folder / "checkpoint")
    torch.testing.assert_close(
        losses, torch.load(folder / "checkpoint" / "losses.pt"), rtol=1e-7, atol=0
    )


@pytest.fixture
def fake_processes():
    """Be the first of four processes that do nothing."""
    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=0, world_size=4
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("fake_processes")
# Dynamo looks at the .grad of each DTensor.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_blocks_compute_what_eager_ones_do_without_a_graph_break():
    build = partial(cases.transformer, qk_norm=True)
    mesh = mesh_of("dp", "tp")
    eager = parallelize(seeded(build), mesh, recompute=True)
    with patch.object(torch, "compile", cases.traced_only):
        compiled = parallelize(seeded(build), mesh, recompute=True, compile=True)
    found = {}
    for seq in (7, 8):  # the first process along tp has four tokens of each
        x = torch.randn(2, seq, 16, dtype=torch.float64)
        for model in (compiled, eager):
            x = x.detach().clone().requires_grad_()
            out = model(x)
            out.square().mean().backward()
            found[model] = [out, x.grad]
            for parameter in model.parameters():
                assert not cases.is_partial(parameter.grad)
                found[model].append(parameter.grad.to_local())
            model.zero_grad()
        torch.testing.assert_close(*found.values(), rtol=1e-12, atol=1e-12)
    assert not torch._dynamo.utils.counters["graph_break"]
    # One graph for each length, which all blocks share.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize(
    "axes",
    [axes for axes, shape in cases.MESHES.items() if 1 not in shape],
    ids="+".join,
)
@pytest.mark.parametrize("num_layers", [2, None], ids=["stack", "block"])
@pytest.mark.usefixtures("fake_processes")
def test_collectives_are_two_gathers_and_two_scatters_a_block_each_way(
    axes, num_layers
):
    # FSDP would pad the gains of smaller heads over four processes.
    options = {**cases.SIZES, "qk_norm": True, "d_head": 4}
    build = partial(Transformer, num_layers, max_seq_len=8) if num_layers else Block
    mesh = mesh_of(*axes)
    shape = cases.MESHES[axes]
    model = parallelize(seeded(partial(build, 16, 8, 32, **options)), mesh)
    _, data_ranks = cases.data_rank(mesh)
    size = replace(SIZE, batch_size=2 * data_ranks, qk_norm=True, num_layers=num_layers)
    with Collectives(mesh) as forward:
        out = model(torch.randn(2, 8, 16, dtype=torch.float64, requires_grad=True))
    with Collectives(mesh) as backward:
        out.sum().backward()
    counted = {"forward": forward.calls, "backward": backward.calls}
    sizes = dict(zip(axes, shape, strict=True))
    assert counted == collectives_of(size, Mesh(**sizes))
    if "tp" not in axes:
        return
    for calls in counted.values():
        # One more than the blocks call: for the output, or for the gradient of the input.
        assert calls[GATHER] == 2 * size.layers + 1
        assert calls[SCATTER] == 2 * size.layers


@pytest.mark.usefixtures("fake_processes")
def test_recomputing_costs_the_collectives_of_the_forward_pass_but_for_the_last_of_a_block():
    mesh = mesh_of("tp")
    model = parallelize(cases.transformer(), mesh, recompute=True)
    size = replace(SIZE, d_head=2, num_layers=2)
    out = model(torch.randn(2, 8, 16, dtype=torch.float64, requires_grad=True))
    with Collectives(mesh) as backward:
        out.sum().backward()
    expected = collectives_of(size, Mesh(tp=4), recompute=True)
    assert backward.calls == expected["backward"]
    assert backward.calls[GATHER] == 2 * (2 + 2) + 1
    assert backward.calls[SCATTER] == 2 * (2 + 1)


@pytest.mark.usefixtures("fake_processes")
def test_each_pass_that_is_profiled_calls_what_a_step_calls():
    # A Block would keep its gathered weights for a second call.
    size = replace(SIZE, batch_size=4)
    mesh = Mesh(dp=2, tp=2)
    settings = Settings(torch.device("cpu"), torch.float32, "train", mesh=mesh)
    devices = mesh_of(*DP_TP)
    runs = build_distributed(size, settings, devices).runs
    calls = collectives_of(size, mesh)
    expected_calls = {
        "forward": calls["forward"],
        "train": calls["forward"] + calls["backward"],
    }
    for name, expected in expected_calls.items():
        for _ in range(2):
            with Collectives(devices) as counted:
                runs["all", name]()
            assert counted.calls == expected, name


class FusedGate(nn.Module):
    def __init__(self, d_model, d_ff, **options):
        super().__init__()
        self.w1 = nn.Linear(d_model, 16, **options)
        self.w2 = nn.Linear(8, d_model, **options)


class WithoutDownProjection(nn.Module):
    def __init__(self, d_model, d_ff, **options):
        super().__init__()
        self.w1 = nn.Linear(d_model, d_model, **options)


class ScaledLinear(nn.Linear):
    """A linear layer with one more parameter, as LoRA has."""

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.scale = nn.Parameter(torch.ones(1))


class ScaledFeedForward(FeedForward):
    def __init__(self, d_model, d_ff, **options):
        super().__init__(d_model, d_ff, **options)
        self.w1 = ScaledLinear(d_model, self.w1.out_features, bias=False)


class Convolution(nn.Conv1d):
    """A mixer of tokens that is no attention."""

    def __init__(self, d_model, num_heads, **options):
        super().__init__(d_model, d_model, kernel_size=3)


@pytest.mark.parametrize(
    ("axes", "model", "options", "expected"),
    [
        (TP, {"num_heads": 2}, {}, "num_heads=2 must be a multiple of the 4 processes"),
        (TP, {"num_kv_heads": 2}, {}, "num_kv_heads=2 must"),
        (TP, {"d_ff": 6}, {}, "ffn.w1=6 must be a multiple"),
        (
            TP,
            {"ffn": FusedGate},
            {},
            "ffn.w1 must have as many outputs as ffn.w2 has inputs, 8, got 16",
        ),
        (
            TP,
            {"ffn": WithoutDownProjection},
            {},
            "a block with ffn.w1 must have the linear layer ffn.w2; use only 'dp'",
        ),
        (
            TP,
            {"ffn": cases.MIXTURE},
            {},
            "no rule splits layers.0.ffn.router.weight over the axis 'tp'",
        ),
        (
            TP,
            {"ffn": ScaledFeedForward},
            {},
            "no rule splits layers.0.ffn.w1.scale over the axis 'tp'",
        ),
        (
            TP,
            {"attention": Convolution},
            {},
            "Convolution must have num_heads, .*output_proj; use only 'dp'",
        ),
        (
            TP,
            {},
            {"mp_policy": None},
            "mesh must have the axis 'dp' for mp_policy, an option of fully_shard, got the axes \\('tp',\\)",
        ),
        (
            DP_TP,
            {},
            {"mp_polcy": None},
            "an option must be one of reshard_after_forward, .*mp_policy, .* fully_shard, got mp_polcy",
        ),
        (
            DP_TP,
            {},
            {"mp_policy": torch.bfloat16},
            "mp_policy must be a MixedPrecisionPolicy, got torch.bfloat16",
        ),
        (
            DP_TP,
            {},
            {"ignored_params": set()},
            "ignored_params must be left out over the axis 'tp', got the axes \\('dp', 'tp'\\)",
        ),
        (
            DP_TP,
            {},
            {"reshard_after_forward": "no"},
            "reshard_after_forward should be a bool or an int",
        ),
    ],
)
@pytest.mark.usefixtures("fake_processes")
def test_parallelize_rejects_in_one_line_and_changes_nothing(
    axes, model, options, expected
):
    transformer = Transformer(
        **{"num_layers": 2, "d_model": 16, "num_heads": 8, "max_seq_len": 8, **model}
    )
    assert_rejected(transformer, mesh_of(*axes), expected, **options)


@pytest.mark.parametrize(
    ("path", "of", "expected"),
    [
        (
            "layers.1.ffn.w1.weight",
            "layers.0.ffn.w1.weight",
            "0.ffn.w1.weight and layers.1.ffn.w1.weight are the same",
        ),
        ("layers.1.ln2", "layers.0.ln2", "layers.0.ln2.weight and layers.1.ln2.weight"),
        ("ln_final", "layers.0.ln1", "layers.0.ln1.weight and ln_final.weight"),
        ("layers.2", "layers.0", "layers.0.ln1.weight and layers.2.ln1.weight"),
    ],
)
@pytest.mark.usefixtures("fake_processes")
def test_parallelize_rejects_shared_parameters(path, of, expected):
    for axes in (TP, ("dp",)):
        model = Transformer(2, 16, 8, max_seq_len=8)
        *parents, name = path.split(".")
        setattr(
            model.get_submodule(".".join(parents)), name, operator.attrgetter(of)(model)
        )
        assert_rejected(model, mesh_of(*axes), expected)


@pytest.mark.usefixtures("fake_processes")
def test_parallelize_rejects_a_distributed_model_and_another_module_and_mesh():
    for axes in (TP, DP_TP):
        mesh = mesh_of(*axes)
        model = Transformer(1, 16, 8, max_seq_len=8)
        assert_rejected(
            nn.Sequential(model),
            mesh,
            "Sequential must have ln1, .*; pass the Transformer",
        )
        assert_rejected(parallelize(model, mesh), mesh, "already distributed")
    model = Transformer(1, 16, 8, max_seq_len=8)
    expected = "mesh must contain this rank and have the axes .*, got "
    assert_rejected(model, None, expected + "None")
    assert_rejected(model, DeviceMesh("cpu", [1, 2], mesh_dim_names=TP), expected)
    assert_rejected(
        model,
        init_device_mesh("cpu", (4,), mesh_dim_names=("data",)),
        expected + ".*data=4",
    )
    assert_rejected(
        model,
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp")),
        expected + ".*tp=2, dp=2",
    )


@pytest.mark.parametrize(
    ("x", "got"),
    [(torch.ones(16), "(16,)"), (torch.ones(0, 7, 16), "(0, 7, 16)"), (None, "None")],
)
@pytest.mark.usefixtures("fake_processes")
def test_parallel_model_rejects_an_x_without_tokens(x, got):
    with pytest.raises(
        ValueError, match=f"x must be a tensor .*, not empty, got {re.escape(got)}"
    ):
        parallelize(Block(16, 8), mesh_of("tp"))(x)


def assert_rejected(model, mesh, expected, **options):
    def state():
        hooks = [
            [*module._forward_hooks, *module._forward_pre_hooks]
            for module in model.modules()
        ]
        return (
            [*map(id, model.parameters())],
            [(type(module), dict(vars(module))) for module in model.modules()],
            hooks,
        )

    before = state()
    with pytest.raises(ValueError, match=expected) as caught:
        parallelize(model, mesh, recompute=True, **options)
    assert "\n" not in str(caught.value)
    assert state() == before
