"""A profile as text: what to conclude from it, and the table behind that."""

from lab.tables import markdown, number, share, si
from lab.timing import Spread

from .kernels import Recording
from .measure import Profile
from .roofline import Row

_ADVICE = {
    "compute": "computing takes at least half of its time: "
    "a smaller model or a lower-precision dtype helps",
    "memory": "moving bytes takes at least half of its time: "
    "fusion, --compile or more tokens per weight help",
    "overhead": "calling operations takes at least half of its time: more tokens or --compile help",
    "kernel": "its kernels or, with --block, its calls are slow",
    "GPU idle": "launching takes too long: more tokens, --compile or CUDA graphs help",
}
_LEGEND = """\
A part is what one module does itself, without its children: `attn` is the attention kernel and
its reshapes, `ffn` is the gate, and `sums` is what the model itself does, such as residual sums.
Layers in an nn.ModuleList add up in one row. Varies: p20 to p80 of the total, divided by the
median. Rest: what the parts do not explain, such as the start of backward; below 0, reading the
clock between the parts took longer than that. Of roofline: the least time, which is
max(FLOP / matmul rate, bytes / memory copy rate), divided by the measured time; above 100%, data
came from a cache, or a rate is NOISY. Limit: computing, moving bytes, or overhead (the same calls
on a tiny input), if it takes at least half of the time; otherwise `kernel`. FLOPs count matmuls,
convolutions and attention. Bytes are what a part must read and write at least. MFU (model FLOP
utilization) divides FLOP/s by the measured matmul rate. docs/profile.md has more."""


def report(profile: Profile) -> str:
    matmul = si(profile.rates.flops, "FLOP/s")
    copy = si(profile.rates.bytes, "B/s")
    sections = [
        f"{profile.machine}\n{profile.title}\n"
        f"Measured in the same rounds: matmul {matmul}, memory copy {copy}",
        _summary(profile),
        _losses(profile),
        _table(profile),
        kernel_table(profile.recording),
        _LEGEND,
    ]
    return "\n\n".join(filter(None, sections))


def time_line(took: Spread, tokens: int) -> str:
    return (
        f"Time: {si(took.median, 's')} (p20 to p80: {si(took.p20, 's')} to "
        f"{si(took.p80, 's')}), {si(tokens / took.median)} tokens/s"
    )


def _summary(profile: Profile) -> str:
    took, whole = profile.took, profile.whole
    time = time_line(took, profile.tokens)
    mfu = share(whole.flops / whole.total / profile.rates.flops)
    overhead = "unknown for a block of your own"
    if whole.overhead is not None:
        overhead = si(whole.overhead, "s")
    memory = {**profile.memory, "kept for backward": whole.kept}
    sizes = [f"{name} {si(size, 'B')}" for name, size in memory.items()]
    lines = [
        f"{time}, {share(whole.least / whole.total)} of the roofline",
        f"MFU: {mfu} of the matmul rate",
        f"Overhead, the same calls on a tiny input: {overhead}",
        f"Memory: {', '.join(sizes)}",
    ]
    return "\n".join([*lines, *profile.notes])


def _losses(profile: Profile) -> str:
    """Return the three rows that lose the most time, with what would help."""
    if profile.settings.compile:  # the parts are not
        return ""
    rows = [row for row in profile.rows if row.name != "rest" and row.total > row.least]
    rows.sort(key=lambda row: row.least - row.total)
    lines = ["Most time lost against the roofline:"]
    for row in rows[:3]:
        lost = row.total - row.least
        advice = _ADVICE[row.limit or row.name]
        lines.append(
            f"  {row.name}: {si(lost, 's')}, {share(lost / profile.whole.total)}; {advice}"
        )
    return "\n".join(lines)


def _table(profile: Profile) -> str:
    columns = ["part", "count", "forward ms", "total ms", "varies", "share", "FLOP/s"]
    columns += ["of roofline", "limit", "overhead", "kept"]
    rows = [_cells(row, profile.whole) for row in (*profile.rows, profile.whole)]
    return markdown(columns, rows)


def _cells(row: Row, whole: Row) -> list[str]:
    return [
        row.name,
        str(row.count) if row.count > 1 else "",
        number(1e3 * row.forward),
        number(1e3 * row.total),
        share(row.varies) if row.varies else "",
        share(row.total / whole.total),
        si(row.flops / row.total) if row.flops else "",
        share(row.least / row.total) if row.least and row.total else "",
        row.limit,
        si(row.overhead, "s") if row.overhead is not None else "",
        si(row.kept, "B"),
    ]


def kernel_table(recording: Recording) -> str:
    """Return the kernels that take the longest, and their sum; nothing for a CPU."""
    kernels = sorted(recording.kernels.items(), key=lambda item: -item[1][1])
    if not kernels:
        return ""
    launches = sum(count for _, (count, _) in kernels)
    busy = recording.busy_seconds
    rows = []
    for name, (count, taken) in [*kernels[:10], ("all", (launches, busy))]:
        rows.append([name[:70], str(count), number(1e3 * taken), share(taken / busy)])
    return markdown(["kernel", "calls", "ms", "share of GPU"], rows)
