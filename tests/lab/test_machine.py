"""The ceilings and the roofline."""

import pytest
import torch
from lab.machine import Ceilings, datasheet, measure_ceilings
from lab.timing import Spread


def ceilings(flops: float, bandwidth: float) -> Ceilings:
    return Ceilings(Spread(flops, flops, flops, 1), Spread(bandwidth, bandwidth, bandwidth, 1), 1024, 2**20)


def test_roofline_takes_the_longer_of_computing_and_moving():
    machine = ceilings(flops=100.0, bandwidth=10.0)
    assert machine.ridge == 10.0
    assert machine.seconds(flops=1000, bytes_moved=50) == 10.0
    assert machine.seconds(flops=1000, bytes_moved=500) == 50.0
    assert machine.seconds(flops=1000, bytes_moved=100) == 10.0
    assert [machine.bound(intensity) for intensity in (9.9, 10.0, 10.1)] == ["memory", "compute", "compute"]


def test_datasheet_of_a_device_that_is_not_known_exactly_is_none():
    for name in ("NVIDIA A100", "nvidia h200", "NVIDIA GeForce RTX 3060", ""):
        assert datasheet(name) is None


def test_datasheet_knows_the_dtypes_and_the_precision_of_float32():
    h200 = datasheet("NVIDIA H200")
    assert h200.flops_per_second(torch.bfloat16) == h200.flops_per_second(torch.float16) == 989e12
    assert h200.flops_per_second(torch.float64) is None
    assert datasheet("Tesla V100-SXM2-16GB").flops_per_second(torch.bfloat16) is None  # it has no such unit
    try:
        for precision, peak in (("high", None), ("medium", None), ("highest", 67e12)):
            torch.set_float32_matmul_precision(precision)
            assert h200.flops_per_second(torch.float32) == peak
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measure_ceilings_counts_products_and_copies(dtype, monkeypatch):
    # A clock by which every call of whatever is timed takes a thousandth of a second.
    def interleave(runs, rounds, **options):
        for run in runs.values():
            run()
        return {name: [1e-3] * rounds for name in runs}

    monkeypatch.setattr("lab.machine.interleave", interleave)
    machine = measure_ceilings(torch.device("cpu"), dtype, largest_product=64, copy_bytes=4000, rounds=3)
    assert machine.product_size == 64
    assert machine.flops_per_second.median == pytest.approx(2 * 64**3 / 1e-3)
    assert machine.copy_bytes == 4000
    assert machine.bytes_per_second == Spread.of([2 * 4000 / 1e-3] * 3)


def test_measure_ceilings_grows_the_product_within_its_time(monkeypatch):
    names = []

    def interleave(runs, rounds, **options):  # a machine of 1 GFLOP/s
        names.append(list(runs))
        return {name: [2 * int(name or 256) ** 3 * 1e-9 if name != "copy" else 1.0] * rounds for name in runs}

    monkeypatch.setattr("lab.machine.interleave", interleave)
    cpu = torch.device("cpu")
    slow = measure_ceilings(cpu, torch.float32, largest_product=512, product_seconds=0.1, copy_bytes=4096)
    assert slow.product_size == 256
    assert names.pop() == ["256", "copy"]  # 34 ms, and eight times that is too long
    fast = measure_ceilings(cpu, torch.float32, largest_product=512, product_seconds=1.0, copy_bytes=4096)
    assert names.pop() == ["256", "512", "copy"]
    assert fast.flops_per_second.median == pytest.approx(1e9)
