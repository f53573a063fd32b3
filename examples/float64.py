"""Compute in float64, also what a model lowers itself: a mistake survives this, and rounding does not.

    with in_float64():
        model = build()  # tables and other constants become exact, too
    model.double().load_state_dict(trained.state_dict())
    with in_float64():
        logits = model(tokens)

An operation without a kernel for float64 raises torch's own error. Two things are not undone: the rounding of numbers
that `torch.tensor(numbers, dtype=...)` and numpy do at once, and a float32 that is read as integers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

__all__ = ["in_float64"]

WIDE = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}


def wide(value: Any) -> Any:
    return WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def widened(tensor: Tensor) -> Tensor:
    return tensor.to(wide(tensor.dtype))


class Float64(TorchDispatchMode):
    """Each operation is asked for float64 where the model asks for a lower dtype."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if set(types) - {Tensor, nn.Parameter}:
            return NotImplemented  # first to a subclass, which asks again with tensors
        torch.set_default_dtype(torch.float64)  # a model may have set its own
        kwargs = kwargs or {}
        # No operation takes a dtype inside a list. view(dtype) does not convert.
        if func is not torch.ops.aten.view.dtype:
            args = [wide(each) for each in args]
            kwargs = {name: wide(each) for name, each in kwargs.items()}
        result = func(*args, **kwargs)
        # What torch.tensor and numpy made is seen here for the first time.
        if isinstance(result, Tensor):  # of most operations: at once
            return widened(result)
        return tree_map_only(Tensor, widened, result)


@contextmanager
def in_float64() -> Iterator[None]:
    """Create and compute in float64, in eager mode, whatever dtype the code names."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Float64(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.set_default_dtype(before)
