"""What four processes check together: test_parallelize starts this file in each."""

import copy
import os
import sys
import warnings
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as distributed_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from tinyblock import Block, FeedForward, Transformer, parallelize

MESHES = {
    ("tp",): (4,),
    ("dp",): (4,),
    ("dp", "tp"): (2, 2),
    ("dp_replicate", "dp"): (2, 2),
    ("dp_replicate", "dp", "tp"): (2, 1, 2),
}
# torch 2.11 requires lengths that the number of processes divides.
ODD = 7 if torch.__version__ >= "2.13" else 8
SIZES: dict[str, Any] = {
    "d_model": 16,
    "num_heads": 8,
    "d_ff": 32,
    "num_kv_heads": 4,
    "dtype": torch.float64,
}
transformer = partial(Transformer, 2, **SIZES, qk_norm=True, max_seq_len=16)
other_parts = partial(
    Transformer, 1, **SIZES, ffn=FeedForward, norm=nn.LayerNorm, max_seq_len=16
)
one_block = partial(Block, **SIZES)
CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def mesh_of(*axes):
    return init_device_mesh("cpu", MESHES[axes], mesh_dim_names=axes)


def seeded(build, seed=0):
    """Build a model whose gains and biases are random numbers, too."""
    torch.manual_seed(seed)
    model = build()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


assert_close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-13)


def data_rank(mesh):
    """Return the number of this process's batch, and how many there are."""
    rank = 0
    count = 1
    for axis in mesh.mesh_dim_names:
        if axis != "tp":
            rank = rank * mesh[axis].size() + mesh[axis].get_local_rank()
            count *= mesh[axis].size()
    return rank, count


def assert_like_one_process(model, mesh, reference, shape, *others):
    """Compare outputs and all gradients with those of the whole batch."""
    rank, count = data_rank(mesh)
    torch.manual_seed(1)
    batch, weights = torch.randn(2, count, *shape, dtype=torch.float64)
    whole_x = batch.clone().requires_grad_()
    x = batch[rank].clone().requires_grad_()
    expected = reference(whole_x, *others)
    (expected * weights).mean().backward()
    out = model(x, *others)
    (out * weights[rank]).mean().backward()
    assert type(out) is torch.Tensor
    assert_close(out, expected[rank])
    assert_close(x.grad / count, whole_x.grad[rank])
    for (name, found), exact in zip(
        model.named_parameters(), reference.parameters(), strict=True
    ):
        assert_close(whole(found.grad), exact.grad, msg=name)


def numbers_are_those_of_one_process(axes):
    mesh = mesh_of(*axes)
    torch.manual_seed(0)
    positions = torch.randperm(16)[:ODD]
    mask = torch.rand(ODD, ODD) < 0.7
    model = parallelize(seeded(transformer), mesh, recompute=True)
    shape = (2, ODD, 16)
    assert_like_one_process(model, mesh, seeded(transformer), shape, positions, mask)


for _axes in MESHES:
    _name = f"numbers_over_{'_and_'.join(_axes)}_are_those_of_one_process"
    CHECKS[_name] = partial(numbers_are_those_of_one_process, _axes)


@check
def numbers_of_other_parts_and_of_one_block_are_those_of_one_process():
    mesh = mesh_of("tp")
    for build, shape in ((other_parts, (8, 16)), (one_block, (2, 3, 1, 16))):
        model = parallelize(seeded(build), mesh)
        assert_like_one_process(model, mesh, seeded(build), shape)


@check
def a_copy_over_tp_has_weights_of_its_own():
    mesh = mesh_of("tp")

    def compile(
        function, **options
    ):  # takes no time, and returns a function as torch does
        return lambda *args, **kwargs: function(*args, **kwargs)

    with patch.object(torch, "compile", compile):
        original = parallelize(seeded(transformer), mesh, recompute=True, compile=True)
    model = copy.deepcopy(original)
    for parameter in original.parameters():
        nn.init.zeros_(parameter)
    assert_like_one_process(model, mesh, seeded(transformer), (2, 8, 16))


@check
def weights_are_those_of_the_first_rank():
    expected = seeded(transformer).state_dict()
    mesh = mesh_of("tp")
    model = parallelize(seeded(transformer, seed=dist.get_rank()), mesh)
    for name, tensor in model.state_dict().items():
        assert torch.equal(whole(tensor), expected[name]), name


@check
def weights_come_by_way_of_meta():
    expected = seeded(transformer)
    mesh = mesh_of("dp", "tp")
    model = parallelize(transformer(device="meta"), mesh)
    model.to_empty(device="cpu")
    options = distributed_state.StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True
    )
    state = expected.state_dict() if dist.get_rank() == 0 else {}
    distributed_state.set_model_state_dict(model, state, options=options)
    assert_like_one_process(model, mesh, expected, (2, ODD, 16))


@check
def mixed_precision_streams_bfloat16_and_returns_float32():
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        output_dtype=torch.float32,
    )
    build = partial(transformer, dtype=torch.float32)
    model = parallelize(seeded(build), mesh_of("dp", "tp"), mp_policy=policy)
    streams = []
    model.layers[1].ln1.register_forward_pre_hook(
        lambda ln1, args: streams.append(args[0].dtype)
    )
    x = torch.randn(2, ODD, 16)
    out = model(x)
    out.sum().backward()
    assert streams == [torch.bfloat16]
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    torch.testing.assert_close(out, seeded(build)(x), rtol=0.1, atol=0.1)


def train(model, optimizer, steps, rank=0, count=1):
    """Train on batches drawn by their step alone, and return the norms of gradients."""
    norms = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, ODD, 16, dtype=torch.float64, generator=generator)
        model(x.chunk(count)[rank]).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        norms.append(float(whole(norm)))
    return norms


def state_of(model, optimizer):
    weights, state = distributed_state.get_state_dict(model, optimizer)
    return {"model_state_dict": weights, "optim_state_dict": state}


@check
def training_with_clipping_resumes_on_another_mesh():
    reference = seeded(transformer)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    expected = train(reference, optimizer, range(3))
    for axes in (("dp", "tp"), ("tp",)):
        mesh = mesh_of(*axes)
        model = parallelize(seeded(transformer), mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if len(axes) == 2:
            found = train(model, optimizer, range(2), *data_rank(mesh))
            checkpoint.save(state_of(model, optimizer), checkpoint_id="checkpoint")
        else:
            state = state_of(model, optimizer)
            checkpoint.load(state, checkpoint_id="checkpoint")
            distributed_state.set_state_dict(model, optimizer, **state)
        last = train(model, optimizer, range(2, 3), *data_rank(mesh))
        assert_close(found + last, expected)
        for weight, exact in zip(
            model.parameters(), reference.parameters(), strict=True
        ):
            assert_close(whole(weight), exact.detach())


def main():
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "TypedStorage")  # of torch 2.10's checkpoints
    os.chdir(sys.argv[1])
    dist.init_process_group("gloo")
    for name, run in CHECKS.items():
        run()
        dist.barrier()
        if dist.get_rank() == 0:
            print("passed", name, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
