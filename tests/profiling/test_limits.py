"""Reasons, limits and noise, and what they follow from, calculated by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from profiling.measure import left_over
from profiling.report import kernel_table, losses
from profiling.roofline import Operation, Rates, Row, rate_samplers
from profiling.runs import Kernel, Recording, Times, kernels_of
from torch.utils._python_dispatch import TorchDispatchMode

# FLOPs, bytes, and calls per second.
RATES = Rates({"float32": 100.0, "bfloat16": 200.0}, 10.0, 1.0)


def add(calls, seconds, nbytes):
    return Operation("add", calls, seconds, nbytes)


def row_of(*operations, on_gpu=False, p20_s=10.0, **figures):
    """Return a row of 10 s, so that what takes 5 s is its limit."""
    row = Row("part", operations=list(operations), **figures)
    row.total_s, row.p20_s = 10.0, p20_s
    row.compare(RATES, on_gpu)
    return row


# Rows, their limits, and a part of the reason.
LIMITS = [
    (
        row_of(add(1, 9, 1), flops={"float32": 300, "bfloat16": 400}),
        "compute",
        "Computing takes 50% of the time.",
    ),
    (
        row_of(add(1, 9, 1), moved_bytes=50),
        "memory",
        "Reading and writing 50.0 B takes",
    ),
    (
        row_of(add(5, 9, 1), Operation("view", 3)),
        "overhead",
        "Calling 5 operations besides views takes at least 50% of the time.",
    ),
    # Of calls and Python, which contains them, calls are named.
    (row_of(add(5, 1, 1)), "overhead", "at least 50% of the time."),
    (
        row_of(add(1, 5, 1)),
        "Python",
        "Python, autograd and calls take 50% of the time.",
    ),
    # The time between operations is what they leave of a fast run.
    (row_of(add(1, 3, 1), p20_s=7.9), "kernel", "Its operations are slow: "),
    (
        row_of(add(1, 9, 30), Operation("mul", 1, 0, 20), add(1, 0, 0)),
        "traffic",
        "Its operations read and write 50.0 B (add 30.0 B, mul 20.0 B), which takes 50% of "
        "the time, where 0 B must be moved.",
    ),
    (
        row_of(add(4, 5.1, 49), flops={"float32": 499}, moved_bytes=49),
        "kernel",
        "their FLOPs take 50% of the time, and what they read and write (49.0 B) takes 49% "
        "of the time. Try fewer and larger operations. 4 operations",
    ),
    # Fewer passes save time above 30% of the time, and twice of what must be moved.
    (
        row_of(add(1, 6, 31), moved_bytes=15),
        "kernel",
        "Try fewer passes over the data, or --compile. 1",
    ),
    (row_of(add(1, 6, 30), moved_bytes=14), "kernel", "Try another operation in place"),
    (row_of(add(1, 6, 32), moved_bytes=16), "kernel", "Try another operation in place"),
    # What --compile does not change.
    (
        row_of(add(1, 9, 50), compiles=False),
        "traffic",
        "must be moved. Try fewer passes over the data. 1 operations",
    ),
    (
        row_of(add(5, 9, 1), is_optimizer=True, may_be_fused=True),
        "overhead",
        "50% of the time. Try part(..., fused=True). 5 operations",
    ),
    (row_of(moved_bytes=50, is_optimizer=True), "memory", "50% of the time."),
    # On a GPU, calls overlap with kernels.
    (row_of(add(9, 3, 1), on_gpu=True), "kernel", "Its operations are slow: "),
    # What is unknown is the reason only if it takes the time.
    (
        row_of(Operation("c", 1, 5.0), add(1, 4.9, 1), unknown=["a.b", "a.c"]),
        "unknown",
        "Operations whose FLOPs are unknown (a.b, a.c) take 50% of the time.",
    ),
    (row_of(Operation("c", 1, 4.9), add(1, 5, 1), unknown=["a.c"]), "kernel", "slow: "),
    (
        row_of(Operation("c", 1, 9), unknown=["a.c"], moved_bytes=50),
        "memory",
        "writing",
    ),
]


def text_of(row):
    """Return what the report says of the row, in one line."""
    whole = Row("total", total_s=40.0)
    profile: Any = SimpleNamespace(rows=[row], whole=whole, parts_are_eager=False)
    return " ".join(losses(profile).split())


def test_limit_and_reason_name_what_takes_half_of_the_time():
    for row, limit, reason in LIMITS:
        assert row.limit == limit, row
        assert reason in text_of(row), row


def test_slowest_operations_are_named_with_their_share_and_passes():
    row = row_of(
        Operation("mm", 2006, 5.0, backward_calls=2004),
        Operation("mul", 3, 2.5, backward_calls=3),
        Operation("relu", 1, 1.0),
        Operation("exp", 1, 0.4),
        Operation("sin", 1, 0.3),
    )
    assert text_of(row).endswith(
        " 2,012 operations: mm x 2,006 (50%, 2,004 in backward), mul x 3 (25%, backward), "
        "relu x 1 (10%), exp x 1 (4.0%)"
    )
    text = text_of(row_of(add(2, 0.09, 1)))
    assert text.endswith(" 2 operations, which take less than 1% each")


def test_thresholds_of_what_varies():
    assert [Row("", varies=varies).digits for varies in (0.05, 0.051)] == [3, 2]
    assert "may be wrong" not in text_of(row_of(add(1, 9, 1), varies=0.5))
    assert "by 51%, so the reason may be wrong." in text_of(row_of(varies=0.51))


# --- Noise ----------------------------------------------------------------------------


def test_what_varies_by_more_than_20_percent_is_named():
    # Copies take 1.2 to 1.8 s (p20 to p80), of 1.5 s.
    times = Times([], [], {"matmul": [1.0, 1.0, 1.0], "copy": [1.0, 2.0, 1.5]})
    rows = [Row("small", total_s=4.9, varies=0.3), Row("even", total_s=9.0, varies=0.2)]
    rows.append(Row("large", total_s=5.1, varies=0.3))
    whole = Row("total", total_s=100.0, varies=0.21)
    [note] = times.noise(rows, whole, 0.2)
    assert note.startswith(
        "NOISY: copy by 40%, large by 30%, total by 21% (p20 to p80)"
    )
    [note] = times.noise(rows, whole, 0.25)
    assert "total by 21%, rest by 25% of the total (p20" in note
    assert Times([], [], {}).noise(rows[:2], Row("total", total_s=100.0), 0.0) == []


def test_rest_is_noise_if_it_varies_by_more_than_itself():
    whole = Row("total", total_s=10.0)
    # A part takes 8.766 or 11.234 s; the rest varies by shares of 10 s.
    for taken in (8.766, 11.234):
        for varies, limit, digits in (
            (0.001, "", 3),
            (0.123, "", 2),
            (0.124, "noise", 2),
        ):
            part = Row("up", total_s=taken)
            [rest] = left_over([part], whole, Recording([], 0), varies)
            assert rest.total_s == pytest.approx(10 - taken)
            assert (rest.limit, rest.digits) == (limit, digits), (taken, varies)


# --- The machine ----------------------------------------------------------------------


class Layouts(TorchDispatchMode):
    """Notes which axis of the right matrix of each product is contiguous."""

    def __init__(self):
        super().__init__()
        self.strides = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.mm.out:
            self.strides.add(args[1].stride(0))
        return function(*args, **(kwargs or {}))


def test_rates_count_two_flops_per_product_and_two_bytes_per_copy(clock):
    clock.takes = {"mm": 1.0, "copy_": 1.0, "mul": 1.0}
    meta = torch.device("meta")  # where operations compute nothing
    for train in (False, True):  # 100 calls on one number, and as many backward
        with torch.set_grad_enabled(train), Layouts() as layouts, clock:
            samplers = rate_samplers(meta, [torch.float32, torch.bfloat16], clock)
            assert {name: sampler() for name, sampler in samplers.items()} == {
                "matmul float32": 1 / (2 * 1024**3),
                "matmul bfloat16": 1 / (2 * 1024**3),
                "memory copy": 1 / (2 * 2**27),
                "an operation on one number": 1.0,
            }
        assert layouts.strides == {1}, "as a layer's weight, which is transposed"


# --- A GPU ----------------------------------------------------------------------------


def event(name, microseconds, device="CUDA", is_user_annotation=False):
    return SimpleNamespace(
        name=name,
        device_type=SimpleNamespace(name=device),
        is_user_annotation=is_user_annotation,
        time_range=SimpleNamespace(elapsed_us=lambda: microseconds),
    )


def test_launches_of_a_kernel_add_up_and_the_longest_comes_first():
    events = [event("a", 1e6), event("b", 5e6), event("a", 1e6)]
    # A label and an operation of the CPU are no kernels.
    events += [event("attn", 9e6, is_user_annotation=True), event("mm", 9e6, "CPU")]
    assert kernels_of(events) == [Kernel("b", 1, 5.0), Kernel("a", 2, 2.0)]


def test_gpu_is_idle_while_no_kernel_runs():
    recording = Recording([Kernel(f"k{i}", 2, 0.5) for i in range(12)], 0)
    whole = Row("total", total_s=10.0)
    rest, idle = left_over([Row("up", total_s=7.0)], whole, recording, 0.0)
    assert (rest.total_s, idle.total_s) == (-1.0, 4.0)
    reason = "GPU idle: loses 4.00 s of its 4.00 s, 10.0% of the total No kernel runs."
    assert reason in text_of(idle)
    # Ten are named, and all are summed.
    _, *named, everything = kernel_table(recording).splitlines()
    assert [line.split() for line in named] == [
        [f"k{i}", "2", "500", "8.33%"] for i in range(10)
    ]
    assert everything.split() == ["all", "24", "6000", "100%"]
