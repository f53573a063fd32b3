"""Compare two models in float64, and name the module in which they part."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from float64 import in_float64
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .runs import Call, Refused, Run, Seen, Subject, error, flat, numbers

TOLERANCE = 2.0**-20  # a model may hold constants in float32, which has 24 bits
NOISE = 2.0**-26  # a gradient below this share of the largest one is rounding
EXACT = 1e-9  # float64 has 1e-16


@dataclass
class Answer:
    """The first line, the exit code, and a table."""

    line: str
    exit_code: int
    columns: list[str]
    rows: list[list[Any]]


@dataclass(eq=False)
class Pair:
    """Calls of partners, and how far their first inputs and results are from each other."""

    ours: Call
    theirs: Call
    same_weights: bool
    input: float
    result: float

    @property
    def names(self) -> str:
        return f"{self.ours.name} ({self.theirs.name})"


def compare(ours: Subject, theirs: Subject) -> Answer | dict[str, str]:
    """Compare two models in float64.

    Return the partners' names for the names of our calls, if they are the same function.

    Raises:
        Refused: they get other inputs, or their results have other sizes.
    """
    inputs = [
        [leaf for leaf in tree_leaves(each.inputs) if isinstance(leaf, Tensor)]
        for each in (ours, theirs)
    ]
    fewer, more = sorted(inputs, key=len)  # a port may take fewer
    if not all(any(error(one, other) == 0 for other in more) for one in fewer):
        sizes = [[list(each.shape) for each in tensors] for tensors in inputs]
        raise Refused(
            f"both models must get the same input, got tensors of {sizes[0]} and "
            f"{sizes[1]} with other numbers; draw them with a torch.Generator of the "
            "same seed"
        )
    a, b = ours.run_wide(), theirs.run_wide()
    if a.result.numel() != b.result.numel():
        got = f"{list(a.result.shape)} and {list(b.result.shape)}"
        raise Refused(f"results must have the same size, got {got}")
    pairs = partners(a, b, {})
    if error(a.result, b.result) <= TOLERANCE:
        names = {pair.ours.name: pair.theirs.name for pair in pairs}
        return wrong_in_backward(a, b, pairs) or names
    same = [pair for pair in pairs if pair.same_weights]
    own = layers(a.calls, [pair.ours for pair in same])
    exchange = Exchange(
        ours={call.module: is_linear for call, is_linear in own.items()},
        theirs=layers(b.calls, [pair.theirs for pair in same]),
    )
    if exchange.ours:
        a = ours.run_wide(exchange=exchange)
        pairs = partners(a, b, exchange.found)
    others = [pair for pair in exchange.found.values() if pair.result > TOLERANCE]
    off = error(a.result, b.result)
    if off > TOLERANCE:
        return wrong_in_forward(a, pairs, off, {pair.ours.module for pair in others})
    modules = "1 module" if len(others) == 1 else f"{len(others)} modules"
    line = f"OTHER WEIGHTS in {modules}, else the same function"
    columns = ["module", "partner", "result off by"]
    rows = [[pair.ours.name, pair.theirs.name, pair.result] for pair in others]
    return Answer(line, 1, columns, rows)


# --- Partners ---------------------------------------------------------------------------


def partners(ours: Run, theirs: Run, exchanged: dict[nn.Module, Pair]) -> list[Pair]:
    """Pair calls of modules that hold the same numbers, in the order of our calls.

    Of several, the first with the same input is taken, then the first. What is left is
    paired if it contains the same partners: modules around weights that differ.
    """
    keys = dict[nn.Module, int]()

    def key(module: nn.Module) -> int:
        if module in exchanged:
            module = exchanged[module].theirs.module
        if module not in keys:
            own = sum(map(hash_of, module.parameters(recurse=False)))
            keys[module] = (own + sum(map(key, module.children()))) % 2**64
        return keys[module]

    def pair(one: Call, other: Call) -> Pair:
        return Pair(
            one,
            other,
            same_weights=key(one.module) == key(other.module),
            input=difference(values(one.inputs), values(other.inputs)),
            result=difference(values(one.results), values(other.results)),
        )

    *own, model = ours.calls
    *others, their_model = theirs.calls
    found = {model: pair(model, their_model)}
    waiting = defaultdict[int, list[Call]](list)
    for each in others:
        waiting[key(each.module)].append(each)
    waiting.pop(0, None)  # modules without numbers
    for each in own:
        same = waiting[key(each.module)]
        if same:
            pairs = (pair(each, other) for other in same)
            first = next((new for new in pairs if new.input <= TOLERANCE), None)
            found[each] = first or pair(each, same[0])
            same.remove(found[each].theirs)
    known = list(found.values())
    taken = {new.theirs for new in known}
    by_contents = {
        frozenset(new for new in known if new.theirs.is_inside(each)): each
        for each in reversed(others)  # of several, the innermost is kept
        if each not in taken
    }
    for each in own:
        inside = frozenset(new for new in known if new.ours.is_inside(each))
        if each not in found and inside and inside in by_contents:
            found[each] = pair(each, by_contents.pop(inside))
    return [found[each] for each in ours.calls if each in found]


def hash_of(weight: Tensor) -> int:
    """Return a sum over the numbers: the same if they are permuted, joined or split."""
    total = 0
    for some in flat(weight).split(2**20):  # to bound memory
        bits = (numbers(some) + 0.0).view(torch.int64)  # -0.0 becomes 0.0
        bits = (bits ^ (bits >> 29)) * 0x1CE4E5B9BF58476D
        total += int(((bits ^ (bits >> 32)) * 0x14D049BB133111EB).sum().item())
    return total


def values(seen: list[Seen]) -> list[Tensor]:
    return [each.value for each in seen if each.value.is_floating_point()]


def difference(
    found: list[Tensor], exact: list[Tensor], least_norm: float = 1e-300
) -> float:
    """Return the error of our first tensor against the nearest of theirs.

    It may be in another order: rows may be permuted, and axes exchanged.
    """
    if not found:
        return 0.0
    errors = [float("inf")]
    for each in exact:
        errors.append(error(found[0], each, least_norm))
        if TOLERANCE < errors[-1] < float("inf"):
            own, other = (numbers(x).sort().values for x in (found[0], each))
            errors.append(error(own, other, least_norm))
    return min(errors)


# --- Forward ----------------------------------------------------------------------------


def wrong_in_forward(
    run: Run, pairs: list[Pair], off: float, others: set[nn.Module]
) -> Answer:
    """Name the innermost pair with the same input, in the same order, and another result.

    Also name the first pair in it that has another input or order, if there is one.
    off: how far the result of the model is off.
    others: modules with other weights.
    """
    leaks = leaking(run, pairs)
    wrong = [
        pair
        for pair in pairs
        if pair.result > TOLERANCE and first_node(pair.ours.results) in leaks
    ]
    same = (pair for pair in wrong if pair.input <= TOLERANCE and is_in_order(pair))
    place = next(same, pairs[-1])
    line = (
        f"MISTAKE in forward, in {place.names}: its result is off by "
        f"{place.result:.1e}, the model's by {off:.1e}"
    )
    has_others = not others.isdisjoint(place.ours.module.modules())
    if has_others or not (place.same_weights or one_holds_all(place)):
        line = f"OTHER WEIGHTS in {place.names}, and perhaps a mistake"
    inside = [pair.ours.name for pair in wrong if pair.ours.is_inside(place.ours)]
    if inside:
        line += f"; it shows first in {inside[0]}"
    return table_around(place, pairs, line)


def is_in_order(pair: Pair) -> bool:
    """Say whether the first input equals one of theirs without a permutation."""
    ours, theirs = values(pair.ours.inputs), values(pair.theirs.inputs)
    return not ours or any(error(ours[0], each) <= TOLERANCE for each in theirs)


def one_holds_all(pair: Pair) -> bool:
    """Say whether one module holds all numbers of the other, such as without biases."""
    ours, theirs = (
        torch.cat([numbers(each) for each in call.module.state_dict().values()])
        for call in (pair.ours, pair.theirs)
    )
    found = torch.isin(ours, theirs), torch.isin(theirs, ours)
    return any(bool(each.all()) for each in found)


def leaking(run: Run, pairs: list[Pair]) -> set[Any]:
    """Return autograd's nodes whose error reaches the result.

    A tensor that equals its partner's stops it: what came before was made good, or was
    only cut into modules in another way.
    """
    right = {first_node(pair.ours.inputs) for pair in pairs if pair.input <= TOLERANCE}
    right |= {
        first_node(pair.ours.results) for pair in pairs if pair.result <= TOLERANCE
    }
    leaks = set[Any]()
    waiting = [run.result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in right and node not in leaks:
            leaks.add(node)
            waiting += [earlier for earlier, _ in node.next_functions]
    return leaks


def first_node(seen: list[Seen]) -> Any:
    """Return the node of the first tensor of floats."""
    nodes = (each.node for each in seen if each.value.is_floating_point())
    return next(nodes, None)


def table_around(place: Pair, pairs: list[Pair], line: str) -> Answer:
    at = pairs.index(place)
    columns = ["module", "partner", "input off by", "result off by"]
    rows = [
        [pair.ours.name, pair.theirs.name, pair.input, pair.result]
        for pair in pairs[max(at - 8, 0) : at + 5]
    ]
    return Answer(line, 1, columns, rows)


# --- Other weights ----------------------------------------------------------------------


@dataclass
class Exchange:
    """Lets layers of theirs compute in place of ours, if they differ in weights only.

    Both get the same input, and are linear, or norms whose results differ by the same
    factors in all rows, or embeddings.

    ours, theirs: layers without a partner, and whether they are linear.
    found: our module, and what it is exchanged with.
    """

    ours: dict[nn.Module, bool]
    theirs: dict[Call, bool]
    found: dict[nn.Module, Pair] = field(default_factory=dict)

    def __call__(self, call: Call, given: list[Any], y: Any) -> Any:
        if call.module not in self.ours or not isinstance(y, Tensor):
            return y
        x = given[0]
        alike = []
        for other, is_linear in self.theirs.items():
            before, after = other.inputs[0].value, other.results[0].value
            if error(x, before) > TOLERANCE or after.numel() != y.numel():
                continue
            exact = other.module(x.reshape(before.shape)).reshape(y.shape)
            are_linear = is_linear and self.ours[call.module]
            are_embeddings = not x.is_floating_point()
            if are_linear or are_embeddings or differ_by_factors(y, exact):
                alike.append((error(y, exact), other, exact))
        if not alike:
            return y
        # The nearest or, if no weight was loaded, the first.
        off, other, exact = min(alike, key=lambda each: min(each[0], 0.5))
        del self.theirs[other]
        self.found[call.module] = Pair(call, other, False, 0.0, off)
        return exact


def layers(calls: list[Call], known: list[Call]) -> dict[Call, bool]:
    """Return the outermost layers outside of known calls, and whether they are linear.

    They take and return one tensor, and hold numbers.
    """
    found = dict[Call, bool]()
    for call in reversed(calls):  # outer ones first
        has_numbers = [*call.module.parameters(), *call.module.buffers()]
        is_simple = call.takes_one and len(call.results) == 1 and has_numbers
        others = [*known, *found]
        if is_simple and not any(call is e or call.is_inside(e) for e in others):
            linear = is_linear(call)
            if linear or not list(call.module.children()):
                found[call] = linear
    return dict(reversed(found.items()))


@torch.no_grad()
def is_linear(call: Call) -> bool:
    """Say whether sums of inputs give sums of results, apart from a bias."""
    x = call.inputs[0].value
    if not x.is_floating_point():
        return False
    with in_float64():
        y = [call.module(each) for each in (x, x.cos(), x + x.cos(), 0 * x)]
        return isinstance(y[0], Tensor) and error(y[0] + y[1], y[2] + y[3]) < EXACT


def differ_by_factors(found: Tensor, exact: Tensor) -> bool:
    """Say whether each feature differs by a factor and a bias, the same for all rows."""
    u, v = (each.flatten(0, -2) for each in (found, exact))
    u, v = u - u[:1], v - v[:1]
    return len(u) > 2 and error(u * v[1:2], v * u[1:2]) < EXACT


# --- Backward ---------------------------------------------------------------------------


def wrong_in_backward(ours: Run, theirs: Run, pairs: list[Pair]) -> Answer | None:
    """Name the innermost pair whose result has the same gradient, but not its input.

    Or not its weights. Those of several calls are compared in the whole model.
    """
    sums = backward(ours) | backward(theirs)

    def total(call: Call) -> Tensor:
        zeros = torch.zeros(3, dtype=torch.float64)
        return sum((sums[each] for each in call.module.parameters()), zeros)

    def held(call: Call) -> int:
        return sum({hash_of(each) for each in call.module.parameters()}) % 2**64

    calls = [*ours.calls, *theirs.calls]
    uses = Counter(w for call in calls for w in call.module.parameters(recurse=False))
    norms = [each.norm().item() for call in calls for each in gradients(call.results)]
    least = max(NOISE * max(norms), 1e-300)
    for pair in pairs:
        one, other = pair.ours, pair.theirs
        of_results = difference(gradients(one.results), gradients(other.results), least)
        if max(pair.input, pair.result, of_results) > TOLERANCE:
            continue
        off = difference(gradients(one.inputs), gradients(other.inputs), least)
        weights = [*one.module.parameters(), *other.module.parameters()]
        is_shared = any(uses[each] > 1 for each in weights)
        is_comparable = pair.same_weights and not is_shared
        if pair is pairs[-1]:  # tied weights count once
            is_comparable = held(one) == held(other)
        if is_comparable:
            exact = total(other)
            sums_off = (total(one) - exact)[1:].norm().item()
            off = max(off, sums_off / max(exact[0].sqrt().item(), least))
        if off > TOLERANCE:
            line = (
                f"MISTAKE in backward, in {pair.names}: its gradients are off by "
                f"about {off:.0e}"
            )
            return table_around(pair, pairs, line)
    return None


def gradients(seen: list[Seen]) -> list[Tensor]:
    return [each.gradient for each in seen if each.value.is_floating_point()]


def backward(run: Run) -> dict[nn.Parameter, Tensor]:
    """Go backward, and return sums of each weight's gradient, instead of the gradient.

    They are the same if numbers are permuted, joined or split: the sum of squares, and
    two sums with factors that depend on the numbers of the weight.
    """
    run.forget_values()
    weights = list(run.model.parameters())
    sums = {each: torch.zeros(3, dtype=torch.float64) for each in weights}

    def keep(weight: nn.Parameter) -> None:
        assert weight.grad is not None
        parts = (flat(each).split(2**20) for each in (weight.grad, weight))
        for some, values in zip(*parts, strict=True):  # to bound memory
            gradient, angle = numbers(some), 1e3 * numbers(values)
            terms = gradient, angle.cos(), angle.sin()
            sums[weight] += torch.stack([gradient @ each for each in terms]).cpu()
        weight.grad = None

    hooks = [
        each.register_post_accumulate_grad_hook(keep)
        for each in weights
        if each.requires_grad
    ]
    # The gradient of the result depends on its values alone.
    result = numbers(run.result).view_as(run.result)
    size = result.square().mean().sqrt().clamp_min(1e-300)
    with in_float64():
        run.result.backward(torch.cos(3 * result / size))
    for hook in hooks:
        hook.remove()
    return sums
