"""What must be done at least: FLOPs, bytes, and what autograd keeps for backward."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from .block import known_flops
from .parts import Part

Storages = dict[int, UntypedStorage]  # by address


@dataclass(frozen=True)
class Work:
    """FLOPs, and the fewest bytes that must be read and written, in all passes."""

    flops: float
    bytes: int


def works_of(whole: Part, parts: list[Part], *, is_own: bool) -> dict[str, Work]:
    """Return the work of all copies of each part, and of the rest.

    Backward of a product is two products, and counts as such in all parts. In a block of
    the user's own, the rest has the FLOPs that no part has. How many bytes it moves is
    unknown.
    """
    passes = 3 if whole.gradients else 1
    works = {}
    for part in parts:
        flops = known_flops(part) if is_own else None
        if flops is None:
            flops = count_flops(part)
        moved = part.count * _bytes_moved(part)
        works[part.name] = Work(part.count * passes * flops, moved)
    if not is_own:
        counted = total_of(list(works.values())).flops
        works["rest"] = Work(passes * count_flops(whole) - counted, 0)
    return works


def total_of(works: list[Work]) -> Work:
    return Work(sum(work.flops for work in works), sum(work.bytes for work in works))


def work_of_adamw(whole: Part) -> Work:
    """Return the work of a step: it reads four values for each weight, and writes three."""
    trained = [weight for weight in whole.weights if weight.requires_grad]
    return Work(14 * sum(map(Tensor.numel, trained)), 7 * nbytes(trained))


def count_flops(part: Part) -> int:
    """Return the FLOPs of forward's matrix products, with all scores of attention."""

    def attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
        return sdpa_flop_count(q, k, v)

    # FlopCounterMode has no formula for a CPU's attention.
    on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with FlopCounterMode(display=False, custom_mapping={on_cpu: attention}) as counter:
        part.forward()
    return counter.get_total_flops()


def _bytes_moved(part: Part) -> int:
    """Return the fewest bytes of all passes.

    Forward reads inputs, weights and tables, and writes outputs. Backward reads the
    gradients of the outputs and what autograd has saved of all these, and writes the
    gradients of inputs and weights.
    """
    read = [*part.inputs, *part.weights, *part.tables]
    moved = list(read)
    for call in part.calls:
        moved += _without(call.outputs, _storages(call.inputs))
    if part.gradients:
        saved = saved_by(part)
        moved += part.gradients
        moved += [x for x in (*read, *part.outputs) if _address(x) in saved]
        moved += _without(part.train(), _storages(part.gradients))
    return nbytes(moved)


def saved_by(part: Part) -> Storages:
    """Return what autograd keeps for backward.

    Outputs count as those of the model's run, which are the inputs of the next part.
    """
    saved: Storages = {}

    def pack(tensor: Tensor) -> Tensor:
        saved.update(_storages([tensor]))
        return tensor.detach()  # an output as it is would keep the graph alive

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = part.forward()
    for output, original in zip(outputs, part.outputs, strict=True):
        if saved.pop(_address(output), None) is not None:
            saved.update(_storages([original]))
    return saved


def kept_bytes(parts: list[Part]) -> dict[str, int]:
    """Return the bytes that all copies of each part keep, and no part before it."""
    # Holds the storages: a free address may be given out again.
    seen: Storages = {}
    for part in parts:
        seen.update(_storages([*part.weights, *part.tables]))
    kept = {}
    for part in parts:
        saved = saved_by(part)
        new = [storage for address, storage in saved.items() if address not in seen]
        kept[part.name] = part.count * sum(storage.nbytes() for storage in new)
        seen.update(saved)
    return kept


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _storages(tensors: Iterable[Tensor]) -> Storages:
    return {_address(tensor): tensor.untyped_storage() for tensor in tensors}


def _without(tensors: Iterable[Tensor], storages: Storages) -> list[Tensor]:
    """Return the tensors that have none of these storages."""
    return [tensor for tensor in tensors if _address(tensor) not in storages]
