"""A profile as text: what to conclude from it, and the table behind that."""

from lab.machine import in_one_line
from lab.tables import markdown, number
from lab.timing import Spread

from .kernels import Recording
from .measure import Profile
from .roofline import Rates
from .rows import Row
from .units import seconds, share, si

MODES = {
    "forward": "Forward",
    "train": "Forward and backward",
    "step": "Forward, backward and AdamW",
}
_ADVICE = {
    "compute": "matrix products: larger ones, fewer bits or another machine help",
    "memory": "it waits for memory: fusion (--compile) or more tokens per weight help",
    "overhead": "its calls take longer than its work: more tokens or --compile help",
    "AdamW": "AdamW(fused=True), or more tokens per step help",
    "GPU idle": "launching takes too long: more tokens, --compile or CUDA graphs help",
    "rest": "no row measures it: --trace shows what it is",
}
_LEGEND = """\
Total: forward and backward of all copies. Varies: p20 to p80 of the total, divided by it.
Rest: what no part takes (0 within the noise, below 0 if parts run faster together).
Of roofline: the least possible time, which is max(FLOP / FLOP/s, bytes / B/s) of this machine,
divided by the measured time; above 100%, data came from a cache. Bytes are the fewest possible."""
_OWN = """\
Limit: the longest of computing, moving bytes, and the same calls on a tiny input (overhead).
MFU (model FLOP utilization): FLOP/s of forward and backward, divided by the peak."""
_USERS = """\
Limit: the longer of computing and of moving bytes.
MFU (model FLOP utilization): FLOP/s of matrix products, divided by the peak. FLOPs are those
of torch's FlopCounterMode: all attention scores, causal or not, and no elementwise work. A row
is a module with weights and without children; attention, sums and all else are the rest, whose
bytes are unknown."""


def title(profile: Profile) -> str:
    """Return the model and the settings in one line."""
    attention = profile.recording.attention or "no fused"
    return f"{profile.title}; {profile.settings.describe()}; {attention} attention"


def report(profile: Profile) -> str:
    heading = [in_one_line(profile.environment), title(profile), _rates(profile)]
    sections = ["\n".join(heading), _summary(profile)]
    sections += [_losses(profile), _table(profile)]
    if profile.recording.kernels:
        sections.append(kernel_table(profile.recording))
    legend = _OWN if profile.is_own else _USERS
    return "\n\n".join([*sections, f"{_LEGEND}\n{legend}"])


def _rates(profile: Profile) -> str:
    line = f"Measured in the same rounds: {_pair(profile.ceilings)} (product, copy)"
    if profile.datasheet is not None:
        line += f"; datasheet: {_pair(profile.datasheet)}"
    return line


def _pair(rates: Rates) -> str:
    return f"{si(rates.flops, 'FLOP/s')}, {si(rates.bytes, 'B/s')}"


def time_line(mode: str, took: Spread, tokens: int) -> str:
    return (
        f"{MODES[mode]}: {seconds(took.median)} (p20 to p80: {seconds(took.p20)} to "
        f"{seconds(took.p80)}), {si(tokens / took.median)} tokens/s"
    )


def _summary(profile: Profile) -> str:
    took, whole = profile.took, profile.rows[-1]
    time = time_line(profile.settings.mode, took, profile.tokens)
    lines = [
        f"{time}, {share(whole.least_seconds / whole.total)} of the roofline",
        _mfu(profile),
    ]
    if whole.overhead:
        lines.append(
            f"Overhead, the same calls on a tiny input: {seconds(whole.overhead)}"
        )
    recording = profile.recording
    if recording.kernels:
        busy = recording.busy_seconds / took.median
        verdict = "launch-bound (below 80%)" if busy < 0.8 else "not launch-bound"
        lines.append(
            f"GPU: {recording.launches} kernels, copies and fills, "
            f"busy {share(busy)} of the time: {verdict}"
        )
    if profile.compilation is not None:
        lines.append(f"Compilation: {profile.compilation}")
    memory = {**profile.memory, "kept for backward": whole.kept_bytes}
    sizes = [f"{name} {si(size, 'B')}" for name, size in memory.items()]
    lines.append(f"Memory: {', '.join(sizes)}")
    if took.width > 0.2:
        lines.append(
            f"NOISY: samples vary by {share(took.width)}; close other programs"
        )
    return "\n".join(lines)


def _mfu(profile: Profile) -> str:
    *rows, whole = profile.rows
    flops = sum(row.work.flops for row in rows if row.name != "AdamW")
    rate = flops / whole.total
    text = f"MFU: {share(rate / profile.ceilings.flops)} of the measured product"
    if profile.datasheet is not None:
        text += f", {share(rate / profile.datasheet.flops)} of the datasheet"
    return text


def _losses(profile: Profile) -> str:
    """Return the three rows that lose most time, and what would help."""
    *rows, whole = profile.rows

    def lost(row: Row) -> float:
        return row.total - row.least_seconds

    lines = ["Most time lost against the roofline:"]
    for row in sorted(rows, key=lost, reverse=True)[:3]:
        advice = _ADVICE.get(row.name, _ADVICE[row.limit])
        of_whole = share(lost(row) / whole.total)
        lines.append(f"  {row.name}: {seconds(lost(row))}, {of_whole}; {advice}")
    return "\n".join(lines)


def _table(profile: Profile) -> str:
    passes = ["forward", "backward"] if profile.settings.train else []
    columns = ["part"]
    for name in (*passes, "total"):
        columns.append(f"{name} ms")
    columns += ["varies", "share", "FLOP/s", "of roofline", "limit", "kept"]
    whole = profile.rows[-1].total
    rows = []
    for row in profile.rows:
        cells = [row.name]
        for name in (*passes, "total"):
            known = name in row.seconds
            cells.append(number(1e3 * row.seconds[name]) if known else "")
        cells.append(share(row.varies) if row.varies else "")
        cells.append(share(row.total / whole))
        if row.least_seconds and row.total > 0:
            of_roofline = share(row.least_seconds / row.total)
            cells += [si(row.work.flops / row.total), of_roofline, row.limit]
        else:
            cells += ["", "", ""]
        rows.append([*cells, si(row.kept_bytes, "B")])
    return markdown(columns, rows)


def kernel_table(recording: Recording) -> str:
    """Return the kernels that take the longest."""
    rows = []
    for kernel in recording.kernels[:10]:
        of_busy = share(kernel.seconds / recording.busy_seconds)
        rows.append(
            [kernel.name[:70], str(kernel.count), number(1e3 * kernel.seconds), of_busy]
        )
    return markdown(["kernel", "calls", "ms", "share of GPU"], rows)
