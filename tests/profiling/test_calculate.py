"""What follows from events, in tables of events that are written by hand: no model runs.

A storage has 16 tokens of 4 numbers of 4 bytes: 256 bytes.
"""

import torch
from profiling.calculate import Operation, moved_bytes, works_of
from profiling.events import Event, Place, Record, Stay
from profiling.operations import Flops

X, RESULT, INSIDE = 1, 2, 3  # numbers of storages
TOKEN = ((4, 1),)


def all_of(storage):
    return Place(storage, 256, 4, 0, ((16, 4), *TOKEN))


def tokens(storage, first, count):
    return Place(storage, 256, 4, 4 * first, ((count, 4), *TOKEN))


def column(storage):
    return Place(storage, 256, 4, 0, ((16, 4),))


def windows(storage, count):
    """Return windows of 3 tokens, each of which begins a token after the last."""
    return Place(storage, 256, 4, 0, ((count, 4), (3, 4), *TOKEN))


def somewhere(storage, numbers):
    return Place(storage, 256, 4, 0, ((16, 4), *TOKEN), numbers)


def event(read=(), written=(), made=()):
    return Event("aten.f", read=read, written=written, made=made)


def make(storage):
    """Allocate a storage, and write nothing."""
    return event(made=(all_of(storage),))


# Events, the bytes that they must read, and the bytes that they must write.
# The result outlives the part. What is made inside of it does not.
MOVED = {
    "what is made between": (
        [
            event([all_of(X)], [all_of(INSIDE)], [all_of(INSIDE)]),
            event([all_of(INSIDE)], [all_of(RESULT)], [all_of(RESULT)]),
        ],
        256 + 256,
    ),
    "tokens that overlap": ([event([tokens(X, 0, 8), tokens(X, 6, 8)])], 14 * 16),
    "a column of a token": ([event([tokens(X, 0, 1), column(X)])], 16 + 15 * 4),
    "windows of a half, with more numbers than all": ([event([windows(X, 6)])], 128),
    "a cache that is written in part, and read": (
        [event((), [tokens(RESULT, 5, 1)]), event([all_of(RESULT)])],
        16 + (256 - 16),
    ),
    "a cache that is read, and written in part": (
        [event([all_of(RESULT)]), event((), [tokens(RESULT, 5, 1)])],
        256 + 16,
    ),
    # Nobody knows which of its bytes are not read.
    "a cache that is written at positions, and read": (
        [event((), [somewhere(RESULT, 4)]), event([all_of(RESULT)])],
        16 + 256,
    ),
    "a cache that is written up to a token, and read at positions": (
        [event((), [tokens(RESULT, 0, 15)]), event([somewhere(RESULT, 40)])],
        15 * 16 + 16,
    ),
    "a buffer that is filled by pieces": (
        [make(RESULT), *[event((), [tokens(RESULT, n, 1)]) for n in range(16)]],
        256,
    ),
    "a buffer that is filled by pieces in part, and twice": (
        [make(RESULT), *[event((), [tokens(RESULT, n, 2)]) for n in range(5)]],
        6 * 16,
    ),
    "a buffer that is filled and read, and is gone": (
        [
            make(INSIDE),
            event([tokens(X, 0, 4)], [tokens(INSIDE, 0, 4)]),
            event([tokens(INSIDE, 0, 4)], [all_of(RESULT)], [all_of(RESULT)]),
        ],
        4 * 16 + 256,
    ),
    "rows that are changed, and read again": (
        [event([somewhere(X, 8)], [somewhere(X, 8)]), event([somewhere(X, 8)])],
        2 * 4 * 8,
    ),
    "a table that is read at more positions than it has": (
        [event([somewhere(X, 40)]), event([somewhere(X, 40)])],
        256,
    ),
}


def test_bytes_that_a_part_must_move():
    for title, (events, moved) in MOVED.items():
        left = frozenset({X, RESULT})
        assert (
            moved_bytes(Stay("part", "forward", True, tuple(events), left)) == moved
        ), title


def of(seconds, count=0, operation="aten.f"):
    """Return a call that writes a result."""
    flops = None if count is None else Flops(count, torch.float32)
    return Event(operation, seconds, flops, written=(all_of(RESULT),))


def test_runs_have_the_median_time_of_operations_beyond_that_of_small_ones():
    records = [
        Record(
            call_s=1.0,
            stays=[
                Stay("first", "forward", True, (of(3.0 * pace, 5),)),
                Stay("second", "forward", True, (of(2.0, 7), of(1.5, None, "x.g"))),
                Stay("first", "forward", False, (of(0.5, 5),)),  # none is less than 0
                Stay("second", "backward", False, (of(2.0, 14),)),
            ],
        )
        for pace in (1, 2, 9)
    ]
    works = works_of(records)
    # In the order of the last operations of forward.
    second, first = works.items()
    assert (second[0], first[0]) == ("second", "first")
    assert (first[1].calls, first[1].flops) == (1, {"float32": 10})
    assert first[1].operations == (Operation("f", 2, 6.0 - 1, 512, 0),)
    assert second[1].flops == {"float32": 21}
    assert second[1].unknown == {"x.g": 1.5}
    assert second[1].operations == (
        Operation("f", 2, 1.0 + 1.0, 512, 1),
        Operation("g", 1, 0.5, 256, 0),
    )
    assert first[1].unseen == second[1].unseen == ()


# What a part does in three runs: whether it is called, and its FLOPs.
DIFFERENT = {
    "it is called in each": ([5, 5, 5], ()),
    "it is not called in the first": ([None, 5, 5], ("runs that differ",)),
    "its FLOPs differ": ([7, 5, 9], ("runs that differ",)),
}


def test_parts_whose_runs_differ_have_the_fewest_flops():
    for title, (counts, unseen) in DIFFERENT.items():
        records = []
        for count in counts:
            events = () if count is None else (of(1.0, count),)
            stays = [Stay("part", "forward", True, events)] if events else []
            records.append(Record(stays=stays))
        work = works_of(records)["part"]
        assert (work.flops, work.unseen) == ({"float32": 5}, unseen), title
        assert work.kept_bytes == (None if unseen else 0), title
