"""Find the module in which two models part."""

from typing import Any

from torch import Tensor, nn

from .partners import Keys, Pair
from .runs import Run, first_node
from .values import TOLERANCE, difference, joined

NOISE = 2.0**-26  # a gradient below this share of the largest one is rounding


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
