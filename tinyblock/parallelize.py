"""Distribute a Transformer or a Block over processes, with DTensor and FSDP2.

The methods are tensor, sequence and data parallelism.

Sources: Shoeybi et al., "Megatron-LM" (arXiv 1909.08053) for weights split by columns,
then by rows; Korthikanti et al., "Reducing Activation Recomputation" (arXiv 2205.05198)
for norms and residual sums split by tokens; Zhao et al., "PyTorch FSDP" (arXiv
2304.11277) for weights, gradients and optimizer states sharded over the data.
Convention for the axes of the mesh: "tp" splits each layer; "dp" splits the batch and
shards all weights; "dp_replicate" splits only the batch. The layers need no changes:
their children are found by name, in tinyblock and in copies of its files.
"""

import re
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

# torch.distributed.tensor and .fsdp are imported where they are used, because their
# import takes a second, and not every torch has them.

__all__ = ["parallelize"]

_Model = TypeVar("_Model", bound=nn.Module)
_MESHES = [
    ("tp",),
    ("dp",),
    ("dp", "tp"),
    ("dp_replicate", "dp"),
    ("dp_replicate", "dp", "tp"),
]
_NORMS = ("ln1", "ln2", "ln_final", "attn.q_norm", "attn.k_norm")


def parallelize(
    model: _Model,
    mesh: DeviceMesh,
    *,
    recompute: bool = False,
    compile: bool = False,
    **fsdp: Any,
) -> _Model:
    """Distribute a Transformer or a Block over a mesh, in place, and return it.

    The mesh has the axes ("dp_replicate", "dp", "tp") in this order, or some of them;
    "dp_replicate" requires "dp", and "tp" requires torch 2.13. Each process calls the
    model with plain tensors and gets a plain tensor. Ranks along "tp" share one batch, so
    they pass the same `x`, positions and mask; the first call compares them. Ranks along
    "dp" and "dp_replicate" pass different batches. Gradients are averaged over all ranks.

    - `recompute` keeps only the input of each block for the backward pass.
    - `compile` compiles the blocks, once for each of at most 8 shapes (torch's
      recompile_limit). Over "tp", lengths must then be multiples of its number of
      processes.
    - `fsdp` are options of torch's `fully_shard`, such as `mp_policy`.

    All ranks get the weights of the first one. Build a large model on "meta" instead, call
    `to_empty(device=...)` afterwards, and load the weights with `set_model_state_dict` and
    the options `full_state_dict=True` and `broadcast_from_rank0=True`. Create the optimizer
    after this call. If you use LoRA, add it before, and use a mesh without "tp". Do not
    initialize layers again afterwards, because on a CPU, ranks would draw the same numbers
    for their parts.

    Raises:
        ValueError: the axes of the mesh are not supported; modules share a parameter;
            with `compile`, `forward` is set on a block instead of its class; over "tp",
            torch is older than 2.13, the number of processes does not divide heads or
            d_ff, no rule splits a parameter, or the model has an nn.Dropout. The model
            is then unchanged. In calls over "tp": x has fewer than two axes or is empty;
            with `compile`, the number of processes does not divide seq; in the first
            call, ranks along "tp" pass different tensors.
    """
    axes = _require_axes(mesh)
    blocks: Any = list(getattr(model, "layers", [model]))
    shard = _shard_function(mesh, fsdp)
    if "tp" in axes:
        _require_splittable(model, blocks, mesh["tp"])
    else:
        _require_own_parameters(model, part="layers.")
    if compile:
        _require_forward_of_class(blocks)

    _send_weights(model, mesh)
    if "tp" in axes:
        _split(model, blocks, mesh["tp"], even=compile)
    for block in blocks:
        if compile:
            compiled = torch.compile(type(block).forward, dynamic=False)
            # A method, because a copied block must use the weights of the copy.
            block.forward = MethodType(compiled, block)
        if recompute:
            # Around the compiled forward, because torch 2.13 does not compile a checkpoint.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if shard is not None:
        for module in dict.fromkeys((*blocks, model)):  # a Block is both
            shard(module)
    if "tp" in axes:  # after FSDP's hooks, which would warn of a view
        model.register_forward_hook(_gather_output)
    return model


def _require_axes(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of the mesh's axes, or raise a ValueError."""
    axes = mesh.mesh_dim_names
    if axes not in _MESHES:
        supported = " or ".join(map(str, _MESHES))
        raise ValueError(f"mesh must have the axes {supported}, got {axes}")
    # Each process has a part of the gradient of a norm weight. Clipping and AdamW of older
    # releases take this part for the sum. NVIDIA's builds of torch 2.13 are alphas.
    if "tp" in axes and torch.__version__ < "2.13.0a0":
        raise ValueError(
            f"torch must be 2.13 or newer for the axis 'tp', got {torch.__version__}: "
            "install a newer torch, or use only 'dp'"
        )
    return axes


def _shard_function(
    mesh: DeviceMesh, options: dict[str, Any]
) -> Callable[[nn.Module], Any] | None:
    """Return `fully_shard` over the axes of the data, or None if there are none."""
    axes = mesh.mesh_dim_names or ()
    if "dp" not in axes:
        if options:
            raise ValueError(f"mesh must have the axis 'dp' for {', '.join(options)}")
        return None
    from torch.distributed.fsdp import fully_shard

    data_axes = tuple(axis for axis in axes if axis != "tp")
    shard = partial(fully_shard, mesh=mesh[data_axes], **options)
    shard(nn.Identity())  # a wrong option raises before the model is changed
    return shard


def _send_weights(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give all processes the weights and buffers of the first one, except on "meta"."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            # NCCL sends only from GPUs.
            sent = tensor.detach().to(mesh.device_type).contiguous()
            for axis in range(mesh.ndim):
                dist.broadcast(sent, group=mesh.get_group(axis), group_src=0)
            tensor.detach().copy_(sent)


def _plan() -> dict[str, Any]:
    """Return how each module of a block is split over "tp", by its name."""
    from torch.distributed.tensor import Replicate, Shard, parallel

    # Norms and sums work on some of the tokens; attention and ffn gather all of them.
    by_tokens = Shard(-2)
    by_heads = Shard(-3)
    # The projections return heads of this process, because attention treats each alone.
    to_heads = parallel.ColwiseParallel()
    # The others return DTensors, so that an activation may read all of d_ff, as softmax
    # does, and shape checks see the whole shape.
    column = parallel.ColwiseParallel(use_local_output=False)
    row = parallel.RowwiseParallel(output_layouts=by_tokens, use_local_output=False)
    norm_of_heads = parallel.PrepareModuleInputOutput(
        input_layouts=by_heads,
        desired_input_layouts=by_heads,
        output_layouts=by_heads,
        desired_output_layouts=by_heads,
    )
    return {
        "attn": parallel.PrepareModuleInput(
            input_layouts=(by_tokens, None, None),  # x, token_positions, mask
            desired_input_layouts=(Replicate(), None, None),
        ),
        "attn.q_proj": to_heads,
        "attn.k_proj": to_heads,
        "attn.v_proj": to_heads,
        "attn.q_norm": norm_of_heads,
        "attn.k_norm": norm_of_heads,
        "attn.output_proj": row,
        "ffn": parallel.PrepareModuleInput(
            input_layouts=by_tokens, desired_input_layouts=Replicate()
        ),
        "ffn.w1": column,
        "ffn.w3": column,
        "ffn.w2": row,
    }


def _split(
    model: nn.Module, blocks: list[nn.Module], tp: DeviceMesh, even: bool
) -> None:
    """Split weights by the plan, make norm weights DTensors, and split the tokens of x."""
    from torch.distributed.tensor import (
        DTensor,
        Replicate,
        Shard,
        distribute_module,
        parallel,
    )

    plan = _plan()
    for block in blocks:
        found = {
            name: plan[name]
            for name, module in block.named_modules()
            if name in plan and list(module.parameters())  # an nn.Identity has none
        }
        parallel.parallelize_module(block, tp, found)
    for name, module in model.named_modules():
        if _in_block(name) in _NORMS:
            distribute_module(module, tp)

    is_first_call = True

    def split_tokens(_model: nn.Module, args: Any, kwargs: Any) -> Any:
        nonlocal is_first_call
        everything = (*args, *kwargs.values())
        tensors = [value for value in everything if isinstance(value, Tensor)]
        x, *others = args or (kwargs.pop("x"),)
        if x.ndim < 2 or x.numel() == 0:  # torch 2.13 would hang on an empty x
            raise ValueError(
                f"x must be (..., seq, d_model) and not empty, got {tuple(x.shape)}"
            )
        if even and x.shape[-2] % tp.size():
            raise ValueError(
                f"x must have a multiple of {tp.size()} tokens, got {tuple(x.shape)}"
            )
        if is_first_call and not torch.compiler.is_compiling():
            _require_one_batch(tensors, tp)
            is_first_call = False
        whole = DTensor.from_local(x, tp, [Replicate()])
        return (whole.redistribute(placements=[Shard(-2)]), *others), kwargs

    model.register_forward_pre_hook(split_tokens, with_kwargs=True)


def _require_one_batch(tensors: list[Tensor], tp: DeviceMesh) -> None:
    """Raise a ValueError if the processes along "tp" pass different tensors."""
    group = tp.get_group()
    must = "processes along 'tp' must pass the same x, token_positions and mask, got"
    repair = "choose batches by the rank along 'dp', not by the global rank"
    own_shapes = [tuple(tensor.shape) for tensor in tensors]
    shapes: list[Any] = [None] * tp.size()
    dist.all_gather_object(shapes, own_shapes, group)
    if any(other != own_shapes for other in shapes):
        raise ValueError(f"{must} the shapes {shapes}: {repair}")
    for tensor in tensors:
        numbers = tensor.byte() if tensor.dtype == torch.bool else tensor.detach()
        largest = numbers.clone(memory_format=torch.contiguous_format)
        smallest = largest.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        dist.all_reduce(smallest, dist.ReduceOp.MIN, group)
        difference = (largest - smallest).max()
        # Processes may round differently when they compute x.
        allowed = 0.01 * largest.abs().max() if tensor.is_floating_point() else 0
        if difference > allowed:
            raise ValueError(
                f"{must} differences of up to {difference:.3g} in a tensor of shape "
                f"{tuple(tensor.shape)}: {repair}"
            )


def _gather_output(_model: nn.Module, _args: Any, out: Any) -> Tensor:
    """Return the whole output; the gradients that processes have for it are averaged."""
    from torch.distributed.tensor import Partial

    return out.full_tensor(grad_placements=[Partial("avg")])


def _in_block(name: str) -> str:
    """Return the name that a module or parameter has in its block."""
    return re.sub(r"^layers\.\d+\.", "", name)


def _require_own_parameters(model: nn.Module, part: str = "") -> None:
    """Raise a ValueError if modules share a parameter, one with `part` in its name."""
    names: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(parameter, name)
        if first != name and part in first + name:
            raise ValueError(
                f"{first} and {name} are the same parameter: give each module its own"
            )


def _require_forward_of_class(blocks: list[nn.Module]) -> None:
    for block in blocks:
        if "forward" in vars(block):
            raise ValueError(
                "compile=True requires blocks whose forward is a method of their class, "
                f"got {block.forward} set on a block: override forward in a subclass"
            )


def _require_splittable(
    model: nn.Module, blocks: list[nn.Module], tp: DeviceMesh
) -> None:
    """Raise a ValueError unless each block can be split over "tp"."""
    _require_own_parameters(model)
    _require_rules(model, {*_plan(), *_NORMS} - {"attn", "ffn"})
    for block in blocks:
        _require_equal_shares(block, tp.size())
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise ValueError(
                f"{name} must have p=0 over 'tp', got {module.p}, because each process "
                "would drop the same units of its share: use a mesh without 'tp'"
            )


def _require_rules(model: nn.Module, rules: set[str]) -> None:
    for name, _ in model.named_parameters():
        owner, _, kind = _in_block(name).rpartition(".")
        if owner not in rules or kind not in ("weight", "bias"):
            raise ValueError(
                f"each parameter must have a rule for 'tp', got {name}: use a mesh without 'tp'"
            )


def _require_equal_shares(block: Any, processes: int) -> None:
    """Raise a ValueError unless processes get equal shares of the heads and of d_ff."""
    d_ff = block.ffn.w2.in_features
    for name in ("w1", "w3"):
        linear = getattr(block.ffn, name, None)
        if linear is not None and linear.out_features != d_ff:
            raise ValueError(
                f"ffn.{name} must have as many outputs as ffn.w2 has inputs, {d_ff}, "
                f"got {linear.out_features}: use only 'dp'"
            )
    sizes = {
        "num_heads": block.attn.num_heads,
        "num_kv_heads": block.attn.num_kv_heads,
        "d_ff": d_ff,
    }
    for name, size in sizes.items():
        if size % processes:
            raise ValueError(
                f"{name} must be a multiple of the {processes} processes of the axis "
                f"'tp', got {size}"
            )
