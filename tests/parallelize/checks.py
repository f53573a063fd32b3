"""What four processes check together: test_parallelize starts this file in each."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
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
# Its activation reads all of d_ff.
with_softmax = partial(
    one_block, ffn=partial(FeedForward, activation=partial(torch.softmax, dim=-1))
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


def mean_square(out, mesh):
    return out.square().mean()


def mean_square_of_own_tokens(out, mesh):
    """Return the share of the mean square that this process along tp computes."""
    tp = mesh["tp"]
    tokens = out.chunk(tp.size(), dim=-2)[tp.get_local_rank()]
    return tokens.square().sum() / (out.numel() / tp.size())


def assert_trains_like_one_process(
    model, mesh, reference, shape=SHAPE, loss=mean_square
):
    """Compare a step with that of one process, which takes the batches of all.

    The x of each process has this shape.
    """
    torch.manual_seed(1)
    first, *others = shape
    whole_x = torch.randn(number_of_parts(mesh) * first, *others, dtype=torch.float64)
    x = own_part(whole_x, mesh).clone().requires_grad_()
    whole_x.requires_grad_()
    seq = shape[-2]
    positions = torch.randperm(16)[:seq]
    mask = torch.rand(seq, seq) < 0.7
    expected = reference(whole_x, positions, mask)
    expected.square().mean().backward()
    out = model(x=x, token_positions=positions, mask=mask)
    loss(out, mesh).backward()
    assert type(out) is torch.Tensor
    assert_close(out, own_part(expected, mesh))
    assert_close(x.grad / number_of_parts(mesh), own_part(whole_x.grad, mesh))
    found = dict(model.named_parameters())
    for name, exact in reference.named_parameters():
        assert_close(whole(found[name]), exact, msg=name)
        assert_close(whole(found[name].grad), exact.grad, msg=f"gradient of {name}")


def assert_distributed_like_one_process(build, mesh, **options):
    """Compare a model that all processes but the first build from another seed.

    Returns it, and the model of one process.
    """
    other_seed = sum(mesh.get_coordinate())
    model = parallelize(seeded(build, seed=other_seed), mesh, recompute=True)
    reference = seeded(build)
    assert_trains_like_one_process(model, mesh, reference, **options)
    return model, reference


def gradients_and_their_norm_where_each_process_has_the_loss_of_some_tokens():
    models = assert_distributed_like_one_process(
        transformer, mesh_of("dp", "tp"), loss=mean_square_of_own_tokens
    )
    norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in models]
    assert_close(*map(whole, norms))


def a_block_over_tp_with_one_token():
    assert_distributed_like_one_process(with_softmax, pairs(), shape=ONE_TOKEN)


def a_model_over_both_axes_of_data():
    assert_distributed_like_one_process(one_layer, mesh_of("dp_replicate", "dp"))


def a_block_over_all_axes():
    mesh = mesh_of("dp_replicate", "dp", "tp")
    assert_distributed_like_one_process(one_block, mesh)


def weights_by_way_of_meta():
    expected = seeded(one_layer)
    mesh = mesh_of("dp", "tp")
    model = parallelize(one_layer(device="meta"), mesh)
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state = expected.state_dict() if dist.get_rank() == 0 else {}
    set_model_state_dict(model, state, options=options)
    assert_trains_like_one_process(model, mesh, expected)


def buffers_come_from_the_first_process():
    model = one_block()
    table = torch.full((2, 3), float(dist.get_rank()))
    model.register_buffer("table", table)
    model.register_buffer("strided", table.clone().T)  # a contiguous copy is sent
    parallelize(model, mesh_of("dp", "tp"))
    assert model.get_buffer("table").count_nonzero() == 0
    assert model.get_buffer("strided").count_nonzero() == 0


def different_tensors_along_tp_raise():
    mesh = pairs()
    rank = mesh.get_local_rank()
    torch.manual_seed(0)
    x = torch.randn(SHAPE, dtype=torch.float64)
    positions = torch.arange(249, 256)
    mask = torch.ones(7, 7, dtype=torch.bool)
    other_x = x.clone()
    other_x[1, 1, 6, 15] += rank
    other_mask = mask.clone()
    other_mask[6, 5] = rank == 0
    model = parallelize(one_layer(max_seq_len=257), mesh)
    for message, arguments in (
        (r"differences .* \(2, 2, 7, 16\).* rank along 'dp'", (other_x,)),
        (r"differences of up to 1 .* \(7,\)", (x, positions + rank)),
        (r"differences of up to 1 .* \(7, 7\)", (x, positions, other_mask)),
        (r"shapes .*\(2, 2, 7, 16\).*\(2, 2, 6, 16\)", (x[..., rank:, :],)),
        ("shapes", (x, None, mask if rank == 0 else None)),
    ):
        with pytest.raises(ValueError, match=message):
            model(*arguments)
    one_unit_in_bfloat16 = 2.0**-8
    model(x * (1 + rank * one_unit_in_bfloat16))  # processes may round differently


def an_overflow_in_one_process_skips_the_step_in_all():
    """The page asks for a matrix as the first parameter of the optimizer."""
    model = parallelize(seeded(one_layer), mesh_of("dp", "tp"))
    parameters = sorted(model.parameters(), key=lambda parameter: -parameter.ndim)
    before = [whole(parameter).clone() for parameter in parameters]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    loss = model(torch.ones(SHAPE, dtype=torch.float64)).square().mean()
    scaler.scale(loss).backward()
    if dist.get_rank() == 3:
        model.layers[0].ffn.w1.weight.grad.to_local()[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    for parameter, value in zip(parameters, before, strict=True):
        assert torch.equal(whole(parameter), value)


CHECKS = [
    gradients_and_their_norm_where_each_process_has_the_loss_of_some_tokens,
    a_block_over_tp_with_one_token,
    a_model_over_both_axes_of_data,
    a_block_over_all_axes,
    weights_by_way_of_meta,
    buffers_come_from_the_first_process,
    different_tensors_along_tp_raise,
    an_overflow_in_one_process_skips_the_step_in_all,
]


def main():
    warnings.simplefilter("error")
    dist.init_process_group("gloo")
    for check in CHECKS:
        check()
        dist.barrier()
        if dist.get_rank() == 0:
            print("passed", check.__name__, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
