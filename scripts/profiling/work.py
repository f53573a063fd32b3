"""What a stretch must do at least: FLOPs, and bytes that it reads and writes."""

import re
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from .record import Stretch, storages

_PRODUCTS = re.compile(
    r"m[mv]|dot|linear(?!ize)|matmul|conv|attention|encoder|lstm|gru|rnn"
)


def attention_flops(function: Any, args: Any) -> int:
    """Return the FLOPs of a fused attention: two products for each score that it needs.

    Backward has twice as many products, and what a kernel computes again is not counted.
    """
    names = [each.name for each in function._schema.arguments]
    given = dict(zip(names, args, strict=False))
    q, k, v = (given[name].shape for name in ("query", "key", "value"))
    pairs = q[-2] * k[-2]
    if given.get("is_causal"):
        pairs = sum(min(query + 1, k[-2]) for query in range(q[-2]))
    passes = 2 if names[0].startswith("grad_out") else 1
    return passes * 2 * q[:-2].numel() * pairs * (q[-1] + v[-1])


class FlopCounter(TorchDispatchMode):
    """Adds up FLOPs, and notes operations that multiply matrices and have no formula."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.unknown: set[str] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        operation = function._overloadpacket
        foreign = function.namespace not in ("aten", "prim", "prims")
        if operation.__name__.startswith("_scaled_dot_product"):
            self.flops += attention_flops(function, args)
        elif operation in flop_registry:
            self.flops += flop_registry[operation](*args, **kwargs, out_val=result)
        elif foreign or _PRODUCTS.search(operation.__name__):
            self.unknown.add(str(operation))
        return result


def bytes_of(stretch: Stretch) -> int:
    """Return the fewest bytes of all passes.

    Forward reads its inputs and writes its results. Backward reads what was saved and the
    gradients of the results, and writes the gradients of the inputs. Views move nothing.
    """
    moved = _moved(stretch.inputs, list(stretch.results.values()), stretch.changed)
    found = stretch.backward(stretch.forward())
    given = list(stretch.gradients.values())
    backward = _moved(given, [each for each in found if each is not None])
    if backward:
        moved += backward + sum(each.nbytes() for each in stretch.saved.values())
    return moved


def _moved(read: list[Tensor], results: list[Tensor], changed: int = 0) -> int:
    """Return the bytes of all, unless each result is an unchanged view of an input."""
    old = storages(read)
    written = [x for x in results if x.untyped_storage().data_ptr() not in old]
    if not written and not changed:
        return 0
    return changed + sum(x.nbytes for x in (*read, *written))
