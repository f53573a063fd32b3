"""Follow a model: which tensors its modules get and return, and their gradients."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from profiling.runs import Inputs, call
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from .values import Refused, floats, tensors_in


class NoTies(TorchDispatchMode):
    """Refuses routers that choose between equal scores, which two models may do differently."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.topk.default and result[0].shape[-1]:
            least = result[0].min(-1, keepdim=True).values
            chosen, all_equal = ((x == least).sum(-1) for x in (result[0], args[0]))
            if ((chosen < all_equal) & least[..., 0].isfinite()).any():
                raise Refused(
                    "a router must not choose between equal scores, got some in float64; "
                    "use other inputs, or weights that are not equal"
                )
        return result


@dataclass(eq=False)
class Traced:
    """What a module got or returned: values, autograd's nodes, and gradients."""

    values: list[Tensor] = field(default_factory=list)
    shapes: list[torch.Size | None] = field(default_factory=list)  # of floats
    nodes: list[Any] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)

    def add(self, tensor: Tensor, same: Tensor) -> None:
        """Keep a tensor, and the gradient of an alias that goes on in its place."""
        if same.requires_grad:
            place = len(self.values)
            same.register_hook(partial(self.gradients.__setitem__, place))
        self.values.append(tensor.detach().clone())
        self.shapes.append(tensor.shape if tensor.is_floating_point() else None)
        self.nodes.append(tensor.grad_fn)

    @property
    def floats(self) -> list[Tensor]:
        return floats(self.values)

    @property
    def float_gradients(self) -> list[Tensor]:
        """Return gradients of floats; zeros where the result does not depend on them."""
        return [
            self.gradients.get(
                place, torch.zeros((), dtype=torch.float64).expand(shape)
            )
            for place, shape in enumerate(self.shapes)
            if shape is not None
        ]


@dataclass(eq=False)
class Call:
    """One call of a module, and the call that contains it."""

    name: str
    module: nn.Module
    outer: "Call | None"
    inputs: Traced = field(default_factory=Traced)
    results: Traced = field(default_factory=Traced)

    def is_inside(self, other: "Call") -> bool:
        outer = self.outer
        return outer is not None and (outer is other or outer.is_inside(other))


@dataclass(eq=False)
class Run:
    """The calls of a model's modules, in the order in which they end.

    forced: calls of an equal model. Each call then gets their inputs, and what contains it
        gets their results, so that a call's own result has no error of another call.
    exchanged: functions of the input, whose results modules return.
    """

    model: nn.Module
    forced: dict[str, Call] = field(default_factory=dict)
    exchanged: dict[nn.Module, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    weight_gradients: dict[Tensor, Tensor] = field(default_factory=dict)
    _open: list[Call] = field(default_factory=list)
    _counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def start(self, inputs: Inputs) -> "Run":
        """Call the model, and follow its modules."""
        hooks: list[Any] = []
        for path, module in self.model.named_modules():
            begin = partial(self._begin, path or "the model")
            hooks.append(module.register_forward_pre_hook(begin, with_kwargs=True))
            hooks.append(module.register_forward_hook(self._end))
        torch.manual_seed(0)
        before = random_state(self.model)
        output = call(self.model, inputs)
        for hook in hooks:
            hook.remove()
        if not torch.equal(before, random_state(self.model)):
            raise Refused(
                "forward must not draw random numbers; set probabilities to 0"
            )
        results = floats(tensors_in(output))
        if not results:
            raise Refused(f"forward must return floats, got {type(output).__name__}")
        self.result = results[0]
        return self

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._counts[path] += 1
        again = f" (call {self._counts[path]})" if self._counts[path] > 1 else ""
        started = Call(path + again, module, self._open[-1] if self._open else None)
        self._open.append(started)
        given = args, kwargs
        forced = self.forced.get(started.name)
        return passed_on(given, started.inputs, forced.inputs if forced else None)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end(self, module: nn.Module, args: Any, output: Any) -> Any:
        ended = self._open.pop()
        self.calls.append(ended)
        if module in self.exchanged:
            given = floats(tensors_in(args)) or tensors_in(args)
            output = self.exchanged[module](given[0])
        forced = self.forced.get(ended.name)
        return passed_on(output, ended.results, forced.results if forced else None)

    def backward(self) -> None:
        """Set all gradients. That of the result depends on its values alone."""
        result = self.result.detach()
        size = result.square().mean().sqrt().clamp_min(1e-300)
        gradient = torch.cos(3 * result / size)
        self.model.zero_grad(set_to_none=True)
        hooks = [
            weight.register_post_accumulate_grad_hook(self._keep)
            for weight in self.weight_gradients
        ]
        self.result.backward(gradient)
        for hook in hooks:
            hook.remove()

    def forget_values(self) -> None:
        """Free memory once values are compared."""
        for each in self.calls:
            each.inputs.values.clear()
            each.results.values.clear()

    def _keep(self, weight: Tensor) -> None:
        assert weight.grad is not None
        self.weight_gradients[weight].copy_(weight.grad)
        weight.grad = None


def random_state(model: nn.Module) -> Tensor:
    """Return the state of the generator of the model's device."""
    on_gpu = any(weight.is_cuda for weight in model.parameters())
    return torch.cuda.get_rng_state() if on_gpu else torch.get_rng_state()


def passed_on(tree: Any, traced: Traced, forced: Traced | None) -> Any:
    """Trace tensors, and return aliases of them, or other values in their dtypes."""
    aliases: dict[int, Tensor] = {}
    others = iter(forced.values if forced else ())

    def alias(tensor: Tensor) -> Tensor:
        same = aliases.get(id(tensor))
        if same is None:
            followed = tensor
            is_followed = torch.is_grad_enabled() and tensor.is_floating_point()
            if is_followed and not tensor.requires_grad:  # such as a table's rows
                followed = tensor.detach().requires_grad_().clone()
            same = aliases[id(tensor)] = followed.view_as(followed)
        traced.add(tensor, same)
        if forced is None:
            return same
        other = next(others)
        # A router may choose other tokens.
        return other.to(tensor.dtype) if other.shape == tensor.shape else same

    return tree_map_only(Tensor, alias, tree)


def first_node(traced: Traced) -> Any:
    """Return the node of the first tensor of floats."""
    pairs = zip(traced.values, traced.nodes, strict=True)
    return next((node for value, node in pairs if value.is_floating_point()), None)
