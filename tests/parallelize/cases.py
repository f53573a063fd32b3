"""What four processes check together: each case raises, on any of them, where it finds a difference."""

import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tinyblock import Block, FeedForward, RotaryPositionalEmbedding, Transformer, parallelize

PROCESSES = 4
MESHES = {
    ("tp",): (4,),
    ("dp",): (4,),
    ("dp", "tp"): (2, 2),
    ("dp_replicate", "dp"): (2, 2),
    ("dp_replicate", "dp", "tp"): (2, 1, 2),
}
SIZES: dict[str, Any] = {"num_kv_heads": 4, "dtype": torch.float64}
transformer = partial(Transformer, 2, 16, 8, 32, max_seq_len=16, **SIZES)  # a key head each for a tp of 4
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, Any]]] = {
    "with q_norm and k_norm": (partial(transformer, qk_norm=True), (2, 7, 16), {}),  # 7: an uneven sequence
    "of FeedForward and LayerNorm, recomputed": (
        partial(transformer, ffn=FeedForward, norm=nn.LayerNorm, theta=None),
        (8, 16),  # no batch axis
        {"recompute": True},
    ),
    "of one token": (partial(transformer, qk_norm=True), (2, 1, 16), {}),  # fewer than a tp of 4
    "of one Block": (
        lambda: Block(16, 8, 32, rope=RotaryPositionalEmbedding(10000.0, 2, 16), qk_norm=True, **SIZES),
        (2, 3, 5, 16),  # two batch axes
        {"recompute": True},
    ),
}
CASES: dict[str, Callable[[], None]] = {}


def run_cases(rank: int, folder: Path) -> None:
    """Run all cases in one of the processes, and note which have passed."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")  # dynamo looks at that of each DTensor
    store = dist.FileStore(str(folder / "store"), PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES, timeout=timedelta(seconds=60))
    os.chdir(folder)
    for name, case in CASES.items():
        case()
        dist.barrier()
        if rank == 0:
            with Path("passed").open("a") as passed:
                print(name, file=passed)
    dist.destroy_process_group()


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__.replace("_", " ")] = function
    return function


def mesh_of(*axes: str) -> DeviceMesh:
    return init_device_mesh("cpu", MESHES[axes], mesh_dim_names=axes)


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Build a model whose gains differ from 1."""
    torch.manual_seed(seed)
    model = build()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.uniform_(parameter.data, 0.5, 1.5)
    return model


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def data_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """Return which of how many batches the processes of this one's tensor-parallel group have."""
    axes = [axis for axis in mesh.mesh_dim_names or () if axis != "tp"]
    rank, count = 0, 1
    for axis in axes:
        rank, count = rank * mesh[axis].size() + mesh[axis].get_local_rank(), count * mesh[axis].size()
    return rank, count


def assert_close(what: str, actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    error, norm = (float(tensor.detach().norm()) for tensor in (actual - expected, expected))
    assert error <= 1e-12 * norm + 1e-15, f"{what}, of norm {norm:.1e}, is off by {error:.1e}"


def assert_like_one_process(
    mesh: DeviceMesh, model: nn.Module, reference: nn.Module, shape: tuple[int, ...], positions: bool = True
) -> None:
    """Compare the output, and the gradients of the input and of each parameter, with those of the whole batch."""
    rank, count = data_rank(mesh)
    torch.manual_seed(1)
    shapes = (count, *shape)
    batch, weights = torch.randn(2, *shapes, dtype=torch.float64)
    extra = {"mask": torch.rand(*shapes[:-1], shape[-2]) < 0.7}
    if positions:
        extra["token_positions"] = torch.randint(0, 16, shapes[:-1])
    whole_x, x = batch.clone().requires_grad_(), batch[rank].clone().requires_grad_()
    expected = reference(whole_x, **extra)
    (expected * weights).mean().backward()
    out = model(x, **{name: tensor[rank] for name, tensor in extra.items()})
    (out * weights[rank]).mean().backward()
    assert type(out) is Tensor
    assert_close("the output", out, expected[rank])
    assert x.grad is not None
    assert whole_x.grad is not None
    assert_close("the input's gradient", x.grad / count, whole_x.grad[rank])
    pairs = list(zip(model.named_parameters(), reference.named_parameters(), strict=True))
    for (name, parameter), (expected_name, expected_parameter) in pairs:
        assert name == expected_name
        assert_close(f"the gradient of {name}", whole(parameter.grad), whole(expected_parameter.grad))
    model.zero_grad()
    reference.zero_grad()


def _equality(axes: tuple[str, ...], kind: str) -> None:
    build, shape, options = MODELS[kind]
    mesh = mesh_of(*axes)
    model = parallelize(seeded(build), mesh, **options)
    assert_like_one_process(mesh, model, seeded(build), shape, positions="LayerNorm" not in kind)


for _axes in MESHES:
    for _kind in MODELS:
        CASES[f"a model {_kind} over {' '.join(_axes)} is like one process"] = partial(_equality, _axes, _kind)


@case
def compiled_blocks_are_like_one_process_without_a_graph_break() -> None:
    for axes in (("tp",), ("dp", "tp")):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        build, mesh = partial(transformer, qk_norm=True), mesh_of(*axes)
        compiler = torch.compile
        torch.compile = partial(compiler, backend="aot_eager")  # type: ignore[assignment] # traces all, builds no C++
        model = parallelize(seeded(build), mesh, compile=True, recompute=axes == ("dp", "tp"))
        torch.compile = compiler
        for seq in (7, 8, 8):  # the first process has four tokens of each
            assert_like_one_process(mesh, model, seeded(build), (2, seq, 16))
        assert not torch._dynamo.utils.counters["graph_break"]
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # one a length, for all blocks


@case
def weights_are_those_of_the_first_rank_and_the_same_by_way_of_meta() -> None:
    build = partial(transformer, qk_norm=True)
    expected = seeded(build).state_dict()
    for axes in MESHES:
        mesh = mesh_of(*axes)
        rank = mesh["tp"].get_local_rank() if "tp" in axes else 0
        spread = parallelize(seeded(build, seed=rank), mesh)
        loaded = parallelize(build(device="meta"), mesh)
        loaded.to_empty(device="cpu")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(loaded, dict(expected) if dist.get_rank() == 0 else {}, options=options)
        for model in (spread, loaded):
            for name, tensor in model.state_dict().items():
                assert torch.equal(whole(tensor), expected[name]), (axes, name)
        x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        assert torch.equal(spread(x), loaded(x))  # the table of rotations, which is not in the state dict
