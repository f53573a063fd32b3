"""How fast a machine is: the roofline (Williams et al., 2009), measured or from a datasheet."""

from dataclasses import dataclass
from functools import partial

import torch
from lab.machine import device_name
from lab.timing import Run, Sampler, wall_sampler

RATES = ("matmul", "memory copy")


@dataclass(frozen=True)
class Rates:
    """FLOPs and bytes per second."""

    flops: float
    bytes: float


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
    if dtype == torch.float32:
        return None
    return _DATASHEETS.get(device_name(device))


def rate_samplers(device: torch.device, dtype: torch.dtype) -> dict[str, Sampler]:
    """Return samplers of a large matmul and a large copy, per FLOP and per byte."""
    on_gpu = device.type == "cuda"
    side = 8192 if on_gpu else 1024
    a = torch.randn(side, side, device=device).to(dtype)
    matmul = partial(torch.mm, a, a, out=torch.empty_like(a))
    size = 2**29 if on_gpu else 2**27  # more than caches hold
    source = torch.ones(size, device=device, dtype=torch.uint8)
    copy = partial(torch.empty_like(source).copy_, source)
    return {
        "matmul": _per_unit(matmul, 2 * side**3),
        "memory copy": _per_unit(copy, 2 * size),
    }


def _per_unit(run: Run, units: int) -> Sampler:
    sample = wall_sampler(run, least_seconds=0.01)
    return lambda: sample() / units
