"""What a machine allows: the roofline (Williams et al., 2009), by measured rates."""

from dataclasses import dataclass
from functools import partial

import torch
from lab.timing import Run, Sampler, wall_sampler

RATES = ("matmul", "memory copy")


@dataclass(frozen=True)
class Rates:
    """FLOPs and bytes per second."""

    flops: float
    bytes: float


@dataclass
class Row:
    """A part in all copies of a layer, AdamW, the rest, GPU idle, or the total.

    varies: the range from p20 to p80 of the total, divided by the median.
    overhead: seconds of the same calls on a tiny input; None if unknown.
    kept: bytes that autograd keeps for backward, unless an earlier row keeps them.
    least: seconds of the work at the machine's rates.
    limit: what explains at least half of the time: compute, memory, overhead; or "kernel".
    """

    name: str
    count: int = 1
    forward: float = 0.0
    total: float = 0.0
    varies: float = 0.0
    flops: float = 0.0
    bytes: int = 0
    kept: int = 0
    overhead: float | None = None
    least: float = 0.0
    limit: str = ""

    def compare(self, rates: Rates) -> None:
        """Set the least time and the limit, by the rates of a machine."""
        causes = {
            "compute": self.flops / rates.flops,
            "memory": self.bytes / rates.bytes,
            "overhead": self.overhead or 0.0,
        }
        self.least = max(causes["compute"], causes["memory"])
        longest = max(causes, key=lambda cause: causes[cause])
        self.limit = longest if causes[longest] >= self.total / 2 else "kernel"


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
    sample = wall_sampler(run)
    return lambda: sample() / units
