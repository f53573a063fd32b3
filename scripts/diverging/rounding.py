"""Measure the rounding of each part beside the least that its dtype allows."""

from collections import defaultdict
from dataclasses import dataclass

import torch
from float64 import in_float64
from profiling.parts import parts_of

from .runs import Run, Seen, Subject, error, load, numbers


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

    def add(self, found: list[Seen], exact: list[Seen], dtype: torch.dtype) -> None:
        """Add the errors of tensors. What is exact has gradients of the result's error."""
        for own, true in zip(found, exact, strict=True):
            x, y = own.value, true.value
            # Where a router chose other tokens, that is no error of this part.
            if x.is_floating_point() and x.shape == y.shape:
                is_number = y.abs() < 1e30  # a mask has the least number of its dtype
                x, y, gradient = x[is_number], y[is_number], true.gradient[is_number]
                coarse = max(dtype, x.dtype, key=epsilon)
                squares, least = error(x, y) ** 2, error(y.to(coarse), y) ** 2
                self.tensors += bool(squares or least)  # not what is only passed on
                self.squares += squares
                self.least_squares += least
                off = numbers(x) - numbers(y)
                self.share += (off @ numbers(gradient)).item()


@dataclass
class Rounding:
    """The error of a model's result, and of its parts. names: the part of each call."""

    off: float
    parts: dict[str, Part]
    names: dict[str, str]


def rounding(subject: Subject, compiled: bool = False) -> Rounding:
    """Compare a model with itself in float64, call by call."""
    model, _ = subject.build()
    load(model, subject.wide)
    if compiled:  # what each module does itself
        for module in model.modules():
            module.forward = torch.compile(module.forward, dynamic=False)
    stance = "default" if compiled else "force_eager"
    with torch.no_grad(), torch.compiler.set_stance(stance):
        narrow = Run(model).start(subject.inputs)
    with torch.no_grad():
        exact_result = subject.run_wide().result
    calls = {each.name: each for each in narrow.calls}
    subject.wide.requires_grad_(False)  # only gradients of results are wanted
    alone = subject.run_wide(forced=calls)
    off = (numbers(narrow.result) - numbers(exact_result)).view(exact_result.shape)
    with in_float64():
        alone.result.backward(off / off.square().sum().clamp_min(1e-300))
    names = {**parts_of(model), model: "the model"}
    parts: dict[str, Part] = defaultdict(Part)
    for exact in alone.calls:
        found = calls.get(exact.name)
        if found is None:  # a router chose another expert
            continue
        part = parts[names[found.module]]
        part.calls += 1
        part.add(found.results, exact.results, subject.dtype)
        if found.outer is not None:  # which computes the inputs
            outer = parts[names[found.outer.module]]
            outer.add(found.inputs, exact.inputs, subject.dtype)
    missed = 1 - sum(part.share for part in parts.values())
    if off.any() and abs(missed) > 0.01:
        parts["other experts, and second order"].share = missed
    return Rounding(
        error(narrow.result, exact_result),
        parts,
        {name: names[each.module] for name, each in calls.items()},
    )


def epsilon(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps
