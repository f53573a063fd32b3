"""A model on a device: the numbers of float64 on the CPU, by each kernel, and in each way that torch runs it.

What each layer promises at small sizes, tinyblock/contract tries on CUDA too.
"""

import copy
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from jaxtyping import TypeCheckError, config
from on_device.comparing import ALLOWED, assert_close, assert_right, draw, results
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tinyblock import CausalMultiHeadSelfAttention, RotaryPositionalEmbedding, Transformer, parallelize

# Inductor warns where it finds tensor cores that float32 leaves unused: a warning is no error here.
pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("default")]
HALVES = (torch.bfloat16, torch.float16)


def name_of(value):
    return str(value).removeprefix("torch.")


def transformer(sizes, dtype=torch.float32, layers=2, **options):
    options = {"max_seq_len": sizes.longest, "num_kv_heads": sizes.kv_heads, "qk_norm": True, **options}
    return Transformer(layers, sizes.d_model, sizes.heads, dtype=dtype, **options)


def causes(sizes, batch=2):
    """Return positions that are not in order, and a mask that leaves each token itself."""
    positions = torch.randint(0, sizes.longest, (batch, sizes.seq), generator=torch.Generator().manual_seed(2))
    mask = torch.rand(batch, sizes.seq, sizes.seq, generator=torch.Generator().manual_seed(3)) < 0.7
    return positions, mask | torch.eye(sizes.seq, dtype=torch.bool)


@pytest.mark.parametrize("given", ["", "positions and mask"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=name_of)
def test_model_is_close_to_float64_on_the_cpu(dtype, given, device, sizes):
    inputs = causes(sizes) if given else ()
    assert_right(transformer(sizes, dtype), draw(2, sizes.seq, sizes.d_model).to(dtype), *inputs, device=device)


KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def must_run(kernel, device, grouped, masked, d_head):
    """Tell whether torch documents that the kernel takes this; of the rest it may refuse."""
    if device.type == "cpu":
        return kernel in ("flash", "math")
    takes = {"flash": not masked, "efficient": masked or not grouped, "math": True}
    return takes.get(kernel, not grouped and not masked and d_head <= 128)


@pytest.mark.parametrize("masked", [False, True], ids=["", "mask"])
@pytest.mark.parametrize("grouped", [False, True], ids=["", "grouped"])
@pytest.mark.parametrize("d_head", [64, 96, 128, 256])
@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_kernel(kernel, d_head, grouped, masked, device, sizes):
    for dtype in HALVES:
        options = {"num_kv_heads": sizes.kv_heads if grouped else None, "d_head": d_head, "dtype": dtype}
        options["rope"] = RotaryPositionalEmbedding(1e4, d_head, sizes.longest)
        attention = CausalMultiHeadSelfAttention(sizes.d_model, sizes.heads, **options)
        x, inputs = draw(2, sizes.seq, sizes.d_model).to(dtype), [None, causes(sizes)[1]] if masked else []
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch explains at length why it has no kernel
                assert_right(attention, x, *inputs, device=device, by=sdpa_kernel(KERNELS[kernel]))
        except RuntimeError as error:
            refused = any(said in str(error) for said in ("No available kernel", "No viable backend", "cuDNN"))
            if not refused or must_run(kernel, device, grouped, masked, d_head):
                raise
            pytest.skip(f"torch has no such kernel here: {error}")


@pytest.mark.parametrize("masked", [False, True], ids=["", "mask"])
def test_attention_does_not_materialize_the_scores(masked, device, sizes):
    model = transformer(sizes, torch.bfloat16).to(device)
    x = draw(2, sizes.seq, sizes.d_model).to(device)
    inputs = [it.to(device) for it in causes(sizes)] if masked else []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(x, *inputs)
    called = {event.name for event in profile.events() if "_scaled_dot_product" in event.name}
    assert called
    assert not any("math" in name for name in called), called


MOVES = {
    "to": lambda make, device: make().to(device),
    "to bfloat16": lambda make, device: make().to(device, torch.bfloat16),
    "made there, half": lambda make, device: make(device=device).half(),
    "meta, to_empty": lambda make, device: emptied(make(device="meta"), device),
    "meta, called there": lambda make, device: make(device="meta"),
}


def emptied(rope, device):
    rope.to_empty(device=device).reset_parameters()
    return rope


@pytest.mark.parametrize("move", MOVES)
def test_rope_table_is_exact_up_to_position_131071(move, device):
    rope = MOVES[move](lambda **options: RotaryPositionalEmbedding(5e5, 64, 131072, **options), device)
    positions = torch.tensor([0, 1, 4095, 65537, 131071])
    angles = positions.double()[:, None] * 5e5 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    x = torch.tensor([1.0, 0.0]).repeat(32).expand(5, 64)  # each pair turns to the cosine and sine of its angle
    turned = rope(x.to(device), positions.to(device)).cpu().double().unflatten(-1, (32, 2))
    assert (turned - torch.stack((angles.cos(), angles.sin()), -1)).abs().max() < 1e-6


OFF_THE_TABLE = """
import sys, torch
from tinyblock import RotaryPositionalEmbedding
device = sys.argv[1]
rope = RotaryPositionalEmbedding(1e4, 8, 16, device=device)
print(float(rope(torch.ones(1, 8, device=device), torch.tensor([15], device=device)).sum()))
rope(torch.ones(1, 8, device=device), torch.tensor([int(sys.argv[2])], device=device)).sum().item()
"""


def test_positions_off_the_table_end_their_process(device):
    """In processes of their own: after a device-side assert, CUDA answers nothing in the one that met it."""
    found = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": found}
    for position in ("16", "-1") if device.type == "cuda" else ("16",):
        command = [sys.executable, "-c", OFF_THE_TABLE, device.type, position]
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
        assert done.stdout, done.stderr  # the last position of the table is on it
        assert done.returncode != 0
        assert ("device-side assert" if device.type == "cuda" else "must be 0 ... 15") in done.stderr


@pytest.mark.parametrize("masked", [False, True], ids=["", "mask"])
def test_deterministic_algorithms_serve_and_repeat_every_bit(masked, device, sizes):
    model, x = transformer(sizes, torch.bfloat16).to(device), draw(2, sizes.seq, sizes.d_model).to(device)
    inputs = [it.to(device) for it in causes(sizes)] if masked else []
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (results(model, x, *inputs) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
def test_autocast_computes_in_the_half_without_a_warning(dtype, device, sizes):
    model, x = transformer(sizes).to(device), draw(2, sizes.seq, sizes.d_model).float().to(device)
    expected = model(x)
    with warnings.catch_warnings(), torch.autocast(device.type, dtype):
        warnings.simplefilter("error")
        out = model(x)
    assert out.dtype == torch.float32  # that of the residual stream
    error = (out - expected).norm() / expected.norm()
    assert 0 < error <= ALLOWED[dtype]


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


def test_grad_scaler_finds_the_gradients_of_float32(device, sizes):
    model, x = transformer(sizes).to(device), draw(2, sizes.seq, sizes.d_model).float().to(device)
    optimizer, scaler = torch.optim.SGD(model.parameters()), torch.amp.GradScaler(device.type, init_scale=2.0**10)
    parameters = list(model.parameters())
    expected = flat(torch.autograd.grad(model(x).square().mean(), parameters))
    with torch.autocast(device.type, torch.float16):
        loss = model(x).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    actual = flat([parameter.grad for parameter in parameters])
    assert (actual - expected).norm() <= 4 * ALLOWED[torch.float16] * expected.norm()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**10  # nothing overflowed


def compiled_there(model, device, **options):
    """Compile, on a CPU without code: that takes long, and other tests have it."""
    options = options if device.type == "cuda" else {"backend": "aot_eager", "dynamic": options.get("dynamic")}
    return torch.compile(model, fullgraph=True, **options)


def test_cuda_graphs_replay_what_eager_computes(device, sizes):
    model = transformer(sizes, layers=1).to(device)
    graphed = compiled_there(model, device, mode="reduce-overhead")
    for seed in range(4):  # two to warm up and record, two to replay
        x = draw(2, sizes.seq, sizes.d_model, seed=seed).float().to(device)
        torch.compiler.cudagraph_mark_step_begin()
        assert_close(results(model, x, run=graphed), results(model, x), ALLOWED[torch.float32])
    counters = torch._dynamo.utils.counters
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert counters["stats"]["unique_graphs"] == 1


def test_one_graph_serves_every_length(device, sizes):
    model = transformer(sizes, layers=1).to(device)
    compiled = torch.compile(
        model, fullgraph=True, dynamic=True, backend="inductor" if device.type == "cuda" else "eager"
    )

    def check(length):
        x = draw(1, length, sizes.d_model).float().to(device)
        actual, expected = compiled(x), model(x)
        assert (actual - expected).norm() <= ALLOWED[torch.float32] * expected.norm()

    for length in (7, 1):  # torch compiles a single token apart
        check(length)
    with torch.compiler.set_stance("fail_on_recompile"):
        for length in (2, 1, 16, sizes.seq + 3, sizes.longest - 1, sizes.longest):
            check(length)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert not torch._dynamo.utils.counters["graph_break"]


def test_checkpoints_that_are_not_reentrant(device, sizes):
    model, x = transformer(sizes).to(device), draw(2, sizes.seq, sizes.d_model).float().to(device)
    inputs = [it.to(device) for it in causes(sizes)]

    def recomputed(x, *inputs):
        for layer in model.layers:
            x = checkpoint(layer, x, *inputs, use_reentrant=False)
        return model.ln_final(x)

    expected = results(model, x, *inputs)
    assert_close(results(model, x, *inputs, run=recomputed), expected, ALLOWED[torch.float32])


def test_shape_checks_refuse_a_wrong_width(device, sizes):
    if config.jaxtyping_disable:
        pytest.skip("the shape checks are off: beartype is not installed, or JAXTYPING_DISABLE=1")
    with pytest.raises(TypeCheckError, match=f"d_model={sizes.d_model}"):
        transformer(sizes).to(device)(torch.zeros(2, sizes.seq, sizes.d_model + 1, device=device))


@pytest.fixture
def process_group(device):
    if device.type == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("axes", [("dp",), ("tp",), ("dp", "tp")], ids="+".join)
def test_one_process_of_many_computes_the_same(axes, device, sizes):
    mesh = init_device_mesh(device.type, (1,) * len(axes), mesh_dim_names=axes)
    model, x = transformer(sizes).to(device), draw(2, sizes.seq, sizes.d_model).float().to(device)
    inputs = [it.to(device) for it in causes(sizes)]
    spread = parallelize(copy.deepcopy(model), mesh)
    assert_close(results(spread, x, *inputs), results(model, x, *inputs), ALLOWED[torch.float32])
