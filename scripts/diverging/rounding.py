"""Measure the rounding of each part beside the least that its dtype allows."""

import math
from dataclasses import dataclass, field

import torch
from float64 import in_float64
from profiling.parts import parts_of
from torch import Tensor

from .runs import Call, Seen, Subject, error, load, numbers, run


@dataclass(eq=False)
class Part:
    """Calls of modules that are alike: what they compute themselves.

    errors: of each tensor.
    least_errors: of each exact tensor, rounded to the dtype.
    share: how much of the error of the model's result they cause.
    """

    name: str
    calls: int = 0
    errors: list[float] = field(default_factory=list)
    least_errors: list[float] = field(default_factory=list)
    share: float = 0.0

    @property
    def error(self) -> float:
        return math.hypot(*self.errors) / max(len(self.errors), 1) ** 0.5

    @property
    def least(self) -> float:
        return math.hypot(*self.least_errors) / max(len(self.errors), 1) ** 0.5

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
                coarse = max(dtype, x.dtype, key=lambda each: torch.finfo(each).eps)
                errors = error(x, y), error(y.to(coarse), y)
                if any(errors):  # not what is only passed on
                    self.errors.append(errors[0])
                    self.least_errors.append(errors[1])
                self.share += ((numbers(x) - numbers(y)) @ numbers(gradient)).item()


@dataclass
class Rounding:
    """The error of a model's result, and the part of each of its calls."""

    off: float
    parts: dict[str, Part]


def rounding(subject: Subject, compiled: bool = False) -> Rounding:
    """Compare a model with itself in float64, call by call.

    In float64, each call gets the inputs that it has in the dtype, and what contains it
    gets its results in the dtype, so that its own results have no error of another call.
    """
    model, _ = subject.build()
    load(model, subject.wide)
    if compiled:  # what each module does itself
        for module in model.modules():
            module.forward = torch.compile(module.forward, dynamic=False)
    stance = "default" if compiled else "force_eager"
    with torch.no_grad(), torch.compiler.set_stance(stance):
        narrow = run(model, subject.inputs)
    with torch.no_grad():
        exact_result = subject.run_wide().result
    calls = {call.name: call for call in narrow.calls}

    def in_dtype(call: Call, has_ended: bool) -> list[Tensor]:
        if call.name not in calls:  # a router chose another expert
            return []
        found = calls[call.name]
        return [each.value for each in (found.results if has_ended else found.inputs)]

    subject.wide.requires_grad_(False)  # only gradients of results are wanted
    alone = subject.run_wide(in_dtype)
    off = (numbers(narrow.result) - numbers(exact_result)).view(exact_result.shape)
    with in_float64():
        alone.result.backward(off / off.square().sum().clamp_min(1e-300))
    names = {**parts_of(model), model: "the model"}
    by_name = {name: Part(name) for name in names.values()}
    parts = {name: by_name[names[call.module]] for name, call in calls.items()}
    for exact in alone.calls:
        if exact.name in calls:
            found = calls[exact.name]
            parts[found.name].calls += 1
            parts[found.name].add(found.results, exact.results, subject.dtype)
            if found.outer is not None:  # which computes the inputs
                outer = parts[found.outer.name]
                outer.add(found.inputs, exact.inputs, subject.dtype)
    missed = 1 - sum(part.share for part in by_name.values())
    if off.any() and abs(missed) > 0.01:
        name = "other experts, and second order"
        parts[name] = Part(name, share=missed)
    return Rounding(error(narrow.result, exact_result), parts)
