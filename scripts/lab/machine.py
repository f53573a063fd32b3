"""How fast this machine is: measured ceilings beside the datasheet's, and the roofline that they make.

The roofline model: Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model" (2009). Work of
a given arithmetic intensity can run at most at min(peak FLOP/s, intensity * peak bytes/s).
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .timing import Clock, Spread, clock, interleave


@dataclass(frozen=True)
class Datasheet:
    """The manufacturer's peaks: tensor-core FLOP/s without sparsity, float32 FLOP/s without TF32, memory bytes/s."""

    half: float
    float32: float
    bytes_per_second: float

    def flops_per_second(self, dtype: torch.dtype) -> float | None:
        """Return the peak, None where it is not here: of other dtypes, and of float32 that may be computed in TF32."""
        if dtype == torch.float32:
            return (
                self.float32
                if torch.get_float32_matmul_precision() == "highest"
                else None
            )
        return self.half if dtype in (torch.float16, torch.bfloat16) else None

    def peaks(self, dtype: torch.dtype) -> dict[str, float | None]:
        return {
            "flops_per_second": self.flops_per_second(dtype),
            "bytes_per_second": self.bytes_per_second,
        }

    def ceilings(self, dtype: torch.dtype) -> "Ceilings":
        """Return the peaks as ceilings without samples; raise a ValueError if this dtype has none."""
        if (peak := self.flops_per_second(dtype)) is None:
            raise ValueError(
                f"the datasheet has no peak for {str(dtype).removeprefix('torch.')}"
            )
        flops, memory = (
            Spread(rate, rate, rate, 0) for rate in (peak, self.bytes_per_second)
        )
        return Ceilings(flops, memory, peak, product_size=0, copy_bytes=0)


# NVIDIA's datasheets and architecture whitepapers, by the exact name that the driver gives: variants of one GPU differ,
# and an entry that is not certain is better left out. Torch multiplies float32 without TF32 unless it is told to.
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

    @property
    def ridge(self) -> float:
        """Return the arithmetic intensity, in FLOP/byte, above which work is compute-bound."""
        return self.flops_per_second.median / self.bytes_per_second.median

    def seconds(self, flops: float, bytes_moved: float) -> float:
        """Return the least time for this work: the longer of computing it and of moving it."""
        return max(
            flops / self.flops_per_second.median,
            bytes_moved / self.bytes_per_second.median,
        )


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
    """Measure the fastest square matrix product of those that take at most `product_seconds`, and a large copy."""
    copy_bytes = (
        copy_bytes or (128 if device.type == "cpu" else 512) * 2**20
    )  # more than most caches hold

    def product(size: int) -> Callable[[], Tensor]:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        return lambda: torch.mm(a, b, out=out)

    with torch.no_grad():
        size, seconds, products = 256, 0.0, {}
        while size <= largest_product and 8 * seconds <= product_seconds:
            products[size] = product(size)
            (seconds,) = interleave({size: products[size]}, 1, 0.0, 1, clock=clock)[
                size
            ]
            size *= 2
        source = torch.ones(copy_bytes // dtype.itemsize, device=device, dtype=dtype)
        target = torch.empty_like(source)
        runs = {**products, 0: lambda: target.copy_(source)}
        samples = interleave(
            runs, rounds, sample_seconds=0.01, warmup_calls=1, clock=clock
        )
        rates = {
            n: Spread.of([2 * n**3 / seconds for seconds in samples[n]])
            for n in products
        }
        best = max(rates, key=lambda n: rates[n].median)
        (long,) = interleave(
            {best: products[best]}, 1, sample_seconds=0.5, warmup_calls=1, clock=clock
        )[best]
    copied = Spread.of([2 * source.nbytes / seconds for seconds in samples[0]])
    return Ceilings(rates[best], copied, 2 * best**3 / long, best, source.nbytes)


def memory_bytes(device: torch.device) -> int:
    """Return the size of the device's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
