"""How fast a machine is: the roofline (Williams et al., 2009), measured or from a datasheet."""

import statistics
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from lab.machine import device_name
from lab.timing import Run, Sampler, wall_sampler


@dataclass(frozen=True)
class Rates:
    """FLOPs and bytes per second."""

    flops: float
    bytes: float

    NAMES: ClassVar = ("matmul", "memory copy")

    @classmethod
    def of(cls, samples: dict[str, list[float]]) -> "Rates":
        """Return the rates of samples of seconds per FLOP and per byte."""
        return cls(*(1 / statistics.median(samples[name]) for name in cls.NAMES))


# FLOP/s of the tensor cores without sparsity and bytes/s, from NVIDIA's datasheets, by
# the exact name that the driver gives.
_DATASHEETS = {
    "NVIDIA A100-SXM4-80GB": Rates(312e12, 2039e9),
    "NVIDIA A100 80GB PCIe": Rates(312e12, 1935e9),
    "NVIDIA L4": Rates(121e12, 300e9),
    "NVIDIA L40S": Rates(362e12, 864e9),
    "NVIDIA H100 80GB HBM3": Rates(989e12, 3350e9),
    "NVIDIA H100 PCIe": Rates(756e12, 2000e9),
    "NVIDIA H200": Rates(989e12, 4800e9),
}


def datasheet(device: torch.device, dtype: torch.dtype) -> Rates | None:
    """Return the manufacturer's peaks in half precision; None if they are unknown."""
    if dtype not in (torch.float16, torch.bfloat16):
        return None
    return _DATASHEETS.get(device_name(device))


def rate_samplers(device: torch.device, dtype: torch.dtype) -> dict[str, Sampler]:
    """Return samplers of a large matmul and a large copy."""
    return {
        "matmul": _matmul_sampler(device, dtype),
        "memory copy": _copy_sampler(device),
    }


def _matmul_sampler(device: torch.device, dtype: torch.dtype) -> Sampler:
    """Return a sampler of the square matmul that reaches the most FLOP/s.

    Sides double from 256 to 8192, as long as a matmul takes at most about 0.1 s.
    """
    samplers = {}
    side, expected = 256, 0.0
    while side <= 8192 and expected <= 0.1:
        a = torch.randn(side, side, device=device, dtype=dtype)
        b = torch.randn(side, side, device=device, dtype=dtype)
        matmul = partial(torch.mm, a, b, out=torch.empty_like(a))
        flops = 2 * side**3
        sampler = _per_unit(matmul, flops)
        seconds_per_flop = sampler()
        samplers[seconds_per_flop] = sampler
        expected = 8 * flops * seconds_per_flop  # of the next matmul
        side *= 2
    return samplers[min(samplers)]


def _copy_sampler(device: torch.device) -> Sampler:
    size = 2**29 if device.type == "cuda" else 2**27  # more than caches hold
    source = torch.ones(size, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return _per_unit(partial(target.copy_, source), 2 * size)


def _per_unit(run: Run, units: int) -> Sampler:
    sample = wall_sampler(run, least_seconds=0.01)
    return lambda: sample() / units
