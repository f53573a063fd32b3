"""The block as a list of steps, and the parts that are timed: steps with their tensors from inside the block."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from tinyblock import Block, CausalMultiHeadSelfAttention, Transformer


@dataclass(frozen=True)
class Step:
    """A function of the block, the names of the tensors that it takes and gives, and the weights that it uses.

    `part_steps` adds its inputs, and the gradients of its outputs unless there is no backward pass.
    """

    name: str
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    run: Callable[..., tuple[Tensor, ...]]
    weights: tuple[nn.Parameter, ...] = ()
    inputs: tuple[Tensor, ...] = ()
    gradients: tuple[Tensor, ...] = ()

    def forward(self) -> tuple[Tensor, ...]:
        return self.run(*self.inputs)

    def backward(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the gradients of the inputs and of the weights, from the outputs of a forward pass."""
        return torch.autograd.grad(
            outputs, (*self.inputs, *self.weights), self.gradients
        )

    def train(self) -> tuple[Tensor, ...]:
        """Run forward and backward, and return the gradients of the inputs and of the weights."""
        return self.backward(self.forward())

    def accumulate(self) -> None:
        """Run forward and backward as a training step does, with fresh gradients where the optimizer looks for them."""
        self.clear()
        torch.autograd.backward(self.forward(), self.gradients)

    def clear(self) -> None:
        for leaf in (*self.inputs, *self.weights):
            leaf.grad = None

    def compiled(self) -> "Step":
        """Return the step with its function compiled for these sizes alone."""
        return replace(self, run=torch.compile(self.run, dynamic=False))

    def __add__(self, other: "Step") -> "Step":
        """Return one step that does both, each with its own inputs."""
        first, count = self.run, len(self.takes)
        names = ("takes", "gives", "weights", "inputs", "gradients")
        both: dict[str, Any] = {
            name: getattr(self, name) + getattr(other, name) for name in names
        }
        return replace(
            self,
            run=lambda *inputs: (*first(*inputs[:count]), *other.run(*inputs[count:])),
            **both,
        )


def block_steps(model: Block | Transformer) -> list[Step]:
    """Return the steps of the model's first block, in its order, and the final norm of a stack."""
    block = model.layers[0] if isinstance(model, Transformer) else model
    assert isinstance(block, Block)
    attn = block.attn
    assert isinstance(attn, CausalMultiHeadSelfAttention)
    q_norm, k_norm, rope = attn.q_norm, attn.k_norm, attn.rope
    assert rope is not None

    def project(h: Tensor) -> tuple[Tensor, ...]:
        projected = attn.q_proj(h), attn.k_proj(h), attn.v_proj(h)
        split = "... seq (heads d_head) -> ... heads seq d_head"
        return tuple(rearrange(heads, split, d_head=attn.d_head) for heads in projected)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return (
            rearrange(
                attn.attend(q, k, v, None),
                "... heads seq d_head -> ... seq (heads d_head)",
            ),
        )

    def add(x: Tensor, branch: Tensor) -> tuple[Tensor, ...]:
        return (
            x,
            x + branch,
        )  # x too, because it also goes into a branch: the sum of its two gradients is work

    def weights(*modules: nn.Module) -> tuple[nn.Parameter, ...]:
        return tuple(weight for module in modules for weight in module.parameters())

    # A function of its own for each step: torch.compile counts recompilations for each, and gives up after a few.
    projections, output = (
        weights(attn.q_proj, attn.k_proj, attn.v_proj),
        weights(attn.output_proj),
    )
    steps = [
        Step("ln1", ("x",), ("h",), lambda x: (block.ln1(x),), weights(block.ln1)),
        Step("q/k/v projections", ("h",), ("q", "k", "v"), project, projections),
        Step(
            "rope", ("q", "k"), ("q", "k"), lambda q, k: (rope(q, None), rope(k, None))
        ),
        Step("attention", ("q", "k", "v"), ("heads",), attend),
        Step(
            "output projection",
            ("heads",),
            ("attended",),
            lambda heads: (attn.output_proj(heads),),
            output,
        ),
        Step("residual adds", ("x", "attended"), ("x", "y"), add),
        Step("ln2", ("y",), ("h",), lambda y: (block.ln2(y),), weights(block.ln2)),
        Step("ffn", ("h",), ("fed",), lambda h: (block.ffn(h),), weights(block.ffn)),
        Step("residual adds", ("y", "fed"), ("y", "z"), add),
    ]
    if q_norm is not None and k_norm is not None:
        norms = weights(q_norm, k_norm)
        steps.insert(
            2,
            Step(
                "q/k norm",
                ("q", "k"),
                ("q", "k"),
                lambda q, k: (q_norm(q), k_norm(k)),
                norms,
            ),
        )
    if isinstance(model, Transformer):
        steps.append(
            Step(
                "final norm",
                ("z",),
                ("out",),
                lambda z: (model.ln_final(z),),
                weights(model.ln_final),
            )
        )
    return steps


def run_steps(
    steps: Sequence[Step],
    x: Tensor,
    run: Callable[[Step, list[Tensor]], tuple[Tensor, ...]] = lambda step, inputs: (
        step.run(*inputs)
    ),
) -> Tensor:
    """Run the steps one after another from x, each by `run(step, inputs)`, and return what the last one gives."""
    values = {"x": x}
    for step in steps:
        outputs = run(step, [values[name] for name in step.takes])
        values.update(zip(step.gives, outputs, strict=True))
    return outputs[-1]


def part_steps(
    steps: Sequence[Step], x: Tensor, gradient: Tensor | None = None
) -> list[Step]:
    """Return the parts that are timed: a step for each name, with the tensors that it has for x, strides included.

    `gradient` is that of the output; None leaves the backward pass out.
    """
    train, ran = gradient is not None, []

    def record(step: Step, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        outputs = step.run(*inputs)
        ran.append((step, inputs, outputs))
        return outputs

    with torch.set_grad_enabled(train):
        out = run_steps(steps, x, record)
    outputs = [tensor for *_, of_step in ran for tensor in of_step]
    # As autograd lays them out in memory, which decides how fast the kernels that take them are.
    gradients = iter(torch.autograd.grad(out, outputs, gradient) if train else ())
    parts: dict[str, Step] = {}
    for step, inputs, of_step in ran:
        leaves = tuple(tensor.detach().requires_grad_(train) for tensor in inputs)
        part = replace(
            step,
            inputs=leaves,
            gradients=tuple(next(gradients) for _ in of_step) if train else (),
        )
        parts[step.name] = parts[step.name] + part if step.name in parts else part
    return list(parts.values())


def whole(model: Block | Transformer, x: Tensor, *gradient: Tensor) -> Step:
    """Return the whole model as one step; `gradient` is that of the output, unless there is no backward pass."""
    return Step(
        "whole",
        ("x",),
        ("out",),
        lambda x: (model(x),),
        tuple(model.parameters()),
        (x,),
        gradient,
    )
