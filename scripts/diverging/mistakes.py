"""Compare two models in float64, and name the module in which they part."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from float64 import in_float64
from lab.options import Refused
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .runs import Call, Run, Seen, Subject, error, numbers

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
    """Calls of partners, and how far their first inputs and results are from each other.

    The results of modules, but not of the models, are also compared sorted.
    """

    ours: Call
    theirs: Call
    same_weights: bool
    input: float
    result: float

    @property
    def names(self) -> str:
        return f"{self.ours.name} ({self.theirs.name})"


def with_table(line: str, pairs: list[Pair], *places: Pair) -> Answer:
    """Return an answer with a table of pairs or, if some are named, of those around them."""
    columns = ["module", "partner", "input off by", "result off by"]
    rows = [[p.ours.name, p.theirs.name, p.input, p.result] for p in pairs]
    if places:
        at = [pairs.index(place) for place in places]
        rows = rows[max(min(at) - 8, 0) : max(at) + 5]
    return Answer(line, 1, columns, rows)


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
    pairs = partners(a, b, [])
    if error(a.result, b.result) <= TOLERANCE:
        names = {pair.ours.name: pair.theirs.name for pair in pairs}
        return wrong_in_backward(a, b, pairs) or names
    a, exchanged = run_exchanged(ours, a, b, pairs)
    pairs = partners(a, b, exchanged)
    off = error(a.result, b.result)
    if off > TOLERANCE:
        return wrong_in_forward(a, pairs, off)
    others = [pair for pair in exchanged if pair.result > TOLERANCE]
    modules = "1 module" if len(others) == 1 else f"{len(others)} modules"
    line = f"OTHER WEIGHTS in {modules}, else the same function"
    return with_table(line, others)


def partners(ours: Run, theirs: Run, known: list[Pair]) -> list[Pair]:
    """Pair calls of modules that hold the same numbers, in the order of our calls.

    What is left is paired if the same partners were called in it: modules around weights
    that differ.
    """
    hashed = cache(hash_of)
    found = dict[Call, Pair]()

    def numbers_in(call: Call) -> int:
        return sum({hashed(each) for each in call.module.parameters()}) % 2**64

    def partners_in(call: Call) -> frozenset[Pair]:
        return frozenset(
            pair
            for pair in known
            if pair.ours.is_inside(call) or pair.theirs.is_inside(call)
        )

    def pair_up(one: Call, other: Call) -> None:
        found[one] = Pair(
            one,
            other,
            same_weights=numbers_in(one) == numbers_in(other),
            input=difference(one.inputs, other.inputs, in_any_order=False),
            result=difference(
                one.results, other.results, in_any_order=one is not model
            ),
        )

    model = ours.calls[-1]
    pair_up(model, theirs.calls[-1])
    for pair in known:
        pair_up(pair.ours, pair.theirs)
    keys: list[Callable[[Call], Hashable]] = [numbers_in, partners_in]
    for key in keys:
        known = list(found.values())
        taken = {pair.theirs for pair in known}
        waiting = defaultdict[Hashable, list[Call]](list)
        for other in theirs.calls:
            if other not in taken:
                waiting[key(other)].append(other)
        for one in ours.calls:
            if one not in found and key(one) and waiting[key(one)]:
                pair_up(one, waiting[key(one)].pop(0))
    return [found[call] for call in ours.calls if call in found]


def hash_of(weight: Tensor) -> int:
    """Return a sum over the numbers: the same if they are permuted, joined or split."""
    bits = (numbers(weight) + 0.0).view(torch.int64)  # -0.0 becomes 0.0
    bits ^= bits >> 29
    bits *= 0x1CE4E5B9BF58476D
    bits ^= bits >> 32
    bits *= 0x14D049BB133111EB
    return int(bits.sum().item())


def difference(
    found: list[Seen],
    exact: list[Seen],
    of: str = "value",
    least_norm: float = 1e-300,
    in_any_order: bool = True,
) -> float:
    """Return the error of our first tensor of floats against the nearest of theirs.

    In any order, rows may be permuted, and axes exchanged. No tensor has no error.
    """
    ours, theirs = (
        [getattr(each, of) for each in floats(seen)] for seen in (found, exact)
    )
    if not ours:
        return 0.0
    errors = [error(ours[0], each, least_norm) for each in theirs]
    if in_any_order and min(errors, default=0.0) > TOLERANCE:
        own, *others = (numbers(each).sort().values for each in (ours[0], *theirs))
        errors += [error(own, each, least_norm) for each in others]
    return min(errors, default=float("inf"))


def floats(seen: list[Seen]) -> list[Seen]:
    return [each for each in seen if each.value.is_floating_point()]


def wrong_in_forward(run: Run, pairs: list[Pair], off: float) -> Answer:
    """Name the innermost pair with the same input and another result.

    Also name the first pair in it that has another input, if there is one.
    off: how far the result of the model is off.
    """
    leaks = leaking(run, pairs)
    place = next((pair for pair in leaks if pair.input <= TOLERANCE), pairs[-1])
    line = (
        f"MISTAKE in forward, in {place.names}: its result is off by "
        f"{place.result:.1e}, the model's by {off:.1e}"
    )
    if not place.same_weights:
        line = f"OTHER WEIGHTS in {place.names}, and perhaps a mistake"
    inside = [pair for pair in leaks if pair.ours.is_inside(place.ours)][:1]
    for first in inside:
        line += f"; it shows first in {first.ours.name}"
    return with_table(line, pairs, place, *inside)


def leaking(run: Run, pairs: list[Pair]) -> list[Pair]:
    """Return the pairs with another result, whose error reaches the model's result.

    This walks back from the model's result, and stops where a tensor equals its partner's:
    what came before was made good, or was only cut into modules in another way.
    """

    def node(seen: list[Seen]) -> Any:
        return floats(seen)[0].node if floats(seen) else None

    right = {node(pair.ours.inputs) for pair in pairs if pair.input <= TOLERANCE}
    right |= {node(pair.ours.results) for pair in pairs if pair.result <= TOLERANCE}
    leaks = set[Any]()
    waiting = [run.result.grad_fn]
    while waiting:
        here = waiting.pop()
        if here is not None and here not in right and here not in leaks:
            leaks.add(here)
            waiting += [earlier for earlier, _ in here.next_functions]
    return [pair for pair in pairs if node(pair.ours.results) in leaks]


def run_exchanged(
    ours: Subject, a: Run, b: Run, pairs: list[Pair]
) -> tuple[Run, list[Pair]]:
    """Run ours again. A layer without a partner returns what theirs of the same input did.

    Return how far the results of these layers were off.
    """
    same = [pair for pair in pairs if pair.same_weights]
    own = {call.name for call in layers(a.calls, {pair.ours for pair in same})}
    others = layers(b.calls, {pair.theirs for pair in same})
    found = list[Pair]()

    def exchange(call: Call, has_ended: bool) -> list[Tensor]:
        if call.name not in own or not has_ended:
            return []
        result = call.results[0]
        alike = [
            Pair(call, other, False, 0.0, error(result.value, other.results[0].value))
            for other in others
            if error(call.inputs[0].value, other.inputs[0].value) <= TOLERANCE
            and result.value.numel() == other.results[0].value.numel()
        ]
        if not alike:
            return []
        # The nearest or, if no weight was loaded, the first.
        nearest = min(alike, key=lambda pair: min(pair.result, 0.5))
        found.append(nearest)
        others.remove(nearest.theirs)
        result.value = nearest.theirs.results[0].value.reshape(result.value.shape)
        return [result.value]

    return (ours.run_wide(exchange) if own else a), found


def layers(calls: list[Call], closed: set[Call]) -> list[Call]:
    """Return the outermost layers outside of closed calls, in the order of calls.

    The layers, and what is in them, become closed.
    """
    found = list[Call]()
    for call in reversed(calls):  # outer ones first
        if call in closed or call.outer in closed:
            closed.add(call)
        elif is_layer(call):
            closed.add(call)
            found.append(call)
    return found[::-1]


@torch.no_grad()
def is_layer(call: Call) -> bool:
    """Say whether a module takes and returns one tensor, and holds numbers.

    It must also have no modules inside, or be linear: sums of inputs give sums of results,
    apart from a bias.
    """
    module = call.module
    has_numbers = bool([*module.parameters(), *module.buffers()])
    if not (call.takes_one and len(call.results) == 1 and has_numbers):
        return False
    x, is_leaf = call.inputs[0].value, not list(module.children())
    if is_leaf or not x.is_floating_point():
        return is_leaf
    with in_float64():
        y = [module(each) for each in (x, x.cos(), x + x.cos(), 0 * x)]
        return isinstance(y[0], Tensor) and error(y[0] + y[1], y[2] + y[3]) < EXACT


def wrong_in_backward(ours: Run, theirs: Run, pairs: list[Pair]) -> Answer | None:
    """Name the innermost pair with equal gradients of results, but not of what it gets.

    That is its input and its weights. Weights of several calls are compared in the whole
    model.
    """
    sums = backward(ours) | backward(theirs)
    calls = [*ours.calls, *theirs.calls]
    uses = Counter(w for call in calls for w in call.module.parameters(recurse=False))
    norms = [each.gradient.norm().item() for call in calls for each in call.results]
    least = max(NOISE * max(norms), 1e-300)
    for pair in pairs:
        one, other = pair.ours, pair.theirs
        of_results = difference(one.results, other.results, "gradient", least)
        if max(pair.input, pair.result, of_results) > TOLERANCE:
            continue
        off = difference(one.inputs, other.inputs, "gradient", least)
        own, exact = (list(call.module.parameters()) for call in (one, other))
        is_shared = any(uses[weight] > 1 for weight in own + exact)
        if own and pair.same_weights and (pair is pairs[-1] or not is_shared):
            (total, _), (true, square) = (
                torch.stack([sums[weight] for weight in weights]).sum(0).tolist()
                for weights in (own, exact)
            )
            off = max(off, abs(total - true) / max(square**0.5, least))
        if off > TOLERANCE:
            line = (
                f"MISTAKE in backward, in {pair.names}: its gradients are off by "
                f"about {off:.0e}"
            )
            return with_table(line, pairs, pair)
    return None


def backward(run: Run) -> dict[nn.Parameter, Tensor]:
    """Go backward, and return two sums over each weight's gradient, instead of the gradient.

    In the first, the factors depend on the weight's numbers. The second is of squares. So
    the sums are the same if numbers are permuted, joined or split.
    """
    for seen in (each for call in run.calls for each in (*call.inputs, *call.results)):
        seen.value = seen.value.new_empty(0)  # which was compared, and takes memory
    weights = run.calls[-1].module.parameters()
    sums = {each: torch.zeros(2, dtype=torch.float64) for each in weights}

    def keep(weight: nn.Parameter) -> None:
        assert weight.grad is not None
        gradient = numbers(weight.grad)
        weight.grad = None
        factors = numbers(weight).mul_(1e3).cos_()
        sums[weight] = torch.stack([gradient @ factors, gradient @ gradient]).cpu()

    for weight in sums:
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(keep)
    # The gradient of the result depends on its values alone.
    result = numbers(run.result).view_as(run.result)
    size = result.square().mean().sqrt().clamp_min(1e-300)
    with in_float64():
        run.result.backward(torch.cos(3 * result / size))
    return sums
