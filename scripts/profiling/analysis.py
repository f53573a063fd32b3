"""Compute what follows from measured times: shares, MFU, distances from the roofline, and where time is lost."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lab.costs import Cost
from lab.machine import Rates
from lab.tables import si
from lab.timing import Spread

from .records import Part, Pass, Point, Profile

Cause = Literal["overhead", "products", "weights", "elementwise"]
# Seconds by the name of a part and of one of its passes.
PassSeconds = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Utilization:
    """Model FLOPs utilization: FLOPs of the matrix products / time / peak.

    causal: counts the attention scores on and below the diagonal.
    dense: counts all attention scores.
    """

    causal: float
    dense: float


@dataclass(frozen=True)
class Loss:
    """The time that a part takes above its roofline.

    name: the part, or AdamW.
    seconds: of all its copies.
    share: of the time of the whole.
    roofline_fraction: the least time of the part divided by its time.
    cause: what its figures point to. overhead: it takes less than twice as long as its calls without arithmetic;
        products: its costliest pass has matrix products, and computing them bounds it; weights: it has matrix products,
        and moving their bytes bounds it; elementwise: it has no matrix product.
    """

    name: str
    seconds: float
    share: float
    roofline_fraction: float
    cause: Cause


@dataclass(frozen=True)
class Analysis:
    """What follows from the times of one size. The whole is that of the mode.

    tokens_per_second: of the whole.
    overhead_share: the time of the same calls on a tiny input, as a share of the whole.
    whole_minus_parts: the median of the whole, minus those of all parts and of AdamW, in seconds.
    mfu_measured: under the measured ceiling; None if that is too low.
    mfu_datasheet: under the peak of the datasheet; None if that is unknown.
    roofline_seconds: the least time of each part and pass under the measured ceilings. That of the whole is the sum of
        its parts: nothing is fused from one part to the next. None if a ceiling is too low.
    losses: the three parts that lose most; none if a ceiling is too low.
    """

    tokens_per_second: float
    overhead_share: float
    whole_minus_parts: float
    mfu_measured: Utilization | None
    mfu_datasheet: Utilization | None
    roofline_seconds: PassSeconds | None
    losses: tuple[Loss, ...]

    def roofline_fraction(self, part: Part, name: str) -> float | None:
        """Return the least time of a pass divided by its time, on a GPU its own time; None if either is unknown."""
        each = part.passes[name]
        if self.roofline_seconds is None or each.is_noise:
            return None
        return self.roofline_seconds[part.name][name] / each.own_seconds


def analyze(point: Point, profile: Profile) -> Analysis:
    """Return what follows from a point of a profile."""
    mode = profile.settings.mode
    whole = point.whole.passes[mode]
    rates: Rates | None = None
    least: PassSeconds | None = None
    losses: tuple[Loss, ...] = ()
    if not ceiling_too_low(profile):
        rates = profile.ceilings.rates
        least = roofline_seconds(point, rates)
        losses = _losses(point, mode, least, rates)
    accounted = sum(part_seconds(part) for part in point.addends)
    seconds = whole.seconds.median
    return Analysis(
        tokens_per_second=point.size.tokens / seconds,
        overhead_share=point.overhead[mode].median / seconds,
        whole_minus_parts=seconds - accounted,
        mfu_measured=_utilization(whole, rates),
        mfu_datasheet=_utilization(whole, profile.datasheet),
        roofline_seconds=least,
        losses=losses,
    )


def part_seconds(part: Part) -> float:
    """Return the median time of all copies of a part, in all of its passes."""
    return part.count * sum(each.seconds.median for each in part.passes.values())


def _utilization(whole: Pass, rates: Rates | None) -> Utilization | None:
    if rates is None:
        return None
    possible = whole.seconds.median * rates.flops_per_second
    causal = whole.cost.matmul_flops / possible
    dense = whole.cost.dense_matmul_flops / possible
    return Utilization(causal, dense)


def bound(cost: Cost, rates: Rates) -> str:
    """Return the side of the ridge: "compute" or "memory"."""
    return "compute" if cost.intensity >= rates.ridge else "memory"


def roofline_seconds(point: Point, rates: Rates) -> PassSeconds:
    """Return the least time of each part and pass, and of the whole."""
    found: PassSeconds = {}
    # Parts have forward and backward, and AdamW has optimizer. The whole also has their sums.
    of_whole = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
    for part in point.addends:
        found[part.name] = {}
        for name, timed in part.passes.items():
            least = rates.seconds(timed.cost.flops, timed.cost.bytes)
            found[part.name][name] = least
            of_whole[name] += part.count * least
    of_whole["train"] = of_whole["forward"] + of_whole["backward"]
    of_whole["step"] = of_whole["train"] + of_whole["optimizer"]
    found["whole"] = {name: of_whole[name] for name in point.whole.passes}
    return found


def ceiling_too_low(profile: Profile) -> str | None:
    """Return what shows best that a measured ceiling is too low; None if nothing does.

    A part may be faster than the ceiling of the memory if its data fit into a cache. So only parts that move more than
    the copy, which the caches do not hold, show that this ceiling is too low. Backward is a difference of two times,
    and shows nothing.
    """
    flops_ceiling = profile.ceilings.flops_per_second
    bytes_ceiling = profile.ceilings.bytes_per_second
    excesses: list[tuple[float, str]] = []
    for point, part, name, each in _timed_passes(profile):
        where = f"{name} of {part} at {point.size.tokens} tokens"
        flops = each.cost.flops / _slow_seconds(each)
        if flops > flops_ceiling.p80:
            excess = _excess(where, flops, flops_ceiling.median, "FLOP/s")
            excesses.append((flops / flops_ceiling.median, excess))
        moved = each.cost.bytes / _slow_seconds(each)
        is_cached = each.cost.bytes < profile.ceilings.copy_bytes
        if moved > bytes_ceiling.p80 and not is_cached:
            excess = _excess(where, moved, bytes_ceiling.median, "B/s")
            excesses.append((moved / bytes_ceiling.median, excess))
    if not excesses:
        return None
    _, largest = max(excesses)
    return largest


def _excess(where: str, rate: float, ceiling: float, unit: str) -> str:
    return f"{where} reaches {si(rate, unit)}, and the ceiling is {si(ceiling, unit)}"


def beats_ceilings(profile: Profile) -> bool:
    """Return whether a part is faster than its roofline, for whatever reason."""
    rates = profile.ceilings.rates
    for _, _, _, each in _timed_passes(profile):
        least = rates.seconds(each.cost.flops, each.cost.bytes)
        if _slow_seconds(each) < least:
            return True
    return False


def _timed_passes(profile: Profile) -> list[tuple[Point, str, str, Pass]]:
    """Return all passes of parts that were timed themselves, with their point and their names."""
    found = []
    for point in profile.points:
        if isinstance(point, Point):
            for part in point.addends:
                for name, each in part.passes.items():
                    if name != "backward":
                        found.append((point, part.name, name, each))
    return found


def _slow_seconds(each: Pass) -> float:
    """Return p80 of the times, which is sure to be no lucky sample."""
    seconds: Spread = each.seconds
    if each.gpu_seconds is not None:
        seconds = each.gpu_seconds
    return seconds.p80


def _losses(
    point: Point, mode: str, least: PassSeconds, rates: Rates
) -> tuple[Loss, ...]:
    """Return the three parts that lose most against the roofline."""
    overheads = _overheads(point, mode)
    whole = point.whole.passes[mode].seconds.median
    losses = []
    for part in point.addends:
        taken = sum(each.own_seconds for each in part.passes.values())
        possible = sum(least[part.name].values())
        if taken > possible:
            seconds = part.count * (taken - possible)
            loss = Loss(
                name=part.name,
                seconds=seconds,
                share=seconds / whole,
                roofline_fraction=possible / taken,
                cause=_cause(part, least[part.name], overheads[part.name], rates),
            )
            losses.append(loss)
    losses.sort(key=lambda loss: loss.seconds, reverse=True)
    return tuple(losses[:3])


def _cause(
    part: Part, least: Mapping[str, float], overhead: float, rates: Rates
) -> Cause:
    """Return what probably makes a part slower than its roofline."""
    taken = sum(each.own_seconds for each in part.passes.values())
    if taken < 2 * overhead:
        return "overhead"

    def lost(name: str) -> float:
        return part.passes[name].own_seconds - least[name]

    costliest = part.passes[max(part.passes, key=lost)]
    if not costliest.cost.matmul_flops:
        return "elementwise"
    if bound(costliest.cost, rates) == "compute":
        return "products"
    return "weights"


def _overheads(point: Point, mode: str) -> dict[str, float]:
    """Return how long the calls of each part take without arithmetic.

    Each part has an equal share of the same calls on a tiny input, and AdamW has what these take longer with it. On a
    GPU, a part's own time contains no such calls.
    """
    of_parts = point.overhead["forward" if mode == "forward" else "train"].median
    count = sum(part.count for part in point.parts)
    overheads = {part.name: of_parts / count for part in point.parts}
    overheads["AdamW"] = point.overhead[mode].median - of_parts
    for part in point.addends:
        if part.has_gpu_seconds:
            overheads[part.name] = 0.0
    return overheads
