"""A Transformer is exact in each way that torch runs it, and the host never waits."""

import copy
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from on_device.comparing import Operations, assert_close, draw, results

from tinyblock import Transformer

pytestmark = pytest.mark.cuda
D_MODEL = 128


def transformer(**options):
    options = {"num_kv_heads": 1, "qk_norm": True, "max_seq_len": 1024, **options}
    return Transformer(1, D_MODEL, 2, **options)


def train(call, model, x, positions, mask):
    """Return the result of a call, and the gradients of x and of the model's weights."""
    call = partial(call, token_positions=positions, mask=mask)
    return results(call, {"x": x}, **dict(model.named_parameters()))


def autocast(model, device):
    return torch.autocast(device, torch.bfloat16)(model)


def compiled(model, device):
    return torch.compile(model, fullgraph=True)


def cuda_graph(model, device):
    return torch.compile(model, fullgraph=True, mode="reduce-overhead")


@pytest.mark.filterwarnings("default")  # inductor recommends TensorFloat32
@pytest.mark.parametrize("way", [autocast, compiled, cuda_graph])
def test_training_is_exact(way, device, seq, mask):
    """A row of the mask is empty. All gradients are finite and exact."""
    model = transformer()
    exact_model = copy.deepcopy(model).double()
    call = way(model.to(device), device)
    positions = torch.arange(seq).flip(0)
    dtype = torch.bfloat16 if way is autocast else torch.float32
    for seed in range(3):  # a CUDA graph warms up, is recorded, and is replayed
        x = draw(2, seq, D_MODEL, seed=seed)
        exact = train(exact_model, exact_model, x, positions, mask.cpu())
        inputs = (x.float().to(device), positions.to(device), mask)
        assert_close(train(call, model, *inputs), exact, dtype)


@torch.no_grad()
def test_one_token_is_exact(device):
    model = transformer().to(torch.bfloat16)
    exact_model = copy.deepcopy(model).double()
    call = cuda_graph(model.to(device), device)
    for position in range(3):
        x = draw(1, 1, D_MODEL, seed=position)
        at = torch.tensor([[position]])
        actual = call(x.bfloat16().to(device), at.to(device))
        assert_close({"": actual}, {"": exact_model(x, at)}, torch.bfloat16)


@torch.no_grad()
def test_one_token_runs_in_a_cuda_graph(device):
    torch._dynamo.reset()
    skips = torch._dynamo.utils.counters["inductor"]
    skips.clear()
    call = cuda_graph(transformer().to(device), device)
    for _ in range(3):  # it warms up, is recorded, and is replayed
        call(torch.ones(1, 1, D_MODEL, device=device))
    assert skips["cudagraph_skips"] == 0, "inductor made no CUDA graph of the model"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_host_never_waits(dtype, device, seq, mask):
    """No operation reads a tensor's values, or copies between host and device."""
    model = transformer(dtype=dtype, device=device)
    x = draw(2, seq, D_MODEL).to(device, dtype)
    positions = torch.arange(seq, device=device)
    upstream = torch.ones_like(x)
    model(x, positions, mask).backward(upstream)  # libraries start, and may wait
    try:
        torch.cuda.set_sync_debug_mode("error")
        with Operations() as operations:
            model(x).backward(upstream)
            model(x, positions, mask).backward(upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    reads = torch.Tag.data_dependent_output
    assert [each for each in operations.seen if reads in each.tags] == []


@pytest.mark.parametrize("move", ["emptied", "assigned"])
def test_rope_is_exact_after_a_move(move, device):
    """A table that was cast to bfloat16, or computed in float32, would be off.

    In float64, RoPE computes the angles of positions, and has no use for its table.
    """
    model = transformer(theta=5e5, max_seq_len=131072).to(torch.bfloat16).float()
    x = draw(1, 5, D_MODEL)
    positions = torch.tensor([[0, 1, 4095, 65537, 131071]])
    exact = copy.deepcopy(model).double()(x, positions)
    weights = copy.deepcopy(model).to(device).state_dict()
    model.to("meta")
    if move == "emptied":
        model.to_empty(device=device)
    model.load_state_dict(weights, assign=move == "assigned")
    model.to(device)  # also moves RoPE's table, which is in no state dict
    actual = model(x.float().to(device), positions.to(device))
    assert_close({"": actual}, {"": exact}, torch.float32)


@pytest.mark.parametrize("position", ["-1", "16"])
def test_position_out_of_range_fails_on_the_gpu(position, device):
    """In a process of its own, in which all later calls would fail, too."""
    command = [sys.executable, "-m", "tests.on_device.rope_out_of_range", position]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
    assert "device-side assert" in done.stderr


def peak(seq):
    """Return the most bytes that a step of training adds to the weights."""
    model = transformer(device="cuda", dtype=torch.bfloat16, max_seq_len=seq)
    x = draw(1, seq, D_MODEL).to("cuda", torch.bfloat16)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model(x).sum().backward()
    return torch.cuda.max_memory_allocated() - before


def test_memory_grows_in_proportion_to_the_tokens(device):
    """If scores were stored, they would take more than all else."""
    peak(64)  # cuBLAS allocates its workspace
    assert peak(4096) <= 2.2 * peak(2048)
