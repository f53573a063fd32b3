"""What follows from the events of a run: the work of each part. No model runs here."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd, prod
from operator import itemgetter
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor

from .events import Event, Place, Record, Stay
from .operations import name_of

Number = TypeVar("Number", int, float)

THREADS = "what runs in Python threads"
DIFFERENT = "runs that differ"


@dataclass(frozen=True)
class Operation:
    """All calls of one of torch's operations in a part.

    total_s: their time beyond that of as many calls on one number.
    moved_bytes: what they read and write; views do neither.
    backward_calls: how many of them run in backward.
    """

    name: str
    calls: int = 0
    total_s: float = 0.0
    moved_bytes: int = 0
    backward_calls: int = 0


@dataclass(frozen=True)
class Work:
    """What a part does in one run.

    calls: how often its modules are called.
    operations: by their time.
    flops: by dtype.
    unknown: the seconds of operations whose FLOPs are unknown.
    unseen: what else hides some of the work.
    moved_bytes: what it must read and write at least.
    kept_bytes: what autograd keeps for backward, unless an earlier part keeps it; None if
        it is unknown.
    """

    calls: int = 0
    operations: tuple[Operation, ...] = ()
    flops: Mapping[str, int] = field(default_factory=dict)
    unknown: Mapping[str, float] = field(default_factory=dict)
    unseen: tuple[str, ...] = ()
    moved_bytes: int = 0
    kept_bytes: int | None = 0

    @property
    def ops(self) -> int:
        return sum(each.calls for each in self.operations)

    @property
    def computations(self) -> int:
        """Return how many operations are no views, whose calls take less time."""
        return sum(each.calls for each in self.operations if each.moved_bytes)


def works_of(records: Sequence[Record]) -> dict[str, Work]:
    """Return the work of each part, as it is in all runs.

    Parts are in the order of their last operations in forward.
    """
    runs = [works_in(record) for record in records]
    parts = dict.fromkeys(part for run in runs for part in run)
    works = {}
    for part in parts:
        found = [run[part] for run in runs if part in run]
        works[part] = least(found)
        if len(found) < len(runs) or any(
            _content(x) != _content(found[0]) for x in found
        ):
            works[part] = bounded(works[part], DIFFERENT)
    return works


def least(works: Sequence[Work]) -> Work:
    """Return the work with the fewest FLOPs. Operations have the median of their times."""
    work = min(works, key=lambda each: sum(each.flops.values()))
    times: dict[str, list[float]] = defaultdict(list)
    for each in works:
        for operation in each.operations:
            times[operation.name].append(operation.total_s)
    return replace(
        work,
        operations=sorted_by_time(
            replace(each, total_s=median(times[each.name])) for each in work.operations
        ),
    )


def _content(work: Work) -> object:
    """Return what is equal in runs that do the same."""
    operations = {each.name: (each.calls, each.moved_bytes) for each in work.operations}
    return work.calls, work.flops, work.kept_bytes, operations


def bounded(work: Work, unseen: str) -> Work:
    """Return the work of a part of which some may be missing."""
    names = dict.fromkeys([*work.unseen, unseen])
    return replace(work, unseen=tuple(names), kept_bytes=None)


def works_in(record: Record) -> dict[str, Work]:
    """Return the work of each part in one run."""
    stays: dict[str, list[Stay]] = defaultdict(list)
    for stay in record.stays:
        if stay.phase == "forward" and stay.events:  # its part moves to the end
            stays[stay.part] = stays.pop(stay.part, [])
        stays[stay.part].append(stay)
    kept = kept_bytes(record)
    works = {}
    for part, found in stays.items():
        events = [event for stay in found for event in stay.events]
        works[part] = Work(
            calls=sum(stay.is_called for stay in found),
            operations=operations_of(found, record.call_s),
            flops=flops_of(events),
            unknown=unknown_in(events),
            moved_bytes=sum(map(moved_bytes, found)),
            kept_bytes=None if kept is None else kept.get(part, 0),
        )
    return {part: work for part, work in works.items() if work != Work()}


def operations_of(stays: Iterable[Stay], call_s: float) -> tuple[Operation, ...]:
    """Return what is called, with the seconds beyond those of as many small calls."""
    calls = [
        Operation(
            name=event.name,
            calls=1,
            total_s=max(0.0, event.seconds - call_s),
            moved_bytes=traffic(event),
            backward_calls=int(stay.phase == "backward"),
        )
        for stay in stays
        for event in stay.events
    ]
    return added(calls)


def added(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """Add up the calls of each operation."""
    found: dict[str, Operation] = {}
    for each in operations:
        sums = found.get(each.name, Operation(each.name))
        found[each.name] = Operation(
            each.name,
            calls=sums.calls + each.calls,
            total_s=sums.total_s + each.total_s,
            moved_bytes=sums.moved_bytes + each.moved_bytes,
            backward_calls=sums.backward_calls + each.backward_calls,
        )
    return sorted_by_time(found.values())


def sorted_by_time(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    return tuple(sorted(operations, key=lambda each: -each.total_s))


def sums(pairs: Iterable[tuple[str, Number]]) -> dict[str, Number]:
    """Add up the numbers of each name."""
    found: dict[str, Number] = {}
    for name, number in pairs:
        found[name] = found.get(name, 0) + number
    return found


def flops_of(events: Iterable[Event]) -> dict[str, int]:
    """Return the known FLOPs, by dtype."""
    flops = [event.flops for event in events if event.flops]
    return sums((name_of(each.dtype), each.count) for each in flops if each.count)


def unknown_in(events: Iterable[Event]) -> dict[str, float]:
    """Return the operations whose FLOPs are unknown, with their seconds."""
    return sums((each.operation, each.seconds) for each in events if each.flops is None)


def kept_bytes(record: Record) -> dict[str, int] | None:
    """Return the bytes of the storages that each part is the first to hold."""
    if record.held is None:
        return None
    first = {held.storage: held for held in reversed(record.held)}
    return sums((held.part, held.nbytes) for held in first.values())


def read_before_made(record: Record) -> dict[int, int]:
    """Return the bytes of the storages that existed before the run, and are read in it."""
    made: set[int] = set()
    read: dict[int, int] = {}
    for event in (event for stay in record.stays for event in stay.events):
        made |= {place.storage for place in event.made}
        read |= {each.storage: each.stored for each in event.read}
    return {storage: size for storage, size in read.items() if storage not in made}


def traffic(event: Event) -> int:
    """Return the bytes that a call reads and writes."""
    return sum(map(touched_bytes, (*event.read, *event.written)))


def touched_bytes(place: Place) -> int:
    size = min(prod(size for size, _ in place.axes) * place.itemsize, place.stored)
    if place.touched is None:
        return size
    return min(size, place.touched * place.itemsize)


def moved_bytes(stay: Stay) -> int:
    """Return the bytes that a part reads from others, and leaves to them.

    A byte is read once, and not if the part wrote it before. It is written once, if it
    outlives the part.
    """
    units: dict[int, int] = {}
    for place in [
        each for event in stay.events for each in (*event.read, *event.written)
    ]:
        units[place.storage] = gcd(units.get(place.storage, 0), unit_of(place))
    made: set[int] = set()
    read: dict[int, Bytes] = {}
    written: dict[int, Bytes] = {}
    for event in stay.events:
        made |= {place.storage for place in event.made}
        for place in event.read:
            storage = place.storage
            if storage not in made:
                none = Bytes(place.stored, units[storage])
                read.setdefault(storage, none).add(place, written.get(storage))
        for place in event.written:
            none = Bytes(place.stored, units[place.storage])
            written.setdefault(place.storage, none).add(place)
    left = [written[storage] for storage in written if storage in stay.left]
    return sum(each.count for each in (*read.values(), *left))


@dataclass
class Bytes:
    """Some bytes of a storage.

    unit: so many follow each other, and are all among them, or none.
    all: whether each is one of them.
    marks: those whose place is known; a bool for each unit of the storage, or None.
    somewhere: how many more there are at places that depend on numbers, at most.
    """

    stored: int
    unit: int
    all: bool = False
    marks: Tensor | None = None
    somewhere: int = 0

    @property
    def count(self) -> int:
        if self.all:
            return self.stored
        marked = 0 if self.marks is None else int(self.marks.sum()) * self.unit
        return min(self.stored, marked + self.somewhere)

    def add(self, place: Place, but: "Bytes | None" = None) -> None:
        """Add the bytes of a place, but those of others."""
        if not touched_bytes(place) or self.all or (but and but.all):
            return
        known = None if but is None or but.marks is None else self._at(place, but.marks)
        if place.touched is not None:
            whole = touched_bytes(replace(place, touched=None))
            new = whole - (0 if known is None else int(known.sum()) * self.unit)
            elsewhere = but.somewhere if but else 0
            self.somewhere += max(0, min(touched_bytes(place), new) - elsewhere)
        elif (
            known is None and touched_bytes(place) == place.stored and _is_dense(place)
        ):
            self.all = True
        else:
            if self.marks is None:
                units = -(-self.stored // self.unit)
                self.marks = torch.zeros(units, dtype=torch.bool, device="cpu")
            marks = self._at(place, self.marks)
            marks |= True if known is None else ~known

    def _at(self, place: Place, marks: Tensor) -> Tensor:
        """Return the marks of a place."""
        run, axes = _runs(place)
        sizes = [size for size, _ in axes]
        strides = [stride // self.unit for _, stride in axes]
        start = place.offset * place.itemsize // self.unit
        return marks.as_strided([*sizes, run // self.unit], [*strides, 1], start)


def _runs(place: Place) -> tuple[int, list[tuple[int, int]]]:
    """Return how many bytes follow each other, and the other axes, with strides in bytes."""
    run = place.itemsize
    others: list[tuple[int, int]] = []
    axes = [(size, stride * place.itemsize) for size, stride in place.axes if size > 1]
    for size, stride in sorted(axes, key=itemgetter(1)):
        if stride == run and not others:
            run *= size
        else:
            others.append((size, stride))
    return run, others


def unit_of(place: Place) -> int:
    """Return the largest number of bytes of which a place consists of multiples."""
    run, axes = _runs(place)
    return gcd(run, place.offset * place.itemsize, *[stride for _, stride in axes])


def _is_dense(place: Place) -> bool:
    """Say if the numbers of a tensor follow each other without a gap or an overlap."""
    return not _runs(place)[1]


def together(works: Iterable[Work]) -> Work:
    """Add up the work of parts."""
    works = list(works)
    kept = [work.kept_bytes for work in works]
    return Work(
        calls=sum(work.calls for work in works),
        operations=added(each for work in works for each in work.operations),
        flops=sums(each for work in works for each in work.flops.items()),
        unknown=sums(each for work in works for each in work.unknown.items()),
        unseen=tuple(dict.fromkeys(name for work in works for name in work.unseen)),
        moved_bytes=sum(work.moved_bytes for work in works),
        kept_bytes=None if None in kept else sum(each or 0 for each in kept),
    )
