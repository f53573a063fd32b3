"""A block of the user's own, cut at its modules that have weights and no children."""

import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from .parts import Call, flat


def load(name: str) -> Callable[[], nn.Module]:
    """Return the function `package.module:function`; the working directory is searched first."""
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    return getattr(importlib.import_module(module), function)


def record_modules(
    model: nn.Module, x: Tensor
) -> tuple[list[tuple[str, Call]], Tensor]:
    """Run the model; return the calls of modules with weights and no children, and the output."""
    calls: list[tuple[str, Call]] = []
    hooks = []
    for name, module in model.named_modules():
        if list(module.parameters()) and not list(module.children()):
            hook = partial(_append, calls, name or type(module).__name__)
            hooks.append(module.register_forward_hook(hook, with_kwargs=True))
    out = model(x)
    for each in hooks:
        each.remove()
    return calls, out


def _append(
    calls: list[tuple[str, Call]],
    name: str,
    module: nn.Module,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    result: Any,
) -> None:
    """Keep a call, unless it takes other things than tensors by position."""
    takes_tensors = all(isinstance(each, Tensor) for each in arguments)
    if takes_tensors and not keywords:
        calls.append((name, Call(module, arguments, flat(result), (module,))))
