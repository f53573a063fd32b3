"""What four processes check together: test_parallelize starts this file in each."""

import os
import sys
import warnings
from functools import partial
from typing import Any

import pytest
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

SIZES_OF_MESHES = {1: (4,), 2: (2, 2), 3: (2, 1, 2)}  # by their number of axes
ODD = 7  # a number of tokens that the number of processes does not divide
# DTensor plans each operation once for each shape, which takes most of the time. So
# weights have as few shapes as possible, and x has SHAPE in most checks.
SHAPE = (2, 2, ODD, 16)
ONE_TOKEN = (2, 2, 1, 16)
SIZES: Any = {"d_model": 16, "d_ff": 32, "dtype": torch.float64}
transformer = partial(
    Transformer,
    **SIZES,
    num_layers=2,
    num_heads=4,
    d_head=8,
    qk_norm=True,
    max_seq_len=16,
)
# Where a second layer would show no more.
one_layer = partial(transformer, num_layers=1)
# It has other parts: fewer heads of keys, biases, no gate and no norms of heads.
one_block = partial(
    Block,
    **SIZES,
    num_heads=8,
    num_kv_heads=4,
    d_head=4,
    rope=RotaryPositionalEmbedding(10000.0, 4, 16),
    ffn=FeedForward,
    norm=nn.LayerNorm,
)


def mesh_of(*axes):
    return init_device_mesh("cpu", SIZES_OF_MESHES[len(axes)], mesh_dim_names=axes)


def pairs():
    """Return the mesh of two processes that each half of the processes has."""
    return mesh_of("dp", "tp")["tp"]


def seeded(build, seed=0):
    """Build a model whose gains and biases are random numbers, too."""
    torch.manual_seed(seed)
    model = build()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def number_of_parts(mesh):
    """Return into how many parts the processes split a batch."""
    if "tp" in mesh.mesh_dim_names:
        return mesh.size() // mesh["tp"].size()
    return mesh.size()


def whole_batch(mesh, shape=SHAPE):
    """Draw x of all processes; the x of one has this shape."""
    first, *others = shape
    return torch.randn(number_of_parts(mesh) * first, *others, dtype=torch.float64)


def own_part(batches, mesh):
    """Return what this process takes of the batches; ranks along tp take the same."""
    for axis in mesh.mesh_dim_names:
        if axis != "tp":
            parts = batches.chunk(mesh[axis].size())
            batches = parts[mesh[axis].get_local_rank()]
    return batches


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


def assert_like_one_process(model, mesh, reference, shape=SHAPE):
    """Compare weights, all gradients and outputs with one process on the whole batch."""
    torch.manual_seed(1)
    whole_x = whole_batch(mesh, shape).requires_grad_()
    x = own_part(whole_x.detach(), mesh).clone().requires_grad_()
    seq = shape[-2]
    positions = torch.randperm(16)[:seq]
    mask = torch.rand(seq, seq) < 0.7
    expected = reference(whole_x, positions, mask)
    expected.square().mean().backward()
    out = model(x, positions, mask=mask)
    out.square().mean().backward()
    assert_equal_parameters(model, reference)
    assert type(out) is torch.Tensor
    assert_close(out, own_part(expected, mesh))
    assert_close(x.grad / number_of_parts(mesh), own_part(whole_x.grad, mesh))


def assert_distributed_like_one_process(build, mesh, **options):
    """Compare a model that all processes but the first build from another seed."""
    other_seed = sum(mesh.get_coordinate())
    model = parallelize(seeded(build, seed=other_seed), mesh, recompute=True)
    assert_like_one_process(model, mesh, seeded(build), **options)


def a_model_over_tp():
    assert_distributed_like_one_process(transformer, pairs())


def a_block_over_tp_with_one_token():
    assert_distributed_like_one_process(one_block, pairs(), shape=ONE_TOKEN)


def a_model_over_both_axes_of_data():
    assert_distributed_like_one_process(one_layer, mesh_of("dp_replicate", "dp"))


def a_block_over_all_axes():
    assert_distributed_like_one_process(one_block, mesh_of("dp_replicate", "dp", "tp"))


def an_activation_that_reads_all_of_d_ff():
    softmax = partial(torch.softmax, dim=-1)
    build = partial(one_block, ffn=partial(FeedForward, activation=softmax))
    assert_distributed_like_one_process(build, pairs(), shape=ONE_TOKEN)


def weights_by_way_of_meta():
    expected = seeded(one_layer)
    mesh = mesh_of("dp", "tp")
    model = parallelize(one_layer(device="meta"), mesh)
    model.to_empty(device="cpu")
    options = distributed_state.StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True
    )
    state = expected.state_dict() if dist.get_rank() == 0 else {}
    distributed_state.set_model_state_dict(model, state, options=options)
    assert_like_one_process(model, mesh, expected)


def a_loss_over_a_part_of_the_tokens_in_each_process():
    mesh = mesh_of("dp", "tp")
    torch.manual_seed(1)
    x = whole_batch(mesh)
    reference = seeded(one_layer)
    reference(x).square().mean().backward()
    model = parallelize(seeded(one_layer), mesh)
    out = model(own_part(x, mesh))
    tp = mesh["tp"]
    own_tokens = out.chunk(tp.size(), dim=-2)[tp.get_local_rank()]
    mean_size = out.numel() / tp.size()
    (own_tokens.square().sum() / mean_size).backward()
    assert_equal_parameters(model, reference)


def different_tensors_along_tp_raise():
    mesh = pairs()
    rank = mesh.get_local_rank()
    x = torch.randn(2, 8, 16, dtype=torch.float64, generator=torch.manual_seed(0))
    positions = torch.arange(248, 256)
    mask = torch.ones(8, 8, dtype=torch.bool)
    other_x = x.clone()
    other_x[1, 7, 15] += rank
    other_mask = mask.clone()
    other_mask[7, 6] = rank == 0
    model = parallelize(one_layer(max_seq_len=257), mesh)
    with pytest.raises(
        ValueError, match=r"differences .* \(2, 8, 16\).* rank along 'dp'"
    ):
        model(other_x, positions, mask)
    with pytest.raises(ValueError, match=r"differences of up to 1 .* \(8,\)"):
        model(x, token_positions=positions + rank, mask=mask)
    with pytest.raises(ValueError, match=r"differences of up to 1 .* \(8, 8\)"):
        model(x, positions, other_mask)
    with pytest.raises(ValueError, match=r"shapes .*\(2, 8, 16\).*\(2, 7, 16\)"):
        model(x[:, rank:])
    with pytest.raises(ValueError, match="shapes"):
        model(x, mask=mask if rank == 0 else None)


def x_that_processes_along_tp_round_differently_passes():
    mesh = pairs()
    torch.manual_seed(0)
    x = whole_batch(mesh)
    one_unit_in_bfloat16 = 2.0**-8
    rounded = x * (1 + mesh.get_local_rank() * one_unit_in_bfloat16)
    parallelize(one_layer(), mesh)(rounded)


def buffers_come_from_the_first_process():
    model = one_block()
    table = torch.full((2, 3), float(dist.get_rank()))
    model.register_buffer("table", table)
    model.register_buffer("strided", table.clone().T)  # a contiguous copy is sent
    parallelize(model, mesh_of("dp", "tp"))
    assert model.get_buffer("table").count_nonzero() == 0
    assert model.get_buffer("strided").count_nonzero() == 0


def an_overflow_in_one_process_skips_the_step_in_all():
    """The page asks for a matrix as the first parameter of the optimizer."""
    mesh = mesh_of("dp", "tp")
    model = parallelize(seeded(one_layer), mesh)
    parameters = sorted(model.parameters(), key=lambda parameter: -parameter.ndim)
    before = [whole(parameter).clone() for parameter in parameters]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    x = torch.ones(SHAPE, dtype=torch.float64)
    loss = model(x).square().mean()
    scaler.scale(loss).backward()
    if dist.get_rank() == 3:
        model.layers[0].ffn.w1.weight.grad.to_local()[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    for parameter, value in zip(parameters, before, strict=True):
        assert torch.equal(whole(parameter), value)


def train(model, optimizer, batch):
    """Train for one step, and return the norm of the gradients."""
    model(x=batch).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return whole(norm)


def with_optimizer(model):
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def state_of(model, optimizer):
    weights, state = distributed_state.get_state_dict(model, optimizer)
    return {"model_state_dict": weights, "optim_state_dict": state}


def training_with_clipping_resumes_on_another_mesh():
    """Along tp, a process has a part of a gain's gradient. The norm is of their sum."""
    dp_and_tp, dp = mesh_of("dp", "tp"), mesh_of("dp")
    torch.manual_seed(1)
    batches = [whole_batch(dp_and_tp), whole_batch(dp)]
    reference, optimizer = with_optimizer(seeded(one_layer))
    expected = [train(reference, optimizer, batch) for batch in batches]

    model, optimizer = with_optimizer(parallelize(seeded(one_layer), dp_and_tp))
    norm = train(model, optimizer, own_part(batches[0], dp_and_tp))
    assert_close(norm, expected[0], msg="norm of the gradients over dp and tp")
    checkpoint.save(state_of(model, optimizer), checkpoint_id="checkpoint")

    model, optimizer = with_optimizer(parallelize(one_layer(), dp))
    state = state_of(model, optimizer)
    checkpoint.load(state, checkpoint_id="checkpoint")
    distributed_state.set_state_dict(model, optimizer, **state)
    norm = train(model, optimizer, own_part(batches[1], dp))
    assert_close(norm, expected[1], msg="norm of the gradients over dp")
    assert_equal_parameters(model, reference)


CHECKS = [
    a_model_over_tp,
    a_block_over_tp_with_one_token,
    a_model_over_both_axes_of_data,
    a_block_over_all_axes,
    an_activation_that_reads_all_of_d_ff,
    weights_by_way_of_meta,
    a_loss_over_a_part_of_the_tokens_in_each_process,
    different_tensors_along_tp_raise,
    x_that_processes_along_tp_round_differently_passes,
    buffers_come_from_the_first_process,
    an_overflow_in_one_process_skips_the_step_in_all,
    training_with_clipping_resumes_on_another_mesh,
]


def main():
    warnings.simplefilter("error")
    os.chdir(sys.argv[1])
    dist.init_process_group("gloo")
    for check in CHECKS:
        check()
        dist.barrier()
        if dist.get_rank() == 0:
            print("passed", check.__name__, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
