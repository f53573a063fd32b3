"""Find where two models part, and say whether that is a mistake or rounding.

PYTHONPATH=FOLDER python scripts/diverge.py --ours my_port:build --theirs hf:build
PYTHONPATH=FOLDER python scripts/diverge.py --ours my_model:build --dtype bfloat16

A mistake survives float64, and rounding does not. MODULE:FUNCTION is called without
arguments, and returns an nn.Module and its inputs: a tuple, or a dict of keywords. The exit
code is 0 for the same function, 1 for a mistake and for other weights, and 2 for bad input.
See docs/diverge.md.
"""

import argparse
import copy
import json
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # This checkout's tinyblock and examples, installed or not.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "examples"))

import torch
from float64 import in_float64
from lab.progress import show_progress
from lab.tables import number, share, terminal
from profile_block import DTYPES, device, new_file, users_build
from profiling.parts import parts_of, results_in
from profiling.runs import Build, Inputs, call
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

TOLERANCE = 2.0**-20  # a model may hold constants in float32, which has 24 bits
NOISE = 2.0**-26  # a gradient below this share of the largest one is rounding


class Refused(ValueError):
    """Something that this program does not take."""


# --- Numbers ------------------------------------------------------------------------------


def numbers(tensor: Tensor) -> Tensor:
    """Return finite numbers in float64: masks have infinities, and masked rows NaN."""
    if type(tensor) not in (Tensor, nn.Parameter):
        tensor = tensor.dequantize()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.detach().double().flatten().nan_to_num(0.0).clamp_(-1e100, 1e100)


def error(found: Tensor, exact: Tensor, least_norm: float = 1e-300) -> float:
    """Return the norm of the difference, divided by the norm of the exact numbers."""
    if found.numel() != exact.numel():
        return float("inf")
    off, norm = 0.0, 0.0
    parts = (each.flatten().split(2**20) for each in (found, exact))  # to bound memory
    for some, exact_ones in zip(*parts, strict=True):
        true = numbers(exact_ones)
        off += (numbers(some) - true).square().sum().item()
        norm += true.square().sum().item()
    return off**0.5 / max(norm**0.5, least_norm)


def difference(found: Tensor, exact: Tensor, least_norm: float = 1e-300) -> float:
    """Return the error in whatever order: rows may be permuted, and axes exchanged."""
    in_order = error(found, exact, least_norm)
    if in_order <= TOLERANCE or in_order == float("inf"):
        return in_order
    found, exact = numbers(found).sort().values, numbers(exact).sort().values
    return min(in_order, error(found, exact, least_norm))


def nearest(found: list[Tensor], exact: list[Tensor]) -> float:
    """Return the difference between our first tensor and the nearest of theirs."""
    if not found:
        return 0.0
    return min((difference(found[0], each) for each in exact), default=float("inf"))


def hash_of(weight: Tensor) -> int:
    """Return a sum over the numbers: the same if they are permuted, joined or split."""
    total = 0
    for some in weight.detach().flatten().split(2**20):  # which bounds the memory
        bits = (numbers(some) + 0.0).view(torch.int64)  # -0.0 becomes 0.0
        bits = (bits ^ (bits >> 29)) * 0x1CE4E5B9BF58476D
        total += int(((bits ^ (bits >> 32)) * 0x14D049BB133111EB).sum().item())
    return total


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


# --- A run --------------------------------------------------------------------------------


def tensors_in(tree: Any) -> list[Tensor]:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return tensors or list(results_in(tree, set()))


def floats(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [each for each in tensors if each.is_floating_point()]


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


# --- A model in float64 -------------------------------------------------------------------


@dataclass
class Subject:
    """A model as it was built, the same in float64, and their inputs."""

    narrow: nn.Module
    wide: nn.Module
    inputs: Inputs

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of most weights."""
        sizes: dict[torch.dtype, int] = defaultdict(int)
        pairs = zip(self.narrow.parameters(), self.wide.parameters(), strict=True)
        for weight, exact in pairs:
            if weight.is_floating_point():
                sizes[weight.dtype] += exact.numel()
        return max(sizes, key=sizes.__getitem__, default=torch.float32)

    def run_wide(self, **options: Any) -> Run:
        try:
            with in_float64(), NoTies():
                inputs = tree_map_only(Tensor, beginning, self.inputs)
                return Run(self.wide, **options).start(inputs)
        except Exception as refused:
            refused.add_note(
                "The model ran in float64. Give its eager form where a kernel has no "
                "float64, such as attn_implementation='eager'."
            )
            raise


def beginning(tensor: Tensor) -> Tensor:
    """Return a copy of an input, which may be changed in place, with a gradient."""
    copied = tensor.detach().clone()
    if copied.is_floating_point():
        copied.requires_grad_()
    return copied.clone()


def plain(model: nn.Module) -> nn.Module:
    """Return the model that torch.compile wraps, for evaluation."""
    inner: nn.Module = getattr(model, "_orig_mod", model)
    inner.eval()
    for weight in floats(inner.parameters()):
        weight.requires_grad_()
    return inner


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast to a lower dtype, but not complex buffers, which would become real."""
    casts = {torch.bfloat16: model.bfloat16, torch.float16: model.half}
    return casts[dtype]() if dtype in casts else model


def subjects_of(builds: list[Build], device: torch.device, dtype: torch.dtype) -> Any:
    """Build each model as it is, and in float64, where its constants are exact.

    If a model cannot be built in float64, all models keep the constants that they have.

    Raises:
        Refused: a model comes without inputs, or with some that a run could change.
    """
    narrow, inputs = [], []
    for build in builds:
        torch.manual_seed(0)
        built = build(device, torch.float32)  # which casts nothing
        if not isinstance(built, tuple):
            raise Refused("FUNCTION must return a model and its inputs")
        narrow.append(cast(plain(built[0]), dtype))
        inputs.append(built[1])
        for leaf in tree_leaves(built[1]):
            if not isinstance(leaf, Tensor) and hasattr(leaf, "__dict__"):
                raise Refused(
                    "inputs must be tensors and plain values, because each run gets "
                    f"them again, got {type(leaf).__name__}"
                )
    try:
        wide = []
        for build in builds:
            torch.manual_seed(0)
            with in_float64():
                built = build(device, torch.float32)
                wide.append(built[0] if isinstance(built, tuple) else built)
    except Exception as refused:
        print(f"Constants stay rounded: no float64 for {refused}", file=sys.stderr)
        wide = [copy.deepcopy(each) for each in narrow]
    weights = [id(each) for model in (*narrow, *wide) for each in model.parameters()]
    if len(weights) > len(set(weights)):
        raise Refused(
            "FUNCTION must build a model with weights of its own at each call"
        )
    wide = [plain(each.double()) for each in wide]
    for own, given in zip(wide, narrow, strict=True):
        load(own, given)
        for weight in plain_weights(given):
            weight.data = weight.data.new_empty(0)  # until `rounding`
    return [Subject(*each) for each in zip(narrow, wide, inputs, strict=True)]


def plain_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights that are no other class of tensors, such as quantized ones."""
    return [each for each in model.parameters() if type(each.data) is Tensor]


@torch.no_grad()
def load(wide: nn.Module, narrow: nn.Module) -> None:
    """Copy all weights, and buffers unless they are constants, which are nearly equal."""
    given = dict([*narrow.named_parameters(), *narrow.named_buffers()])
    for name, own in [*wide.named_parameters(), *wide.named_buffers()]:
        has_fractions = own.is_floating_point() or own.is_complex()
        is_constant = has_fractions and not isinstance(own, nn.Parameter)
        if not is_constant or error(own, given[name]) > 2.0**-6:
            own.copy_(given[name])


# --- Partners -----------------------------------------------------------------------------


@dataclass(eq=False)
class Pair:
    """Calls of partners, and how far their first inputs and results are from each other."""

    ours: Call
    theirs: Call
    input: float
    result: float

    @classmethod
    def of(cls, ours: Call, theirs: Call) -> "Pair":
        return cls(
            ours,
            theirs,
            nearest(ours.inputs.floats, theirs.inputs.floats),
            nearest(ours.results.floats, theirs.results.floats),
        )

    @property
    def names(self) -> str:
        return f"{self.ours.name} ({self.theirs.name})"


class Keys:
    """Hashes of the numbers in a module. An exchanged module has its partner's numbers."""

    def __init__(self, exchanged: dict[nn.Module, int] | None = None) -> None:
        self.exchanged = exchanged or {}
        self._known: dict[nn.Parameter, int] = {}

    def __getitem__(self, module: nn.Module) -> int:
        weights, total = dict[nn.Parameter, None](), 0
        waiting = [module]
        while waiting:
            each = waiting.pop()
            if each in self.exchanged:
                total += self.exchanged[each]
                continue
            weights |= dict.fromkeys(each.parameters(recurse=False))
            waiting += each.children()
        for weight in weights:
            if weight not in self._known:
                self._known[weight] = hash_of(weight)
            total += self._known[weight]
        return total % 2**64


def partners(ours: Run, theirs: Run, keys: Keys) -> list[Pair]:
    """Pair calls of modules that hold the same numbers.

    Of several, the first with the same input is taken, then the first. What is left is
    paired if it contains the same partners: modules around weights that differ.
    """
    waiting: dict[int, list[Call]] = defaultdict(list)
    for each in theirs.calls[:-1]:
        waiting[keys[each.module]].append(each)
    waiting.pop(0, None)  # they have no numbers
    found = {ours.calls[-1]: Pair.of(ours.calls[-1], theirs.calls[-1])}
    for each in ours.calls[:-1]:
        same = waiting[keys[each.module]]
        if same:
            pairs = (Pair.of(each, other) for other in same)
            found[each] = next(
                (pair for pair in pairs if pair.input <= TOLERANCE),
                Pair.of(each, same[0]),
            )
            same.remove(found[each].theirs)
    inside, their_inside = contents(ours), contents(theirs)
    partner = {each: pair.theirs for each, pair in found.items()}
    taken = set(partner.values())
    by_contents = {
        frozenset(their_inside[each] & taken): each
        for each in reversed(theirs.calls)  # of several, the innermost is kept
        if each not in taken
    }
    for each in ours.calls:
        within = frozenset(partner[c] for c in inside[each] if c in partner)
        if each not in found and within and within in by_contents:
            found[each] = Pair.of(each, by_contents.pop(within))
    return [found[each] for each in ours.calls if each in found]


def contents(run: Run) -> dict[Call, set[Call]]:
    """Return the calls that each call contains."""
    inside: dict[Call, set[Call]] = defaultdict(set)
    for each in run.calls:
        outer = each.outer
        while outer is not None:
            inside[outer].add(each)
            outer = outer.outer
    return inside


# --- Mistakes -----------------------------------------------------------------------------


def leaking(run: Run, pairs: list[Pair]) -> set[Any]:
    """Return autograd's nodes whose error reaches the result.

    A tensor that equals its partner's stops it: what came before was made good, or was
    only cut into modules in another way.
    """
    right = set()
    for pair in pairs:
        if pair.input <= TOLERANCE:
            right.add(first_node(pair.ours.inputs))
        if pair.result <= TOLERANCE:
            right.add(first_node(pair.ours.results))
    leaks: set[Any] = set()
    waiting = [run.result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in leaks and (node not in right or not leaks):
            leaks.add(node)
            waiting += [earlier for earlier, _ in node.next_functions]
    return leaks


def first_node(traced: Traced) -> Any:
    """Return the node of the first tensor of floats."""
    pairs = zip(traced.values, traced.nodes, strict=True)
    return next((node for value, node in pairs if value.is_floating_point()), None)


def wrong_in_forward(run: Run, pairs: list[Pair]) -> tuple[Pair, Pair | None]:
    """Return the innermost pair with the same input and another result.

    Also return the first pair in it that has another input, if there is one.
    """
    leaks = leaking(run, pairs)
    wrong = [
        pair
        for pair in pairs
        if pair.result > TOLERANCE and first_node(pair.ours.results) in leaks
    ]
    place = next((pair for pair in wrong if pair.input <= TOLERANCE), pairs[-1])
    inside = [pair for pair in wrong if pair.ours.is_inside(place.ours)]
    return place, next(iter(inside), None)


def wrong_in_backward(
    ours: Run, theirs: Run, pairs: list[Pair], keys: Keys
) -> tuple[Pair, float] | None:
    """Return the innermost pair whose result has the same gradient, but not its input.

    Or not its weights: those that no pair inside has, and no pair with another gradient.
    """
    runs = (ours, theirs)
    of_tensors = [
        g for run in runs for c in run.calls for g in c.results.float_gradients
    ]
    of_weights = [g for run in runs for g in run.weight_gradients.values()]
    least = [
        NOISE * max((each.norm().item() for each in gradients), default=0.0)
        for gradients in (of_tensors, of_weights)
    ]

    def off(found: list[Tensor], exact: list[Tensor]) -> float:
        return min(
            (difference(found[0], each, least[0]) for each in exact), default=0.0
        )

    judged = [p for p in pairs if max(p.input, p.result) <= TOLERANCE]
    same: list[Pair] = []
    others: list[Pair] = []
    for pair in judged:
        own, exact = (side.results.float_gradients for side in (pair.ours, pair.theirs))
        (same if off(own, exact) <= TOLERANCE else others).append(pair)
    seen = set[nn.Parameter]()
    for pair in same:
        sides = pair.ours, pair.theirs
        worst = 0.0
        if pair.ours.inputs.float_gradients:
            worst = off(*(side.inputs.float_gradients for side in sides))
        left_out = set(seen)
        for other in others:
            if not other.ours.is_inside(pair.ours):  # it may share a weight
                left_out.update(other.ours.module.parameters())
                left_out.update(other.theirs.module.parameters())
        gradients = []
        for run, side in zip(runs, sides, strict=True):
            known = run.weight_gradients
            weights = [w for w in side.module.parameters() if w not in left_out]
            gradients.append(joined([known[w] for w in weights if w in known]))
            seen.update(weights)
        if keys[pair.ours.module] == keys[pair.theirs.module]:
            length = max(map(len, gradients))  # zeros are left out
            padded = [nn.functional.pad(g, (0, length - len(g))) for g in gradients]
            worst = max(worst, difference(padded[0], padded[1], least[1]))
        if worst > TOLERANCE:
            return pair, worst
    return None


def joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0), *(each.flatten() for each in tensors)])


# --- Other weights ------------------------------------------------------------------------


@dataclass(eq=False)
class Layer:
    """A call of a layer that can be exchanged: it is linear, a norm, or an embedding.

    sizes: only a layer with the same sizes may take its place.
    after: how many calls with a partner ended before.
    """

    call: Call
    sizes: tuple[Any, ...]
    after: int

    def __call__(self, x: Tensor) -> Tensor:
        """Return the rows that the layer returns for a tensor of any shape."""
        x = x.reshape(self.call.inputs.values[0].shape)
        return rows_of(tensors_in(self.call.module(x))[0])


@dataclass(eq=False)
class Exchange:
    """A layer of ours and one of theirs that differ in weights only.

    function: what ours returns with their weights.
    off: how far our result is from that.
    """

    ours: Layer
    theirs: Layer
    function: Callable[[Tensor], Tensor]
    off: float


def exchanges(ours: Run, theirs: Run, pairs: list[Pair]) -> list[Exchange]:
    """Find what to exchange: layers with the same input, the nearest, then in order."""
    leaks = leaking(ours, pairs)
    lone = [
        each
        for each in layers_without_partner(ours, {pair.ours for pair in pairs})
        if first_node(each.call.results) in leaks
    ]
    their_lone = layers_without_partner(theirs, {pair.theirs for pair in pairs})
    found = []
    for own in lone:
        for other in their_lone:
            near = abs(own.after - other.after)
            if own.sizes != other.sizes or near > 2:
                continue
            exchange = exchange_of(own, other)
            if exchange:
                distance = exchange.off if exchange.off < 0.5 else 1.0
                same = Pair.of(own.call, other.call).input <= TOLERANCE
                found.append((distance, not same, near, exchange))
    chosen: list[Exchange] = []
    for *_, new in sorted(found, key=lambda each: each[:3]):
        if not any(
            overlap(new.ours.call, old.ours.call)
            or overlap(new.theirs.call, old.theirs.call)
            for old in chosen
        ):
            chosen.append(new)
    return chosen


def overlap(one: Call, other: Call) -> bool:
    is_same = one.module is other.module
    return is_same or one.is_inside(other) or other.is_inside(one)


@torch.no_grad()
def layers_without_partner(run: Run, known: set[Call]) -> list[Layer]:
    """Return calls that take and return one tensor, and do the same for all rows."""
    layers, after = [], 0
    for each in run.calls:
        states = [*each.module.parameters(), *each.module.buffers()]
        tensors = each.inputs.values, each.results.values
        after += each in known
        if each in known or not states or any(len(values) != 1 for values in tensors):
            continue
        x, y = tensors[0][0], tensors[1][0]
        layer = Layer(each, (x.numel(), y.shape[-1], y.numel()), after)
        if x.is_floating_point():
            layer.sizes += (x.shape[-1],)
            with in_float64():
                turned = rows_of(x).flip(0)
                if error(layer(turned).flip(0), layer(x)) > 1e-9:
                    continue
                sums = layer(x + x.cos()) + layer(0 * x), layer(x) + layer(x.cos())
                layer.sizes += (error(*sums) < 1e-9,)  # it is linear
        layers.append(layer)
    return layers


@torch.no_grad()
def exchange_of(ours: Layer, theirs: Layer) -> Exchange | None:
    """Return how to exchange two layers, if they are shown to differ in weights only.

    Both look up rows, or both are linear, or their results differ by factors of features.
    """
    x, y = ours.call.inputs.values[0], ours.call.results.values[0]
    with in_float64():
        u, v = rows_of(y), theirs(x)
    is_norm = x.is_floating_point() and not ours.sizes[-1]
    if is_norm:
        du, dv = u - u[:1], v - v[:1]  # without biases
        if error(du * dv[1:2], dv * du[1:2]) > 1e-9:
            return None
    order = torch.arange(u.shape[1], device=u.device)
    if error(u, v) > 0.5:  # the features may be permuted
        found = torch.cdist(u.T, v.T).argmin(1)
        order = found if len(found.unique()) == len(found) else order
    function = partial(rows_in_order, theirs, order, y.shape)
    return Exchange(ours, theirs, function, error(u, v[:, order]))


def rows_in_order(layer: Layer, order: Tensor, shape: torch.Size, x: Tensor) -> Tensor:
    return layer(x)[:, order].reshape(shape)


def rows_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


# --- Rounding -----------------------------------------------------------------------------


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
        return (self.squares / self.tensors) ** 0.5 if self.tensors else 0.0

    @property
    def least(self) -> float:
        return (self.least_squares / self.tensors) ** 0.5 if self.tensors else 0.0

    @property
    def ratio(self) -> float:
        return self.error / self.least if self.least else 1.0

    def add(self, found: Traced, exact: Traced, influence: Traced, dtype: Any) -> None:
        """Add the errors of tensors. influence: has gradients of the result's error."""
        gradients = influence.float_gradients
        for own, true, gradient in zip(
            found.floats, exact.floats, gradients, strict=True
        ):
            if own.shape != true.shape:  # a router chose other tokens: no error of ours
                continue
            if gradient.shape != true.shape:
                gradient = torch.zeros_like(true)
            is_seen = true.abs() < 1e30  # no mask
            own, true, gradient = own[is_seen], true[is_seen], gradient[is_seen]
            coarse = max(dtype, own.dtype, key=epsilon)
            squares = error(own, true) ** 2
            least = error(true.to(coarse), true) ** 2
            self.tensors += bool(squares or least)
            self.squares += squares
            self.least_squares += least
            self.share += ((numbers(own) - numbers(true)) @ numbers(gradient)).item()


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
    calls = {each.name: each for each in narrow.calls}
    influences = {each.name: each for each in wide.calls}
    with torch.no_grad():
        alone = subject.run_wide(forced=calls)
    of_modules = parts_of(subject.narrow)
    of_modules[subject.narrow] = "the model"
    names = {name: of_modules[each.module] for name, each in calls.items()}
    parts: dict[str, Part] = defaultdict(Part)
    for exact in alone.calls:
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


def narrowed(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Return a copy of an input, in the model's dtype if it is of floats."""
    return tensor.to(dtype if tensor.is_floating_point() else None, copy=True)


@torch.no_grad()
def run_narrow(subject: Subject, compiled: bool) -> Run:
    """Run a model in its own dtype. If compiled, what each module does itself is compiled."""
    if compiled:
        for module in subject.narrow.modules():
            module.forward = torch.compile(module.forward, dynamic=False)
    inputs = tree_map_only(Tensor, partial(narrowed, subject.dtype), subject.inputs)
    with torch.compiler.set_stance("default" if compiled else "force_eager"):
        return Run(subject.narrow).start(inputs)


# --- The answer ---------------------------------------------------------------------------


@dataclass
class Answer:
    """The first line, the exit code, and a table."""

    line: str
    exit_code: int
    columns: list[str]
    rows: list[list[Any]]


def compare(ours: Subject, theirs: Subject) -> Answer | dict[str, str]:
    """Compare two models in float64. Return partners if they are the same function.

    Raises:
        Refused: they get other inputs, or their results have other sizes.
    """
    require_same_inputs(ours.inputs, theirs.inputs)
    a, b = ours.run_wide(), theirs.run_wide()
    if a.result.numel() != b.result.numel():
        sizes = f"{list(a.result.shape)} and {list(b.result.shape)}"
        raise Refused(f"results must have the same size, got {sizes}")
    keys = Keys()
    pairs = partners(a, b, keys)
    off = error(a.result, b.result)
    if off <= TOLERANCE:
        names = {pair.ours.name: pair.theirs.name for pair in pairs}
        return compare_backward(a, b, pairs, keys) or names
    others = exchanges(a, b, pairs)
    if others:
        functions = {each.ours.call.module: each.function for each in others}
        a = ours.run_wide(exchanged=functions)
        off = error(a.result, b.result)
        same_keys = {
            each.ours.call.module: keys[each.theirs.call.module] for each in others
        }
        keys = Keys(same_keys)
        others = [each for each in others if each.off > TOLERANCE]
        if off <= TOLERANCE:
            return other_weights(others)
        pairs = partners(a, b, keys)
    place, first = wrong_in_forward(a, pairs)
    same_numbers = keys[place.ours.module] == keys[place.theirs.module]
    if not same_numbers and holds_other_numbers(place):
        line = f"OTHER WEIGHTS in {place.names}, so a mistake in it would not be seen"
    else:
        line = (
            f"MISTAKE in forward, in {place.names}: its result is off by "
            f"{figure(place.result)}, the model's by {figure(off)}"
        )
    if first:
        line += f"; it shows first in {first.ours.name}"
    if others:
        line += f"; {len(others)} modules have other weights"
    return table_around(line, pairs, place)


def require_same_inputs(ours: Inputs, theirs: Inputs) -> None:
    known = tensors_in(theirs)
    for each in tensors_in(ours):
        if any(each.shape == t.shape and error(each, t) == 0 for t in known):
            return
    sizes = [[list(each.shape) for each in tensors_in(tree)] for tree in (ours, theirs)]
    raise Refused(
        f"both models must get the same input, got tensors of {sizes[0]} and {sizes[1]} "
        "without an equal one; draw them with a torch.Generator of the same seed"
    )


def holds_other_numbers(pair: Pair) -> bool:
    """Say whether each of two modules holds numbers that the other one lacks."""
    ours, theirs = (
        joined([numbers(each) for each in each.module.state_dict().values()])
        for each in (pair.ours, pair.theirs)
    )
    lacks = [~torch.isin(ours, theirs), ~torch.isin(theirs, ours)]
    return all(bool(each.any()) for each in lacks)


def compare_backward(
    ours: Run, theirs: Run, pairs: list[Pair], keys: Keys
) -> Answer | None:
    if not (ours.result.requires_grad and theirs.result.requires_grad):
        return None
    for run in (ours, theirs):
        for each in run.calls:  # which are compared, and need memory
            each.inputs.values.clear()
            each.results.values.clear()
        for weight in floats(run.model.parameters()):
            zeros = torch.zeros(weight.shape, device=weight.device)
            run.weight_gradients[weight] = zeros  # float32: 24 bits are enough
        with in_float64():
            run.backward()
    found = wrong_in_backward(ours, theirs, pairs, keys)
    if not found:
        return None
    place, off = found
    line = f"MISTAKE in backward, in {place.names}: its gradients are off by {off:.1e}"
    return table_around(line, pairs, place)


def table_around(line: str, pairs: list[Pair], place: Pair) -> Answer:
    at = pairs.index(place)
    columns = ["module", "partner", "input off by", "result off by"]
    rows = [
        [pair.ours.name, pair.theirs.name, pair.input, pair.result]
        for pair in pairs[max(at - 8, 0) : at + 5]
    ]
    return Answer(line, 1, columns, rows)


def other_weights(exchanged: list[Exchange]) -> Answer:
    line = f"OTHER WEIGHTS in {len(exchanged)} modules, else the same function"
    columns = ["module", "partner", "result off by"]
    rows = [
        [each.ours.call.name, each.theirs.call.name, each.off] for each in exchanged
    ]
    return Answer(line, 1, columns, rows)


def describe(
    ours: Subject, own: Rounding, theirs: Rounding | None, pairs: dict[str, str]
) -> Answer:
    """Say where the error of a dtype comes from, beside the least one and the partner's.

    pairs: the name of a call of theirs for that of ours.
    """
    partner: dict[str, Part] = {}
    if theirs:
        for name, other in pairs.items():
            partner[own.names[name]] = theirs.parts[theirs.names[other]]
    rows, excess = rows_of_parts(own, partner, is_alone=theirs is None)
    columns = ["part", "calls", "error", "least", "of least", "share", "partner's"]
    line = f"in {str(ours.dtype)[6:]}, the result is off by {own.off:.1e}"
    if theirs:
        line += f", theirs by {theirs.off:.1e}"
    else:
        columns.pop()
    if rows:
        line += f"; most comes from {rows[0][0]} ({share(rows[0][5], 2)})"
    if excess:
        worst = max(excess, key=excess.__getitem__)
        than = "its partner's error" if theirs else "the least error"
        line += f"; at most {excess[worst]:.2f} times {than}: {worst}"
    return Answer(line, 0, columns, rows)


def rows_of_parts(
    own: Rounding, partner: dict[str, Part], is_alone: bool
) -> tuple[list[list[Any]], dict[str, float]]:
    """Return rows by their share, and how many times the expected error each part has."""
    rows: list[list[Any]] = []
    excess = {}
    missed = 1.0
    for name, part in sorted(own.parts.items(), key=lambda item: -item[1].share):
        missed -= part.share
        if not part.squares:
            continue
        rows.append([name, part.calls, part.error, part.least, part.ratio, part.share])
        if is_alone:
            excess[name] = part.ratio
            continue
        rows[-1].append(partner[name].ratio if name in partner else "")
        if name in partner:  # which cannot have less than the least error
            excess[name] = part.ratio / max(partner[name].ratio, 1.0)
    if own.off and abs(missed) > 0.01:
        rest = ["other experts, and second order", "", "", "", "", missed]
        rows.append(rest if is_alone else [*rest, ""])
    return rows, excess


def figure(value: float) -> str:
    return f"{value:.1e}" if value != float("inf") else "its size"


def cell(column: str, value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    if column == "share":
        return share(value, 2)
    return number(value) if 0.01 < value < 1e4 else f"{value:.1e}" if value else "0"


def progress(doing: str) -> None:
    if sys.stderr.isatty():
        show_progress(doing)


def answer(
    builds: list[Build],
    device: torch.device,
    dtype: torch.dtype,
    compiled: bool = False,
) -> Answer:
    """Build the models, and compare them, or one with itself in float64."""
    progress("building")
    subjects = subjects_of(builds, device, dtype)
    ours = subjects[0]
    prefix, partner, pairs = "", None, dict[str, str]()
    if len(subjects) > 1:
        progress("comparing in float64")
        found = compare(*subjects)
        if isinstance(found, Answer):
            return found
        pairs = found
        prefix = "SAME FUNCTION; "
        progress("comparing roundings")
        partner = rounding(subjects.pop())  # and free it
    own = rounding(ours)
    if compiled:
        eager, own = own, rounding(ours, compiled)
        if not partner:
            partner, pairs = eager, {name: name for name in own.names}
    described = describe(ours, own, partner, pairs)
    described.line = prefix + described.line
    return described


def main(arguments: list[str] | None = None) -> int:
    """Print the answer, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    form = "MODULE:FUNCTION"
    add("--ours", metavar=form, required=True, help="check the model that it returns")
    add("--theirs", metavar=form, help="compare with the model that it returns")
    add(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="cast the models to this dtype (default: leave them as they are built)",
    )
    add("--compile", action="store_true", help="compile each module of ours alone")
    add(
        "--device",
        type=device,
        choices=["cuda", "cpu"],
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="run on this device (default: %(default)s)",
    )
    add("--json", type=new_file, metavar="FILE", help="write all figures")
    typed = parser.parse_args(arguments)
    try:
        builds = [users_build(typed.ours, given_by="--ours")]
        if typed.theirs:
            builds.append(users_build(typed.theirs, given_by="--theirs"))
    except ValueError as error:
        parser.error(str(error))
    place, dtype = torch.device(typed.device), getattr(torch, typed.dtype)
    try:
        found = answer(builds, place, dtype, typed.compile)
    except Refused as refused:
        parser.error(str(refused))
    except Exception:  # of the user's code: 1 would say that it has a mistake
        traceback.print_exc()
        return 2
    progress("")
    rows = [list(map(cell, found.columns, row)) for row in found.rows]
    print(found.line, terminal(found.columns, rows), sep="\n\n")
    if typed.json:
        typed.json.write_text(json.dumps(asdict(found), indent=1))
    return found.exit_code


if __name__ == "__main__":
    sys.exit(main())
