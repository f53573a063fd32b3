"""Parts of a model: calls that are timed by themselves, with the tensors that they had in it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Call:
    """A function of the model, what it got and returned, and the modules that it uses.

    The model makes this call `count` times.
    """

    run: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    modules: tuple[nn.Module, ...] = ()
    count: int = 1


@dataclass(frozen=True)
class Part:
    """Calls that are timed together.

    gradients: those of the outputs that have one; without any, there is no backward pass.
    """

    name: str
    calls: tuple[Call, ...] = ()
    gradients: tuple[Tensor, ...] = ()

    @property
    def count(self) -> int:
        return self.calls[0].count

    @property
    def inputs(self) -> list[Tensor]:
        return [tensor for call in self.calls for tensor in call.inputs]

    @property
    def outputs(self) -> list[Tensor]:
        return [tensor for call in self.calls for tensor in call.outputs]

    @property
    def modules(self) -> list[nn.Module]:
        return [module for call in self.calls for module in call.modules]

    @property
    def weights(self) -> list[Tensor]:
        return [weight for module in self.modules for weight in module.parameters()]

    @property
    def tables(self) -> list[Tensor]:
        return [table for module in self.modules for table in module.buffers()]

    @property
    def leaves(self) -> list[Tensor]:
        """Return the inputs and weights whose gradients backward computes."""
        return [leaf for leaf in (*self.inputs, *self.weights) if leaf.requires_grad]

    def forward(self) -> list[Tensor]:
        outputs: list[Tensor] = []
        for call in self.calls:
            outputs.extend(flat(call.run(*call.inputs)))
        return outputs

    def backward(self, outputs: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the gradients of the leaves."""
        with_gradient = [output for output in outputs if output.requires_grad]
        return torch.autograd.grad(with_gradient, self.leaves, self.gradients)

    def train(self) -> tuple[Tensor, ...]:
        return self.backward(self.forward())

    def run(self) -> object:
        """Run forward, and backward if there are gradients."""
        return self.train() if self.gradients else self.forward()

    def compiled(self) -> "Part":
        calls = []
        for call in self.calls:
            calls.append(replace(call, run=torch.compile(call.run, dynamic=False)))
        return replace(self, calls=tuple(calls))


def flat(result: Any) -> tuple[Tensor, ...]:
    """Return the tensors that a function returns."""
    results = result if isinstance(result, tuple) else (result,)
    return tuple(each for each in results if isinstance(each, Tensor))


def cut(
    calls: Sequence[tuple[str, Call]], out: Tensor, gradient: Tensor | None
) -> list[Part]:
    """Return the parts of a run that made these calls, by name, and returned `out`.

    Their tensors are those of the run, gradients and strides included: they decide how
    fast kernels are.
    """
    gradients = iter(_gradients(calls, out, gradient))
    parts: dict[str, Part] = {}
    for name, call in calls:
        part = parts.get(name, Part(name))
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in call.inputs]
        of_call = [next(gradients) for result in call.outputs if result.requires_grad]
        parts[name] = replace(
            part,
            calls=(*part.calls, replace(call, inputs=tuple(leaves))),
            gradients=(*part.gradients, *of_call),
        )
    return list(parts.values())


def _gradients(
    calls: Sequence[tuple[str, Call]], out: Tensor, gradient: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the gradients of all results that require one."""
    if gradient is None:
        return ()
    results = [result for _, call in calls for result in call.outputs]
    differentiable = [result for result in results if result.requires_grad]
    return torch.autograd.grad(out, differentiable, gradient, materialize_grads=True)
