"""parallelize: four processes against one, collectives, compiled blocks and rejections."""

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallelize import checks
from parallelize.checks import mesh_of, one_block, seeded, transformer
from processes import run
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

from tinyblock import Block, SwiGLU, parallelize

pytestmark = pytest.mark.usefixtures("fake_processes")
# Dynamo looks at the .grad of each DTensor.
without_warning_of_dynamo = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)


def test_four_processes_do_what_one_does():
    failed, printed = run(checks.__file__, processes=4)
    assert not failed, printed


class Collectives(TorchDispatchMode):
    """Note which collectives of torch.distributed run, and what broadcasts send."""

    def __init__(self):
        super().__init__()
        self.names = []
        self.sent = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.names.append(function.name())
        if function is torch.ops.c10d.broadcast_.default:
            [tensor], group, *_ = args
            self.sent.append((tensor, dist.ProcessGroup.unbox(group)))
        return function(*args, **(kwargs or {}))


def with_second_block(block):
    model = transformer()
    model.layers[1] = block
    return model


def with_parts_of_ffn(**parts):
    """Return a model whose second block has other modules in its SwiGLU."""
    block = one_block(ffn=SwiGLU)
    for name, part in parts.items():
        setattr(block.ffn, name, part)
    return with_second_block(block)


def with_lora():
    model = with_parts_of_ffn()
    model.layers[1].ffn.w1.lora_a = nn.Parameter(torch.ones(1, 16))
    return model


def with_shared_weights():
    linear = nn.Linear(16, 32)
    return with_parts_of_ffn(w1=linear, w3=linear)


def with_tied_embedding():
    model = transformer()
    model.embedding = nn.Embedding(16, 16)
    model.head = nn.Linear(16, 16)
    model.head.weight = model.embedding.weight
    return model


def with_own_forward():
    model = transformer()
    model.layers[1].forward = lambda x, token_positions, mask: x
    return model


SHARED = r"layers\.1\.ffn\.w1\.weight and layers\.1\.ffn\.w3\.weight"
REJECTED: dict[str, Any] = {
    "another axis": (transformer(), ["data"], {}, r"axes .*'tp'.* got \('data'"),
    "order": (transformer(), ["tp", "dp"], {}, r"axes .* got \('tp', 'dp'"),
    "no dp": (transformer(), ["dp_replicate", "tp"], {}, r"axes .* got \('dp_repl"),
    "heads": (
        with_second_block(one_block(num_heads=2, num_kv_heads=1)),
        ["tp"],
        {},
        "num_heads .* 4 .* got 2",
    ),
    "heads of keys": (
        with_second_block(one_block(num_kv_heads=2)),
        ["tp"],
        {},
        "num_kv_heads .* 4 .* got 2",
    ),
    "d_ff": (with_second_block(one_block(d_ff=6)), ["tp"], {}, "d_ff .* 4 .* got 6"),
    "a w1 that also holds the value": (
        with_parts_of_ffn(w1=nn.Linear(16, 64)),
        ["tp"],
        {},
        r"ffn\.w1 .* 32, got 64",
    ),
    "a parameter without a rule": (
        with_lora(),
        ["tp"],
        {},
        r"layers\.1\.ffn\.w1\.lora_a",
    ),
    "a shared parameter over tp": (with_shared_weights(), ["tp"], {}, SHARED),
    "a shared parameter over dp": (with_shared_weights(), ["dp"], {}, SHARED),
    "dropout": (
        with_parts_of_ffn(dropout=nn.Dropout(0.1)),
        ["tp"],
        {},
        r"layers\.1\.ffn\.dropout .* got 0\.1",
    ),
    "a forward set on a block": (
        with_own_forward(),
        ["dp", "tp"],
        {"compile": True},
        "compile.* forward .* subclass",
    ),
    "a misspelled option of fully_shard": (
        transformer(),
        ["dp", "tp"],
        {"mp_polcy": None},
        "mp_polcy",
    ),
    "an option of fully_shard without dp": (
        transformer(),
        ["tp"],
        {"mp_policy": None},
        "'dp' for mp_policy",
    ),
}
ACCEPTED: dict[str, Any] = {
    "dropout that drops nothing": (with_parts_of_ffn(dropout=nn.Dropout(0.0)), ["tp"]),
    "a forward set on a block, without compile": (with_own_forward(), ["dp"]),
    "ties outside of blocks over dp": (with_tied_embedding(), ["dp"]),
}


def assert_rejects(model, mesh, options, message):
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


@pytest.mark.parametrize("title", REJECTED)
def test_what_cannot_be_distributed_is_rejected_and_left_unchanged(title):
    model, axes, options, message = REJECTED[title]
    assert_rejects(model, mesh_of(*axes), options, message)


@pytest.mark.parametrize("title", ACCEPTED)
def test_what_looks_alike_and_can_be_distributed_is_accepted(title):
    model, axes = ACCEPTED[title]
    parallelize(model, mesh_of(*axes))


def with_torch(version, monkeypatch):
    # No argument, because nobody but a test has another torch.
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))


def test_tp_requires_torch_2_13(monkeypatch):
    with_torch("2.12.1", monkeypatch)
    message = r"2\.13 .* 'tp', got 2\.12\.1: .* only 'dp'"
    assert_rejects(one_block(), mesh_of("tp"), {}, message)
    parallelize(one_block(), mesh_of("dp"))
    with_torch("2.13.0a0+1.nv26.06", monkeypatch)
    parallelize(one_block(), mesh_of("tp"))


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


def test_weights_are_sent_one_after_the_other_along_each_axis():
    """Contiguous, because NCCL sends nothing else."""
    model = one_block()
    model.register_buffer("strided", torch.rand(2, 3).T)
    tensors = copy.deepcopy([*model.parameters(), *model.buffers()])
    mesh = mesh_of("dp_replicate", "dp", "tp")
    groups = [mesh.get_group(axis) for axis in range(3)]
    with Collectives() as collectives:
        parallelize(model, mesh)
    for tensor, axis in itertools.product(tensors, groups):
        sent, group = collectives.sent.pop(0)
        assert torch.equal(sent, tensor)
        assert sent.is_contiguous()
        assert group is axis


def test_only_the_first_call_compares_what_processes_pass():
    model = parallelize(one_block(), mesh_of("tp"))
    x = torch.randn(2, 8, 16, dtype=torch.float64)
    with Collectives() as first:
        model(x)
    with Collectives() as second:
        model(x)
    assert "c10d::allgather_" in first.names
    assert "c10d::allgather_" not in second.names


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


def collectives_of(act):
    """Return how often something gathers tokens, and how often it scatters sums."""
    with torch.profiler.profile() as recorded:
        act()
    counts = {event.key: event.count for event in recorded.key_averages()}
    gathers = counts.get("_c10d_functional::all_gather_into_tensor")
    return gathers, counts.get("_c10d_functional::reduce_scatter_tensor")


@pytest.mark.parametrize("options", [{}, {"recompute": True}], ids=repr)
def test_each_of_two_blocks_gathers_twice_and_scatters_twice_in_each_direction(options):
    """Recomputing stops before w2's scatter, where the backward pass has what it needs."""
    model = parallelize(transformer(), mesh_of("tp"), **options)
    x = torch.randn(2, 8, 16, dtype=torch.float64, requires_grad=True)
    outputs = []
    forward = collectives_of(lambda: outputs.append(model(x)))
    assert forward == (2 * 2 + 1, 2 * 2), "a gather more for the output"
    gathers, scatters = collectives_of(outputs[0].sum().backward)
    again = (2 * 2, 2) if options else (0, 0)
    assert gathers == 2 * 2 + 1 + again[0], "one more for the gradient of x"
    assert scatters == 2 * 2 + 1 + again[1], "one more for the gradient of the output"


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
