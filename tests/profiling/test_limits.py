"""Reasons, limits and rates, and what a GPU's kernels leave, calculated by hand."""

from types import SimpleNamespace
from typing import Any

import torch
from profiling.calculate import Operation, Work, added
from profiling.parts import Part
from profiling.report import actions, kernel_table, losses
from profiling.roofline import Rates, rate_samplers
from profiling.rows import Row, Time, left_over
from profiling.rows import row_of as compared
from profiling.runs import Recording, kernels_of
from torch.utils._python_dispatch import TorchDispatchMode

# FLOPs, bytes, and calls per second.
RATES = Rates({"float64": 50.0, "float32": 100.0, "bfloat16": 200.0}, 10.0, 1.0)
PART = Part("part")


def add(calls, seconds, nbytes):
    """Return calls of an operation, with the time and the bytes of all of them."""
    return Operation("add", calls, seconds, nbytes)


def row_of(*operations, on_gpu=False, p20_s=10.0, varies=0.0, part=PART, **figures):
    """Return a row of 10 s, so that what takes 5 s is its limit."""
    work = Work(operations=added(operations), **figures)
    return compared(part, work, Time(10.0, p20_s, varies), RATES, on_gpu)


# Each row, its limit, and a part of the reason that the report gives.
LIMITS = {
    "computing in two dtypes takes 3 + 2 s": (
        row_of(add(1, 9, 1), flops={"float32": 300, "bfloat16": 400}),
        "compute",
        "Computing takes 50% of the time.",
    ),
    "computing in float64": (
        row_of(add(1, 9, 1), flops={"float64": 250}),
        "compute",
        "Try float32 in place of float64, fewer FLOPs, or a dtype whose matmuls are faster.",
    ),
    "moving takes 5 s; three digits, if it varies by 5%": (
        row_of(moved_bytes=50, varies=0.050),
        "memory",
        "of its 10.0 s, 12.5% of the total Reading and writing 50.0 B takes 50% of",
    ),
    "two digits, if it varies by more": (
        row_of(moved_bytes=50, varies=0.051),
        "memory",
        "of its 10 s, 12% of the total",
    ),
    "calls take 5 s; Python, which contains them, is not named": (
        row_of(add(5, 1, 1), Operation("view", 3)),
        "overhead",
        "Calling 5 operations besides views takes at least 50% of the time.",
    ),
    "operations take 0.09 s and leave the rest to Python": (
        row_of(add(1, 0.09, 1)),
        "Python",
        "Python, autograd and calls take 99% of the time. Try less Python, fewer and larger "
        "operations, or more tokens. 1 operations, which take less than 1% each",
    ),
    "operations leave 4.9 s of a fast run to Python": (
        row_of(add(1, 3, 1), p20_s=7.9),
        "kernel",
        "Its operations are slow: ",
    ),
    "what operations move takes 5 s": (
        row_of(add(1, 9, 30), Operation("mul", 1, 0, 20), add(1, 0, 0)),
        "traffic",
        "Its operations read and write 50.0 B (add 30.0 B, mul 20.0 B), which takes 50% of "
        "the time, where 0 B must be moved. Try fewer passes over the data, or --compile.",
    ),
    "operations move more than twice of what must be moved": (
        row_of(add(1, 6, 31), moved_bytes=15),
        "kernel",
        "Try fewer passes over the data",
    ),
    "operations move twice of what must be moved": (
        row_of(add(1, 6, 32), moved_bytes=16),
        "kernel",
        "Try another operation in place",
    ),
    "many calls that are slow": (
        row_of(add(4, 6, 1)),
        "kernel",
        "Try fewer and larger operations. 4 operations",
    ),
    "an optimizer": (
        row_of(add(5, 9, 1), part=Part("part", is_optimizer=True)),
        "overhead",
        "takes at least 50% of the time. 5 operations",
    ),
    "a loop, which more tokens make longer": (
        row_of(add(1, 0.09, 1), Operation("select", 301), calls=3),
        "Python",
        "Try fewer and larger operations (301 are select), or less Python. 302 operations",
    ),
    "no operation is in a loop": (
        row_of(add(1, 0.09, 1), Operation("select", 300), calls=3),
        "Python",
        "Try less Python, fewer and larger operations, or more tokens. 301 operations",
    ),
    "numbers that a loop returns to Python": (
        row_of(add(1, 9, 60), Operation("_local_scalar_dense", 101)),
        "traffic",
        "Try fewer and larger operations (101 are .item()), or fewer passes over the data.",
    ),
    "an embedding whose gradient has all rows": (
        row_of(
            Operation("embedding_dense_backward", 1, 9, 1, 1),
            part=Part("part", may_be_sparse=True),
        ),
        "kernel",
        "Try sparse=True, whose gradient has no rows of zeros, and a sparse optimizer.",
    ),
    "a slow operation of backward": (
        row_of(Operation("max_backward", 1, 9, 1, 1)),
        "kernel",
        "Try another operation, whose backward is not max_backward.",
    ),
    "what came from a cache": (
        row_of(add(1, 9, 130)),
        "traffic",
        "(add 130 B), which takes all of the time, where",
    ),
    "on a GPU, calls overlap with kernels": (
        row_of(add(9, 3, 1), on_gpu=True),
        "kernel",
        "Its operations are slow: ",
    ),
    "what is unknown takes 5 s": (
        row_of(
            Operation("c", 1, 5.0), add(1, 4.9, 1), unknown={"a.b": 0.0, "a.c": 5.0}
        ),
        "unknown",
        "Operations whose FLOPs are unknown (a.b, a.c) take 50% of the time.",
    ),
    "what is unknown takes 4.9 s": (
        row_of(Operation("c", 1, 4.9), add(1, 5, 1), unknown={"a.c": 4.9}),
        "kernel",
        "Its operations are slow: ",
    ),
}


def text_of(row):
    """Return what the report says of the row, in one line."""
    whole = Row("total", total_s=40.0)
    profile: Any = SimpleNamespace(
        rows=[row], whole=whole, parts_are_eager=False, others=0.0
    )
    return " ".join(losses(profile).split())


def test_limit_and_reason_name_what_takes_half_of_the_time():
    for title, (row, limit, reason) in LIMITS.items():
        assert row.limit == limit, title
        assert reason in text_of(row), title


def test_a_part_that_loses_more_than_the_total_has_no_share_of_it():
    """The total is measured in other runs, without the clock between the parts."""
    whole = Row("total", total_s=9.0)
    profile: Any = SimpleNamespace(
        rows=[row_of()], whole=whole, parts_are_eager=False, others=0.0
    )
    assert "part: loses 10.0 s of its 10.0 s\n" in losses(profile)


def test_losses_below_half_a_percent_of_the_total_are_not_worth_a_try():
    profile: Any = SimpleNamespace(rows=[row_of()], parts_are_eager=False, others=0.0)
    for seconds, is_tried in (1999.0, True), (2001.0, False):
        profile.whole = Row("total", total_s=seconds)
        assert bool(actions(profile)) == is_tried, seconds


def test_the_rest_varies_by_a_share_of_itself():
    [rest] = left_over([Row("up", total_s=8.0)], 10.0, None, rest_varies=0.1)
    assert (rest.total_s, rest.varies) == (2.0, 0.5)


class AsInLayers(TorchDispatchMode):
    """Sees that all tensors are on meta, and right matrices transposed, as weights are."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert all(each.is_meta for each in args if isinstance(each, torch.Tensor))
        if function is torch.ops.aten.mm.out:
            assert args[1].T.is_contiguous()
        return function(*args, **(kwargs or {}))


def test_rates_count_two_flops_per_product_and_two_bytes_per_copy(clock):
    clock.takes = {"mm": 1.0, "copy_": 1.0, "mul": 1.0}
    meta = torch.device("meta")  # where operations compute nothing
    for train in (False, True):  # 100 calls on one number, and as many backward
        with torch.set_grad_enabled(train), AsInLayers(), clock:
            samplers = rate_samplers(meta, [torch.float32], clock)
            rates = Rates.of({name: [sample()] for name, sample in samplers.items()})
        assert rates == Rates({"float32": 2 * 1024**3}, 2 * 2**27, 1.0)


def event(name, seconds, device="CUDA", is_user_annotation=False):
    """Return an event of torch.profiler."""
    return SimpleNamespace(
        name=name,
        device_type=SimpleNamespace(name=device),
        is_user_annotation=is_user_annotation,
        time_range=SimpleNamespace(elapsed_us=lambda: 1e6 * seconds),
    )


def test_gpu_is_idle_while_no_kernel_runs():
    # A label and an operation of the CPU are no kernels.
    events = [event("attn", 9.0, is_user_annotation=True), event("mm", 9.0, "CPU")]
    events += [event("short", 0.5), event("long", 4.0), event("short", 0.5)]
    recording = Recording(kernels_of(events), 0)
    assert [line.split() for line in kernel_table(recording).splitlines()[1:]] == [
        ["long", "1", "4000", "80.0%"],
        ["short", "2", "1000", "20.0%"],
        ["all", "3", "5000", "100%"],
    ]
    rest, idle = left_over([Row("up", total_s=7.0)], 10.0, recording.busy_s, 0.0)
    assert (rest.total_s, idle.total_s) == (-2.0, 5.0)
    reason = "GPU idle: loses 5.00 s of its 5.00 s, 12.5% of the total No kernel runs."
    assert reason in text_of(idle)
