"""Build models in float64, run them, and keep what their modules get and return."""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from float64 import in_float64
from lab.options import Refused
from profiling.parts import results_in
from profiling.runs import Build, Inputs, call, copied
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


def numbers(tensor: Tensor) -> Tensor:
    """Return the numbers of any tensor, such as of a quantized weight, in float64.

    Those of masks, beyond 1e30, and NaN become 0.
    """
    if type(tensor) not in (Tensor, nn.Parameter):
        tensor = tensor.dequantize()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    wide = tensor.detach().flatten().double()
    return torch.where(wide.abs() < 1e30, wide, 0.0)


def error(found: Tensor, exact: Tensor, least_norm: float = 1e-300) -> float:
    """Return the norm of the difference, divided by the norm of the exact numbers."""
    if found.numel() != exact.numel():
        return float("inf")
    true = numbers(exact)
    return ((numbers(found) - true).norm() / true.norm().clamp_min(least_norm)).item()


@dataclass(eq=False)
class Seen:
    """A tensor that a module got or returned.

    node: what made it, for autograd.
    gradient: of the model's result; 0 if the result does not depend on it.
    """

    value: Tensor
    node: Any
    gradient: Tensor


@dataclass(eq=False)
class Call:
    """One call of a module, and the call that contains it.

    takes_one: whether its only argument is a tensor.
    """

    name: str
    module: nn.Module
    outer: "Call | None"
    takes_one: bool
    inputs: list[Seen] = field(default_factory=list)
    results: list[Seen] = field(default_factory=list)

    def is_inside(self, other: "Call") -> bool:
        outer = self.outer
        return outer is not None and (outer is other or outer.is_inside(other))


@dataclass
class Run:
    """The calls of a model's modules, in the order in which they end, and its result."""

    calls: list[Call]
    result: Tensor


Instead = Callable[[Call, bool], list[Tensor]]


def run(model: nn.Module, inputs: Inputs, instead: Instead = lambda *_: []) -> Run:
    """Run a model, and keep what its modules get and return.

    instead: gets a call, and whether it has ended. It returns values for the call's inputs,
        or in the end for its results: as many tensors, or none. Gradients pass as if
        nothing was changed.

    Raises:
        Refused: forward draws random numbers.
    """
    open_calls, calls, counts = list[Call](), list[Call](), Counter[str]()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        counts[path] += 1
        again = f" (call {counts[path]})" if counts[path] > 1 else ""
        leaves = tree_leaves((args, kwargs))
        takes_one = len(leaves) == 1 and isinstance(leaves[0], Tensor)
        outer = open_calls[-1] if open_calls else None
        begun = Call(path + again, module, outer, takes_one)
        open_calls.append(begun)
        return passed_on((args, kwargs), begun.inputs, partial(instead, begun, False))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(module: nn.Module, args: Any, output: Any) -> Any:
        ended = open_calls.pop()
        calls.append(ended)
        return passed_on(output, ended.results, partial(instead, ended, True))

    hooks: list[Any] = []
    for path, module in model.named_modules():
        named = partial(begin, path or "the model")
        hooks.append(module.register_forward_pre_hook(named, with_kwargs=True))
        hooks.append(module.register_forward_hook(end))
    torch.manual_seed(0)
    on_gpu = any(weight.is_cuda for weight in model.parameters())
    random_state = torch.cuda.get_rng_state if on_gpu else torch.get_rng_state
    before = random_state()
    output = call(model, copied(inputs))  # which may be changed in place
    for hook in hooks:
        hook.remove()
    if not torch.equal(before, random_state()):
        raise Refused("forward must not draw random numbers; set probabilities to 0")
    results = results_in(output, set())
    return Run(calls, next(each for each in results if each.is_floating_point()))


def passed_on(tree: Any, kept: list[Seen], instead: Callable[[], list[Tensor]]) -> Any:
    """Keep the tensors of a tree, and return copies, whose gradients are kept.

    Copies, so that a change in place leaves what is kept as it was. A tensor that is there
    several times, such as x in attention(x, x, x), has one copy with the whole gradient.
    """
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    for tensor in tensors:
        zeros = torch.zeros((), device=tensor.device).expand(tensor.shape)
        kept.append(Seen(tensor.detach().clone(), tensor.grad_fn, zeros))
    seen, values = iter(kept), iter(instead() or tensors)
    copies = dict[int, Tensor]()

    def copy_of(tensor: Tensor) -> Tensor:
        keeper, value = next(seen), next(values)
        if value.shape != tensor.shape:  # a router chose other tokens
            value = tensor
        if not (torch.is_grad_enabled() and tensor.is_floating_point()):
            return value
        if value is tensor and id(tensor) in copies:
            return copies[id(tensor)]
        own = tensor
        if not tensor.requires_grad:  # such as a table's rows
            own = tensor.detach().requires_grad_()
        copy = copies[id(tensor)] = own.clone()
        copy.register_hook(partial(setattr, keeper, "gradient"))
        if value is not tensor:  # The gradient goes to where the tensor came from.
            copy.data = value.to(copy.dtype, copy=True)
        return copy

    return tree_map_only(Tensor, copy_of, tree)


class NoTies(TorchDispatchMode):
    """Refuses routers that choose between equal scores, which two models may do differently."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.topk.default and result[0].numel():
            least = result[0].min(-1, keepdim=True).values
            chosen, equal = ((x == least).sum(-1) for x in (result[0], args[0]))
            if ((chosen < equal) & least[..., 0].isfinite()).any():
                raise Refused(
                    "a router must not choose between equal scores, got some; use other "
                    "inputs, or weights that are not equal"
                )
        return result


@dataclass
class Subject:
    """A model in float64, how to build it as it is, its inputs, and its main dtype."""

    wide: nn.Module
    build: Callable[[], tuple[nn.Module, Inputs]]
    inputs: Inputs
    dtype: torch.dtype

    def run_wide(self, *instead: Instead) -> Run:
        with in_float64(), NoTies():
            done = run(self.wide, self.inputs, *instead)
        results = done.calls[-1].results
        if torch.is_grad_enabled() and not any(each.node for each in results):
            raise Refused("forward must be differentiable: leave out torch.no_grad")
        return done


def subjects_of(
    builds: list[Build], device: torch.device, dtype: torch.dtype
) -> list[Subject]:
    """Build each model as it is, and in float64, where its constants are exact.

    If a model cannot be built in float64, all models keep the constants that they have.
    """
    functions = [partial(built, build, device, dtype) for build in builds]
    narrow = [function() for function in functions]
    try:
        with in_float64():
            wide = [built(build, device, torch.float32)[0] for build in builds]
    except Exception as reason:
        print(f"Constants stay rounded: no float64 for {reason}", file=sys.stderr)
        wide = [function()[0] for function in functions]
    subjects = []
    held: dict[Any, Tensor] = {}
    for exact, (model, inputs), function in zip(wide, narrow, functions, strict=True):
        if not set(exact.parameters()).isdisjoint(model.parameters()):
            raise Refused("FUNCTION must build a model with new weights at each call")
        load(exact.double(), model)
        for weight in exact.parameters():  # to save memory, equal ones are held once
            if type(weight.data) is Tensor:
                same = held.setdefault((weight.shape, weight.sum().item()), weight.data)
                if torch.equal(weight.data, same):
                    weight.data = same
        largest = max(model.parameters(), key=Tensor.numel, default=torch.zeros(0))
        subjects.append(Subject(exact, function, inputs, largest.dtype))
    return subjects


def built(
    build: Build, device: torch.device, dtype: torch.dtype
) -> tuple[nn.Module, Inputs]:
    """Build a model for evaluation, without what torch.compile puts around it.

    Raises:
        Refused: the model comes without inputs, or with some that a run could change.
    """
    torch.manual_seed(0)
    pair = build(device, dtype)
    if not isinstance(pair, tuple):
        raise Refused("FUNCTION must return a model and its inputs")
    for leaf in tree_leaves(pair[1]):
        if not isinstance(leaf, Tensor) and hasattr(leaf, "__dict__"):
            raise Refused(
                "inputs must be tensors and plain values, because each run gets them "
                f"again, got {type(leaf).__name__}"
            )
    model: nn.Module = getattr(pair[0], "_orig_mod", pair[0])
    for weight in model.parameters():
        weight.requires_grad_(weight.is_floating_point())
    return model.eval(), pair[1]


@torch.no_grad()
def load(model: nn.Module, other: nn.Module) -> None:
    """Copy all weights, and buffers unless they are constants, which are nearly equal."""
    given = dict([*other.named_parameters(), *other.named_buffers()])
    for name, own in [*model.named_parameters(), *model.named_buffers()]:
        has_fractions = own.is_floating_point() or own.is_complex()
        is_constant = has_fractions and not isinstance(own, nn.Parameter)
        if not is_constant or error(own, given[name]) > 2.0**-6:
            own.copy_(given[name])
