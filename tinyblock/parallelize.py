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

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

# torch.distributed.tensor and .fsdp are imported where they are used: they take a
# second, and not every torch has them.

__all__ = ["parallelize"]

_Model = TypeVar("_Model", bound=nn.Module)
_MESHES = [
    ("tp",),
    ("dp",),
    ("dp", "tp"),
    ("dp_replicate", "dp"),
    ("dp_replicate", "dp", "tp"),
]
# Linear layers whose outputs are split over "tp", by heads or by d_ff.
_COLUMNS = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "ffn.w1", "ffn.w3")
# Linear layers whose inputs are split.
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
    """Distribute a Transformer or a Block over a mesh, in place, and return it.

    The mesh has the axes ("dp_replicate", "dp", "tp") in this order, or some of them;
    "dp_replicate" requires "dp". Each process calls the model with plain tensors and
    gets a plain tensor. Ranks along "tp" share one batch: they pass the same `x`,
    positions and mask. Ranks along "dp" and "dp_replicate" pass different batches, and
    gradients are averaged over them.

    - `recompute` keeps only the input of each block for the backward pass.
    - `compile` compiles each block once per shape, with and without gradients. All
      models in a process share torch's limit of 8 graphs,
      `torch._dynamo.config.recompile_limit`.
    - `fsdp` are options of torch's `fully_shard`, such as `mp_policy`. The
      `param_dtype` of `mp_policy` is also the dtype of the residual stream.

    The weights of the first rank along "tp" become those of the model. Either use the
    same seed on every rank, or build the model on "meta", call `to_empty(device=...)`
    afterwards, and load the weights by `set_model_state_dict` with the options
    `full_state_dict=True` and `broadcast_from_rank0=True`.

    - Create the optimizer after this call.
    - Add LoRA before this call, and use only "dp".
    - Do not call `reset_parameters` after this call: on a CPU, all ranks draw the same
      numbers for their parts.
    - Over "dp", do not run the first forward pass in `torch.inference_mode`.

    Complete programs are examples/parallel.py, parallel_lora.py and pipeline.py in
    tinyblock's repository.

    Torch 2.9 raises an error for `compile` with "tp", and for a length that "tp" does
    not divide; 2.13 supports both.

    These mistakes cannot be detected. The relative error of the gradients is in
    parentheses where it was measured:

    - ranks along "tp" pass different `x` (1.4), or each computes the loss over some of
      the tokens (1.0)
    - ranks along "dp" average their losses over batches of different sizes (0.9)
    - ranks along "dp_replicate" use different seeds, so that the copies differ
    - over "tp", `attend` mixes heads (0.4), or an ffn mixes the outputs of w1, as
      softmax does (0.01)
    - over "tp", dropout between w1 and w2 drops the same units of each rank's part
    - with a GradScaler, an optimizer lists gains before matrices, so that only some
      ranks skip a step

    Raises:
        ValueError: the axes of the mesh are not supported; "tp" does not divide heads,
            key heads or d_ff; two modules share a parameter, or no rule splits it over
            "tp"; the model is already distributed; `fully_shard` has no such option, or
            the mesh has no axis "dp" for it. The model is then unchanged.
    """
    blocks = list(getattr(model, "layers", [model]))
    _require_mesh(mesh)
    axes = mesh.mesh_dim_names or ()
    _require_options(fsdp, axes)
    _require_model(model, blocks, mesh)
    if "dp" in axes:  # now: a wrong option raises before the model is changed
        shard = _shard_function(mesh, fsdp)
    # One object for all blocks: another one would compile them again.
    tp = mesh["tp"] if "tp" in axes else None
    if tp is not None:
        _split_model(model, blocks, tp)
    for block in blocks:
        if compile:
            _compile_forward(block)
        if recompute:
            # Around the compiled forward: inside of it, torch 2.13 fails on DTensors.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if "dp" in axes:
        for module in dict.fromkeys((*blocks, model)):  # a Block is both
            shard(module)
    else:
        _sum_gradients_of_gains(model)  # over "dp", FSDP does so
    if tp is not None:
        # After FSDP's hook, which would warn that the plain tensor is a view.
        model.register_forward_hook(_gather_output)
    return model


def _require_mesh(mesh: DeviceMesh) -> None:
    axes = getattr(mesh, "mesh_dim_names", None)
    if axes not in _MESHES or mesh.get_coordinate() is None:
        supported = " or ".join(map(str, _MESHES))
        raise ValueError(
            f"mesh must contain this rank and have the axes {supported}, got {mesh}"
        )


def _require_options(fsdp: dict[str, Any], axes: tuple[str, ...]) -> None:
    """Raise a ValueError unless `fully_shard` has these options, of these types."""
    from torch.distributed.fsdp import fully_shard

    options = dict(inspect.signature(fully_shard).parameters)
    for given_here in ("module", "mesh"):
        options.pop(given_here)
    for name, value in fsdp.items():
        if "dp" not in axes:
            raise ValueError(
                f"mesh must have the axis 'dp' for {name}, an option of fully_shard, "
                f"got the axes {axes}: leave {name} out"
            )
        if name not in options:
            raise ValueError(
                f"an option must be one of {', '.join(options)}, the options of "
                f"fully_shard, got {name}"
            )
        if name == "ignored_params" and "tp" in axes:
            raise ValueError(
                "ignored_params must be left out over the axis 'tp', "
                f"got the axes {axes}"
            )
        default = options[name].default
        if default is not None and not isinstance(value, type(default)):
            raise ValueError(f"{name} must be a {type(default).__name__}, got {value}")


def _require_model(model: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh) -> None:
    """Raise a ValueError unless the rules here distribute each parameter of the model."""
    from torch.distributed.tensor import DTensor

    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError("the model is already distributed: call parallelize once")
    for block in blocks:
        _require_attributes(
            block,
            ("ln1", "attn", "ln2", "ffn"),
            subject=f"{type(block).__name__} must have",
            advice="pass the Transformer or a Block",
        )
    if "tp" not in (mesh.mesh_dim_names or ()):
        _require_own_parameters(model, name_part="layers.")
        return
    for block in blocks:
        _require_divisible_sizes(block, mesh["tp"].size())
    _require_own_parameters(model)
    _require_rules(model, blocks)


def _require_attributes(
    owner: Any, required: tuple[str, ...], *, subject: str, advice: str
) -> None:
    missing = [name for name in required if not hasattr(owner, name)]
    if missing:
        raise ValueError(f"{subject} {', '.join(missing)}; {advice}")


def _require_own_parameters(model: nn.Module, name_part: str = "") -> None:
    """Raise a ValueError if modules share a parameter one of whose names has `name_part`.

    Every name has the empty text in it.
    """
    first_names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(id(parameter), name)
        is_shared = first != name
        if is_shared and (name_part in first or name_part in name):
            raise ValueError(
                f"{first} and {name} are the same parameter; give each module its own"
            )


def _require_divisible_sizes(block: Any, processes: int) -> None:
    """Raise a ValueError unless processes get equal shares of the heads and of d_ff."""
    _require_attributes(
        block.attn,
        ("num_heads", "num_kv_heads", "q_proj", "k_proj", "v_proj", "output_proj"),
        subject=f"over 'tp', {type(block.attn).__name__} must have",
        advice="use only 'dp'",
    )
    linears = _linear_layers(block)
    split_sizes = {
        "num_heads": block.attn.num_heads,
        "num_kv_heads": block.attn.num_kv_heads,
    }
    for name, linear in linears.items():
        # By columns, the outputs are split; by rows, the inputs.
        is_column = name in _COLUMNS
        split_sizes[name] = linear.out_features if is_column else linear.in_features
    for name, size in split_sizes.items():
        if size % processes:
            raise ValueError(
                f"{name}={size} must be a multiple of the {processes} processes "
                "of the axis 'tp'"
            )
    _require_equal_width(linears)


def _require_equal_width(linears: dict[str, nn.Linear]) -> None:
    """Raise a ValueError unless the outputs of ffn.w1 and ffn.w3 fit ffn.w2.

    Each process must have the inputs of ffn.w2 for the outputs that it computes.
    """
    down = linears.get("ffn.w2")
    for name in ("ffn.w1", "ffn.w3"):
        if name not in linears:
            continue
        if down is None:
            raise ValueError(
                f"over 'tp', a block with {name} must have the linear layer ffn.w2; "
                "use only 'dp'"
            )
        outputs = linears[name].out_features
        if outputs != down.in_features:
            raise ValueError(
                f"{name} must have as many outputs as ffn.w2 has inputs, "
                f"{down.in_features}, got {outputs}"
            )


def _linear_layers(block: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers of a block that are split over "tp", by name."""
    found = {}
    for name, module in block.named_modules():
        if name in (*_COLUMNS, *_ROWS) and isinstance(module, nn.Linear):
            found[name] = module
    return found


def _norms(block: nn.Module) -> dict[str, nn.Module]:
    """Return the norms of a block that have gains, by name. Others may be shared."""
    found = {}
    for name, module in block.named_modules():
        if name in (*_NORMS, *_HEAD_NORMS) and list(module.parameters()):
            found[name] = module
    return found


def _require_rules(model: nn.Module, blocks: list[nn.Module]) -> None:
    """Raise a ValueError for a parameter of neither a norm nor a linear layer to split."""
    known: set[Any] = set()
    for block in blocks:
        for norm in _norms(block).values():
            known.update(norm.parameters())
        for linear in _linear_layers(block).values():
            # Only these two: a subclass may have more, such as those of LoRA.
            known.update((linear.weight, linear.bias))
    final_norm = getattr(model, "ln_final", None)
    if isinstance(final_norm, nn.Module):
        known.update(final_norm.parameters())
    for name, parameter in model.named_parameters():
        if parameter not in known:
            raise ValueError(
                f"no rule splits {name} over the axis 'tp'; "
                "use only 'dp', or keep it out of the model"
            )


def _shard_function(mesh: DeviceMesh, fsdp: dict[str, Any]) -> Callable[..., Any]:
    """Return `fully_shard` over the axes of the data; raise a ValueError for its options."""
    from torch.distributed.fsdp import fully_shard

    axes = mesh.mesh_dim_names or ()
    data_axes = tuple(axis for axis in axes if axis != "tp")
    shard = partial(fully_shard, mesh=mesh[data_axes], **fsdp)
    shard(nn.Identity())  # a trial, before the model is changed
    return shard


def _split_model(model: nn.Module, blocks: list[nn.Module], tp: DeviceMesh) -> None:
    """Split blocks and final norm over `tp`, and the tokens of the input."""
    for block in blocks:
        _split_block(block, tp)
    final_norm = getattr(model, "ln_final", None)
    if isinstance(final_norm, nn.Module):
        _replicate(final_norm, tp)
    _split_input(model, tp)


def _split_block(block: nn.Module, tp: DeviceMesh) -> None:
    """Split weights by columns, then by rows, and the tokens between the sub-layers."""
    from torch.distributed.tensor import Replicate, Shard, parallel

    # Between the sub-layers, each process has some of the tokens. A sub-layer needs all
    # of them.
    by_tokens = Shard(-2)
    whole = Replicate()
    # For x, token_positions and mask.
    attention_input = parallel.PrepareModuleInput(
        input_layouts=(by_tokens, None, None),
        desired_input_layouts=(whole, None, None),
    )
    ffn_input = parallel.PrepareModuleInput(
        input_layouts=by_tokens, desired_input_layouts=whole
    )
    plan: dict[str, Any] = {"attn": attention_input, "ffn": ffn_input}
    for name in _linear_layers(block):
        if name in _COLUMNS:
            plan[name] = parallel.ColwiseParallel()
        else:
            # The output stays a DTensor, so that shape checks see the whole shape.
            plan[name] = parallel.RowwiseParallel(
                output_layouts=by_tokens, use_local_output=False
            )
    parallel.parallelize_module(block, tp, plan)
    for name, norm in _norms(block).items():
        _replicate(norm, tp)
        # The norms of heads get the plain outputs of the split q_proj and k_proj. The
        # other norms get DTensors.
        if name in _HEAD_NORMS:
            _convert_heads(norm, tp)


def _replicate(norm: nn.Module, tp: DeviceMesh) -> None:
    """Store all gains on each process, as DTensors, whose gradients are summed."""
    from torch.distributed.tensor import distribute_module

    distribute_module(norm, tp)


def _convert_heads(norm: nn.Module, tp: DeviceMesh) -> None:
    """Convert the heads of this process to a DTensor before a norm, and back after it.

    With plain heads, its gains would get the gradients of only these heads.
    """
    from torch.distributed.tensor import DTensor, Shard

    def to_dtensor(_module: nn.Module, args: Any) -> Any:
        [local_heads] = args
        # The shape is (..., heads, seq, d_head).
        return DTensor.from_local(local_heads, tp, [Shard(-3)])

    def to_plain(_module: nn.Module, _args: Any, out: Any) -> Any:
        return out.to_local()

    norm.register_forward_pre_hook(to_dtensor)
    norm.register_forward_hook(to_plain)


def _split_input(model: nn.Module, tp: DeviceMesh) -> None:
    """Make the model take a plain `x`, and split its tokens over `tp`.

    `x` is (..., seq, d_model), and all processes along `tp` pass the same values.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def split_tokens(model: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            x, *other_args = args
        else:
            x = kwargs.pop("x", None)
            other_args = []
        _require_tokens(x)
        whole = DTensor.from_local(x, tp, [Replicate()])
        by_tokens = whole.redistribute(placements=[Shard(-2)])
        return (by_tokens, *other_args), kwargs

    model.register_forward_pre_hook(split_tokens, with_kwargs=True)


def _require_tokens(x: Any) -> None:
    # torch 2.13 hangs on an empty DTensor.
    if not isinstance(x, Tensor) or x.ndim < 2 or x.numel() == 0:
        got = tuple(x.shape) if isinstance(x, Tensor) else x
        raise ValueError(
            f"x must be a tensor of shape (..., seq, d_model), not empty, got {got}"
        )


def _gather_output(model: nn.Module, args: Any, out: Any) -> Tensor:
    return out.full_tensor()


def _compile_forward(block: nn.Module) -> None:
    """Replace a block's forward by a compiled partial, which deepcopy binds to a copy."""
    compiled = torch.compile(_call_at_shape, dynamic=False)
    block.forward = partial(_call_with_shape, compiled, block.forward)


def _call_with_shape(
    compiled: Callable[..., Tensor], forward: Any, x: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Pass the shape of `x` as an argument, so that code is compiled for each shape.

    torch 2.13 compares only the local shapes of DTensors, and would run 8 tokens as 7.
    """
    return compiled(forward, x.shape, x, *args, **kwargs)


def _call_at_shape(
    forward: Callable[..., Tensor],
    shape: torch.Size,
    x: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    return forward(x.view(shape), *args, **kwargs)


def _sum_gradients_of_gains(model: nn.Module) -> None:
    """Sum the gradients of replicated gains in the backward pass, as FSDP does.

    Otherwise they are partial sums, and torch 2.9 clips those by a wrong norm.
    """
    from torch.distributed.tensor import DTensor, Replicate

    def sum_over_processes(grad: Any) -> Any:
        return grad.redistribute(placements=[Replicate()])

    # Before each call, because copies and `.to` lose the hooks of parameters.
    def add_missing_hooks(model: nn.Module, args: Any) -> None:
        for gains in model.parameters():
            if not isinstance(gains, DTensor) or not gains.requires_grad:
                continue
            is_replicated = gains.placements[0].is_replicate()
            hooks = gains._backward_hooks or {}
            if is_replicated and sum_over_processes not in hooks.values():
                gains.register_hook(sum_over_processes)

    model.register_forward_pre_hook(add_missing_hooks)
