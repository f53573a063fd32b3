"""The block cut into its parts, each with the inputs and gradients that it has inside the block, strides included."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from einops import rearrange
from torch import Tensor, nn

from tinyblock import Block, Transformer


@dataclass(frozen=True)
class Part:
    """A function of tensors, what goes in, what the backward pass starts from, and the weights in between.

    `gradients` is empty where no backward pass is wanted. `outputs` came out when the block was cut: other parts have
    them for their inputs.
    """

    name: str
    run: Callable[..., tuple[Tensor, ...]]
    inputs: tuple[Tensor, ...]
    weights: tuple[nn.Parameter, ...] = ()
    gradients: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()

    def forward(self) -> tuple[Tensor, ...]:
        return self.run(*self.inputs)

    def train(self) -> tuple[Tensor, ...]:
        """Run forward and backward, and return the gradients of the inputs and of the weights."""
        return backward_of(self, self.forward())

    def compiled(self) -> "Part":
        """Return the part with its function compiled for these sizes alone."""
        return replace(self, run=torch.compile(self.run, dynamic=False))


def backward_of(part: Part, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run the backward pass that belongs to these outputs of `part`."""
    return torch.autograd.grad(outputs, (*part.inputs, *part.weights), part.gradients)


def accumulate(part: Part) -> None:
    """Run forward and backward as a training step does, with fresh gradients where the optimizer looks for them."""
    clear(part)
    torch.autograd.backward(part.forward(), part.gradients)


def clear(part: Part) -> None:
    for leaf in (*part.inputs, *part.weights):
        leaf.grad = None


def whole(model: Block | Transformer, x: Tensor, gradient: Tensor | None) -> Part:
    """Return the whole model as one part."""
    gradients = () if gradient is None else (gradient,)
    return Part("whole", lambda x: (model(x),), (x,), tuple(model.parameters()), gradients)


def cut(model: Block | Transformer, x: Tensor, gradient: Tensor | None = None) -> list[Part]:
    """Cut the model's first block into parts, in the order in which it runs them, with the inputs that it has for `x`.

    `gradient` is the gradient of the block's output; None leaves the backward pass out. A stack's final norm is a part
    too.
    """
    block = model.layers[0] if isinstance(model, Transformer) else model
    assert isinstance(block, Block)
    functions = _functions(block)
    inputs_of: dict[str, tuple[Tensor, ...]] = {}
    outputs_of: dict[str, tuple[Tensor, ...]] = {}

    def call(name: str, *inputs: Tensor) -> tuple[Tensor, ...]:
        inputs_of[name], outputs_of[name] = inputs, functions[name][0](*inputs)
        return outputs_of[name]

    train = gradient is not None
    with torch.set_grad_enabled(train):
        out = flow(call, x, "q/k norm" in functions)
    gradients_of: dict[str, tuple[Tensor, ...]] = dict.fromkeys(inputs_of, ())
    if gradient is not None:
        # As autograd lays them out in memory, which decides how fast the kernels that take them are.
        between = [t for name, outputs in outputs_of.items() if name != _ADDS for t in outputs]
        x, _, y, _ = inputs_of[_ADDS]
        gradients = iter(torch.autograd.grad(out, [*between, x, y], gradient))
        for name, outputs in outputs_of.items():
            if name != _ADDS:
                gradients_of[name] = tuple(next(gradients) for _ in outputs)
        of_x, of_y = gradients
        gradients_of[_ADDS] = (of_x, of_y, of_y, gradient)

    def leaves(*tensors: Tensor, requires_grad: bool = train) -> tuple[Tensor, ...]:
        return tuple(t.detach().requires_grad_(requires_grad) for t in tensors)

    def weights(*modules: nn.Module) -> tuple[nn.Parameter, ...]:
        return tuple(weight for module in modules for weight in module.parameters())

    parts = [
        Part(
            name,
            run,
            leaves(*inputs_of[name]),
            weights(*modules),
            gradients_of[name],
            leaves(*outputs_of[name], requires_grad=False),
        )
        for name, (run, modules) in functions.items()
    ]
    if isinstance(model, Transformer):
        final_norm, last = model.ln_final, () if gradient is None else (gradient,)
        parts.append(Part("final norm", lambda x: (final_norm(x),), leaves(out), weights(final_norm), last))
    return parts


def flow(call: Callable[..., tuple[Tensor, ...]], x: Tensor, qk_norm: bool) -> Tensor:
    """Compute a block of its parts, by `call(name, *inputs) -> outputs`."""
    (h,) = call("ln1", x)
    q, k, v = call("q/k/v projections", h)
    if qk_norm:
        q, k = call("q/k norm", q, k)
    q, k = call("rope", q, k)
    (heads,) = call("attention", q, k, v)
    (attended,) = call("output projection", heads)
    y = x + attended  # the second branch needs it before the part that does both additions
    (h,) = call("ln2", y)
    (fed,) = call("ffn", h)
    return call(_ADDS, x, attended, y, fed)[-1]


_ADDS = "residual adds"


def _functions(block: Block) -> dict[str, tuple[Callable[..., tuple[Tensor, ...]], list[nn.Module]]]:
    """Return each part's function, and the modules whose weights it uses, in the order of Block.forward."""
    attn = block.attn
    q_norm, k_norm, rope = attn.q_norm, attn.k_norm, attn.rope
    assert rope is not None

    def project(h: Tensor) -> tuple[Tensor, ...]:
        projected = attn.q_proj(h), attn.k_proj(h), attn.v_proj(h)
        split = "... seq (heads d_head) -> ... heads seq d_head"
        return tuple(rearrange(heads, split, d_head=attn.d_head) for heads in projected)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return (rearrange(attn._attend(q, k, v, None), "... heads seq d_head -> ... seq (heads d_head)"),)

    def add(x: Tensor, attended: Tensor, y: Tensor, fed: Tensor) -> tuple[Tensor, ...]:
        # x and y are outputs too, because each goes on into a branch: the sum of its two gradients is this part's work.
        return x, x + attended, y, y + fed

    functions: dict[str, tuple[Callable[..., tuple[Tensor, ...]], list[nn.Module]]] = {
        "ln1": (lambda x: (block.ln1(x),), [block.ln1]),
        "q/k/v projections": (project, [attn.q_proj, attn.k_proj, attn.v_proj]),
    }
    if q_norm is not None and k_norm is not None:
        functions["q/k norm"] = (lambda q, k: (q_norm(q), k_norm(k)), [q_norm, k_norm])
    return functions | {
        "rope": (lambda q, k: (rope(q, None), rope(k, None)), []),
        "attention": (attend, []),
        "output projection": (lambda heads: (attn.output_proj(heads),), [attn.output_proj]),
        _ADDS: (add, []),
        "ln2": (lambda y: (block.ln2(y),), [block.ln2]),
        "ffn": (lambda h: (block.ffn(h),), [block.ffn]),
    }
