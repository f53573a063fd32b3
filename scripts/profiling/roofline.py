"""What a machine allows: the roofline (Williams et al., 2009), by measured rates."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from lab.timing import Clock, Run, Sampler, wall_sampler

from .operations import name_of

MATMUL = "matmul "
COPY = "memory copy"
SMALL = "an operation on one number"


@dataclass(frozen=True)
class Rates:
    """What this machine does in a second.

    flops_per_s: of a large matmul, for each dtype.
    bytes_per_s: that a large copy reads and writes.
    small_operations_per_s: calls of an operation on one number.
    """

    flops_per_s: dict[str, float]
    bytes_per_s: float
    small_operations_per_s: float

    @classmethod
    def of(cls, samples: dict[str, list[float]]) -> "Rates":
        """Return the rates from the samples of `rate_samplers`."""
        rates = {name: 1 / median(seconds) for name, seconds in samples.items()}
        copy, small = rates.pop(COPY), rates.pop(SMALL)
        matmuls = {name.removeprefix(MATMUL): rates[name] for name in rates}
        return cls(matmuls, copy, small)


def rate_samplers(
    device: torch.device, dtypes: Iterable[torch.dtype], clock: Clock
) -> dict[str, Sampler]:
    """Return samplers of the seconds per FLOP, byte, and operation on one number.

    They take large matmuls, a large copy, and a chain of small operations. If gradients
    are enabled, half of the chain is in backward.
    """
    on_gpu = device.type == "cuda"
    side = 8192 if on_gpu else 1024
    samplers = {}
    for dtype in dtypes:
        a = torch.randn(side, side, device=device).to(dtype)
        # As nn.Linear calls it: in float16 on a CPU, other layouts are several times slower.
        matmul = partial(torch.mm, a, a.T, out=torch.empty_like(a))
        samplers[MATMUL + name_of(dtype)] = _per_unit(matmul, 2 * side**3, clock)
    size = 2**29 if on_gpu else 2**27  # more than caches hold
    source = torch.ones(size, device=device, dtype=torch.uint8)
    copy = partial(torch.empty_like(source).copy_, source)
    samplers[COPY] = _per_unit(copy, 2 * size, clock)
    train = torch.is_grad_enabled()
    one = torch.ones(1, device=device, requires_grad=train)
    multiply = partial(_multiply_ones, one)
    samplers[SMALL] = _per_unit(multiply, 200 if train else 100, clock)
    return samplers


def _multiply_ones(one: torch.Tensor) -> None:
    """Multiply a number 100 times and, if it requires a gradient, go back."""
    product = one
    factor = one.detach()
    for _ in range(100):
        product = product * factor
    if product.requires_grad:
        torch.autograd.grad(product, one)


def _per_unit(run: Run, units: int, clock: Clock) -> Sampler:
    sample = wall_sampler(run, clock=clock)
    return lambda: sample() / units
