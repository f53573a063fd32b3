"""Distribute a Transformer or a Block over processes: tensor, sequence and data parallelism, by DTensor and FSDP2.

Sources: Shoeybi et al., "Megatron-LM" (arXiv 1909.08053) for weights split by columns, then by rows;
Korthikanti et al., "Reducing Activation Recomputation" (arXiv 2205.05198) for norms and residual sums split by tokens;
Zhao et al., "PyTorch FSDP" (arXiv 2304.11277) for weights, gradients and optimizer states sharded over the data.
Convention: the mesh axis "tp" splits each layer, "dp" the batch and all weights, "dp_replicate" the batch alone.
The layers need no changes: their children are found by name, in tinyblock and in copies of its files.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

__all__ = ["parallelize"]

_Model = TypeVar("_Model", bound=nn.Module)
_MESHES = [
    ("tp",),
    ("dp",),
    ("dp", "tp"),
    ("dp_replicate", "dp"),
    ("dp_replicate", "dp", "tp"),
]
_COLUMNS = (
    "attn.q_proj",
    "attn.k_proj",
    "attn.v_proj",
    "ffn.w1",
    "ffn.w3",
)  # by heads, by d_ff
_ROWS = ("attn.output_proj", "ffn.w2")
_NORMS = ("ln1", "ln2")
_HEAD_NORMS = ("attn.q_norm", "attn.k_norm")


def parallelize(
    model: _Model,
    mesh: DeviceMesh,
    *,
    recompute: bool = False,
    compile: bool = False,
    **fsdp: Any,
) -> _Model:
    """Distribute a Transformer or a Block over the processes of `mesh`, in place, and return it.

    Each process calls the model with plain tensors and gets a plain tensor. Ranks along "tp" share one batch: they pass
    the same `x`, positions and mask. Ranks along "dp" and "dp_replicate" pass batches of their own; gradients are
    averaged over them. The order of axes is ("dp_replicate", "dp", "tp"); "dp_replicate" requires "dp". `recompute`
    saves only the input of each block for the backward pass. `compile` compiles each block once per shape, with and
    without gradients; all models share torch's limit of 8 graphs, `torch._dynamo.config.recompile_limit`. `fsdp` are
    options of torch's `fully_shard`, such as `mp_policy`: its `param_dtype` is also the dtype of the residual stream.

    Weights are those of the first rank along "tp". Use the same seed on every rank, or build on "meta" and afterwards
    call `to_empty(device=...)`, then `set_model_state_dict` with the options `full_state_dict=True` and
    `broadcast_from_rank0=True`. Do not call `reset_parameters` afterwards: on a CPU, all ranks draw the same numbers
    for their parts. Create the optimizer after this call. Add LoRA before it, over "dp" alone. Over "dp", do not run
    the first forward in `torch.inference_mode`. docs/recipes.md has LoRA, tied weights and float16.

    Torch 2.9 raises an error for `compile` with "tp" and for a length that "tp" does not divide; 2.13 supports both.

    Mistakes that cannot be detected (relative gradient error in parentheses): different `x` along "tp" (1.4); a loss
    over the tokens of one rank along "tp" (1.0); mean losses over batches of different sizes along "dp" (0.9);
    different seeds along "dp_replicate" (copies differ); an `attend` that mixes heads (0.4), or an ffn that mixes the
    outputs of w1, as softmax does (0.01); gains before matrices in the optimizer of a GradScaler (ranks skip different
    steps); dropout between w1 and w2 (each rank along "tp" drops the same units of its part).

    Raises:
        ValueError: the axes of the mesh are not supported; "tp" does not divide heads, key heads or d_ff; two modules
            share a parameter, or no rule splits it over "tp"; the model is already distributed; `fully_shard` has no
            such option, or "dp" is missing. The model is then unchanged.
    """
    blocks = list(getattr(model, "layers", [model]))
    _require_rules(model, blocks, mesh, fsdp)
    axes = mesh.mesh_dim_names or ()
    if "dp" in axes:
        from torch.distributed.fsdp import fully_shard

        shard = partial(
            fully_shard, mesh=mesh[tuple(axis for axis in axes if axis != "tp")], **fsdp
        )
        shard(nn.Identity())  # raises for a wrong option before the model is changed
    tp = (
        mesh["tp"] if "tp" in axes else None
    )  # once: compiled code requires the same object
    if tp is not None:
        for block in blocks:
            _split(block, tp)
        if isinstance(ln_final := getattr(model, "ln_final", None), nn.Module):
            _replicate(ln_final, tp)
        _accept_plain_tensors(model, tp)
    for (
        block
    ) in blocks:  # by partials of methods, which copy.deepcopy binds to the copy
        if compile:
            block.forward = partial(
                _with_shape, torch.compile(_at_shape, dynamic=False), block.forward
            )
        if (
            recompute
        ):  # around the compiled forward: inside of it, torch 2.13 fails on DTensors
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if "dp" in axes:
        for module in dict.fromkeys((*blocks, model)):
            shard(module)
    else:
        _sum_gradients_of_gains(model)
    if (
        tp is not None
    ):  # after FSDP's hook, which would warn that the plain tensor is a view
        model.register_forward_hook(lambda model, args, out: out.full_tensor())
    return model


def _require_rules(
    model: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh, fsdp: dict[str, Any]
) -> None:
    from torch.distributed.fsdp import (
        fully_shard,
    )  # not at the top: it takes a second, and not every torch has it
    from torch.distributed.tensor import DTensor

    axes, options = (
        getattr(mesh, "mesh_dim_names", None),
        inspect.signature(fully_shard).parameters,
    )
    if axes not in _MESHES or mesh.get_coordinate() is None:
        raise ValueError(
            f"mesh must contain this rank and have the axes {' or '.join(map(str, _MESHES))}, got {mesh}"
        )
    for name, value in fsdp.items():
        if (
            "dp" not in axes
            or name not in options
            or (name == "ignored_params" and "tp" in axes)
        ):
            raise ValueError(f"fully_shard has no option {name} over the axes {axes}")
        default = options[name].default
        if default is not None and not isinstance(value, type(default)):
            raise ValueError(f"{name} must be a {type(default).__name__}, got {value}")
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError("the model is already distributed: call parallelize once")
    known = {
        id(parameter)
        for parameter in getattr(model, "ln_final", nn.Identity()).parameters()
    }
    for block in blocks:
        if missing := [
            name for name in ("ln1", "attn", "ln2", "ffn") if not hasattr(block, name)
        ]:
            raise ValueError(
                f"{type(block).__name__} must have {', '.join(missing)}; pass the Transformer or a Block"
            )
        if "tp" in axes:
            known |= _parameters_with_rules(block, mesh["tp"].size())
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name and ("tp" in axes or "layers." in first + name):
            raise ValueError(
                f"{first} and {name} are the same parameter; give each module its own"
            )
        if "tp" in axes and id(parameter) not in known:
            raise ValueError(
                f"no rule splits {name} over the axis 'tp'; use 'dp' alone, or keep it out of the model"
            )


def _parameters_with_rules(block: Any, tp: int) -> set[int]:
    required = (
        "num_heads",
        "num_kv_heads",
        "q_proj",
        "k_proj",
        "v_proj",
        "output_proj",
    )
    if missing := [name for name in required if not hasattr(block.attn, name)]:
        raise ValueError(
            f"over 'tp', {type(block.attn).__name__} must have {', '.join(missing)}; use 'dp' alone"
        )
    known, sizes = (
        set(),
        {"num_heads": block.attn.num_heads, "num_kv_heads": block.attn.num_kv_heads},
    )
    for name, module in block.named_modules():
        if name in (*_NORMS, *_HEAD_NORMS):
            known |= {id(parameter) for parameter in module.parameters()}
        elif name in (*_COLUMNS, *_ROWS) and isinstance(module, nn.Linear):
            known |= {id(module.weight), id(module.bias)}
            sizes[name] = (
                module.out_features if name in _COLUMNS else module.in_features
            )
    for name, size in sizes.items():
        if size % tp:
            raise ValueError(
                f"{name}={size} must be a multiple of the {tp} processes of the axis 'tp'"
            )
        if name in ("ffn.w1", "ffn.w3") and size != sizes.get("ffn.w2"):
            raise ValueError(
                f"{name} must have the {sizes.get('ffn.w2')} outputs that ffn.w2 takes, got {size}"
            )
    return known


def _split(block: nn.Module, tp: DeviceMesh) -> None:
    """Split the weights of a block by columns, then by rows, and the tokens between its sub-layers."""
    from torch.distributed.tensor import Replicate, Shard, parallel

    seq, whole = Shard(-2), Replicate()
    plan = {
        "attn": parallel.PrepareModuleInput(
            input_layouts=(seq, None, None), desired_input_layouts=(whole, None, None)
        ),
        "ffn": parallel.PrepareModuleInput(
            input_layouts=seq, desired_input_layouts=whole
        ),
        **{name: parallel.ColwiseParallel() for name in _COLUMNS},
        # DTensors, not their local parts: shape checks then see the whole shape
        **{
            name: parallel.RowwiseParallel(output_layouts=seq, use_local_output=False)
            for name in _ROWS
        },
    }
    modules = dict(block.named_modules())
    parallel.parallelize_module(
        block, tp, {name: style for name, style in plan.items() if name in modules}
    )
    for name in (*_NORMS, *_HEAD_NORMS):
        if name in modules and list(
            modules[name].parameters()
        ):  # a norm without gains may be shared
            _replicate(modules[name], tp, of_local_heads=name in _HEAD_NORMS)


def _replicate(norm: nn.Module, tp: DeviceMesh, of_local_heads: bool = False) -> None:
    """Store all gains on each process, as DTensors: their gradients are then summed over the processes."""
    from torch.distributed.tensor import DTensor, Shard, distribute_module

    distribute_module(norm, tp)
    if of_local_heads:  # inputs and outputs are plain; plain gains would get gradients from local heads alone
        norm.register_forward_pre_hook(
            lambda norm, args: DTensor.from_local(args[0], tp, [Shard(-3)])
        )
        norm.register_forward_hook(lambda norm, args, out: out.to_local())


def _sum_gradients_of_gains(model: nn.Module) -> None:
    """Sum these gradients in the backward pass, as FSDP does: torch 2.9 clips partial sums by a wrong norm."""
    from torch.distributed.tensor import DTensor, Replicate

    def whole(grad: Any) -> Any:
        return grad.redistribute(placements=[Replicate()])

    def add_hooks(
        model: nn.Module, args: Any
    ) -> None:  # before each call, as copies and `.to` lose hooks
        for gains in model.parameters():
            replicated = (
                isinstance(gains, DTensor) and gains.placements[0].is_replicate()
            )
            if (
                replicated
                and gains.requires_grad
                and whole not in (gains._backward_hooks or {}).values()
            ):
                gains.register_hook(whole)

    model.register_forward_pre_hook(add_hooks)


def _with_shape(
    compiled: Callable[..., Tensor], forward: Any, x: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Compile for each shape: torch 2.13 compares the local shapes alone, and would run 8 tokens as 7."""
    return compiled(forward, x.shape, x, *args, **kwargs)


def _at_shape(
    forward: Callable[..., Tensor],
    shape: torch.Size,
    x: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    return forward(x.view(shape), *args, **kwargs)


def _accept_plain_tensors(model: nn.Module, tp: DeviceMesh) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def split_tokens(model: nn.Module, args: Any, kwargs: Any) -> Any:
        x, *rest = args or (kwargs.pop("x", None),)
        if (
            not isinstance(x, Tensor) or x.ndim < 2 or not x.numel()
        ):  # torch 2.13 hangs on an empty DTensor
            raise ValueError(
                f"x must be a tensor (..., seq, d_model), not empty, got {getattr(x, 'shape', x)}"
            )
        whole = DTensor.from_local(x, tp, [Replicate()])
        return (whole.redistribute(placements=[Shard(-2)]), *rest), kwargs

    model.register_forward_pre_hook(split_tokens, with_kwargs=True)
