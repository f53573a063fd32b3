"""A profile as text: what to conclude from it, and the table behind that."""

from textwrap import fill

from lab.tables import number, share, si, terminal

from . import parts
from .calculate import Operation
from .measure import Profile
from .operations import name_of
from .rows import FEW, Row, folded
from .runs import NOISE, Kernel, Recording

_LEGEND = """\
A part is what one module does itself, without its children: `attn` is the attention kernel and its
reshapes, `ffn` is the gate, and the model itself, which is named by its class, has its residual
sums or its loss. Layers of a list that are alike add up in one row: `layers.*`, or `layers.2*` for
the third and those that are like it. Calls, ops (torch's operations) and kept count one run of all
passes. A figure has two digits if its samples vary by more than 5% (p20 to p80: 20th to 80th
percentile). Roofline is the least time, max(FLOPs / matmul rate, bytes / memory copy rate), as a
share of the measured time. It is above 100% if data came from a cache, or was changed in place,
which a CPU does faster than it copies, or if a rate is NOISY. MFU (model FLOP utilization) is the
time of all FLOPs at the matmul rate, as a share of the measured time. FLOPs are counted for
matmuls, convolutions, recurrent layers and attention. After >= or <=, some are unknown. Limit is
what takes at least half of the time: compute, memory (bytes that the part must read and write),
overhead (calling as many operations on one number as it has besides views), Python (with autograd
and calls: what the work of operations leaves), or traffic (bytes that operations read and write,
also for each other); otherwise kernel; threads, if Python threads work in the model. Kept bytes are
what autograd keeps for backward, and what else of forward lives at its end. Rest is what no part
explains, such as the start of backward. It is below 0 if reading the clock between the parts took
longer, and noise if its samples vary by more than itself. docs/profile.md explains more, and
--json has more."""

# A range of times, as a share of their median. A reason may be wrong.
TOO_NOISY = 0.5
FEWER = "fewer and larger operations"
# Of the time of a part. What takes more is worth a try.
SOME = 0.2
# Calls of an operation in a call of a module. What has more is in a loop.
LOOP = 100


def report(profile: Profile, explain: bool = False, all_parts: bool = False) -> str:
    """Return the report, which ends with what to try. With `explain`, its words have a legend.

    all_parts: show also each part that takes less than 0.5% of the time.
    """
    words = _LEGEND if explain else "--explain says what these words and figures mean."
    sections = [
        _machine(profile),
        _summary(profile),
        losses(profile),
        _table(profile, all_parts),
        kernel_table(profile.recording),
        "\n".join(filter(None, [words, actions(profile)])),
    ]
    return "\n\n".join(filter(None, sections))


def _machine(profile: Profile) -> str:
    rates = profile.rates
    measured = [
        f"{dtype} matmul {si(rate, 'FLOP/s')}"
        for dtype, rate in rates.flops_per_s.items()
    ]
    measured.append(f"memory copy {si(rates.bytes_per_s, 'B/s')}")
    seconds = 1 / rates.small_operations_per_s
    measured.append(f"an operation on one number {si(seconds, 's')}")
    return (
        f"{profile.machine}\n{profile.title}\n"
        f"Measured in the same rounds: {', '.join(measured)}"
    )


def _summary(profile: Profile) -> str:
    whole, took, memory = profile.whole, profile.took_s, profile.memory
    [rest] = [row for row in profile.rows if row.name == parts.REST]
    digits = whole.digits
    bound = _at_least(whole)
    roofline = f"{_of_roofline(whole)} of it" if whole.of_roofline else "unknown"
    sizes = [
        f"parameters {si(memory.parameter_bytes, 'B')}",
        f"buffers {si(memory.buffer_bytes, 'B')}",
        f"other tensors {si(memory.other_tensor_bytes, 'B')}",
        f"gradients {si(memory.gradient_bytes, 'B')}",
        f"AdamW {si(memory.adamw_bytes, 'B')}",
        f"kept for backward {_kept(whole)}",
    ]
    lines = [
        f"Time: {si(took.median, 's', digits)} (p20 to p80: {si(took.p20, 's', digits)} to "
        f"{si(took.p80, 's', digits)}), {si(profile.samples_per_s, digits=digits)} {profile.batch.unit}s/s. "
        f"The roofline (the least time) is {roofline}",
        f"MFU: its FLOPs would take {bound}{_of_time(whole.compute_s, whole, digits)} at the matmul rate",
        *_other_dtypes(profile),
        f"Memory: peak {si(memory.peak_bytes, 'B')}. Sizes, not all at one time: {', '.join(sizes)}",
        f"Rest, which no part explains: {share(rest.total_s / whole.total_s, 2)} of the "
        f"time. It varies by {share(profile.rest_varies, 2)} of the time"
        f"{', so it is noise' if rest.limit else ''}",
    ]
    if whole.overhead_s is not None:
        lines.append(
            f"Overhead: calling {whole.computations:,} operations besides views takes at least "
            f"{si(whole.overhead_s, 's', 2)}, {_of_time(whole.overhead_s, whole)}"
        )
    if whole.is_bound:
        names = ", ".join([*whole.unknown, *whole.unseen])
        lines.append(
            f"FLOPs of {names} are unknown, so figures that follow from them have >= or <="
        )
    return "\n".join(map(_wrapped, [*lines, *profile.notes]))


def _other_dtypes(profile: Profile) -> list[str]:
    """Say which FLOPs have another dtype than the model, and where the most of them are."""
    whole, own = profile.whole, name_of(profile.settings.dtype)
    flops = sum(whole.flops.values())
    lines = []
    for dtype, count in whole.flops.items():
        if dtype != own:
            most = max(profile.rows, key=lambda row: row.flops.get(dtype, 0))
            seconds = count / profile.rates.flops_per_s[dtype]
            lines.append(
                f"{dtype}: {share(count / flops, 2)} of the FLOPs are not in {own}, most of "
                f"them in {most.name}. At the matmul rate, they take "
                f"{_of_time(seconds, whole)}"
            )
    return lines


def losses(profile: Profile) -> str:
    """Return the three rows that lose the most time, with the reasons."""
    if profile.parts_are_eager:  # and the total is not
        return ""
    if profile.others > NOISE:
        said = _wrapped(
            f"Other programs took {share(profile.others, 2)} of the time, or the model "
            "waited without working. Limits and reasons would be wrong: measure again. "
            "The slowest operations of the slowest parts:"
        )
        slowest = [row for row in _losing(profile)[:3] if row.operations]
        shown = [_wrapped(f"{row.name}: {_operations(row)}", "  ") for row in slowest]
        return "\n".join([said, *shown])
    lines = ["Most time lost against the roofline, and why:"]
    for row in _losing(profile)[:3]:
        lost = row.total_s - row.least_s
        digits = row.digits
        of_total = lost / profile.whole.total_s
        text = (
            f"  {row.name}: loses {_at_most(row)}{si(lost, 's', digits)} of its "
            f"{si(row.total_s, 's', digits)}"
        )
        if of_total <= 1:  # the total is measured in other runs
            text += f", {_at_most(row)}{share(of_total, digits)} of the total"
        lines.append(text)
        if row.varies > TOO_NOISY:
            doubt = (
                f"Its time varies by {share(row.varies, 2)}, so the reason may be wrong. "
                "Close other programs, and measure again."
            )
            lines.append(_wrapped(doubt, "    "))
        lines.append(_wrapped(_reason(row), "    "))
        if row.operations:
            lines.append(_wrapped(_operations(row), "    "))
    return "\n".join(lines)


def actions(profile: Profile) -> str:
    """Return the three things to try first, where more than a little time is lost."""
    if profile.parts_are_eager or profile.others > NOISE:
        return ""
    least = FEW * profile.whole.total_s
    tips = [
        (row.name, advice_for(row))
        for row in _losing(profile)
        if row.total_s - row.least_s > least and row.varies <= TOO_NOISY
    ]
    lines = [f"{name}: {_listed(advice)}" for name, advice in tips if advice][:3]
    numbered = [
        _wrapped(f"{number}. {line}", "  ") for number, line in enumerate(lines, 1)
    ]
    return "\n".join(["What to try first:", *numbered]) if lines else ""


def _losing(profile: Profile) -> list[Row]:
    """Return the rows that take longer than they must, from the most lost time on."""
    rows = [row for row in profile.rows if row.total_s > row.least_s]
    rows = [row for row in rows if row.name != parts.REST]
    return sorted(rows, key=lambda row: row.least_s - row.total_s)


def _reason(row: Row) -> str:
    """Say what takes most of the time of a row, and what to try."""
    advice = advice_for(row)
    tried = f" Try {_listed(advice)}." if advice else ""
    return _cause(row) + tried


def _cause(row: Row) -> str:
    moved = si(row.moved_bytes, "B")
    of_all = sum(each.moved_bytes for each in row.operations)
    match row.limit or row.name:
        case "compute":
            return f"Computing takes {_of_time(row.compute_s, row)}."
        case "memory":
            return f"Reading and writing {moved} takes {_of_time(row.memory_s, row)}."
        case "overhead":
            least = _of_time(row.overhead_s or 0.0, row)
            return f"Calling {row.computations:,} operations besides views takes at least {least}."
        case "Python":
            return f"Python, autograd and calls take {_of_time(row.between_s or 0.0, row)}."
        case "traffic":
            by_bytes = sorted(row.operations, key=lambda each: -each.moved_bytes)
            most = [f"{each.name} {si(each.moved_bytes, 'B')}" for each in by_bytes[:2]]
            return (
                f"Its operations read and write {si(of_all, 'B')} ({', '.join(most)}), "
                f"which takes {_of_time(row.traffic_s, row)}, where {moved} must be moved."
            )
        case "threads":
            return "What Python threads do is not seen."
        case "unknown":
            names = ", ".join(row.unknown)
            return f"Operations whose FLOPs are unknown ({names}) take {_of_time(row.unknown_s, row)}."
        case parts.GPU_IDLE:
            return "No kernel runs."
    flops = ""
    if row.flops:
        known = "known " if row.is_bound else ""
        flops = f"their {known}FLOPs take {_of_time(row.compute_s, row)}, and "
    needed = (
        f", of which {moved} must be moved" if row.moved_bytes < 0.9 * of_all else ""
    )
    return (
        f"Its operations are slow: at the machine's rates, {flops}what they read and write "
        f"({si(of_all, 'B')}{needed}) takes {_of_time(row.traffic_s, row)}."
    )


def _of_time(seconds: float, row: Row, digits: int = 2) -> str:
    """Write seconds as a share of a row's time. A rate may be too low, as of a cache."""
    part = seconds / row.total_s
    return f"{share(part, digits)} of the time" if part <= 1 else "all of the time"


_ADVICE = {
    "compute": ["fewer FLOPs", "a dtype whose matmuls are faster"],
    "memory": ["a smaller dtype", "more tokens if most of it are weights"],
    "overhead": [FEWER, "more tokens"],
    "Python": ["less Python", FEWER, "more tokens"],
    "traffic": ["fewer passes over the data", "--compile"],
    "unknown": [],
    parts.GPU_IDLE: ["more tokens", "--compile", "CUDA graphs"],
}


def advice_for(row: Row) -> list[str]:
    """Return what to try."""
    if row.is_optimizer:
        return []
    seconds = {each.name: each.total_s for each in row.operations}
    gradient_s = seconds.get("embedding_dense_backward", 0.0)
    if row.may_be_sparse and gradient_s > SOME * row.total_s:
        return [
            "sparse=True, whose gradient has no rows of zeros, and a sparse optimizer"
        ]
    advice = _ADVICE.get(row.limit or row.name, [])
    if row.limit == "kernel":
        advice = _advice_for_kernels(row)
    if "float64" in row.flops:
        advice = ["float32 in place of float64", *advice]
    most = max(row.operations, key=lambda each: each.calls, default=Operation(""))
    is_loop = most.calls > LOOP * max(1, row.calls)
    if is_loop and row.limit in ("overhead", "Python", "traffic"):
        name = ".item()" if most.name == "_local_scalar_dense" else most.name
        # More tokens are more rounds of the loop, and compiling takes as long.
        others = [x for x in advice if x not in (FEWER, "more tokens", "--compile")]
        advice = [f"{FEWER} ({most.calls:,} are {name})", *others]
    return advice


def _advice_for_kernels(row: Row) -> list[str]:
    advice = list(_ADVICE["traffic"]) if _passes(row) else []
    if (row.overhead_s or 0.0) > SOME * row.total_s:
        advice.append(FEWER)
    if row.operations and not (advice or row.flops):
        slowest = row.operations[0]
        if slowest.backward_calls == slowest.calls:
            return [f"another operation, whose backward is not {slowest.name}"]
        return [f"another operation in place of {slowest.name}"]
    return advice


def _listed(advice: list[str]) -> str:
    *first, last = advice
    return f"{', '.join(first)}{', or ' if first else ''}{last}"


def _passes(row: Row) -> bool:
    """Say if fewer passes over the data would save a good part of the time."""
    return row.traffic_s > SOME * row.total_s and row.traffic_s > 2 * row.memory_s


def _operations(row: Row) -> str:
    """Return the operations that take the longest, with their share of the row's time."""
    inside = sum(each.total_s for each in row.operations)
    whole = max(row.total_s, inside)
    slow = [each for each in row.operations[:4] if each.total_s > 0.01 * whole]
    if not slow:
        return f"{row.ops:,} operations, which take less than 1% each"
    shares = [
        f"{each.name} x {each.calls:,} ({share(each.total_s / whole, 2)}{_in_backward(each)})"
        for each in slow
    ]
    return f"{row.ops:,} operations: {', '.join(shares)}"


def _in_backward(operation: Operation) -> str:
    """Say how many calls of an operation run in backward."""
    if operation.backward_calls == operation.calls:
        return ", backward"
    if operation.backward_calls:
        return f", {operation.backward_calls:,} of them in backward"
    return ""


def _wrapped(text: str, indent: str = "") -> str:
    """Break a text into lines that fit a terminal. Further lines are indented."""
    further = indent + "  "
    return fill(text, 120, initial_indent=indent, subsequent_indent=further)


def _of_roofline(row: Row) -> str:
    """Return the least time as a share of the measured time; nothing if it is unknown."""
    if not row.of_roofline:
        return ""
    return _at_least(row) + share(row.of_roofline, row.digits)


def _at_least(row: Row) -> str:
    return ">= " if row.is_bound else ""


def _at_most(row: Row) -> str:
    return "<= " if row.is_bound else ""


def _kept(row: Row) -> str:
    return "unknown" if row.kept_bytes is None else si(row.kept_bytes, "B")


def _table(profile: Profile, all_parts: bool) -> str:
    columns = ["part", "calls", "ops", "params", "forward ms", "total ms", "share"]
    columns += ["roofline", "limit", "kept"]
    rows = profile.rows
    if not all_parts:
        rows = folded(rows, profile.whole.total_s)
    cells = [_cells(row, profile.whole) for row in (*rows, profile.whole)]
    return terminal(columns, cells)


def _cells(row: Row, whole: Row) -> list[str]:
    digits = row.digits
    forward = "" if row.forward_s is None else number(1e3 * row.forward_s, digits)
    return [
        row.name,
        str(row.calls or ""),
        str(row.ops or ""),
        _count(row.parameters) if row.parameters else "",
        forward,
        number(1e3 * row.total_s, digits),
        share(row.total_s / whole.total_s, digits),
        _of_roofline(row),
        row.limit,
        _kept(row) if row.kept_bytes != 0 else "",
    ]


def _count(number_of: int) -> str:
    return str(number_of) if number_of < 1000 else si(number_of)


def kernel_table(recording: Recording) -> str:
    """Return the kernels that take the longest, and their sum; nothing for a CPU."""
    if not recording.kernels:
        return ""
    busy = recording.busy_s
    launches = sum(kernel.launches for kernel in recording.kernels)
    everything = Kernel("all", launches, busy)
    rows = []
    for kernel in (*recording.kernels[:10], everything):
        rows.append(
            [
                kernel.name,
                str(kernel.launches),
                number(1e3 * kernel.total_s),
                share(kernel.total_s / busy),
            ]
        )
    return terminal(["kernel", "launches", "ms", "share of GPU"], rows)
