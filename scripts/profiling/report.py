"""A profile as text: what to conclude from it, and the table behind that."""

from lab.machine import in_one_line
from lab.tables import markdown, number
from lab.timing import Spread

from .kernels import Recording
from .measure import Profile, Row
from .roofline import Rates
from .units import seconds, share, si

MODES = {
    "forward": "Forward",
    "train": "Forward and backward",
    "step": "Forward, backward and AdamW",
}
_ADVICE = {
    "compute": "it computes at the matmul rate: smaller sizes or fewer bits help",
    "memory": "it waits for memory: fusion{compile} or more tokens per weight help",
    "overhead": "its calls take longer than its work: more tokens{compile} help",
    "kernel": "neither computing nor memory explains it: its kernels are slow",
    "AdamW": "AdamW(fused=True) or more tokens per step help",
    "GPU idle": "launching takes too long: more tokens{compile} or CUDA graphs help",
}
_LEGEND = """\
A part is what one module does itself, without its children: `attn` is the attention kernel and
its reshapes, `ffn` is the gate, and `sums` are the residual sums. Copies of a layer add up.
Varies: p20 to p80 of the total, divided by the median. Rest: what no part takes; below 0, the
parts take longer by themselves. Of roofline: the least time, which is max(FLOP / matmul rate,
bytes / memory copy rate), divided by the measured time; above 100%, data came from a cache.
Limit: what explains at least half of the time, which is computing, moving bytes, or overhead
(the same calls on a tiny input); otherwise the kernels are slow. FLOPs are those of matmuls and
attention, bytes the fewest possible. MFU (model FLOP utilization) divides FLOP/s by a peak."""


def title(profile: Profile) -> str:
    """Return the model and the settings in one line."""
    attention = profile.recording.attention or "no fused"
    return f"{profile.title}; {profile.settings.describe()}; {attention} attention"


def report(profile: Profile) -> str:
    heading = [in_one_line(profile.environment), title(profile), _rates(profile)]
    sections = ["\n".join(heading), _summary(profile), _losses(profile)]
    sections.append(_table(profile))
    if profile.recording.kernels:
        sections.append(kernel_table(profile.recording))
    return "\n\n".join([*sections, _LEGEND])


def _rates(profile: Profile) -> str:
    line = f"Measured in the same rounds: {_pair(profile.rates)}"
    if profile.datasheet is not None:
        line += f"; datasheet: {_pair(profile.datasheet)}"
    return line


def _pair(rates: Rates) -> str:
    return f"matmul {si(rates.flops, 'FLOP/s')}, memory copy {si(rates.bytes, 'B/s')}"


def time_line(mode: str, took: Spread, tokens: int) -> str:
    return (
        f"{MODES[mode]}: {seconds(took.median)} (p20 to p80: {seconds(took.p20)} to "
        f"{seconds(took.p80)}), {si(tokens / took.median)} tokens/s"
    )


def _summary(profile: Profile) -> str:
    took, whole = profile.took, profile.whole
    time = time_line(profile.settings.mode, took, profile.tokens)
    lines = [f"{time}, {share(whole.least / whole.total)} of the roofline"]
    lines.append(_mfu(profile))
    if profile.unknown:
        lines.append(f"FLOPs without {', '.join(profile.unknown)}: no formula")
    overhead = "unknown for a block of your own"
    if whole.overhead is not None:
        overhead = seconds(whole.overhead)
    lines.append(f"Overhead, the same calls on a tiny input: {overhead}")
    recording = profile.recording
    if recording.kernels:
        busy = recording.busy_seconds / took.median
        verdict = "launch-bound (below 80%)" if busy < 0.8 else "not launch-bound"
        lines.append(
            f"GPU: {recording.launches} kernels, copies and fills, "
            f"busy {share(busy)} of the time: {verdict}"
        )
    if profile.compilation:
        lines.append(f"Compilation: {profile.compilation}")
        lines.append(
            "The parts run in eager mode: below 0, rest is what compiling saves."
        )
    memory = {**profile.memory, "kept for backward": whole.kept}
    sizes = [f"{name} {si(size, 'B')}" for name, size in memory.items()]
    lines.append(f"Memory: {', '.join(sizes)}")
    if profile.uncut:
        lines.append(f"The model is one part, because a replay fails: {profile.uncut}")
    if profile.noisy:
        noisy = [f"{name} {share(width)}" for name, width in profile.noisy.items()]
        lines.append(f"NOISY: {', '.join(noisy)} vary; close other programs")
    return "\n".join(lines)


def _mfu(profile: Profile) -> str:
    rate = profile.whole.flops / profile.whole.total
    text = f"MFU: {share(rate / profile.rates.flops)} of the matmul rate"
    if profile.datasheet is not None:
        text += f", {share(rate / profile.datasheet.flops)} of the datasheet"
    return text


def _losses(profile: Profile) -> str:
    """Return the three rows that lose the most time, with what would help."""
    whole = profile.whole.total
    rows = {row.name: row for row in profile.rows}
    rest = rows.pop("rest")

    def lost(row: Row) -> float:
        return row.total - row.least

    lines = ["Most time lost against the roofline:"]
    for row in sorted(rows.values(), key=lost, reverse=True)[:3]:
        advice = _ADVICE.get(row.name, _ADVICE.get(row.limit, ""))
        hint = "" if profile.settings.compile else ", --compile"
        advice = advice.format(compile=hint)
        lines.append(
            f"  {row.name}: {seconds(lost(row))}, {share(lost(row) / whole)}; {advice}"
        )
    if rest.total > 0.05 * whole and profile.exceeding:
        more = [f"{name} {seconds(taken)}" for name, taken in profile.exceeding.items()]
        lines.append(f"  rest: the whole exceeds its parts in {', '.join(more)}")
    return "\n".join(lines)


def _table(profile: Profile) -> str:
    passes = ["forward", "backward"] if profile.settings.train else []
    columns = ["part", "count"]
    columns += [f"{name} ms" for name in (*passes, "total")]
    columns += ["varies", "share", "FLOP/s", "of roofline", "limit", "overhead", "kept"]
    lines = []
    for row in (*profile.rows, profile.whole):
        times = [row.forward, row.backward] if passes else []
        cells = [row.name, str(row.count) if row.count > 1 else ""]
        cells += [number(1e3 * taken) for taken in (*times, row.total)]
        cells.append("" if row.varies is None else share(row.varies))
        cells.append(share(row.total / profile.whole.total))
        if row.least and row.total > 0:
            rate = si(row.flops / row.total) if row.flops else ""
            cells += [rate, share(row.least / row.total), row.limit]
        else:
            cells += ["", "", ""]
        cells.append("" if row.overhead is None else seconds(row.overhead))
        lines.append([*cells, si(row.kept, "B")])
    return markdown(columns, lines)


def kernel_table(recording: Recording) -> str:
    """Return the kernels that take the longest."""
    rows = []
    for kernel in recording.kernels[:10]:
        of_busy = share(kernel.seconds / recording.busy_seconds)
        rows.append(
            [kernel.name[:70], str(kernel.count), number(1e3 * kernel.seconds), of_busy]
        )
    return markdown(["kernel", "calls", "ms", "share of GPU"], rows)
