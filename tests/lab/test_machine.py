"""Ceilings, of datasheets and measured."""

import pytest
import torch
from lab.machine import DATASHEETS, Rates, measure_ceilings
from torch.utils._python_dispatch import TorchDispatchMode


@pytest.fixture
def precision():
    """Return a function that sets torch's precision of float32 products, until the end of the test."""
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision("highest")


def test_datasheet_has_one_peak_for_both_half_precisions():
    h200 = DATASHEETS["NVIDIA H200"]
    assert h200.flops_per_second(torch.bfloat16) == 989e12
    assert h200.flops_per_second(torch.float16) == 989e12
    assert h200.rates(torch.bfloat16) == Rates(989e12, 4800e9)


def test_datasheet_has_a_peak_for_float32_without_tf32_only(precision):
    h200 = DATASHEETS["NVIDIA H200"]
    assert h200.flops_per_second(torch.float32) == 67e12
    for lower in ("high", "medium"):
        precision(lower)
        assert h200.flops_per_second(torch.float32) is None


def test_datasheet_has_no_peak_for_float64():
    h200 = DATASHEETS["NVIDIA H200"]
    assert h200.flops_per_second(torch.float64) is None
    with pytest.raises(ValueError, match="no peak for float64"):
        h200.rates(torch.float64)


def test_rates_give_the_longer_of_computing_and_moving():
    rates = Rates(flops_per_second=10.0, bytes_per_second=2.0)
    assert rates.seconds(flops=30, bytes_moved=2) == 3
    assert rates.seconds(flops=30, bytes_moved=8) == 4


class Timed(TorchDispatchMode):
    """A machine of 1 GFLOP/s and 1 MB/s, whose clock moves on by the products and copies that it runs."""

    def __init__(self):
        super().__init__()
        self.seconds, self.sizes = 0.0, []

    def clock(self):
        return self.seconds

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._opname == "mm":
            self.sizes.append(len(args[0]))
            self.seconds += 2 * len(args[0]) ** 3 / 1e9
        if func._opname == "copy_":
            self.seconds += 2 * args[0].nbytes / 1e6
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("product_seconds", "side"), [(0.1, 256), (1.0, 512)]
)  # 34 ms, and eight times that
def test_measure_ceilings_counts_products_and_copies_and_grows_within_its_time(
    product_seconds, side
):
    with Timed() as timed:
        sizes = {
            "largest_product": 512,
            "product_seconds": product_seconds,
            "copy_bytes": 4000,
        }
        machine = measure_ceilings(
            torch.device("cpu"), torch.bfloat16, rounds=3, clock=timed.clock, **sizes
        )
    assert (max(timed.sizes), machine.copy_bytes) == (side, 4000)
    assert machine.flops_per_second.median == pytest.approx(1e9)
    assert machine.flops_per_second.samples == 3
    assert machine.bytes_per_second.median == pytest.approx(1e6)


def test_measure_ceilings_runs_the_product_for_half_a_second_too():
    timed, slow = Timed(), [0.0]

    def throttled():  # a power limit halves the speed for what runs longer than 0.4 s
        slow.append(timed.seconds + max(0.0, timed.seconds - slow[-1] - 0.4))
        return slow[-1]

    with timed:
        sizes = {"largest_product": 256, "copy_bytes": 4000}
        machine = measure_ceilings(
            torch.device("cpu"), torch.float32, clock=throttled, **sizes
        )
    assert machine.sustained_flops_per_second < 0.95 * machine.flops_per_second.median
