"""Find which modules of two models are the same: they hold the same numbers."""

from collections import defaultdict
from dataclasses import dataclass

from torch import nn

from .runs import Call, Run
from .values import TOLERANCE, hash_of, nearest


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
