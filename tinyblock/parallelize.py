"""Spread a Transformer or a Block over many processes: tensor, sequence and data parallel, by DTensor and FSDP2.

Sources: Shoeybi et al., "Megatron-LM" (arXiv 1909.08053) for weights that are split by columns, then by rows;
Korthikanti et al., "Reducing Activation Recomputation" (arXiv 2205.05198) for norms and sums that are split by tokens;
Zhao et al., "PyTorch FSDP" (arXiv 2304.11277) for weights, gradients and optimizer states that are split over the data.
Convention: of a mesh's axes "tp" splits each layer, "dp" the batch and what is stored, "dp_replicate" the batch alone.
Modules are known by the names of their children: those of tinyblock, or copies of them.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

# torch.distributed.tensor takes a second to import, and not every build of torch has it: so functions import it.

__all__ = ["parallelize"]

_Model = TypeVar("_Model", bound=nn.Module)
_MESHES = [("tp",), ("dp",), ("dp", "tp"), ("dp_replicate", "dp"), ("dp_replicate", "dp", "tp")]
_COLUMNS = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "ffn.w1", "ffn.w3")  # by heads, by d_ff
_ROWS = ("attn.output_proj", "ffn.w2")
_NORMS = ("ln1", "ln2")
_HEAD_NORMS = ("attn.q_norm", "attn.k_norm")


def parallelize(
    model: _Model, mesh: DeviceMesh, *, recompute: bool = False, compile: bool = False, **fsdp: Any
) -> _Model:
    """Spread a Transformer or a Block over the processes of `mesh`, in place, and return it.

    Each process then calls the model with plain tensors, and gets one. Processes along "tp" share one batch: `x`, the
    positions and the mask are whole and the same there. Processes along "dp" and "dp_replicate" have batches of their
    own, and gradients are averaged over them. The order of axes is ("dp_replicate", "dp", "tp"), any of them left out,
    though none replicates alone. `recompute` keeps only the input of each block for the backward pass. `compile`
    compiles each block. `fsdp` goes to torch's `fully_shard` for each block and for the model: `mp_policy`, say. With
    parameters in bfloat16 the stream between blocks is, too; `output_dtype` may give the result in float32.

    Weights are those that the model has on the first rank along "tp". Use the same seed on every rank, or build on
    "meta" and after this call `to_empty(device=...)`, then load all with `set_model_state_dict` and the options
    `full_state_dict=True, broadcast_from_rank0=True`. `reset_parameters` after this call draws wrong weights: on a CPU
    each process draws the same numbers for its part. Make the optimizer after this call.

    Torch 2.9 raises an error for `compile` with "tp", and for a length that "tp" does not divide; 2.13 does both.

    Mistakes that nothing here can see, and how far off they put gradients, in units of their size: another `x` on each
    rank along "tp" (1.4); a loss over the tokens of one rank along "tp" instead of all (1.0); the mean over a batch
    that is not as large as the others along "dp" (0.9); another seed on each rank along "dp_replicate" (copies differ).

    Raises:
        ValueError: other axes; heads, key heads or d_ff that "tp" does not divide; a parameter for which there is no
            rule, as in a layer of your own; a model that is spread already; options that `fully_shard` does not have,
            or without "dp". The model is as before then.
    """
    axes = mesh.mesh_dim_names or ()
    blocks = list(getattr(model, "layers", [model]))
    _require_rules(model, blocks, mesh, fsdp)
    tp = mesh["tp"] if "tp" in axes else None  # once: compiled code looks at whether two meshes are the same object
    if tp is not None:
        for block in blocks:
            _split(block, tp)
        if isinstance(ln_final := getattr(model, "ln_final", None), nn.Module):
            _replicate(ln_final, tp)
    for block in blocks:
        if compile:
            block.forward = _compiled(block.forward)
        if recompute:  # around what is compiled: inside of it, torch 2.13 fails on DTensors
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if tp is not None:
        _take_plain_tensors(model, tp)
    if "dp" in axes:
        from torch.distributed.fsdp import fully_shard

        for module in dict.fromkeys((*blocks, model)):
            fully_shard(module, mesh=mesh[tuple(axis for axis in axes if axis != "tp")], **fsdp)
    else:
        _sum_gradients_of_gains(model)
    if tp is not None:  # after FSDP's hook, which would warn that the plain tensor is a view
        model.register_forward_hook(lambda model, args, out: out.full_tensor())
    return model


def _require_rules(model: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh, fsdp: dict[str, Any]) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    axes = mesh.mesh_dim_names or ()
    if axes not in _MESHES:
        raise ValueError(f"a mesh must have one of the axes {', '.join(map(str, _MESHES))}, got {axes}")
    if unknown := fsdp.keys() - (inspect.signature(fully_shard).parameters.keys() - {"module"}):
        raise ValueError(f"fully_shard has no option {', '.join(sorted(unknown))}")
    if fsdp and "dp" not in axes:
        raise ValueError(f"{', '.join(sorted(fsdp))}: an option of fully_shard, but the mesh has no axis 'dp'")
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError("the model is spread over processes already")
    for block in blocks:
        if not {"ln1", "attn", "ln2", "ffn"} <= dict(block.named_children()).keys():
            raise ValueError(f"{type(block).__name__} is no Block: it has not the children ln1, attn, ln2 and ffn")
    if "tp" not in axes:
        return
    tp = mesh["tp"].size()
    known = {id(parameter) for parameter in getattr(model, "ln_final", nn.Identity()).parameters()}
    for block in blocks:
        modules = dict(block.named_modules())
        for name in (*_NORMS, *_HEAD_NORMS):
            known |= {id(parameter) for parameter in modules.get(name, nn.Identity()).parameters()}
        sizes = {"num_heads": modules["attn"].num_heads, "num_kv_heads": modules["attn"].num_kv_heads}
        for name in (*_COLUMNS, *_ROWS):
            if isinstance(linear := modules.get(name), nn.Linear):
                known |= {id(linear.weight), id(linear.bias)}
                sizes[name] = linear.out_features if name in _COLUMNS else linear.in_features
        for name, size in sizes.items():
            if size % tp:
                raise ValueError(f"{name}={size} is not a multiple of the {tp} processes of the axis 'tp'")
    for name, parameter in model.named_parameters():
        if id(parameter) not in known:
            raise ValueError(f"there is no rule that splits the parameter {name} over the axis 'tp'")


def _split(block: nn.Module, tp: DeviceMesh) -> None:
    """Split the weights of a block by columns, then by rows; between sub-layers, the tokens."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    tokens, whole = Shard(-2), Replicate()
    plan = {
        "attn": PrepareModuleInput(input_layouts=(tokens, None, None), desired_input_layouts=(whole, None, None)),
        "ffn": PrepareModuleInput(input_layouts=tokens, desired_input_layouts=whole),
        **{name: ColwiseParallel() for name in _COLUMNS},
        # Not the local part: so shape checks see the whole shape.
        **{name: RowwiseParallel(output_layouts=tokens, use_local_output=False) for name in _ROWS},
    }
    modules = dict(block.named_modules())
    parallelize_module(block, tp, {name: style for name, style in plan.items() if name in modules})
    for name in _NORMS:
        _replicate(modules[name], tp)
    for name in _HEAD_NORMS:
        if name in modules:
            _replicate(modules[name], tp, of_local_heads=True)


def _replicate(norm: nn.Module, tp: DeviceMesh, of_local_heads: bool = False) -> None:
    """Give each process all gains, as a DTensor: so their gradients are summed over the processes."""
    from torch.distributed.tensor import DTensor, Shard, distribute_module

    distribute_module(norm, tp)
    if of_local_heads:  # which come and go as plain tensors; left so, the gains would learn from these heads only
        norm.register_forward_pre_hook(lambda norm, args: DTensor.from_local(args[0], tp, [Shard(-3)]))
        norm.register_forward_hook(lambda norm, args, out: out.to_local())


def _sum_gradients_of_gains(model: nn.Module) -> None:
    """Sum them in the backward pass, as FSDP does: of sums that are left open, torch 2.9 clips a wrong norm."""
    from torch.distributed.tensor import DTensor, Replicate

    def at_first_call(model: nn.Module, args: Any) -> None:  # not before: `to_empty` makes new parameters
        for gains in model.parameters():
            if gains.requires_grad and isinstance(gains, DTensor) and gains.placements[0].is_replicate():
                gains.register_hook(lambda grad: grad.redistribute(placements=[Replicate()]))
        handle.remove()

    handle = model.register_forward_pre_hook(at_first_call)


def _compiled(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile for each shape anew. By itself torch 2.13 looks at the local part alone, and takes 8 tokens for 7."""

    def forward_of_shape(shape: torch.Size, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return forward(x.view(shape), *args, **kwargs)

    compiled = torch.compile(forward_of_shape, dynamic=False)
    return lambda x, *args, **kwargs: compiled(x.shape, x, *args, **kwargs)


def _take_plain_tensors(model: nn.Module, tp: DeviceMesh) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    forward = model.forward

    def forward_of_plain(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        whole = DTensor.from_local(x, tp, [Replicate()])
        return forward(whole.redistribute(placements=[Shard(-2)]), *args, **kwargs)

    model.forward = forward_of_plain
