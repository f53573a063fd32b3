"""Measure the rounding of each part beside the least that its dtype allows."""

from collections import defaultdict
from dataclasses import dataclass
from functools import partial

import torch
from float64 import in_float64
from profiling.parts import parts_of
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .runs import Run, Seen, Subject, error, numbers, plain_weights


@dataclass
class Part:
    """Calls of modules that are alike: what they compute themselves.

    squares: the sum of the squares of the errors of tensors.
    least_squares: of the exact tensors, rounded to the dtype.
    share: how much of the error of the model's result they cause.
    """

    calls: int = 0
    tensors: int = 0
    squares: float = 0.0
    least_squares: float = 0.0
    share: float = 0.0

    @property
    def error(self) -> float:
        return (self.squares / max(self.tensors, 1)) ** 0.5

    @property
    def least(self) -> float:
        return (self.least_squares / max(self.tensors, 1)) ** 0.5

    @property
    def ratio(self) -> float:
        return self.error / self.least if self.least else 1.0

    def add(
        self,
        found: list[Seen],
        exact: list[Seen],
        influence: list[Seen],
        dtype: torch.dtype,
    ) -> None:
        """Add the errors of tensors. influence: has gradients of the result's error."""
        for own, true, other in zip(found, exact, influence, strict=True):
            x, y = own.value, true.value
            # Where a router chose other tokens, that is no error of this part.
            if not x.is_floating_point() or x.shape != y.shape:
                continue
            coarse = max(dtype, x.dtype, key=epsilon)
            squares, least = error(x, y) ** 2, error(y.to(coarse), y) ** 2
            self.tensors += bool(squares or least)
            self.squares += squares
            self.least_squares += least
            if other.gradient.shape == y.shape:
                off = numbers(x) - numbers(y)
                self.share += (off @ numbers(other.gradient)).item()


@dataclass
class Rounding:
    """The error of a model's result, and of its parts. names: the part of each call."""

    off: float
    parts: dict[str, Part]
    names: dict[str, str]


def rounding(subject: Subject, compiled: bool = False) -> Rounding:
    """Compare a model with itself in float64, call by call."""
    weights = plain_weights(subject.narrow), plain_weights(subject.wide)
    for weight, exact_weight in zip(*weights, strict=True):
        weight.data = exact_weight.data.to(weight.dtype)
    narrow = run_narrow(subject, compiled)
    subject.wide.requires_grad_(False)  # only gradients of results are wanted
    wide = subject.run_wide()
    off = numbers(narrow.result) - numbers(wide.result)
    gradient = off / off.square().sum().clamp_min(1e-300)
    with in_float64():
        wide.result.backward(gradient.reshape(wide.result.shape))
    wide.forget_values()
    calls = {each.name: each for each in narrow.calls}
    influences = {each.name: each for each in wide.calls}
    with torch.no_grad():
        alone = subject.run_wide(forced=calls)
    of_modules = {**parts_of(subject.narrow), subject.narrow: "the model"}
    names = {name: of_modules[each.module] for name, each in calls.items()}
    parts: dict[str, Part] = defaultdict(Part)
    for exact in alone.calls:
        if exact.name not in calls:
            continue  # a router chose another expert
        found = calls[exact.name]
        influence = influences.get(exact.name, exact)  # without gradients
        part = parts[names[exact.name]]
        part.calls += 1
        part.add(found.results, exact.results, influence.results, subject.dtype)
        if exact.outer is not None:  # which computes the inputs
            outer = parts[names[exact.outer.name]]
            outer.add(found.inputs, exact.inputs, influence.inputs, subject.dtype)
    return Rounding(error(narrow.result, wide.result), parts, names)


def epsilon(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


@torch.no_grad()
def run_narrow(subject: Subject, compiled: bool) -> Run:
    """Run a model in its own dtype. If compiled, what each module does itself is compiled."""
    if compiled:
        for module in subject.narrow.modules():
            module.forward = torch.compile(module.forward, dynamic=False)
    inputs = tree_map_only(Tensor, partial(narrowed, subject.dtype), subject.inputs)
    with torch.compiler.set_stance("default" if compiled else "force_eager"):
        return Run(subject.narrow).start(inputs)


def narrowed(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Return a copy of an input, in the model's dtype if it is of floats."""
    return tensor.to(dtype if tensor.is_floating_point() else None, copy=True)
