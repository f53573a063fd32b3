"""Build models in float64, run them, and keep what their modules get and return."""

import copy
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from float64 import in_float64
from profiling.parts import results_in
from profiling.runs import Build, Inputs, call, copied
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class Refused(ValueError):
    """Something that this program does not take."""


def flat(tensor: Tensor) -> Tensor:
    """Return the numbers of any tensor, such as of a quantized weight."""
    is_plain = type(tensor) in (Tensor, nn.Parameter)
    return (tensor if is_plain else tensor.dequantize()).detach().flatten()


def numbers(tensor: Tensor) -> Tensor:
    """Return the numbers in float64. Those of masks, beyond 1e30, and NaN become 0."""
    tensor = flat(tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    wide = tensor.flatten().double()
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


@dataclass(eq=False)
class Run:
    """The calls of a model's modules, in the order in which they end.

    forced: calls of an equal model. Each call gets their inputs, and what contains it gets
        their results, so that a call's own result has no error of another call. Gradients
        pass as if nothing was forced.
    exchange: gets a call, what its module got, and its output, and returns the output.
    """

    model: nn.Module
    forced: dict[str, Call] = field(default_factory=dict)
    exchange: Callable[[Call, list[Any], Any], Any] | None = None
    calls: list[Call] = field(default_factory=list)
    _open: list[Call] = field(default_factory=list)
    _counts: Counter[str] = field(default_factory=Counter)

    def start(self, inputs: Inputs) -> "Run":
        hooks: list[Any] = []
        for path, module in self.model.named_modules():
            begin = partial(self._begin, path or "the model")
            hooks.append(module.register_forward_pre_hook(begin, with_kwargs=True))
            hooks.append(module.register_forward_hook(self._end, with_kwargs=True))
        torch.manual_seed(0)
        on_gpu = any(weight.is_cuda for weight in self.model.parameters())
        random_state = torch.cuda.get_rng_state if on_gpu else torch.get_rng_state
        before = random_state()
        output = call(self.model, copied(inputs))  # which may be changed in place
        for hook in hooks:
            hook.remove()
        if not torch.equal(before, random_state()):
            raise Refused(
                "forward must not draw random numbers; set probabilities to 0"
            )
        results = results_in(output, set())
        self.result = next(each for each in results if each.is_floating_point())
        return self

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._counts[path] += 1
        again = f" (call {self._counts[path]})" if self._counts[path] > 1 else ""
        leaves = tree_leaves((args, kwargs))
        begun = Call(
            name=path + again,
            module=module,
            outer=self._open[-1] if self._open else None,
            takes_one=len(leaves) == 1 and isinstance(leaves[0], Tensor),
        )
        self._open.append(begun)
        forced = self.forced.get(begun.name)
        return passed_on((args, kwargs), begun.inputs, forced.inputs if forced else [])

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        ended = self._open.pop()
        self.calls.append(ended)
        if self.exchange is not None:
            output = self.exchange(ended, tree_leaves((args, kwargs)), output)
        forced = self.forced.get(ended.name)
        return passed_on(output, ended.results, forced.results if forced else [])

    def forget_values(self) -> None:
        """Free memory once values are compared."""
        for each in self.calls:
            for seen in (*each.inputs, *each.results):
                seen.value = seen.value.new_empty(0)


def passed_on(tree: Any, kept: list[Seen], forced: list[Seen]) -> Any:
    """Keep tensors, and return aliases with gradients, which may have forced values."""
    values = iter(forced)

    def alias(tensor: Tensor) -> Tensor:
        zeros = torch.zeros((), device=tensor.device).expand(tensor.shape)
        seen = Seen(tensor.detach().clone(), tensor.grad_fn, zeros)
        kept.append(seen)
        other = next(values).value if forced else tensor
        if other.shape != tensor.shape:  # a router chose other tokens
            other = tensor
        if not (torch.is_grad_enabled() and tensor.is_floating_point()):
            return other
        if not tensor.requires_grad:  # such as a table's rows
            tensor = tensor.detach().requires_grad_().clone()
        same = tensor.view_as(tensor)
        same.register_hook(partial(setattr, seen, "gradient"))
        if forced:  # in value only
            same.data = other.to(same.dtype, copy=True)
        return same

    return tree_map_only(Tensor, alias, tree)


class NoTies(TorchDispatchMode):
    """Refuses routers that choose between equal scores, which two models may do differently."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.topk.default and result[0].numel():
            least = result[0].min(-1, keepdim=True).values
            chosen, all_equal = ((x == least).sum(-1) for x in (result[0], args[0]))
            if ((chosen < all_equal) & least[..., 0].isfinite()).any():
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

    def run_wide(self, **options: Any) -> Run:
        with in_float64(), NoTies():
            return Run(self.wide, **options).start(self.inputs)


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
        wide = [copy.deepcopy(model) for model, _ in narrow]
    subjects = []
    held: dict[Any, Tensor] = {}
    for exact, (model, inputs), function in zip(wide, narrow, functions, strict=True):
        if not set(exact.parameters()).isdisjoint(model.parameters()):
            raise Refused("FUNCTION must build a model with new weights at each call")
        load(exact.double(), model)
        hold_once(exact, held)
        largest = max(model.parameters(), key=Tensor.numel, default=torch.zeros(0))
        subjects.append(Subject(exact, function, inputs, largest.dtype))
    return subjects


def built(
    build: Build, device: torch.device, dtype: torch.dtype
) -> tuple[nn.Module, Inputs]:
    """Build a model for evaluation, without what torch.compile puts around it.

    dtype: the model and its inputs are cast to it, unless it is float32.

    Raises:
        Refused: the model comes without inputs, or with some that a run could change.
    """
    torch.manual_seed(0)
    pair = build(device, torch.float32)  # which casts nothing
    if not isinstance(pair, tuple):
        raise Refused("FUNCTION must return a model and its inputs")
    model: nn.Module = getattr(pair[0], "_orig_mod", pair[0])
    for leaf in tree_leaves(pair[1]):
        if not isinstance(leaf, Tensor) and hasattr(leaf, "__dict__"):
            raise Refused(
                "inputs must be tensors and plain values, because each run gets them "
                f"again, got {type(leaf).__name__}"
            )

    def cast(tensor: Tensor) -> Tensor:  # but not what is complex
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    if dtype != torch.float32:
        model._apply(cast)
        pair = model, tree_map_only(Tensor, cast, pair[1])
    for weight in model.parameters():
        weight.requires_grad_(weight.is_floating_point())
    return model.eval(), pair[1]


def hold_once(model: nn.Module, held: dict[Any, Tensor]) -> None:
    """Save memory: let weights that are equal to one that is held be the same numbers."""
    for weight in model.parameters():
        if type(weight.data) is Tensor:
            same = held.setdefault((weight.shape, weight.sum().item()), weight.data)
            if torch.equal(weight.data, same):
                weight.data = same


@torch.no_grad()
def load(model: nn.Module, other: nn.Module) -> None:
    """Copy all weights, and buffers unless they are constants, which are nearly equal."""
    given = dict([*other.named_parameters(), *other.named_buffers()])
    for name, own in [*model.named_parameters(), *model.named_buffers()]:
        has_fractions = own.is_floating_point() or own.is_complex()
        is_constant = has_fractions and not isinstance(own, nn.Parameter)
        if not is_constant or error(own, given[name]) > 2.0**-6:
            own.copy_(given[name])
