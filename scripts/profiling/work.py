"""What a stretch must do at least: FLOPs, and bytes that it reads and writes."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, shape_wrapper

from .record import Storages, Stretch, storages

_ATTENTION = re.compile(r"_scaled_dot_product_\w+_attention(_for_cpu)?(_backward)?")
_PRODUCTS = re.compile(r"mm|linear(?!ize)|matmul|conv|attention|encoder|lstm|gru|rnn")


def attention_flops(*shapes: Any, position: int, backward: bool, **_: Any) -> int:
    """Return the FLOPs of a fused attention: two products for each score that it needs.

    Causal attention needs the scores of keys that are not later. Backward has twice as many
    products, and what a kernel computes again is not counted.
    """
    q, k, v = shapes[1:4] if backward else shapes[:3]
    queries, keys = q[-2], k[-2]
    pairs = queries * keys
    if len(shapes) > position and shapes[position]:
        pairs = sum(min(query + 1, keys) for query in range(queries))
    heads = int(torch.Size(q[:-2]).numel())
    return (2 if backward else 1) * 2 * heads * pairs * (q[-1] + v[-1])


def _attention_formulas() -> dict[Any, Callable[..., int]]:
    formulas: dict[Any, Callable[..., int]] = {}
    for name in torch._C._dispatch_get_all_op_names():
        name = name.removeprefix("aten::")
        if _ATTENTION.fullmatch(name):
            operation = getattr(torch.ops.aten, name)
            arguments = [each.name for each in operation.default._schema.arguments]
            formula = partial(
                attention_flops,
                position=arguments.index("is_causal"),
                backward=name.endswith("backward"),
            )
            formulas[operation] = shape_wrapper(formula)
    return formulas


class _Counter(TorchDispatchMode):
    """Adds up FLOPs, and notes operations that multiply matrices and have no formula."""

    def __init__(self) -> None:
        super().__init__()
        self.formulas = flop_registry | _attention_formulas()
        self.flops = 0
        self.unknown: set[str] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        operation = function._overloadpacket
        foreign = function.namespace not in ("aten", "prim", "prims")
        if operation in self.formulas:
            self.flops += self.formulas[operation](*args, **kwargs, out_val=result)
        elif foreign or _PRODUCTS.search(operation.__name__):
            self.unknown.add(str(operation))
        return result


def flops_of(stretch: Stretch) -> tuple[int, set[str]]:
    """Return the FLOPs of the matrix products that run, and operations without a formula."""
    with _Counter() as counter:
        results = stretch.forward()
        if stretch.gradients:
            stretch.backward(results)
    return counter.flops, counter.unknown


def bytes_of(stretch: Stretch) -> int:
    """Return the fewest bytes of all passes.

    Forward reads its inputs and writes its results. Backward reads what was saved and the
    gradients of the results, and writes the gradients of the inputs. Views move nothing.
    """
    results = list(stretch.results.values())
    written = _new(results, storages(stretch.inputs))
    moved = sum(map(_nbytes, [*stretch.inputs, *written])) if written else 0
    gradients = list(stretch.gradients.values())
    if gradients:
        computed = stretch.backward(stretch.forward())
        found = [each for each in computed if each is not None]
        written = _new(found, storages(gradients))
        if written:
            moved += sum(map(_nbytes, [*gradients, *written]))
            moved += sum(each.nbytes() for each in stretch.saved.values())
    return moved


def _nbytes(tensor: Tensor) -> int:
    return tensor.nbytes


def _new(tensors: list[Tensor], old: Storages) -> list[Tensor]:
    """Return the tensors that have a memory of their own."""
    return [x for x in tensors if x.untyped_storage().data_ptr() not in old]
