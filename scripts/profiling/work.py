"""What a stretch must do at least: FLOPs, and bytes that it reads and writes."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, shape_wrapper

from .record import Stretch, storages

_ATTENTION = re.compile(
    r"aten::(_scaled_dot_product_\w+_attention(_for_cpu)?(_backward)?)"
)
_PRODUCTS = re.compile(
    r"m[mv]|dot|linear(?!ize)|matmul|conv|attention|encoder|lstm|gru|rnn"
)


def attention_flops(*shapes: Any, causal: int, backward: bool, **_: Any) -> int:
    """Return the FLOPs of a fused attention: two products for each score that it needs.

    Argument number `causal` says whether a query needs no later keys. Backward has twice
    as many products, and what a kernel computes again is not counted.
    """
    q, k, v = shapes[1:4] if backward else shapes[:3]
    pairs = q[-2] * k[-2]
    if len(shapes) > causal and shapes[causal]:
        pairs = sum(min(query + 1, k[-2]) for query in range(q[-2]))
    heads = int(torch.Size(q[:-2]).numel())
    return (2 if backward else 1) * 2 * heads * pairs * (q[-1] + v[-1])


def _formulas() -> dict[Any, Callable[..., int]]:
    formulas: dict[Any, Callable[..., int]] = dict(flop_registry)
    for name in torch._C._dispatch_get_all_op_names():
        if match := _ATTENTION.fullmatch(name):
            operation = getattr(torch.ops.aten, match[1])
            arguments = [each.name for each in operation.default._schema.arguments]
            causal = arguments.index("is_causal")
            backward = match[3] is not None
            formula = partial(attention_flops, causal=causal, backward=backward)
            formulas[operation] = shape_wrapper(formula)
    return formulas


class FlopCounter(TorchDispatchMode):
    """Adds up FLOPs, and notes operations that multiply matrices and have no formula."""

    def __init__(self) -> None:
        super().__init__()
        self.formulas = _formulas()
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


def bytes_of(stretch: Stretch) -> int:
    """Return the fewest bytes of all passes.

    Forward reads its inputs and writes its results. Backward reads what was saved and the
    gradients of the results, and writes the gradients of the inputs. Views move nothing.
    """
    moved = _moved(stretch.inputs, list(stretch.results.values()))
    found = stretch.backward(stretch.forward())
    given = list(stretch.gradients.values())
    backward = _moved(given, [each for each in found if each is not None])
    if backward:
        moved += backward + sum(each.nbytes() for each in stretch.saved.values())
    return moved


def _moved(read: list[Tensor], results: list[Tensor]) -> int:
    """Return the bytes of all, unless each result is a view of what was read."""
    old = storages(read)
    written = [x for x in results if x.untyped_storage().data_ptr() not in old]
    return sum(x.nbytes for x in (*read, *written)) if written else 0
