"""The rows of a report: parts with their work and time, compared with what a machine allows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lab.tables import share
from lab.timing import Spread

from .calculate import THREADS, Work, together
from .parts import GPU_IDLE, NO_PART, REST, TOTAL, Part
from .roofline import Rates

# Of the time of a row. What operations may hide that take less does not matter.
HIDDEN = 0.01
# Of the total. Parts that take less are one row.
FEW = 0.005


@dataclass(frozen=True)
class Time:
    """How long a part takes in a run: seconds of all passes, and of forward.

    p20_s, varies: the 20th percentile of total_s, and the range from there to the 80th,
        divided by total_s.
    forward_s: None where it is not measured.
    """

    total_s: float = 0.0
    p20_s: float = 0.0
    varies: float = 0.0
    forward_s: float | None = None

    @classmethod
    def of(cls, total: list[float], forward: list[float]) -> "Time":
        """Return the time by samples."""
        spread = Spread.of(total)
        median = Spread.of(forward).median
        return cls(spread.median, spread.p20, spread.width, median)


@dataclass(frozen=True)
class Row(Time, Work, Part):
    """A part, an optimizer, the rest, GPU idle, or the total, and what follows.

    compute_s, memory_s: the time of its FLOPs and of moved_bytes, at the machine's rates.
    traffic_s: the time of all bytes that its operations read and write, at this rate.
    overhead_s: at least the time of calling its operations: the time of as many on one
        number, as if views took none; None for a part on a GPU.
    between_s: the time of Python, autograd and calls, which is what its operations leave
        of p20_s; None on a GPU.
    least_s: the longer of compute_s and memory_s.
    limit: what explains at least half of the time: compute, memory, overhead, unknown
        operations, Python, or traffic; otherwise kernel. Threads, if modules run in some.
        The rest has none, or noise.
    """

    compute_s: float = 0.0
    memory_s: float = 0.0
    traffic_s: float = 0.0
    overhead_s: float | None = None
    between_s: float | None = None
    least_s: float = 0.0
    flops_per_s: float = 0.0
    of_roofline: float | None = None
    limit: str = ""

    @property
    def unknown_s(self) -> float:
        """Return the time of the operations whose FLOPs are not known."""
        names = [name.rpartition(".")[2] for name in self.unknown]
        return sum(each.total_s for each in self.operations if each.name in names)

    @property
    def is_bound(self) -> bool:
        """Say if its FLOPs, and all figures that follow from them, are bounds.

        What an unknown operation multiplies takes at most its time.
        """
        hidden = sum(self.unknown.values())
        matters = bool(self.unknown) and hidden >= HIDDEN * self.total_s
        return matters or bool(self.unseen)

    @property
    def digits(self) -> int:
        """Return how many digits of a time are worth reading."""
        return 2 if self.varies > 0.05 else 3


def row_of(part: Part, work: Work, time: Time, rates: Rates, on_gpu: bool) -> Row:
    """Compare the work of a part with its time, at the rates of a machine."""
    compute_s = sum(
        count / rates.flops_per_s[dtype] for dtype, count in work.flops.items()
    )
    memory_s = work.moved_bytes / rates.bytes_per_s
    least_s = max(compute_s, memory_s)
    traffic = sum(each.moved_bytes for each in work.operations)
    inside_s = sum(each.total_s for each in work.operations)
    calls_s = work.computations / rates.small_operations_per_s
    row = Row(
        **vars(part),
        **vars(work),
        **vars(time),
        compute_s=compute_s,
        memory_s=memory_s,
        traffic_s=traffic / rates.bytes_per_s,
        # On a GPU, launches overlap with kernels.
        overhead_s=None if on_gpu else calls_s,
        between_s=None if on_gpu else max(0.0, time.p20_s - inside_s),
        least_s=least_s,
        flops_per_s=sum(work.flops.values()) / time.total_s if time.total_s else 0.0,
        of_roofline=least_s / time.total_s if time.total_s else None,
    )
    return replace(row, limit=_limit(row))


def _limit(row: Row) -> str:
    if THREADS in row.unseen:
        return "threads"
    half = row.total_s / 2
    causes = {
        "compute": row.compute_s,
        "memory": row.memory_s,
        "overhead": row.overhead_s or 0.0,
    }
    longest = max(causes, key=lambda cause: causes[cause])
    if causes[longest] >= half:
        return longest
    if row.unknown_s >= half:
        return "unknown"
    if (row.between_s or 0.0) >= half:
        return "Python"
    return "traffic" if row.traffic_s >= half else "kernel"


def total(
    rows: Sequence[Row],
    parameters: int,
    took: Spread,
    rates: Rates,
    on_gpu: bool,
    parts_are_eager: bool,
    trains: bool,
) -> Row:
    """Return the total: the time of the whole, and the work of all parts."""
    # The parts and the whole are measured in separate runs.
    forward_s = sum(row.forward_s or 0.0 for row in rows)
    time = Time(
        took.median,
        took.p20,
        took.width,
        min(forward_s, took.median) if trains else took.median,
    )
    whole = row_of(Part(TOTAL, parameters), together(rows), time, rates, on_gpu)
    # Nothing is fused over parts. A part that is faster than its least time, because its
    # data came from a cache, does not make up for another one.
    least_s = sum(min(row.least_s, row.total_s) for row in rows)
    whole = replace(
        whole, calls=0, limit="", least_s=least_s, of_roofline=least_s / took.median
    )
    if parts_are_eager:  # compiling fuses parts, and removes operations
        return replace(whole, forward_s=None, of_roofline=None, overhead_s=None)
    return whole


def weights_of_no_part(rows: Iterable[Row], whole: Row) -> list[Row]:
    """Return a row for the weights of modules that are not called, if there are any.

    A module may use the weights of its children, as nn.MultiheadAttention does.
    """
    others = whole.parameters - sum(row.parameters for row in rows)
    return [Row(NO_PART, parameters=others)] if others else []


def left_over(
    rows: Iterable[Row], took_s: float, busy_s: float | None, rest_varies: float
) -> list[Row]:
    """Return the rest of the total time and, on a GPU, the time without a kernel.

    busy_s: the time of kernels; None without a GPU.
    rest_varies: the range from p20 to p80 of the rest, divided by the total time.
    """
    left = took_s - sum(row.total_s for row in rows)
    idle = []
    if busy_s is not None:
        idle = [Row(GPU_IDLE, total_s=took_s - busy_s)]
        left -= idle[0].total_s
    varies = rest_varies * took_s / abs(left) if left else 0.0
    is_noise = abs(left) < rest_varies * took_s
    rest = Row(REST, total_s=left, varies=varies, limit="noise" if is_noise else "")
    return [rest, *idle]


def folded(rows: list[Row], total_s: float, most: int | None = None) -> list[Row]:
    """Replace parts that take little time by one row, if there are several.

    They take less than 0.5% of the time or, if this leaves more rows than `most`, the least.
    """
    parts = [row for row in rows if row.operations and not row.is_optimizer]
    few = [row for row in parts if row.total_s < FEW * total_s]
    name = f"{len(few)} parts below {share(FEW, 1)}"
    if most is not None and len(rows) - len(few) + 1 > most:
        parts.sort(key=lambda row: row.total_s)
        few = parts[: len(rows) - most + 1]
        name = f"{len(few)} other parts"
    if len(few) < 2:
        return rows
    one = Row(
        **vars(Part(name, parameters=sum(row.parameters for row in few))),
        **vars(together(few)),
        forward_s=sum(row.forward_s or 0.0 for row in few),
        total_s=sum(row.total_s for row in few),
        least_s=sum(row.least_s for row in few),
    )
    shown = [row for row in rows if row not in few]
    last = sum(row.forward_s is not None and not row.is_optimizer for row in shown)
    return [*shown[:last], one, *shown[last:]]
