"""What four processes check together: each case raises, on any of them, where it finds a difference."""

import copy
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lab.sizes import Size
from parallelize.counting import Collectives
from profiling.collectives import Collective, Mesh, collectives_of
from profiling.distributed import Distributed
from profiling.measure import Settings
from test_recipes import run
from torch import Tensor, nn
from torch.distributed import checkpoint as distributed_checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from tinyblock import (
    Block,
    CausalMultiHeadSelfAttention,
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


class SlidingWindow(CausalMultiHeadSelfAttention):
    """Attend to the last three tokens alone, with biases on queries, keys and values."""

    def __init__(self, d_model: int, num_heads: int, **options: Any) -> None:
        super().__init__(d_model, num_heads, **options)
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            projection.bias = nn.Parameter(torch.zeros_like(projection.weight[:, 0]))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        assert type(q) is type(k) is Tensor  # this process's heads
        near = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(-2)
        return super().attend(q, k, v, near if mask is None else near & mask)


MIXTURE = run("A mixture of experts as the feed-forward layer")["MixtureOfExperts"]
SIZES: dict[str, Any] = {"num_kv_heads": 4, "dtype": torch.float64}  # a key head each for a tp of 4
transformer = partial(Transformer, num_layers=2, d_model=16, num_heads=8, d_ff=32, max_seq_len=16, **SIZES)
one_layer = partial(transformer, num_layers=1, qk_norm=True)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, Any]]] = {
    "with q_norm, k_norm and a sliding window": (
        partial(transformer, qk_norm=True, attention=SlidingWindow),
        (2, 7, 16),  # an uneven sequence
        {},
    ),
    "of a mixture of experts": (partial(transformer, num_layers=1, ffn=MIXTURE), (2, 5, 16), {}),
    "of FeedForward and LayerNorm, recomputed": (
        partial(transformer, ffn=FeedForward, norm=nn.LayerNorm, theta=None),
        (8, 16),  # no batch axis
        {"recompute": True},
    ),
    "of one token": (partial(transformer, qk_norm=True), (2, 1, 16), {}),  # fewer than a tp of 4
    "of one Block": (
        lambda: Block(16, 8, 32, rope=RotaryPositionalEmbedding(10000.0, 2, 16), qk_norm=True, **SIZES),
        (2, 3, 5, 16),  # two batch axes
        {"recompute": True, "compile": True},
    ),
}
CASES: dict[str, Callable[[], None]] = {}


def run_cases() -> None:
    """Run all cases in one of the processes, and note which have passed."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")  # dynamo looks at that of each DTensor
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    for name, case in CASES.items():
        case()
        dist.barrier()
        if dist.get_rank() == 0:
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
    mesh: DeviceMesh,
    model: nn.Module,
    reference: nn.Module,
    shape: tuple[int, ...],
    extra: tuple[str, ...] = ("mask", "token_positions"),
) -> None:
    """Compare the output, and the gradients of the input and of each parameter, with those of the whole batch."""
    rank, count = data_rank(mesh)
    torch.manual_seed(1)
    shapes = (count, *shape)
    batch, weights = torch.randn(2, *shapes, dtype=torch.float64)
    mask, positions = torch.rand(*shapes[:-1], shape[-2]) < 0.7, torch.randint(0, 16, shapes[:-1])
    extras = {name: {"mask": mask, "token_positions": positions}[name] for name in extra}
    whole_x, x = batch.clone().requires_grad_(), batch[rank].clone().requires_grad_()
    expected = reference(whole_x, **extras)
    (expected * weights).mean().backward()
    out = model(x, **{name: tensor[rank] for name, tensor in extras.items()})
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
    with patch.object(torch, "compile", lambda function, **options: function):  # another case compiles
        model = parallelize(seeded(build), mesh, **options)
    if axes == ("tp",):  # FSDP's models raise an error for a copy
        original, model = model, copy.deepcopy(model)
        for parameter in original.parameters():
            nn.init.zeros_(parameter)
    extra = ("mask",) if "LayerNorm" in kind else ("mask", "token_positions")
    assert_like_one_process(mesh, model, seeded(build), shape, extra)


for _kind in MODELS:
    _meshes: list[tuple[str, ...]] = [("tp",)]
    if "experts" in _kind:
        _meshes = [("dp",)]
    elif "window" in _kind:
        _meshes = [axes for axes in MESHES if axes != ("dp",)]
    for _axes in _meshes:
        CASES[f"a model {_kind} over {' '.join(_axes)} is like one process"] = partial(_equality, _axes, _kind)


@case
def compiled_blocks_are_like_one_process_without_a_graph_break() -> None:
    mesh = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "tp"))  # two compile as well as four, in half the time
    if mesh.get_coordinate() is None:
        return
    build = partial(transformer, qk_norm=True)
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):  # traces all, builds no C++
        model = parallelize(seeded(build), mesh, compile=True, recompute=True)
    for seq in (7, 8):  # the first process along tp has four tokens of each
        assert_like_one_process(mesh, model, seeded(build), (2, seq, 16), extra=())
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # one a length, for all blocks


@case
def weights_are_those_of_the_first_rank_and_the_same_by_way_of_meta() -> None:
    expected = seeded(one_layer).state_dict()
    for axes in (("tp",), ("dp", "tp")):
        mesh = mesh_of(*axes)
        spread = parallelize(seeded(one_layer, seed=mesh["tp"].get_local_rank()), mesh)
        loaded = parallelize(one_layer(device="meta"), mesh)
        loaded.to_empty(device="cpu")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(loaded, dict(expected) if dist.get_rank() == 0 else {}, options=options)
        for model in (spread, loaded):
            for name, tensor in model.state_dict().items():
                assert torch.equal(whole(tensor), expected[name]), (axes, name)
        x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        assert torch.equal(spread(x), loaded(x))  # the table of rotations, which is not in the state dict
        for model in (loaded, copy.deepcopy(loaded)) if axes == ("tp",) else (loaded,):
            model(x).sum().backward()  # no gradient is left as a sum to be made
            assert not any(place.is_partial() for gains in model.parameters() for place in gains.grad.placements)


@case
def collectives_are_two_gathers_and_two_scatters_a_block_each_way() -> None:
    sizes = SIZES | {"qk_norm": True, "d_head": 4}  # no weight that FSDP would pad for a dp of 4
    stack, block = partial(Transformer, 2, 16, 8, 32, max_seq_len=8, **sizes), partial(Block, 16, 8, 32, **sizes)
    for axes, shape in MESHES.items():
        for build in (stack, block) if 1 not in shape else ():
            mesh = mesh_of(*axes)
            model = parallelize(seeded(build), mesh)
            batch, layers = 2 * data_rank(mesh)[1], None if build is block else 2
            size = Size(batch, 8, 16, 8, 4, 4, 32, qk_norm=True, num_layers=layers)
            x = torch.randn(2, 8, 16, dtype=torch.float64, requires_grad=True)
            with Collectives(mesh) as forward:
                out = model(x)
            with Collectives(mesh) as backward:
                out.sum().backward()
            counted = {"forward": forward.calls, "backward": backward.calls}
            assert counted == collectives_of(size, Mesh(**dict(zip(axes, shape, strict=True)))), (axes, size, counted)
            if "tp" in axes:  # the one more: the output, the input's gradient
                for calls in counted.values():
                    assert calls[Collective("all-gather", "tp", 2 * 8 * 16)] == 2 * size.layers + 1
                    assert calls[Collective("reduce-scatter", "tp", 2 * 8 * 16)] == 2 * size.layers


@case
def each_pass_that_is_profiled_calls_what_a_step_calls() -> None:
    size, mesh = Size(4, 8, 16, 8, 4, 4, 32), Mesh(dp=2, tp=2)  # a Block, that would keep its weights when called again
    model = Distributed(size, Settings(torch.device("cpu"), torch.float32, "train", mesh=mesh))
    calls = collectives_of(size, mesh)
    forward = Distributed(size, Settings(torch.device("cpu"), torch.float32, "forward", mesh=mesh))
    assert forward.calls == {"forward": calls["forward"]}
    for name, expected in (("forward", calls["forward"]), ("train", calls["forward"] + calls["backward"])):
        for _ in range(2):
            with Collectives(model.devices) as counted:
                model.runs[name]()
            assert counted.calls == expected, (name, counted.calls)


@case
def recomputing_costs_the_collectives_of_the_forward_pass_but_for_the_last_of_a_block() -> None:
    mesh = mesh_of("tp")
    model = parallelize(seeded(partial(transformer, qk_norm=True)), mesh, recompute=True)
    out = model(torch.randn(2, 8, 16, dtype=torch.float64, requires_grad=True))
    with Collectives(mesh) as backward:
        out.sum().backward()
    assert backward.calls[Collective("all-gather", "tp", 2 * 8 * 16)] == 2 * (2 + 2) + 1
    assert backward.calls[Collective("reduce-scatter", "tp", 2 * 8 * 16)] == 2 * (2 + 1)


@case
def mixed_precision_streams_bfloat16_and_returns_what_is_asked_for() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    build = partial(Transformer, 2, 16, 8, 32, max_seq_len=16, qk_norm=True)
    model, streams = parallelize(seeded(build), mesh_of("dp", "tp"), mp_policy=policy), []
    model.layers[1].ln1.register_forward_pre_hook(lambda ln1, args: streams.append(args[0].dtype))
    x = torch.randn(2, 5, 16)
    out = model(x)
    out.sum().backward()
    assert out.dtype == torch.float32
    assert streams == [torch.bfloat16]
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    torch.testing.assert_close(out, seeded(build)(x), rtol=0.1, atol=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, count: int, steps: range) -> list[float]:
    """Train on batches that are drawn by their step alone; return the losses of the whole batch."""
    losses = []
    for step in steps:
        x, target = torch.randn(2, 4, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
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


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def checkpoint_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state}


def resume(mesh: DeviceMesh | None, folder: Path) -> list[float]:
    """Load a checkpoint into a model with other weights, check each bit, and train on."""
    model = seeded(one_layer, seed=1)
    rank, count = data_rank(mesh) if mesh else (0, 1)
    if mesh:
        parallelize(model, mesh)
    optimizer = adamw(model)
    state = checkpoint_of(model, optimizer)
    distributed_checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    expected = torch.load(folder / "whole.pt")
    loaded = checkpoint_of(model, optimizer)
    tensors, treespec = torch.utils._pytree.tree_flatten(loaded)
    expected_tensors, expected_treespec = torch.utils._pytree.tree_flatten(expected)
    assert treespec == expected_treespec
    for tensor, expected_tensor in zip(tensors, expected_tensors, strict=True):
        assert not isinstance(expected_tensor, Tensor) or torch.equal(whole(tensor), expected_tensor)
    return train(model, optimizer, rank, count, range(2, 4))


@case
def checkpoints_of_tp_and_dp_load_anywhere_and_resume() -> None:
    folder, mesh = Path("checkpoint"), mesh_of("dp", "tp")
    model = parallelize(seeded(one_layer), mesh)
    optimizer = adamw(model)
    train(model, optimizer, *data_rank(mesh), range(2))
    state = checkpoint_of(model, optimizer)
    distributed_checkpoint.save(state, checkpoint_id=folder)
    wholes = torch.utils._pytree.tree_map(whole, state)
    if dist.get_rank() == 0:
        torch.save(wholes, folder / "whole.pt")
    dist.barrier()
    expected = train(model, optimizer, *data_rank(mesh), range(2, 4))
    for axis in ("dp", "tp"):
        pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rest", axis))[axis]
        torch.testing.assert_close(resume(pair, folder), expected, rtol=1e-7, atol=0)
    if dist.get_rank() == 0:
        torch.save(expected, folder / "losses.pt")


@case
def recipe_of_tensor_and_data_parallelism_trains_like_one_process() -> None:
    made = run("Tensor and data parallelism")
    model, optimizer = made["model"], made["optimizer"]
    torch.manual_seed(0)
    one = Transformer(2, d_model=64, num_heads=4, max_seq_len=128)
    expected_optimizer = torch.optim.AdamW(one.parameters(), fused=True)
    generators = [torch.Generator().manual_seed(seed) for seed in range(2)]
    for _ in range(2):
        x = torch.cat([torch.randn(4, 16, 64, generator=generator) for generator in generators])
        (one(x) - x).square().mean().backward()
        nn.utils.clip_grad_norm_(one.parameters(), 1.0)
        expected_optimizer.step()
        expected_optimizer.zero_grad()
    trained = {name: whole(tensor).clone() for name, tensor in model.state_dict().items()}
    for name, expected in one.state_dict().items():  # after steps of 1e-3
        torch.testing.assert_close(trained[name], expected, rtol=0, atol=1e-4, msg=f"{name} differs")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(model(x[:1]).sum()).backward()
    if dist.get_rank() == 3:
        model.layers[0].ffn.w2.weight.grad.to_local()[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1.0  # on every process
    for name, tensor in model.state_dict().items():
        assert torch.equal(whole(tensor), trained[name]), name


@case
def recipe_of_embedding_and_head_is_like_one_process_and_on_one_mesh() -> None:
    made = run("Embedding and head of a parallel model")
    model, mesh = made["model"], made["mesh"]
    torch.manual_seed(0)
    one = made["LanguageModel"](vocabulary=1000, d_model=64)
    one.head.weight = one.embedding.weight
    tokens, targets = torch.randint(0, 1000, (2, 2, 3, 9))  # two batches
    rank, _ = data_rank(mesh)
    model(tokens[rank], targets[rank]).backward()
    one(*(part.flatten(0, 1) for part in (tokens, targets))).backward()
    for (name, parameter), expected in zip(model.named_parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(whole(parameter.grad), expected.grad, msg=f"the gradient of {name} differs")
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters(), fused=True).step()
    assert torch.equal(whole(model.head.weight), whole(model.embedding.weight))


@case
def recipe_of_a_pipeline_has_the_losses_of_one_process() -> None:
    made = run("Pipeline parallelism")  # of four stages here
    torch.manual_seed(0)
    one = Transformer(4, d_model=64, num_heads=4, max_seq_len=128)
    optimizer = torch.optim.AdamW(one.parameters())
    torch.manual_seed(0)
    for _ in range(2):
        x = torch.randn(8, 16, 64)
        loss = (one(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(made["losses"]) == (4 if dist.get_rank() == 3 else 0)
    if made["losses"]:
        torch.testing.assert_close(torch.stack(made["losses"]).mean(), loss.detach(), rtol=1e-5, atol=0)
