"""Cut the block into steps, and into the parts that are timed: steps with their tensors from inside the block."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from einops import rearrange
from torch import Tensor, nn

from tinyblock import Block, CausalMultiHeadSelfAttention, Transformer

Function = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Step:
    """A function of the block.

    part: the part to which it belongs; several steps may belong to one.
    takes: the names of the tensors that it takes.
    gives: the names of the tensors that it returns.
    run: the function.
    weights: what it uses of the model's weights.
    """

    part: str
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    run: Function
    weights: tuple[nn.Parameter, ...] = ()


@dataclass(frozen=True)
class Call:
    """A function with the tensors that it is called with."""

    run: Function
    inputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class TimedPart:
    """Calls that are timed together, one after another.

    name: the part.
    calls: what runs in the forward pass.
    weights: what the calls use of the model's weights.
    gradients: those of all outputs, in their order; none if there is no backward pass.
    """

    name: str
    calls: tuple[Call, ...]
    weights: tuple[nn.Parameter, ...] = ()
    gradients: tuple[Tensor, ...] = ()

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(tensor for call in self.calls for tensor in call.inputs)

    def forward(self) -> tuple[Tensor, ...]:
        """Run all calls, and return their outputs."""
        outputs: list[Tensor] = []
        for call in self.calls:
            outputs.extend(call.run(*call.inputs))
        return tuple(outputs)

    def backward(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the gradients of the inputs and of the weights, from the outputs of a forward pass."""
        leaves = (*self.inputs, *self.weights)
        return torch.autograd.grad(outputs, leaves, self.gradients)

    def train(self) -> tuple[Tensor, ...]:
        """Run forward and backward, and return the gradients of the inputs and of the weights."""
        return self.backward(self.forward())

    def accumulate(self) -> None:
        """Run forward and backward as a training step does, with fresh gradients where the optimizer looks for them."""
        self.clear()
        torch.autograd.backward(self.forward(), self.gradients)

    def clear(self) -> None:
        """Remove the gradients of the inputs and of the weights."""
        for leaf in (*self.inputs, *self.weights):
            leaf.grad = None

    def compiled(self) -> "TimedPart":
        """Return the part with its functions compiled for exactly these sizes."""
        calls = []
        for call in self.calls:
            calls.append(replace(call, run=torch.compile(call.run, dynamic=False)))
        return replace(self, calls=tuple(calls))


def block_steps(model: Block | Transformer) -> list[Step]:
    """Return the steps of the model's first block, in its order, and the final norm of a stack."""
    if isinstance(model, Block):
        return [*_attention_steps(model), *_feed_forward_steps(model)]
    block = model.layers[0]
    assert isinstance(block, Block)
    return [*block_steps(block), _final_norm(model)]


# Each step has a function of its own: torch.compile counts recompilations for each, and gives up after a few.


def _attention_steps(block: Block) -> list[Step]:
    """Return the steps from x to y, the sum of x and attention."""
    attn = block.attn
    assert isinstance(attn, CausalMultiHeadSelfAttention)
    rope = attn.rope
    assert rope is not None

    def norm(x: Tensor) -> tuple[Tensor, ...]:
        return (block.ln1(x),)

    def project(h: Tensor) -> tuple[Tensor, ...]:
        projected = attn.q_proj(h), attn.k_proj(h), attn.v_proj(h)
        split = "... seq (heads d_head) -> ... heads seq d_head"
        return tuple(rearrange(each, split, d_head=attn.d_head) for each in projected)

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        return rope(q, None), rope(k, None)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        attended = attn.attend(q, k, v, None)
        merge = "... heads seq d_head -> ... seq (heads d_head)"
        return (rearrange(attended, merge),)

    def project_back(merged: Tensor) -> tuple[Tensor, ...]:
        return (attn.output_proj(merged),)

    projections = _weights(attn.q_proj, attn.k_proj, attn.v_proj)
    output = _weights(attn.output_proj)
    return [
        Step(
            part="ln1",
            takes=("x",),
            gives=("h",),
            run=norm,
            weights=_weights(block.ln1),
        ),
        Step(
            part="q/k/v projections",
            takes=("h",),
            gives=("q", "k", "v"),
            run=project,
            weights=projections,
        ),
        *_head_norm_steps(attn),
        Step(
            part="rope",
            takes=("q", "k"),
            gives=("q", "k"),
            run=rotate,
        ),
        Step(
            part="attention",
            takes=("q", "k", "v"),
            gives=("merged",),
            run=attend,
        ),
        Step(
            part="output projection",
            takes=("merged",),
            gives=("branch",),
            run=project_back,
            weights=output,
        ),
        # Gives x, too, so that the sum of x's two gradients is part of this step.
        Step(
            part="residual sums",
            takes=("x", "branch"),
            gives=("x", "y"),
            run=_add,
        ),
    ]


def _head_norm_steps(attn: CausalMultiHeadSelfAttention) -> list[Step]:
    """Return the step that normalizes queries and keys, if the block has it."""
    q_norm, k_norm = attn.q_norm, attn.k_norm
    if q_norm is None or k_norm is None:
        return []

    def norm(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        return q_norm(q), k_norm(k)

    gains = _weights(q_norm, k_norm)
    return [
        Step(
            part="q/k norm",
            takes=("q", "k"),
            gives=("q", "k"),
            run=norm,
            weights=gains,
        )
    ]


def _feed_forward_steps(block: Block) -> list[Step]:
    """Return the steps from y to z, the output of the block."""

    def norm(y: Tensor) -> tuple[Tensor, ...]:
        return (block.ln2(y),)

    def feed(h: Tensor) -> tuple[Tensor, ...]:
        return (block.ffn(h),)

    return [
        Step(
            part="ln2",
            takes=("y",),
            gives=("h",),
            run=norm,
            weights=_weights(block.ln2),
        ),
        Step(
            part="ffn",
            takes=("h",),
            gives=("branch",),
            run=feed,
            weights=_weights(block.ffn),
        ),
        # Gives y, too, so that the sum of y's two gradients is part of this step.
        Step(
            part="residual sums",
            takes=("y", "branch"),
            gives=("y", "z"),
            run=_add,
        ),
    ]


def _final_norm(model: Transformer) -> Step:
    def norm(z: Tensor) -> tuple[Tensor, ...]:
        return (model.ln_final(z),)

    return Step(
        part="final norm",
        takes=("z",),
        gives=("out",),
        run=norm,
        weights=_weights(model.ln_final),
    )


def _add(x: Tensor, branch: Tensor) -> tuple[Tensor, ...]:
    # x is an output, too, because it also goes into a branch: backward adds its two gradients.
    return x, x + branch


def _weights(*modules: nn.Module) -> tuple[nn.Parameter, ...]:
    return tuple(weight for module in modules for weight in module.parameters())


def run_steps(steps: Sequence[Step], x: Tensor) -> Tensor:
    """Run the steps one after another from x, and return what the last one gives."""
    return run_steps_with(lambda step, inputs: step.run(*inputs), steps, x)


def run_steps_with(
    run: Callable[[Step, list[Tensor]], tuple[Tensor, ...]],
    steps: Sequence[Step],
    x: Tensor,
) -> Tensor:
    """Run the steps one after another from x, each by `run(step, inputs)`, and return what the last one gives."""
    values = {"x": x}
    for step in steps:
        outputs = run(step, [values[name] for name in step.takes])
        values.update(zip(step.gives, outputs, strict=True))
    return outputs[-1]


def timed_parts(
    steps: Sequence[Step], x: Tensor, gradient: Tensor | None = None
) -> list[TimedPart]:
    """Return the parts that are timed, each with the tensors that its steps have for x, strides included.

    Args:
        steps: the steps of the block.
        x: its input.
        gradient: that of its output; None leaves the backward pass out.
    """
    train = gradient is not None
    with torch.set_grad_enabled(train):
        inputs_of, outputs_of = _inputs_and_outputs(steps, x)
    gradients_of: list[tuple[Tensor, ...]] = [() for _ in steps]
    if train:
        gradients_of = _gradients_of(outputs_of, gradient)
    parts: dict[str, TimedPart] = {}
    for step, inputs, gradients in zip(steps, inputs_of, gradients_of, strict=True):
        # A part with several steps grows by each of them.
        part = parts.get(step.part, TimedPart(step.part, ()))
        leaves = tuple(tensor.detach().requires_grad_(train) for tensor in inputs)
        parts[step.part] = TimedPart(
            name=step.part,
            calls=(*part.calls, Call(step.run, leaves)),
            weights=(*part.weights, *step.weights),
            gradients=(*part.gradients, *gradients),
        )
    return list(parts.values())


def _inputs_and_outputs(
    steps: Sequence[Step], x: Tensor
) -> tuple[list[list[Tensor]], list[tuple[Tensor, ...]]]:
    """Run the steps one after another from x, and return the inputs and the outputs of each."""
    inputs_of = []
    outputs_of = []

    def record(step: Step, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        outputs = step.run(*inputs)
        inputs_of.append(inputs)
        outputs_of.append(outputs)
        return outputs

    run_steps_with(record, steps, x)
    return inputs_of, outputs_of


def _gradients_of(
    outputs_of: list[tuple[Tensor, ...]], gradient: Tensor | None
) -> list[tuple[Tensor, ...]]:
    """Return the gradients of each step's outputs, from that of the last output.

    They are laid out in memory as autograd does it, which decides how fast the kernels are that read them.
    """
    outputs = [tensor for of_step in outputs_of for tensor in of_step]
    gradients = iter(torch.autograd.grad(outputs[-1], outputs, gradient))
    gradients_of = []
    for of_step in outputs_of:
        gradients_of.append(tuple(islice(gradients, len(of_step))))
    return gradients_of


def whole(model: Block | Transformer, x: Tensor, *gradient: Tensor) -> TimedPart:
    """Return the whole model as one part; `gradient` is that of the output, unless there is no backward pass."""
    call = Call(lambda x: (model(x),), (x,))
    return TimedPart("whole", (call,), tuple(model.parameters()), gradient)
