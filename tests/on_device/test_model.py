"""A model on a device: close to float64 on the CPU, and the same in each way that torch runs it."""

import copy
import functools
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from on_device.comparing import ALLOWED, HALVES, assert_close, draw, results
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from tinyblock import RotaryPositionalEmbedding, Transformer, parallelize

# Inductor warns if float32 leaves the tensor cores unused; here a warning is no error.
pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("default")]


def transformer(sizes, dtype=torch.float32, layers=2):
    options = {
        "max_seq_len": sizes.longest,
        "num_kv_heads": sizes.kv_heads,
        "qk_norm": True,
        "dtype": dtype,
    }
    return Transformer(layers, sizes.d_model, sizes.heads, **options)


def tokens(sizes, dtype=torch.float32, seed=0):
    return draw(2, sizes.seq, sizes.d_model, seed=seed).to(dtype)


def positions_and_mask(sizes, device="cpu"):
    """Return positions in random order, and a mask in which each token may attend to itself."""
    positions = torch.randint(
        0, sizes.longest, (2, sizes.seq), generator=torch.Generator().manual_seed(2)
    )
    mask = (
        torch.rand(2, sizes.seq, sizes.seq, generator=torch.Generator().manual_seed(3))
        < 0.7
    )
    return positions.to(device), (mask | torch.eye(sizes.seq, dtype=torch.bool)).to(
        device
    )


@pytest.mark.parametrize("given", ["", "positions and mask"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_model_is_close_to_float64_on_the_cpu(dtype, given, device, sizes):
    model = transformer(sizes, dtype)
    x = tokens(sizes, dtype)
    exact = results(
        copy.deepcopy(model).double(),
        x.double(),
        *(positions_and_mask(sizes) if given else ()),
    )
    actual = results(
        model.to(device),
        x.to(device),
        *(positions_and_mask(sizes, device) if given else ()),
    )
    assert_close(actual, exact, dtype)


@pytest.mark.parametrize("masked", [False, True], ids=["", "mask"])
def test_attention_does_not_materialize_the_scores(masked, device, sizes):
    model = transformer(sizes, torch.bfloat16).to(device)
    x = tokens(sizes, torch.bfloat16).to(device)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        model(x, *(positions_and_mask(sizes, device) if masked else ()))
    called = {
        event.name for event in profile.events() if "_scaled_dot_product" in event.name
    }
    assert called
    assert not any("math" in name for name in called), called


MOVES = {
    "made there": lambda device, make: make(device=device).half(),
    "moved": lambda device, make: make().to(device, torch.bfloat16),
    "meta, called there": lambda device, make: make(device="meta"),
    "meta, to_empty": lambda device, make: make(device="meta").to_empty(device=device),
}


@pytest.mark.parametrize("move", MOVES)
def test_rope_table_is_exact_up_to_position_131071(move, device):
    make = functools.partial(RotaryPositionalEmbedding, 5e5, 64, 131072)
    rope = MOVES[move](device, make)
    positions = torch.tensor([0, 1, 4095, 65537, 131071])
    frequencies = 5e5 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    angles = positions.double()[:, None] * frequencies
    # A rotation turns the pair (1, 0) to the cosine and sine of its angle.
    expected = torch.stack((angles.cos(), angles.sin()), -1)
    x = torch.tensor([1.0, 0.0]).repeat(32).expand(5, 64)
    turned = rope(x.to(device), positions.to(device))
    pairs = turned.cpu().double().unflatten(-1, (32, 2))
    assert (pairs - expected).abs().max() < 1e-6


OUT_OF_RANGE = """
import sys, torch
from tinyblock import RotaryPositionalEmbedding
rope, x = RotaryPositionalEmbedding(1e4, 8, 16, device="cuda"), torch.ones(1, 8, device="cuda")
print(float(rope(x, torch.tensor([15], device="cuda")).sum()))
rope(x, torch.tensor([int(sys.argv[1])], device="cuda")).sum().item()
"""


@pytest.mark.parametrize("position", ["16", "-1"])
def test_positions_out_of_range_raise(position, device):
    """In a process of its own: after a device-side assert, CUDA fails in the process that met it."""
    if device.type != "cuda":
        pytest.skip("requires a GPU: on a CPU it is part of the contract")
    command = [sys.executable, "-c", OUT_OF_RANGE, position]
    root = Path(__file__).parents[2]  # where it finds tinyblock
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=root, timeout=120
    )
    assert done.stdout, done.stderr  # position 15 is in range
    assert done.returncode != 0
    assert "device-side assert" in done.stderr


@pytest.mark.parametrize("masked", [False, True], ids=["", "mask"])
def test_deterministic_algorithms_repeat_every_bit(masked, device, sizes):
    model = transformer(sizes, torch.bfloat16).to(device)
    x = tokens(sizes, torch.bfloat16).to(device)
    inputs = positions_and_mask(sizes, device) if masked else ()
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (results(model, x, *inputs) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_autocast_computes_in_half_precision_without_a_warning(dtype, device, sizes):
    model = transformer(sizes).to(device)
    x = tokens(sizes).to(device)

    def autocast(x):
        with torch.autocast(device.type, dtype):
            return model(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual = results(model, x, run=autocast)
    assert autocast(x).dtype == torch.float32  # that of the residual stream
    expected = results(model, x)
    assert not torch.equal(actual["output"], expected["output"])
    assert_close(actual, expected, dtype)


def test_cuda_graphs_replay_what_eager_computes(device, sizes):
    model = transformer(sizes, layers=1).to(device)
    if device.type == "cuda":
        graphed = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    else:  # compiling takes long on a CPU, and other tests have it
        graphed = torch.compile(model, fullgraph=True, backend="aot_eager")
    for seed in range(4):  # two to warm up and record, two to replay
        x = tokens(sizes, seed=seed).to(device)
        torch.compiler.cudagraph_mark_step_begin()
        assert_close(results(model, x, run=graphed), results(model, x), torch.float32)
    counters = torch._dynamo.utils.counters
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert counters["stats"]["unique_graphs"] == 1


def test_two_graphs_serve_every_length(device, sizes):
    model = transformer(sizes, layers=1).to(device)
    backend = "inductor" if device.type == "cuda" else "eager"
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for length in (
        7,
        1,
        2,
        16,
        sizes.seq + 3,
        sizes.longest - 1,
        sizes.longest,
    ):  # torch compiles one token apart
        x = draw(1, length, sizes.d_model).float().to(device)
        actual = compiled(x)
        expected = model(x)
        assert (actual - expected).norm() <= ALLOWED[torch.float32] * expected.norm()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


class NoReads(TorchDispatchMode):
    """Raise on a CPU what CUDA raises: operations whose result, or its shape, depends on a tensor's values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {
            *func.tags
        }:
            raise RuntimeError(f"{func} is synchronizing")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_synchronization(device):
    if device.type == "cpu":
        with NoReads():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "inputs", [0, 1, 2], ids=["", "positions", "positions and mask"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_host_never_waits_for_the_device(dtype, inputs, device, sizes):
    model = transformer(sizes, dtype).to(device)
    x = tokens(sizes, dtype).to(device).requires_grad_()
    given = positions_and_mask(sizes, device)[:inputs]
    upstream = torch.ones_like(x)
    model(x, *given).backward(upstream)  # libraries start, which may take their time
    with no_synchronization(device):
        model(x, *given).backward(upstream)
        with pytest.raises(RuntimeError, match="synchronizing"):
            x.sum().item()


@pytest.mark.parametrize("axes", [("dp",), ("tp",), ("dp", "tp")], ids="+".join)
def test_parallelize_in_one_process_computes_the_same(axes, device, sizes):
    if device.type == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
    )
    try:
        mesh = init_device_mesh(device.type, (1,) * len(axes), mesh_dim_names=axes)
        model = transformer(sizes).to(device)
        x = tokens(sizes).to(device)
        inputs = positions_and_mask(sizes, device)
        parallel = parallelize(copy.deepcopy(model), mesh, recompute=True)
        assert_close(
            results(parallel, x, *inputs), results(model, x, *inputs), torch.float32
        )
    finally:
        dist.destroy_process_group()
