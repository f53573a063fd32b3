"""What four processes check together: test_parallelize starts this file in each."""

import os
import sys
import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as distributed_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tinyblock import (
    Block,
    FeedForward,
    RotaryPositionalEmbedding,
    Transformer,
    parallelize,
)

SHAPES = {1: (4,), 2: (2, 2), 3: (2, 1, 2)}  # of a mesh, by its number of axes
ODD = 7  # a number of tokens that the number of processes does not divide
SHAPE = (2, ODD, 16)
SIZES: Any = {
    "d_model": 16,
    "num_heads": 8,
    "d_ff": 32,
    "num_kv_heads": 4,
    "dtype": torch.float64,
}
transformer = partial(Transformer, num_layers=2, **SIZES, qk_norm=True, max_seq_len=16)
# It has other parts: biases, no gate and no norms of heads.
one_block = partial(
    Block,
    **SIZES,
    rope=RotaryPositionalEmbedding(10000.0, 2, 16),
    ffn=FeedForward,
    norm=nn.LayerNorm,
)


def mesh_of(axes):
    names = tuple(axes.split())
    return init_device_mesh("cpu", SHAPES[len(names)], mesh_dim_names=names)


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


def assert_equal_parameters(model, reference):
    """Compare weights and their gradients."""
    for (name, found), exact in zip(
        model.named_parameters(), reference.parameters(), strict=True
    ):
        assert_close(whole(found), exact, msg=name)
        assert_close(whole(found.grad), exact.grad, msg=f"gradient of {name}")


def split(mesh):
    """Return the ranks of this process along tp and the data, and the data's size."""
    tp = mesh["tp"].size() if "tp" in mesh.mesh_dim_names else 1
    return dist.get_rank() % tp, dist.get_rank() // tp, 4 // tp


def assert_like_one_process(model, mesh, reference, shape=SHAPE):
    """Compare weights, all gradients and outputs with one process on the whole batch."""
    _, rank, count = split(mesh)
    torch.manual_seed(1)
    whole_x = torch.randn(count, *shape, dtype=torch.float64, requires_grad=True)
    x = whole_x.detach()[rank].clone().requires_grad_()
    seq = shape[-2]
    positions = torch.randperm(16)[:seq]
    mask = torch.rand(seq, seq) < 0.7
    expected = reference(whole_x, positions, mask)
    expected.square().mean().backward()
    out = model(x, positions, mask=mask)
    out.square().mean().backward()
    assert_equal_parameters(model, reference)
    assert type(out) is torch.Tensor
    assert_close(out, expected[rank])
    assert_close(x.grad / count, whole_x.grad[rank])


def numbers(build, axes, shape=SHAPE):
    """Compare a model that has the weights of the first rank along tp."""
    mesh = mesh_of(axes)
    model = parallelize(seeded(build, seed=split(mesh)[0]), mesh, recompute=True)
    assert_like_one_process(model, mesh, seeded(build), shape)


def weights_come_by_way_of_meta():
    expected = seeded(transformer)
    mesh = mesh_of("dp tp")
    model = parallelize(transformer(device="meta"), mesh)
    model.to_empty(device="cpu")
    options = distributed_state.StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True
    )
    state = expected.state_dict() if dist.get_rank() == 0 else {}
    distributed_state.set_model_state_dict(model, state, options=options)
    assert_like_one_process(model, mesh, expected)


def train(model, optimizer, steps, rank=0, count=1):
    """Train on batches drawn by their step alone, and return the norms of gradients."""
    norms = []
    for step in steps:
        torch.manual_seed(step)
        x = torch.randn(4, ODD, 16, dtype=torch.float64).chunk(count)[rank]
        model(x=x).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        norms.append(float(whole(norm)))
    return norms


def with_optimizer(model):
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def state_of(model, optimizer):
    weights, state = distributed_state.get_state_dict(model, optimizer)
    return {"model_state_dict": weights, "optim_state_dict": state}


def clipping_and_adamw():
    """Of the gradient of a gain, each process has a part, and torch adds them up."""
    reference, optimizer = with_optimizer(seeded(transformer))
    expected = train(reference, optimizer, range(3))
    model, optimizer = with_optimizer(parallelize(seeded(transformer), mesh_of("tp")))
    assert_close(train(model, optimizer, range(3)), expected)
    assert_equal_parameters(model, reference)


def training_with_clipping_resumes_on_another_mesh():
    reference, optimizer = with_optimizer(seeded(transformer))
    expected = train(reference, optimizer, range(3))
    mesh = mesh_of("dp tp")
    model, optimizer = with_optimizer(parallelize(seeded(transformer), mesh))
    norms = train(model, optimizer, range(2), *split(mesh)[1:])
    checkpoint.save(state_of(model, optimizer), checkpoint_id="checkpoint")
    model, optimizer = with_optimizer(parallelize(transformer(), mesh_of("tp")))
    state = state_of(model, optimizer)
    checkpoint.load(state, checkpoint_id="checkpoint")
    distributed_state.set_state_dict(model, optimizer, **state)
    norms += train(model, optimizer, range(2, 3))
    assert_close(norms, expected)
    assert_equal_parameters(model, reference)


CHECKS: Any = {
    "a model over tp": partial(numbers, transformer, "tp"),
    "a block over tp": partial(numbers, one_block, "tp", shape=(2, 3, 1, 16)),
    "a block over dp": partial(numbers, one_block, "dp"),
    "a model over axes of data": partial(numbers, transformer, "dp_replicate dp"),
    "a model over all axes": partial(numbers, transformer, "dp_replicate dp tp"),
    "weights by way of meta": weights_come_by_way_of_meta,
    "clipping and AdamW over tp": clipping_and_adamw,
    "training on one mesh after another": training_with_clipping_resumes_on_another_mesh,
}


def main():
    warnings.simplefilter("error")
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
