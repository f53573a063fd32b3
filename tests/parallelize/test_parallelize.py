"""parallelize: four processes against one, collectives, compiled blocks and rejections."""

import copy

import pytest
import torch
import torch.distributed as dist
from parallelize import checks
from parallelize.checks import mesh_of, one_block, seeded, transformer
from processes import run
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, parallel
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

from tinyblock import Block, SwiGLU, parallelize

pytestmark = pytest.mark.usefixtures("fake_processes")
# Dynamo looks at the .grad of each DTensor.
without_warning_of_dynamo = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)


@pytest.fixture(scope="module")
def four_processes(tmp_path_factory):
    """Run all checks; return whether a process failed, and what all printed."""
    folder = tmp_path_factory.mktemp("parallelize")
    return run(checks.__file__, folder, processes=4)


@pytest.mark.parametrize("name", [check.__name__ for check in checks.CHECKS])
def test_four_processes_pass(name, four_processes):
    """Checks run in order, up to the first that fails."""
    _, printed = four_processes
    assert f"passed {name}" in printed.splitlines(), printed


def test_no_process_fails(four_processes):
    failed, printed = four_processes
    assert not failed, printed


class Collectives(TorchDispatchMode):
    """Note which collectives of torch.distributed run, and what a broadcast sends."""

    def __init__(self):
        super().__init__()
        self.names = []
        self.sent = []
        self.groups = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.names.append(function.name())
        if function is torch.ops.c10d.broadcast_.default:
            [tensor], group, *_ = args
            self.sent.append(tensor)
            self.groups.append(dist.ProcessGroup.unbox(group))
        return function(*args, **(kwargs or {}))


def assert_rejects(model, mesh, message, **options):
    """Assert that parallelize raises, and leaves the model as it was."""
    parameters = dict(model.named_parameters())
    values = copy.deepcopy(model.state_dict())
    forwards = [vars(module).get("forward") for module in model.modules()]
    collectives = Collectives()
    with collectives, pytest.raises((ValueError, TypeError), match=message):
        parallelize(model, mesh, **options)
    assert not collectives.sent
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name], name
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name]), name
    for module, forward in zip(model.modules(), forwards, strict=True):
        assert not module._forward_pre_hooks
        assert vars(module).get("forward") is forward


def with_second_block(block):
    model = transformer()
    model.layers[1] = block
    return model


def block_of(**parts):
    """Return a block with SwiGLU that has other layers in its feed-forward layer."""
    block = one_block(ffn=SwiGLU)
    for name, layer in parts.items():
        setattr(block.ffn, name, layer)
    return block


@pytest.mark.parametrize(
    "axes", [("data",), ("tp", "dp"), ("dp_replicate", "tp")], ids=", ".join
)
def test_other_axes_are_rejected(axes):
    message = r"axes .*'tp'.* got \(" + ", ".join(f"'{axis}'" for axis in axes)
    assert_rejects(one_block(), mesh_of(*axes), message)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_heads": 2, "num_kv_heads": 1}, "num_heads .* 4 .* got 2"),
        ({"num_kv_heads": 2}, "num_kv_heads .* 4 .* got 2"),
        ({"d_ff": 6}, "d_ff .* 4 .* got 6"),
    ],
    ids=["heads", "heads of keys", "d_ff"],
)
def test_tp_rejects_sizes_that_it_does_not_divide(sizes, message):
    model = with_second_block(one_block(**sizes))
    assert_rejects(model, mesh_of("tp"), message)


def test_tp_rejects_a_w1_that_also_holds_the_value():
    model = with_second_block(block_of(w1=nn.Linear(16, 64)))
    assert_rejects(model, mesh_of("tp"), r"ffn\.w1 .* 32, got 64")


def test_tp_rejects_a_parameter_without_a_rule():
    block = block_of()
    block.ffn.w1.lora_a = nn.Parameter(torch.ones(1, 16))
    model = with_second_block(block)
    assert_rejects(model, mesh_of("tp"), r"layers\.1\.ffn\.w1\.lora_a")


@pytest.mark.parametrize("axis", ["tp", "dp"])
def test_modules_of_blocks_that_share_a_parameter_are_rejected(axis):
    linear = nn.Linear(16, 32)
    model = with_second_block(block_of(w1=linear, w3=linear))
    message = r"layers\.1\.ffn\.w1\.weight and layers\.1\.ffn\.w3\.weight"
    assert_rejects(model, mesh_of(axis), message)


def test_tp_rejects_dropout():
    model = with_second_block(block_of(dropout=nn.Dropout(0.1)))
    assert_rejects(model, mesh_of("tp"), r"layers\.1\.ffn\.dropout .* got 0\.1")


def test_tp_accepts_dropout_that_drops_nothing():
    model = with_second_block(block_of(dropout=nn.Dropout(0.0)))
    parallelize(model, mesh_of("tp"))


@pytest.mark.parametrize("axis", ["tp", "dp"])
def test_compile_rejects_a_forward_that_is_set_on_a_block(axis):
    model = transformer()
    model.layers[1].forward = lambda x, token_positions, mask: x
    message = "compile.* forward .* subclass"
    assert_rejects(model, mesh_of(axis), message, compile=True)


def test_without_compile_forward_may_be_set_on_a_block():
    model = transformer()
    model.layers[1].forward = lambda x, token_positions, mask: x
    parallelize(model, mesh_of("dp"))


def test_a_misspelled_option_of_fully_shard_is_rejected():
    assert_rejects(transformer(), mesh_of("dp", "tp"), "mp_polcy", mp_polcy=None)


def test_options_of_fully_shard_require_dp():
    message = "'dp' for mp_policy"
    assert_rejects(transformer(), mesh_of("tp"), message, mp_policy=None)


def with_torch(version, monkeypatch):
    # No argument, because nobody but a test has another torch.
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))


def test_tp_requires_torch_2_13(monkeypatch):
    with_torch("2.12.1", monkeypatch)
    message = r"2\.13 .* 'tp', got 2\.12\.1: .* only 'dp'"
    assert_rejects(one_block(), mesh_of("tp"), message)
    parallelize(one_block(), mesh_of("dp"))
    with_torch("2.13.0a0+1.nv26.06", monkeypatch)
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
    ids=["one axis", "no sequence", "7 tokens"],
)
def test_compiled_parallel_model_rejects_a_wrong_shape_of_x(shape, message):
    model = parallelize(Block(16, 8), mesh_of("tp"), compile=True)
    with pytest.raises(ValueError, match=message):
        model(torch.ones(shape))


def test_tp_splits_more_than_ten_layers():
    """The name layers.10 has two digits."""
    model = parallelize(transformer(num_layers=11, device="meta"), mesh_of("tp"))
    assert isinstance(model.layers[10].ln1.weight, DTensor)


@without_warning_of_dynamo
def test_a_block_over_tp_compiles_to_one_graph():
    model = parallelize(one_block(), mesh_of("tp"))
    x = torch.randn(2, 8, 16, dtype=torch.float64)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)


def test_weights_are_sent_in_the_order_of_the_model():
    """The order of a set of names differs between processes, which would mix weights up."""
    model = transformer()
    named = [*model.named_parameters(), *model.named_buffers()]
    name_at = {tensor.data_ptr(): name for name, tensor in named}
    with Collectives() as collectives:
        parallelize(model, mesh_of("dp"))
    sent = [name_at[tensor.data_ptr()] for tensor in collectives.sent]
    assert sent == [name for name, _ in named]


def test_weights_are_sent_along_each_axis():
    mesh = mesh_of("dp_replicate", "dp", "tp")
    with Collectives() as collectives:
        parallelize(one_block(), mesh)
    assert set(collectives.groups) == {mesh.get_group(axis) for axis in range(3)}


def test_what_is_sent_is_contiguous():
    """NCCL sends nothing else."""
    model = one_block()
    model.register_buffer("strided", torch.ones(2, 3).T)
    with Collectives() as collectives:
        parallelize(model, mesh_of("dp"))
    assert (3, 2) in [tuple(tensor.shape) for tensor in collectives.sent]
    assert all(tensor.is_contiguous() for tensor in collectives.sent)


def test_only_the_first_call_compares_what_processes_pass():
    model = parallelize(one_block(), mesh_of("tp"))
    x = torch.randn(2, 8, 16, dtype=torch.float64)
    with Collectives() as first:
        model(x)
    with Collectives() as second:
        model(x)
    assert "c10d::allgather_" in first.names
    assert "c10d::allgather_" not in second.names


def test_modules_are_split_in_one_order(monkeypatch):
    """Torch sends weights as it splits a module, so all processes need one order."""
    split = []
    monkeypatch.setattr(
        parallel, "parallelize_module", lambda block, tp, plan: split.append([*plan])
    )
    parallelize(one_block(ffn=SwiGLU), mesh_of("tp"))
    projections = ["attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.output_proj"]
    expected = ["attn", *projections, "ffn", "ffn.w1", "ffn.w3", "ffn.w2"]
    assert split == [expected]


def test_options_reach_fully_shard():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = transformer(dtype=torch.float32)
    parallelize(model, mesh_of("dp", "tp"), mp_policy=policy)
    assert model(torch.randn(2, 8, 16)).dtype == torch.bfloat16


@pytest.fixture
def default_backend():
    """Set the backend of torch.compile for a test."""
    before = torch.compiler.get_default_backend()
    yield torch.compiler.set_default_backend
    torch.compiler.set_default_backend(before)


@without_warning_of_dynamo
def test_copies_over_tp_have_their_own_weights(default_backend):
    """A compiled forward that is a plain function would keep the original's weights."""
    default_backend("eager")
    original = parallelize(transformer(), mesh_of("tp"), recompute=True, compile=True)
    x = torch.randn(2, 8, 16, dtype=torch.float64)
    expected = original(x)
    model = copy.deepcopy(original)
    for parameter in original.parameters():
        nn.init.zeros_(parameter)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)


def collectives(recorded):
    """Return how often a profile gathers tokens, and how often it scatters sums."""
    counts = {event.key: event.count for event in recorded.key_averages()}
    gathers = counts.get("_c10d_functional::all_gather_into_tensor")
    return gathers, counts.get("_c10d_functional::reduce_scatter_tensor")


def collectives_of(model):
    """Return the gathers and scatters of a forward pass, and those of a backward pass."""
    x = torch.randn(2, 8, 16, dtype=torch.float64, requires_grad=True)
    with torch.profiler.profile() as forward:
        out = model(x)
    with torch.profiler.profile() as backward:
        out.sum().backward()
    return collectives(forward), collectives(backward)


def test_each_block_needs_two_gathers_and_two_scatters_in_each_direction():
    model = parallelize(transformer(num_layers=2), mesh_of("tp"))
    forward, backward = collectives_of(model)
    assert forward == (2 * 2 + 1, 2 * 2), "a gather more for the output"
    assert backward == (2 * 2 + 1, 2 * 2 + 1), "one more of each for gradients"


def test_recomputing_repeats_all_of_a_forward_pass_but_the_last_scatter_of_a_block():
    """It stops where the backward pass has all that it needs: before w2's scatter."""
    model = parallelize(transformer(num_layers=2), mesh_of("tp"), recompute=True)
    _, backward = collectives_of(model)
    assert backward == (2 * 2 + 1 + 2 * 2, 2 * 2 + 1 + 2)


@without_warning_of_dynamo
def test_compiled_blocks_share_one_graph_and_compute_what_eager_ones_do(
    default_backend,
):
    graphs, runs = [], []

    def count(graph, inputs):
        graphs.append(graph)

        def counted(*arguments):
            runs.append(graph)
            return graph.forward(*arguments)

        return counted

    default_backend(count)
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
    assert len(graphs) == 1, "the two blocks are not one graph"
    assert len(runs) == 4, "each of two blocks runs it, and runs it again in backward"
