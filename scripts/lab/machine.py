"""How fast this machine is: measured ceilings beside the datasheet's, and the roofline that they make.

The roofline model: Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model" (2009). Work of
a given arithmetic intensity can run at most at min(peak FLOP/s, intensity * peak bytes/s).
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .records import require_at_least
from .timing import Clock, Spread, clock, interleave


@dataclass(frozen=True)
class Rates:
    """The FLOPs that a device computes in a second, and the bytes of its memory that it moves."""

    flops_per_second: float
    bytes_per_second: float

    def seconds(self, flops: float, bytes_moved: float) -> float:
        """Return the least time for this work: the longer of computing it and of moving its bytes."""
        computing = flops / self.flops_per_second
        moving = bytes_moved / self.bytes_per_second
        return max(computing, moving)

    @property
    def ridge(self) -> float:
        """Return the arithmetic intensity, in FLOP/byte, above which work is compute-bound."""
        return self.flops_per_second / self.bytes_per_second


@dataclass(frozen=True)
class Datasheet:
    """The manufacturer's peaks: tensor-core FLOP/s without sparsity, float32 FLOP/s without TF32, memory bytes/s."""

    half: float
    float32: float
    bytes_per_second: float

    def flops_per_second(self, dtype: torch.dtype) -> float | None:
        """Return the peak; None for other dtypes, and for float32 that may be computed in TF32."""
        if dtype in (torch.float16, torch.bfloat16):
            return self.half
        exact = torch.get_float32_matmul_precision() == "highest"
        if dtype == torch.float32 and exact:
            return self.float32
        return None

    def rates(self, dtype: torch.dtype) -> Rates:
        """Return the peaks for a dtype; raise a ValueError if it has none."""
        peak = self.flops_per_second(dtype)
        if peak is None:
            name = str(dtype).removeprefix("torch.")
            raise ValueError(f"the datasheet has no peak for {name}")
        return Rates(peak, self.bytes_per_second)


# NVIDIA's datasheets and architecture whitepapers, by the exact name that the driver gives: variants of one GPU differ,
# and an entry that is not certain is better left out. By default, torch multiplies float32 without TF32.
DATASHEETS = {
    "NVIDIA A100-SXM4-40GB": Datasheet(312e12, 19.5e12, 1555e9),
    "NVIDIA A100-SXM4-80GB": Datasheet(312e12, 19.5e12, 2039e9),
    "NVIDIA A100-PCIE-40GB": Datasheet(312e12, 19.5e12, 1555e9),
    "NVIDIA A100 80GB PCIe": Datasheet(312e12, 19.5e12, 1935e9),
    "NVIDIA L4": Datasheet(121e12, 30.3e12, 300e9),
    "NVIDIA L40S": Datasheet(362e12, 91.6e12, 864e9),
    "NVIDIA H100 80GB HBM3": Datasheet(989e12, 67e12, 3350e9),
    "NVIDIA H100 PCIe": Datasheet(756e12, 51e12, 2000e9),
    "NVIDIA H200": Datasheet(989e12, 67e12, 4800e9),
}


@dataclass(frozen=True)
class Ceilings:
    """Peaks of one device in one dtype, measured in bursts of at least 10 ms.

    `product_size` is the side of the matrices of the product, which then runs for half a second too, in which a power
    limit may lower the clock: `sustained_flops_per_second`. `copy_bytes` is what the copy reads and then writes.
    """

    flops_per_second: Spread
    bytes_per_second: Spread
    sustained_flops_per_second: float
    product_size: int
    copy_bytes: int

    def __post_init__(self) -> None:
        require_at_least(
            1,
            flops_per_second=self.flops_per_second.p20,
            bytes_per_second=self.bytes_per_second.p20,
        )

    @property
    def rates(self) -> Rates:
        """Return the medians."""
        return Rates(self.flops_per_second.median, self.bytes_per_second.median)


def measure_ceilings(
    device: torch.device,
    dtype: torch.dtype,
    *,
    largest_product: int = 8192,
    product_seconds: float = 0.1,
    copy_bytes: int | None = None,
    rounds: int = 7,
    clock: Clock = clock,
) -> Ceilings:
    """Measure the fastest square matrix product of those that take at most `product_seconds`, and a large copy.

    The product is measured in short samples and, for the rate that the machine sustains, once for half a second.
    """
    if copy_bytes is None:
        # More than most caches hold.
        copy_bytes = 2**27 if device.type == "cpu" else 2**29
    with torch.no_grad():
        products = _products(device, dtype, largest_product, product_seconds, clock)
        source = torch.ones(copy_bytes // dtype.itemsize, device=device, dtype=dtype)
        target = torch.empty_like(source)
        runs = {str(side): product for side, product in products.items()}
        runs["copy"] = lambda: target.copy_(source)
        samples = interleave(
            runs, rounds, sample_seconds=0.01, warmup_calls=1, clock=clock
        )
        rates = {}
        for side in products:
            flops = _product_flops(side)
            rates[side] = Spread.of([flops / seconds for seconds in samples[str(side)]])
        fastest_side = max(rates, key=lambda side: rates[side].median)
        sustained_seconds = _seconds_of_one(
            products[fastest_side], sample_seconds=0.5, clock=clock
        )
    # A copy reads and writes.
    moved = 2 * source.nbytes
    return Ceilings(
        flops_per_second=rates[fastest_side],
        bytes_per_second=Spread.of([moved / seconds for seconds in samples["copy"]]),
        sustained_flops_per_second=_product_flops(fastest_side) / sustained_seconds,
        product_size=fastest_side,
        copy_bytes=source.nbytes,
    )


def _products(
    device: torch.device,
    dtype: torch.dtype,
    largest: int,
    longest_seconds: float,
    clock: Clock,
) -> dict[int, Callable[[], Tensor]]:
    """Return products of square matrices by their side, which doubles while a product stays below `longest_seconds`."""
    products = {}
    side, expected_seconds = 256, 0.0
    while side <= largest and expected_seconds <= longest_seconds:
        products[side] = _product(side, device, dtype)
        # Twice the side is eight times the work.
        seconds = _seconds_of_one(products[side], sample_seconds=0.0, clock=clock)
        expected_seconds = 8 * seconds
        side *= 2
    return products


def _product(
    side: int, device: torch.device, dtype: torch.dtype
) -> Callable[[], Tensor]:
    a = torch.randn(side, side, device=device).to(dtype)
    b = torch.randn(side, side, device=device).to(dtype)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _product_flops(side: int) -> int:
    return 2 * side**3


def _seconds_of_one(
    run: Callable[[], Tensor], *, sample_seconds: float, clock: Clock
) -> float:
    """Return the seconds of one call, from a sample of calls that takes at least `sample_seconds`."""
    samples = interleave({"run": run}, 1, sample_seconds, 1, clock=clock)
    return samples["run"][0]


def memory_bytes(device: torch.device) -> int:
    """Return the size of the device's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
