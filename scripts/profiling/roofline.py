"""What a machine allows: the roofline (Williams et al., 2009), by measured rates."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
from lab.timing import Clock, Run, Sampler, wall_sampler

MATMUL = "matmul "
COPY = "memory copy"
SMALL = "an operation on one number"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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


@dataclass
class Operation:
    """All calls of one of torch's operations in a part.

    total_s: their time beyond that of as many calls on one number.
    moved_bytes: what they read and write; views do neither.
    backward_calls: how many of them run in backward.
    """

    name: str
    calls: int = 0
    total_s: float = 0.0
    moved_bytes: int = 0
    backward_calls: int = 0

    def add(self, other: "Operation") -> None:
        self.calls += other.calls
        self.backward_calls += other.backward_calls
        self.total_s += other.total_s
        self.moved_bytes += other.moved_bytes


@dataclass
class Row:
    """A part in all copies of a layer, an optimizer, the rest, GPU idle, or the total.

    What may be done for it:
    is_optimizer, may_be_fused: an optimizer, which torch has in a fused form, too.
    compiles: whether --compile may change it.

    What it does in one run:
    calls: how often its modules are called.
    parameters: numbers in them; what modules share counts in the first of them.
    operations: by their time.
    flops: by dtype.
    unknown: operations whose FLOPs are not known. With them, the FLOPs and all figures
        that follow from them are lower bounds.
    moved_bytes: what it must read and write at least.
    kept_bytes: what autograd keeps for backward, unless an earlier row keeps it; None if
        the model forbids to see it.

    How long it takes (forward_s is None where it is not measured):
    p20_s, varies: the 20th percentile of total_s, and the range from there to the 80th,
        divided by total_s.

    What follows, set by `compare`:
    compute_s, memory_s: the time of its FLOPs and of moved_bytes, at the machine's rates.
    traffic_s: the time of all bytes that its operations read and write, at this rate.
    overhead_s: at least the time of calling its operations: the time of as many on one
        number, as if views took none; None for a part on a GPU.
    between_s: the time of Python, autograd and calls, which is what its operations leave
        of p20_s; None on a GPU.
    least_s: the longer of compute_s and memory_s.
    limit: what explains at least half of the time: compute, memory, overhead, Python or
        unknown operations, or traffic; otherwise kernel. The rest has none, or noise.
    """

    name: str

    is_optimizer: bool = False
    may_be_fused: bool = False
    compiles: bool = True
    calls: int = 0
    parameters: int = 0
    operations: list[Operation] = field(default_factory=list)
    flops: dict[str, int] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    moved_bytes: int = 0
    kept_bytes: int | None = 0

    forward_s: float | None = None
    total_s: float = 0.0
    p20_s: float = 0.0
    varies: float = 0.0

    compute_s: float = 0.0
    memory_s: float = 0.0
    traffic_s: float = 0.0
    overhead_s: float | None = None
    between_s: float | None = None
    least_s: float = 0.0
    flops_per_s: float = 0.0
    of_roofline: float | None = None
    limit: str = ""

    def operation(self, name: str) -> Operation:
        """Return the operation of this name, without calls if it is new."""
        for each in self.operations:
            if each.name == name:
                return each
        self.operations.append(Operation(name))
        return self.operations[-1]

    @property
    def ops(self) -> int:
        return sum(each.calls for each in self.operations)

    @property
    def computations(self) -> int:
        """Return how many operations are no views, whose calls take less time."""
        return sum(each.calls for each in self.operations if each.moved_bytes)

    @property
    def unknown_s(self) -> float:
        """Return the time of the operations whose FLOPs are not known."""
        names = [name.rpartition(".")[2] for name in self.unknown]
        return sum(each.total_s for each in self.operations if each.name in names)

    @property
    def digits(self) -> int:
        """Return how many digits of a time are worth reading."""
        return 2 if self.varies > 0.05 else 3

    def compare(self, rates: Rates, on_gpu: bool) -> None:
        """Set what follows from the rates of a machine."""
        self.compute_s = sum(
            count / rates.flops_per_s[dtype] for dtype, count in self.flops.items()
        )
        self.memory_s = self.moved_bytes / rates.bytes_per_s
        traffic = sum(each.moved_bytes for each in self.operations)
        self.traffic_s = traffic / rates.bytes_per_s
        if not on_gpu:  # where launches overlap with kernels
            self.overhead_s = self.computations / rates.small_operations_per_s
            inside = sum(each.total_s for each in self.operations)
            self.between_s = max(0.0, self.p20_s - inside)
        self.least_s = max(self.compute_s, self.memory_s)
        if self.total_s > 0:
            self.flops_per_s = sum(self.flops.values()) / self.total_s
            self.of_roofline = self.least_s / self.total_s
        self.limit = self._limit()

    def _limit(self) -> str:
        half = self.total_s / 2
        causes = {
            "compute": self.compute_s,
            "memory": self.memory_s,
            "overhead": self.overhead_s or 0.0,
        }
        longest = max(causes, key=lambda cause: causes[cause])
        if causes[longest] >= half:
            return longest
        if (self.between_s or 0.0) >= half:
            return "Python"
        if self.unknown_s >= half:
            return "unknown"
        return "traffic" if self.traffic_s >= half else "kernel"


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
