"""What four processes check together: each case raises, on any of them, where it finds a difference."""

import copy
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from mixture_of_experts import MixtureOfExperts
from torch import Tensor, nn
from torch.distributed import checkpoint as distributed_checkpoint
from torch.distributed.checkpoint import state_dict as distributed_state
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import tinyblock
from tinyblock import (
    Block,
    FeedForward,
    RotaryPositionalEmbedding,
    Transformer,
    parallelize,
)

PROCESSES = 4
MESHES = {
    ("tp",): (4,),
    ("dp",): (4,),
    ("dp", "tp"): (2, 2),
    ("dp_replicate", "dp"): (2, 2),
    ("dp_replicate", "dp", "tp"): (2, 1, 2),
}


class SlidingWindow(tinyblock.CausalMultiHeadSelfAttention):
    """Attend to the last three tokens alone, with biases on queries, keys and values."""

    def __init__(self, d_model, num_heads, **options):
        super().__init__(d_model, num_heads, **options)
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            projection.bias = nn.Parameter(torch.zeros_like(projection.weight[:, 0]))

    def attend(self, q, k, v, mask):
        assert type(q) is type(k) is Tensor  # this process's heads
        near = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(-2)
        return super().attend(q, k, v, near if mask is None else near & mask)


MIXTURE = partial(MixtureOfExperts, num_experts=4)
SIZES: dict[str, Any] = {
    "num_kv_heads": 4,  # one for each of four processes
    "dtype": torch.float64,
}
transformer = partial(
    Transformer, num_layers=2, d_model=16, num_heads=8, d_ff=32, max_seq_len=16, **SIZES
)
one_layer = partial(transformer, num_layers=1, qk_norm=True)
SLIDING = partial(transformer, qk_norm=True, attention=SlidingWindow)
OTHER_PARTS = partial(transformer, ffn=FeedForward, norm=nn.LayerNorm)
ONE_BLOCK = partial(Block, 16, 8, 32, qk_norm=True, **SIZES)
ROPE = partial(RotaryPositionalEmbedding, 10000.0, 2, 16)
MODELS = {
    # kind: (model, shape of its input, options of parallelize, meshes)
    "with q_norm, k_norm and a sliding window": (
        SLIDING,
        (2, 7, 16),
        {},
        [axes for axes in MESHES if axes != ("dp",)],
    ),
    "of a mixture of experts": (
        partial(transformer, num_layers=1, ffn=MIXTURE),
        (2, 5, 16),
        {},
        [("dp",)],
    ),
    "of FeedForward and LayerNorm, without a batch axis": (
        OTHER_PARTS,
        (8, 16),
        {"recompute": True},
        [("tp",)],
    ),
    "of fewer tokens than processes": (
        partial(transformer, qk_norm=True),
        (2, 1, 16),
        {},
        [("tp",)],
    ),
    "of one Block": (
        lambda: ONE_BLOCK(rope=ROPE()),
        (2, 3, 5, 16),
        {"recompute": True, "compile": True},
        [("tp",)],
    ),
}
CASES = {}


def run_cases():
    """Run all cases in one of the processes, and note which have passed."""
    warnings.simplefilter("error")
    # Dynamo looks at the .grad of each DTensor.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    for name, case in CASES.items():
        case()
        dist.barrier()
        if dist.get_rank() == 0:
            with Path("passed").open("a") as passed:
                print(name, file=passed)
    dist.destroy_process_group()


def case(function):
    CASES[function.__name__.replace("_", " ")] = function
    return function


def mesh_of(*axes):
    return init_device_mesh("cpu", MESHES[axes], mesh_dim_names=axes)


def seeded(build, seed=0):
    """Build a model whose gains differ from 1."""
    torch.manual_seed(seed)
    model = build()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.uniform_(parameter.data, 0.5, 1.5)
    return model


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_partial(tensor):
    """Return whether processes hold parts of a tensor that are still to be summed."""
    return any(placement.is_partial() for placement in tensor.placements)


def gradients(model):
    return {name: whole(parameter.grad) for name, parameter in model.named_parameters()}


# Traces a model as inductor would, and builds no C++.
traced_only = partial(torch.compile, backend="aot_eager")


def data_rank(mesh):
    """Return which of how many batches the processes of this one's tensor-parallel group have."""
    rank = 0
    count = 1
    for axis in mesh.mesh_dim_names if mesh else ():
        if axis != "tp":
            rank = rank * mesh[axis].size() + mesh[axis].get_local_rank()
            count *= mesh[axis].size()
    return rank, count


def assert_like_one_process(mesh, model, reference, shape):
    """Compare the output, and the gradients of the input and of each parameter, with those of the whole batch."""
    rank, count = data_rank(mesh)
    torch.manual_seed(1)
    shapes = (count, *shape)
    batch, weights = torch.randn(2, *shapes, dtype=torch.float64)
    mask = torch.rand(*shapes[:-1], shape[-2]) < 0.7
    positions = torch.randint(0, 16, shapes[:-1])
    whole_x = batch.clone().requires_grad_()
    x = batch[rank].clone().requires_grad_()
    expected = reference(whole_x, positions, mask)
    (expected * weights).mean().backward()
    out = model(x, positions[rank], mask=mask[rank])
    (out * weights[rank]).mean().backward()
    assert type(out) is Tensor
    found = {
        "the output": out,
        "the gradient of x": x.grad / count,
        **gradients(model),
    }
    exact = {
        "the output": expected[rank],
        "the gradient of x": whole_x.grad[rank],
        **gradients(reference),
    }
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-14)


def pair_of(axis):
    """Return a mesh of two of the four processes, which take half the time, or None in the others."""
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=(axis,))
    return None if mesh.get_coordinate() is None else mesh


def _equality(axes, kind):
    build, shape, options, _ = MODELS[kind]
    mesh = mesh_of(*axes) if len(axes) > 1 else pair_of(*axes)
    if mesh is None:
        return
    # Nothing is compiled here: another case does that.
    with patch.object(torch, "compile", lambda function, **options: function):
        model = parallelize(seeded(build), mesh, **options)
    if axes == ("tp",):  # FSDP's models raise an error for a copy
        original = model
        model = copy.deepcopy(model)
        for parameter in original.parameters():
            nn.init.zeros_(parameter)
    assert_like_one_process(mesh, model, seeded(build), shape)


for _kind, (*_, _meshes) in MODELS.items():
    for _axes in _meshes:
        _name = f"a model {_kind} over {' '.join(_axes)} is like one process"
        CASES[_name] = partial(_equality, _axes, _kind)


@case
def a_compiled_model_is_like_one_process():
    # Two processes compile as well as four, in half the time.
    mesh = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "tp"))
    if mesh.get_coordinate() is None:
        return
    with patch.object(torch, "compile", traced_only):
        model = parallelize(seeded(one_layer), mesh, recompute=True, compile=True)
    assert_like_one_process(mesh, model, seeded(one_layer), (2, 7, 16))


@case
def weights_are_those_of_the_first_rank_and_the_same_by_way_of_meta():
    expected = seeded(one_layer).state_dict()
    for axes in (("tp",), ("dp", "tp")):
        mesh = mesh_of(*axes)
        spread = parallelize(seeded(one_layer, seed=mesh["tp"].get_local_rank()), mesh)
        loaded = parallelize(one_layer(device="meta"), mesh)
        loaded.to_empty(device="cpu")
        options = distributed_state.StateDictOptions(
            full_state_dict=True, broadcast_from_rank0=True
        )
        distributed_state.set_model_state_dict(
            loaded, dict(expected) if dist.get_rank() == 0 else {}, options=options
        )
        for model in (spread, loaded):
            for name, tensor in model.state_dict().items():
                assert torch.equal(whole(tensor), expected[name]), (axes, name)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2, 5, 16, generator=generator, dtype=torch.float64)
        # The results also depend on the table of rotations, which no state dict has.
        assert torch.equal(spread(x), loaded(x))
        models = [loaded]
        if axes == ("tp",):  # FSDP's models raise an error for a copy
            models.append(copy.deepcopy(loaded))
        for model in models:
            model(x).sum().backward()
            for parameter in model.parameters():
                assert not is_partial(parameter.grad)


@case
def mixed_precision_streams_bfloat16_and_returns_what_is_asked_for():
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        output_dtype=torch.float32,
    )
    build = partial(Transformer, 2, 16, 8, 32, max_seq_len=16, qk_norm=True)
    model = parallelize(seeded(build), mesh_of("dp", "tp"), mp_policy=policy)
    streams = []
    model.layers[1].ln1.register_forward_pre_hook(
        lambda ln1, args: streams.append(args[0].dtype)
    )
    x = torch.randn(2, 5, 16)
    out = model(x)
    out.sum().backward()
    assert out.dtype == torch.float32
    assert streams == [torch.bfloat16]
    assert all(
        parameter.grad.dtype == torch.float32 for parameter in model.parameters()
    )
    torch.testing.assert_close(out, seeded(build)(x), rtol=0.1, atol=0.1)


def train(model, optimizer, mesh, steps):
    """Train on batches that are drawn by their step alone; return the losses and norms of the whole batch."""
    rank, count = data_rank(mesh)
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        shape = (2, 4, 5, 16)  # inputs and targets of a batch of 4
        x, target = torch.randn(shape, dtype=torch.float64, generator=generator)
        share = slice(rank * 4 // count, (rank + 1) * 4 // count)
        loss = (model(x[share]) - target[share]).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(total)
            total /= dist.get_world_size()
        losses += [float(total), float(whole(norm))]
    return losses


def model_and_optimizer(mesh, seed=0):
    model = seeded(one_layer, seed)
    if mesh:
        parallelize(model, mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def checkpoint_of(model, optimizer):
    weights, state = distributed_state.get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state}


def resume(mesh, folder):
    """Load a checkpoint into a model with other weights, train on, and return the losses."""
    model, optimizer = model_and_optimizer(mesh, seed=1)
    state = checkpoint_of(model, optimizer)
    distributed_checkpoint.load(state, checkpoint_id=folder)
    states = {
        "model_state_dict": state["model"],
        "optim_state_dict": state["optimizer"],
    }
    distributed_state.set_state_dict(model, optimizer, **states)
    return train(model, optimizer, mesh, range(1, 3))


@case
def checkpoints_of_tp_and_dp_load_anywhere_and_resume():
    folder = Path("checkpoint")
    mesh = mesh_of("dp", "tp")
    model, optimizer = model_and_optimizer(mesh)
    train(model, optimizer, mesh, range(1))
    distributed_checkpoint.save(checkpoint_of(model, optimizer), checkpoint_id=folder)
    expected = train(model, optimizer, mesh, range(1, 3))
    for axis in ("dp", "tp"):
        pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rest", axis))[axis]
        torch.testing.assert_close(resume(pair, folder), expected, rtol=1e-7, atol=0)
    if dist.get_rank() == 0:
        torch.save(expected, folder / "losses.pt")
