"""Reasons, limits and noise, and what they follow from, calculated by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lab.timing import Spread
from profiling.measure import left_over, total
from profiling.parts import PartTime
from profiling.report import kernel_table, losses
from profiling.roofline import Operation, Rates, Row, rate_samplers
from profiling.runs import Kernel, Recording, Settings, Times, kernels_of, peak_of
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")
# FLOPs, bytes, and calls per second. Each row takes 10 s, so what takes 5 s is its limit.
RATES = Rates({"float32": 100.0, "bfloat16": 200.0}, 10.0, 1.0)
SLOW = "Its operations are slow: at the machine's rates, "


def add(calls=1, seconds=9.0, moved=1, **figures):
    return Operation("add", calls, seconds, moved, **figures)


# A row, whether it runs on a GPU, its limit, and a part of its reason.
LIMITS: list[tuple[dict[str, Any], bool, str, str]] = [
    (
        {"flops": {"float32": 300, "bfloat16": 400}},
        False,
        "compute",
        "Computing takes 50% of the time.",
    ),
    ({"moved_bytes": 50}, False, "memory", "Reading and writing 50.0 B takes 50% of"),
    (
        {"operations": [add(5), Operation("view", 3)]},
        False,
        "overhead",
        "Calling 5 operations besides views takes at least 50% of the time.",
    ),
    # Of calls and Python, which contains them, calls are named.
    ({"operations": [add(5, 1.0)]}, False, "overhead", "at least 50% of the time."),
    (
        {"operations": [add(1, 5.0)]},
        False,
        "Python",
        "Python, autograd and calls take 50% of the time.",
    ),
    # The time between operations is what they leave of a fast run.
    ({"operations": [add(1, 3.0)], "p20_s": 7.9}, False, "kernel", SLOW),
    (
        {"operations": [add(1, 9.0, 30), Operation("mul", 1, 0.0, 20), add(0, 0, 0)]},
        False,
        "traffic",
        "Its operations read and write 50.0 B (add 30.0 B, mul 20.0 B), which takes 50% of "
        "the time, where 0 B must be moved.",
    ),
    (
        {
            "flops": {"float32": 499},
            "moved_bytes": 49,
            "operations": [add(4, 5.1, 49)],
        },
        False,
        "kernel",
        f"{SLOW}their FLOPs take 50% of the time, and what they read and write (49.0 B) takes "
        "49% of the time. Try fewer and larger operations. 4 operations",
    ),
    # Fewer passes save time from 30% of the time, and twice of what must be moved.
    (
        {"operations": [add(1, 6.0, 31)], "moved_bytes": 15},
        False,
        "kernel",
        "Try fewer passes over the data, or --compile. 1 operations",
    ),
    (
        {"operations": [add(1, 6.0, 30)], "moved_bytes": 14},
        False,
        "kernel",
        "Try another operation in place of add. 1 operations",
    ),
    (
        {"operations": [add(1, 6.0, 31)], "moved_bytes": 16},
        False,
        "kernel",
        "Try another operation in place of add. 1 operations",
    ),
    # On a GPU, calls overlap with kernels.
    (
        {"operations": [add(9, 3.0)]},
        True,
        "kernel",
        f"{SLOW}what they read and write (1.00 B)",
    ),
    # What is unknown is the reason only if it takes the time.
    (
        {
            "unknown": ["a.b", "a.c"],
            "operations": [Operation("c", 1, 5.0), add(1, 4.9)],
        },
        True,
        "unknown",
        "Operations whose FLOPs are unknown (a.b, a.c) take 50% of the time.",
    ),
    (
        {"unknown": ["a.b"], "operations": [Operation("b", 1, 4.9), add(1, 5.0)]},
        True,
        "kernel",
        SLOW,
    ),
    ({"unknown": ["a.add"], "moved_bytes": 50}, True, "memory", "Reading and writing"),
    # What --compile does not change.
    (
        {"operations": [add(1, 9.0, 50)], "compiles": False},
        False,
        "traffic",
        "must be moved. Try fewer passes over the data. 1 operations",
    ),
    (
        {"operations": [add(5)], "is_optimizer": True, "may_be_fused": True},
        False,
        "overhead",
        "50% of the time. Try part(..., fused=True). 5 operations",
    ),
    (
        {"moved_bytes": 50, "is_optimizer": True},
        False,
        "memory",
        "50% of the time. 1 operations",
    ),
]


def text_of(*rows, whole_s=40.0):
    """Return what the report says of the slowest rows, in one line."""
    whole = Row("total", total_s=whole_s)
    profile: Any = SimpleNamespace(rows=rows, whole=whole, parts_are_eager=False)
    return " ".join(losses(profile).split())


def row_of(figures, on_gpu=False, name="part"):
    defaults = {"total_s": 10.0, "p20_s": 10.0, "operations": [add()]}
    row = Row(name, **defaults | figures)
    row.compare(RATES, on_gpu)
    return row


def test_limit_and_reason_name_what_takes_half_of_the_time():
    for figures, on_gpu, limit, reason in LIMITS:
        row = row_of(figures, on_gpu)
        assert row.limit == limit, figures
        assert reason in text_of(row), figures
    row = row_of({}, on_gpu=True)
    assert row.between_s is row.overhead_s is None


def test_slowest_operations_are_named_with_their_share_and_passes():
    names = [("mm", 2006, 5.0, 2004), ("mul", 3, 2.5, 3), ("relu", 1, 1.0, 0)]
    names += [("exp", 1, 0.4, 0), ("sin", 1, 0.3, 0), ("view", 9, 0.05, 0)]
    called = [Operation(*name[:3], 0, name[3]) for name in names]
    assert text_of(row_of({"operations": called})).endswith(
        " 2,021 operations: mm x 2,006 (50%, 2,004 in backward), mul x 3 (25%, backward), "
        "relu x 1 (10%), exp x 1 (4.0%)"
    )
    text = text_of(row_of({"operations": [add(2, 0.09)]}))
    assert text.endswith(" 2 operations, which take less than 1% each")


def test_reason_of_a_time_that_varies_by_half_is_doubtful():
    doubt = "Its time varies by 51%, so the reason may be wrong."
    assert doubt in text_of(row_of({"varies": 0.51}))
    assert "varies" not in text_of(row_of({"varies": 0.5}))


# --- Noise ----------------------------------------------------------------------------


def test_times_of_a_part_are_the_median_and_percentiles_of_its_rounds():
    rounds = [(1.0, 0.5), (4.0, 3.0), (2.0, 1.0)]
    taken = [{"up": PartTime(total, forward)} for total, forward in rounds]
    times, row = Times([6.0, 6.0, 6.0], taken, {}), Row("up")
    times.set_on(row)
    assert (row.total_s, row.forward_s) == (2.0, 1.0)
    # A fifth of the way up is 0.4 of the way from 1 to 2.
    assert row.p20_s == pytest.approx(1.4)
    assert row.varies == pytest.approx((3.2 - 1.4) / 2)
    assert times.rest([row]) == [5.0, 2.0, 4.0]


def test_what_varies_by_more_than_20_percent_is_named():
    rates = {"matmul float32": [1.0, 1.0, 1.0], "memory copy": [1.0, 2.0, 1.5]}
    rows = [Row("small", total_s=4.9, varies=0.3), Row("even", total_s=9.0, varies=0.2)]
    rows.append(Row("large", total_s=5.1, varies=0.3))
    whole = Row("total", total_s=100.0, varies=0.21)
    # Copies take 1.2 to 1.8 s (p20 to p80), of 1.5 s.
    named = "memory copy by 40%, large by 30%, total by 21%"
    times = Times([], [], rates)
    assert times.noise(rows, whole, 0.2) == [
        f"NOISY: {named} (p20 to p80); close other programs"
    ]
    [note] = times.noise(rows, whole, 0.25)
    assert note.startswith(f"NOISY: {named}, rest by 25% of the total (p20")
    assert Times([], [], {}).noise([], Row("total", total_s=1.0), 0.0) == []


def test_rest_is_noise_if_it_varies_by_more_than_itself():
    whole = Row("total", total_s=10.0)
    # A part takes 8.766 or 11.234 s; the rest varies by shares of 10 s.
    for taken in (8.766, 11.234):
        for varies, limit, digits in (
            (0.001, "", 3),
            (0.123, "", 2),
            (0.124, "noise", 2),
        ):
            row = Row("up", total_s=taken)
            [rest] = left_over([row], whole, Recording([], 0), varies)
            assert rest.total_s == pytest.approx(10 - taken)
            assert (rest.limit, rest.digits) == (limit, digits), (taken, varies)


def test_times_that_vary_by_more_than_5_percent_have_two_digits():
    assert [Row("", varies=varies).digits for varies in (0.05, 0.051)] == [3, 2]


# --- The machine ----------------------------------------------------------------------


def test_rates_count_two_flops_per_product_and_two_bytes_per_copy(clock):
    # A call on one number takes a second, too, and there are 100, and as many backward.
    clock.takes, clock.other = {"mm": 1.0, "copy_": 1.0, "mul": 1.0}, 0.0
    dtypes = [torch.float32, torch.bfloat16]
    for train in (False, True):
        with torch.set_grad_enabled(train), clock:
            samplers = rate_samplers(CPU, dtypes if train else [], clock)
            samples = {name: [sampler()] for name, sampler in samplers.items()}
        assert samples["memory copy"] == [1 / (2 * 2**27)]
        assert samples["an operation on one number"] == [1.0]
    for dtype in ("float32", "bfloat16"):
        assert samples[f"matmul {dtype}"] == [1 / (2 * 1024**3)]


class Layouts(TorchDispatchMode):
    """Notes which axis of the right matrix of each product is contiguous."""

    def __init__(self):
        super().__init__()
        self.strides = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.mm.out:
            self.strides.add(args[1].stride(0))
        return function(*args, **(kwargs or {}))


def test_rate_of_a_matmul_is_that_of_a_linear_layer(clock):
    with clock, Layouts() as layouts:
        rate_samplers(CPU, [torch.float16], clock)
    assert layouts.strides == {1}  # a layer's weight is transposed


def test_forward_of_the_total_is_at_most_the_total():
    cases = {("train", 3.0): 3.0, ("train", 7.0): 5.0, ("forward", 3.0): 5.0}
    for (mode, forward), expected in cases.items():
        settings = Settings(CPU, torch.float32, mode)
        subject: Any = SimpleNamespace(settings=settings, weights=[])
        rows = [Row("up", forward_s=forward - 1), Row("down", forward_s=1.0)]
        took = Spread(5.0, 4.0, 6.0)
        whole = total(rows, took, RATES, subject, parts_are_eager=False)
        assert whole.forward_s == expected, (mode, forward)
        assert (whole.p20_s, whole.varies) == (4.0, 2 / 5)


# --- What torch.profiler sees ---------------------------------------------------------


def event(name, microseconds, device="CUDA", is_user_annotation=False):
    return SimpleNamespace(
        name=name,
        device_type=SimpleNamespace(name=device),
        is_user_annotation=is_user_annotation,
        time_range=SimpleNamespace(elapsed_us=lambda: microseconds),
    )


def test_launches_of_a_kernel_add_up_and_the_longest_comes_first():
    events = [event("a", 1.0), event("b", 5.0), event("a", 1.0)]
    # A label and an operation of the CPU are no kernels.
    events += [event("attn", 9.0, is_user_annotation=True), event("mm", 9.0, "CPU")]
    found = kernels_of(events)
    assert [(each.name, each.launches) for each in found] == [("b", 1), ("a", 2)]
    seconds = [each.total_s for each in found]
    assert seconds == pytest.approx([5e-6, 2e-6])


def test_peak_is_the_most_that_is_allocated_at_a_time():
    # In the order of their times: 5, 3, 9, 2 bytes.
    assert peak_of([(3, 6), (1, 5), (2, -2), (4, -7)]) == 9
    assert peak_of([(1, -5)]) == 0


def test_gpu_is_idle_while_no_kernel_runs():
    kernels = [Kernel(f"k{i}", 2, 0.5) for i in range(12)]
    recording = Recording(kernels, 0)
    rows, whole = [Row("up", total_s=7.0)], Row("total", total_s=10.0)
    [rest, idle] = left_over(rows, whole, recording, rest_varies=0.0)
    assert (rest.total_s, idle.total_s) == (-1.0, 4.0)
    assert "GPU idle: loses 4.00 s of its 4.00 s, 10.0% of the total No" in text_of(
        idle
    )
    # Ten are named, and all are summed.
    header, *named, everything = kernel_table(recording).splitlines()
    assert header.split() == ["kernel", "launches", "ms", "share", "of", "GPU"]
    assert [line.split() for line in named] == [
        [f"k{i}", "2", "500", "8.33%"] for i in range(10)
    ]
    assert everything.split() == ["all", "24", "6000", "100%"]
