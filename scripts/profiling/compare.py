"""Compare two profiles: the ratio of every time, with the interval in which it may lie."""

from lab.sizes import Size
from lab.tables import Section, Table, number, number_range
from lab.timing import Spread

from .records import LEAST_SECONDS, Point, Profile, times_of
from .report import describe, doubts, interruption, model_name
from .trust import LEAST_SAMPLES

# An interval that contains 1 and goes beyond these limits does not even show that nothing changed much.
_SAME_FROM = 0.8
_SAME_TO = 1.25

# What else can make a difference, beside the code.
_SETTINGS = ("dtype", "mode", "compile", "mesh")
_ENVIRONMENT = (
    "device",
    "torch",
    "threads",
    "driver",
    "cudnn",
    "norm_kernels",
    "commit",
    "float32_matmul_precision",
)
_ADVICE = (
    "Runs of the same code differ, too. To compare two versions, run them in turns: compare_peers.py --against.\n"
    "The interval goes from new p20 / old p80 to new p80 / old p20.\n"
    '"May be slower" means that it lies above 1, and "may be faster" that it lies below 1.\n'
    f'"Same" means that it contains 1 and lies within {_SAME_FROM} to {_SAME_TO}.\n'
    '"Unclear" means that it contains 1 and is wider, or that a time '
    f"has fewer than {LEAST_SAMPLES} samples."
)


def compare(old: Profile, new: Profile) -> list[Section]:
    """Return new / old for every time that both have at the same sizes, and first what else differs between the two.

    Every interval is wider by what the ceilings differ by, because a machine that was slower when they were measured
    may have been slower all the time.
    """
    old_points = {point.size: point for point in old.points}
    margin = _margin(old, new)
    sections: list[Section] = [_differences(old, new)]
    for name, profile in (("Old", old), ("New", new)):
        for warning in (*doubts(profile), *interruption(profile)):
            sections.append(f"{name} profile: {warning}")
    for point in new.points:
        before = {}  # then there is nothing to compare with
        if point.size in old_points:
            before = times_of(old_points[point.size])
        sections.append(_ratios(point.size, before, times_of(point), margin))
    wider = (
        f"The measured ceilings differ by a factor of {number(margin)}, "
        "so every interval is widened by that factor."
    )
    return [*sections, f"{wider}\n{_ADVICE}"]


def measured_sizes(profile: Profile) -> list[Size]:
    """Return the sizes that have times: not those for which the memory did not suffice."""
    return [point.size for point in profile.points if times_of(point)]


def _differences(old: Profile, new: Profile) -> str:
    environment = old.environment
    lines = [
        f"Compared with the profile of {environment.date}, commit {environment.commit}:"
    ]
    for name in _ENVIRONMENT:
        before, after = getattr(environment, name), getattr(new.environment, name)
        lines.extend(_difference(name, before, after))
    for name in _SETTINGS:
        before, after = getattr(old.settings, name), getattr(new.settings, name)
        lines.extend(_difference(name, before, after))
    kernels = _attention_kernels(old), _attention_kernels(new)
    lines.extend(_difference("attention kernel", *kernels))
    return "\n".join(lines)


def _difference(name: str, before: object, after: object) -> list[str]:
    if before == after:
        return []
    return [f"  {name.replace('_', ' ')}: {before} then, {after} now"]


def _attention_kernels(profile: Profile) -> str:
    kernels = {
        point.attention_kernel for point in profile.points if isinstance(point, Point)
    }
    return ", ".join(sorted(kernels))


def _margin(old: Profile, new: Profile) -> float:
    """Return the factor, 1 or more, by which the ceilings of two profiles differ."""
    flops = new.ceilings.flops_per_second.median / old.ceilings.flops_per_second.median
    memory = new.ceilings.bytes_per_second.median / old.ceilings.bytes_per_second.median
    return max(flops, 1 / flops, memory, 1 / memory)


def _ratios(
    size: Size,
    before: dict[tuple[str, str], Spread],
    after: dict[tuple[str, str], Spread],
    margin: float,
) -> Section:
    """Return the table of one size."""
    columns = ["part", "pass", "old us", "new us", "ratio", "interval", ""]
    table = Table(f"New / old: {describe(size)}", columns)
    for part, name in after:
        if (part, name) in before:
            title = model_name(size) if part == "whole" else part
            cells = _ratio(before[part, name], after[part, name], margin)
            table.rows.append([title, name, *cells])
    if not table.rows:
        return f"{describe(size)}: nothing to compare with"
    return table


def _ratio(old: Spread, new: Spread, margin: float) -> list[str]:
    """Return the cells of one time: old, new, their ratio, its interval, and the verdict."""
    times = [number(old.median * 1e6), number(new.median * 1e6)]
    if min(old.p20, new.p20) < LEAST_SECONDS:
        # Backward is a difference of two times, and noise may make it tiny or negative.
        return [*times, "n/a", "n/a", "unclear"]
    low = new.p20 / old.p80 / margin
    high = new.p80 / old.p20 * margin
    ratio = number(new.median / old.median)
    has_samples = min(old.samples, new.samples) >= LEAST_SAMPLES
    shown = verdict(low, high) if has_samples else "unclear"
    return [*times, ratio, number_range(low, high), shown]


def verdict(low: float, high: float) -> str:
    """Return what the interval of a ratio of times shows."""
    if low > 1:
        return "may be slower"
    if high < 1:
        return "may be faster"
    if low < _SAME_FROM or high > _SAME_TO:
        return "unclear"
    return "same"
