"""Show a profile of one process as text: the conclusions first, and then the tables behind them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from lab.machine import Rates
from lab.presets import PRESETS
from lab.sizes import Size
from lab.tables import (
    Section,
    Table,
    number,
    number_range,
    plural,
    share,
    si,
    spread_cells,
    time_unit,
)
from lab.timing import Spread

from .analysis import Analysis, Loss, analyze, bound, ceiling_too_low, part_seconds
from .records import (
    Compilation,
    DistributedPoint,
    HeldMemory,
    Memory,
    OutOfMemory,
    Part,
    Point,
    Profile,
    times_of,
)
from .trust import reasons_to_doubt

_MODES = {
    "forward": "Forward",
    "train": "Forward and backward",
    "step": "Forward, backward and AdamW",
}

# The numerator of the MFU.
MFU = "FLOP/s of the matrix products"
# What the figures point to; {} is the share of the roofline.
_CAUSES = {
    "overhead": "mostly the overhead of its calls (Python, dispatch, launches); more tokens or --compile help",
    "products": "matrix products at {} of the measured ceiling; sizes, layout or threads limit them",
    "weights": "few tokens share its weights, which it reads at {} of the measured bandwidth; a larger batch helps",
    "elementwise": "elementwise work at {} of the roofline, which waits for memory; a compiler would fuse it",
}


def report(profile: Profile) -> list[Section]:
    """Return the sections of a profile: a single size in full, a sweep with one line for each size."""
    sections: list[Section] = [header(profile), *doubts(profile)]
    sections.extend(interruption(profile))
    if profile.settings.sweep is not None:
        sections.extend(_sweep(profile, profile.settings.sweep))
    else:
        for point in profile.points:
            if isinstance(point, OutOfMemory):
                sections.append(f"{describe(point.size)}\n{point.kind}: {point.error}")
            elif isinstance(point, Point):
                sections.extend(_point(point, profile))
    return sections


def interruption(profile: Profile) -> list[str]:
    """Return that sizes are missing, if so."""
    if profile.finished:
        return []
    count = plural(len(profile.points), "size")
    return [f"Interrupted after {count}: the others were not measured."]


@dataclass(frozen=True)
class Doubt:
    """That figures mislead, why, and what to do about it."""

    claim: str
    reasons: Sequence[str]
    advice: str

    def __str__(self) -> str:
        lines = [f"- {reason}" for reason in self.reasons]
        return "\n".join([f"{self.claim}:", *lines, self.advice])


def doubts(profile: Profile) -> list[Section]:
    """Return why the figures of a profile cannot be trusted, if so."""
    return [str(doubt) for doubt in doubts_of(profile)]


def doubts_of(profile: Profile) -> list[Doubt]:
    """Return what must stand beside all figures of a profile."""
    found = []
    reasons = []
    for point in profile.points:
        if not isinstance(point, OutOfMemory):
            reasons.extend(_reasons(point, profile))
    if reasons:
        found.append(
            Doubt(
                "Do not trust these figures",
                reasons,
                "Close other programs, use fewer threads (OMP_NUM_THREADS) or raise --rounds.",
            )
        )
    too_low = ceiling_too_low(profile)
    if too_low is not None:
        found.append(
            Doubt(
                "The measured ceiling is too low",
                [too_low],
                "So no percentages of it are shown. Close other programs and measure again.",
            )
        )
    return found


def _reasons(point: Point | DistributedPoint, profile: Profile) -> list[str]:
    """Return why the figures of one size cannot be trusted: in a sweep, all reasons in one line."""
    samples = min(seconds.samples for seconds in times_of(point).values())
    reasons = reasons_to_doubt(point.trust, profile.ceilings, samples)
    axis = profile.settings.sweep
    if axis is None or not reasons:
        return reasons
    return [f"{axis} {value_on(axis, point.size)}: {'; '.join(reasons)}"]


def model_name(size: Size) -> str:
    """Return what was measured: a Block or a Transformer."""
    return "Block" if size.num_layers is None else "Transformer"


def describe(*sizes: Size) -> str:
    """Return sizes in one line, with a range for what changes from the first to the last."""
    first, last = sizes[0], sizes[-1]

    def values(name: str) -> str:
        start, end = getattr(first, name), getattr(last, name)
        return str(start) if start == end else f"{start} to {end}"

    title = model_name(first)
    if first.num_layers is not None:
        title += f" of {plural(first.num_layers, 'block')}"
    facts = [
        f"batch {values('batch_size')}",
        f"{values('seq_len')} tokens",
        f"d_model {values('d_model')}",
        f"{values('num_heads')} heads of {values('d_head')}",
        f"d_ff {values('d_ff')}",
    ]
    if first.num_kv_heads != first.num_heads:
        facts.insert(4, f"{values('num_kv_heads')} shared key heads")
    if first.qk_norm:
        facts.append("q/k norm")
    for name in ("theta", "eps"):
        default = getattr(Size, name)
        if getattr(first, name) != default:
            facts.append(f"{name} {values(name)}")
    if first.vocab:
        facts.append(f"vocabulary {first.vocab}")
    return f"{title}: {', '.join(facts)}"


def origin(profile: Profile) -> str:
    """Return in one line where, how and when was measured."""
    settings, environment = profile.settings, profile.environment
    device = environment.device
    if settings.device.type == "cpu":
        device += f", {plural(environment.threads, 'thread')}"
    dtype = str(settings.dtype).removeprefix("torch.")
    how = "compiled" if settings.compile else "eager"
    date, _, _ = environment.date.partition("T")
    return f"{device}; {dtype}, mode {settings.mode}, {how}; torch {environment.torch}; {date}"


def header(profile: Profile) -> str:
    """Return the origin, what else was chosen, and the ceilings."""
    facts = [str(profile.settings.mesh)]
    for point in profile.points:
        if isinstance(point, Point):
            kernel = f"{point.attention_kernel} attention"
            if kernel not in facts:
                facts.append(kernel)
    preset = profile.settings.preset
    if preset is not None:
        layers = PRESETS[preset].num_layers
        facts.append(f"preset {preset} ({layers} blocks in the model)")
    return f"{origin(profile)}\n{', '.join(facts)}\n{_ceilings(profile)}"


def _ceilings(profile: Profile) -> str:
    ceilings, sheet = profile.ceilings, profile.datasheet
    side = ceilings.product_size
    flops = si(ceilings.flops_per_second.median, "FLOP/s")
    sustained = si(ceilings.sustained_flops_per_second, "FLOP/s")
    memory = si(ceilings.bytes_per_second.median, "B/s")
    known = "n/a"
    if sheet is not None:
        known = describe_rates(sheet)
    return (
        f"Measured ceilings: {flops} ({side} x {side} matrix product, in bursts; {sustained} sustained for 0.5 s), "
        f"{memory} ({si(ceilings.copy_bytes, 'B')} copy)\n"
        f"Datasheet: {known}"
    )


def describe_rates(rates: Rates) -> str:
    return (
        f"{si(rates.flops_per_second, 'FLOP/s')}, {si(rates.bytes_per_second, 'B/s')}"
    )


def held(memory: HeldMemory) -> str:
    """Return the memory that is there after a run in one line."""
    facts = [f"parameters {si(memory.parameters_bytes, 'B')}"]
    if memory.gradients_bytes is not None:
        facts.append(f"gradients {si(memory.gradients_bytes, 'B')}")
    if memory.optimizer_state_bytes is not None:
        facts.append(f"optimizer state {si(memory.optimizer_state_bytes, 'B')}")
    return f"Memory: {', '.join(facts)}"


def _memory_line(memory: Memory) -> str:
    added = si(memory.held.peak_added_bytes, "B")
    line = held(memory.held)
    line += f", peak {si(memory.peak_bytes, 'B')} ({added} of it allocated by the run)"
    if memory.kept_bytes is not None:
        line += f", kept for backward {si(memory.kept_bytes, 'B')}"
    return line


def _point(point: Point, profile: Profile) -> list[Section]:
    """Return the sections of a single size."""
    analysis = analyze(point, profile)
    passes = [*point.parts[0].passes]
    sections: list[Section] = [_summary(point, analysis, profile)]
    if analysis.losses:
        sections.append(
            _losses(
                analysis.losses,
                mode=profile.settings.mode,
                has_doubts=bool(_reasons(point, profile)),
            )
        )
    sections.append(_times(point, analysis, profile.settings.mode, passes))
    if any(part.has_gpu_seconds for part in point.parts):
        sections.append(_gpu_times(point, passes))
    for name in passes:
        sections.append(_work(point, analysis, profile, name))
    sections.extend([_memory(point), _legend(model_name(point.size))])
    return sections


def _summary(point: Point, analysis: Analysis, profile: Profile) -> str:
    mode = profile.settings.mode
    seconds = point.whole.passes[mode].seconds
    facts = [_timed(seconds), f"{si(analysis.tokens_per_second)} tokens/s"]
    fraction = analysis.roofline_fraction(point.whole, mode)
    if fraction is not None:
        facts.append(f"{share(fraction)} of the roofline")
    lines = [f"{_MODES[mode]}: {', '.join(facts)}"]
    if point.optimizer is not None:
        update = point.optimizer.passes["optimizer"].seconds
        of_step = share(update.median / seconds.median)
        lines.append(f"AdamW: {_timed(update)}, {of_step} of the step")
    for peak, mfu in (
        ("measured ceiling", analysis.mfu_measured),
        ("the datasheet's peak", analysis.mfu_datasheet),
    ):
        if mfu is not None:
            causal, dense = share(mfu.causal), share(mfu.dense)
            lines.append(
                f"MFU ({MFU} / {peak}): {causal} counting only the causal attention scores, "
                f"{dense} counting all scores"
            )
    lines.extend(_overhead(point, analysis, profile))
    if point.kernels is not None:
        busy = share(point.kernels.busy_fraction)
        verdict = "launch-bound" if point.kernels.launch_bound else "not launch-bound"
        lines.append(
            f"Kernels: {point.kernels.count}, busy {busy} of the time: {verdict}"
        )
    if point.compilation is not None:
        lines.extend(_compilation(point.compilation, model_name(point.size)))
    return "\n".join([*lines, _memory_line(point.memory)])


def _timed(seconds: Spread) -> str:
    unit, factor = time_unit(seconds.median)
    limits = number_range(factor * seconds.p20, factor * seconds.p80)
    return f"{number(factor * seconds.median)} {unit} (p20 to p80: {limits})"


def _overhead(point: Point, analysis: Analysis, profile: Profile) -> list[str]:
    """Return a line on the fixed overhead, unless a GPU does not wait for the host."""
    on_cpu = profile.settings.device.type == "cpu"
    waits = point.kernels is None or point.kernels.launch_bound
    if not on_cpu and not waits:
        return []
    mode = profile.settings.mode
    unit, factor = time_unit(point.whole.passes[mode].seconds.median)
    seconds = point.overhead[mode].median
    line = f"Fixed overhead (the same calls on a tiny input): {number(factor * seconds)} {unit}"
    # On a GPU, host and kernels overlap, so the overhead is no part of the time.
    if on_cpu and analysis.overhead_share <= 1:
        line += f", {share(analysis.overhead_share)} of the time of {_passes_of(mode)}"
    return [line]


def _compilation(compilation: Compilation, name: str) -> list[str]:
    cache = ", from inductor's cache" if compilation.from_cache else ""
    graphs = plural(compilation.graphs, "graph")
    breaks = plural(compilation.graph_breaks, "break")
    line = f"Compilation of the {name}: {number(compilation.seconds)} s{cache}; {graphs}, {breaks}"
    reasons = [" ".join(reason.split()) for reason in compilation.break_reasons]
    return [line, *(f"  break: {reason}" for reason in reasons)]


def _losses(losses: tuple[Loss, ...], mode: str, has_doubts: bool) -> str:
    """Return the parts that lose most, and why: but no reasons where the figures cannot be trusted."""
    lines = [
        f"Most time lost against the roofline, as a share of the time of {_passes_of(mode)}:"
    ]
    for loss in losses:
        unit, factor = time_unit(loss.seconds)
        lost = f"{number(factor * loss.seconds)} {unit}"
        line = f"  {loss.name}: {lost}, {share(loss.share)}"
        if not has_doubts:
            line += f"; {_CAUSES[loss.cause].format(share(loss.roofline_fraction))}"
        lines.append(line)
    return "\n".join(lines)


def _times(point: Point, analysis: Analysis, mode: str, passes: Sequence[str]) -> Table:
    """Return the times of parts and whole. All shares are of the mode's whole, so they add up to 100%."""
    name = model_name(point.size)
    total = point.whole.passes[mode].seconds.median
    unit, factor = time_unit(point.whole.passes["forward"].seconds.median)
    columns = ["part"]
    for each in passes:
        columns.extend([f"{each} {unit}", "p20 to p80"])
    table = Table(_times_title(point, mode), [*columns, "share"])
    for part in point.addends:
        of_total = share(part_seconds(part) / total)
        table.rows.append([part.name, *_time_cells(part, passes, factor), of_total])
    rest = share(analysis.whole_minus_parts / total)
    differences = _difference_cells(point, passes, factor)
    table.rows.append([f"{name} minus parts", *differences, rest])
    whole = _time_cells(point.whole, passes, factor)
    table.rows.append([name, *whole, share(1.0)])
    sums = [spread_cells(point.sum_of_parts[each].seconds, factor) for each in passes]
    table.rows.append(["sum of the parts", *chain(*sums), ""])
    ratios = [spread_cells(point.sum_of_parts[each].of_whole, 1) for each in passes]
    table.rows.append([f"sum / {name}", *chain(*ratios), ""])
    return table


def _time_cells(part: Part, passes: Sequence[str], factor: float) -> list[str]:
    """Return the time of each pass and its range; empty cells for a pass that the part lacks."""
    cells = []
    for name in passes:
        if name in part.passes:
            cells.extend(spread_cells(part.passes[name].seconds, factor))
        else:
            cells.extend(["", ""])
    return cells


def _difference_cells(point: Point, passes: Sequence[str], factor: float) -> list[str]:
    """Return what no part accounts for in each pass, without a range."""
    cells = []
    for name in passes:
        whole = point.whole.passes[name].seconds.median
        difference = whole - point.sum_of_parts[name].seconds.median
        cells.extend([number(factor * difference), ""])
    return cells


def _gpu_times(point: Point, passes: Sequence[str]) -> Table:
    """Return the times of the GPU alone, with their ranges."""
    unit, factor = time_unit(point.whole.passes["forward"].own_seconds)
    columns = ["part"]
    for each in passes:
        columns.extend([f"{each} {unit}", "p20 to p80"])
    table = Table("Time of the GPU alone, without waiting for the host", columns)
    for part in (*point.parts, point.whole):
        name = model_name(point.size) if part is point.whole else part.name
        table.rows.append([name, *_gpu_cells(part, passes, factor)])
    if not point.whole.has_gpu_seconds:
        table.title += "\nn/a: the GPU began before all was launched, as a stream takes only about 1,000 launches"
    return table


def _gpu_cells(part: Part, passes: Sequence[str], factor: float) -> list[str]:
    cells = []
    for name in passes:
        seconds = part.passes[name].gpu_seconds
        if seconds is None:
            cells.extend([number(None), ""])
        else:
            cells.extend(spread_cells(seconds, factor))
    return cells


def _times_title(point: Point, mode: str) -> str:
    title = describe(point.size)
    layers = point.size.layers
    if layers > 1:
        title += (
            "\nEach time is that of one run of a part. "
            f"Sums and shares count the parts of a block {layers} times"
        )
    return f"{title}\nShare: percentage of the time of {_passes_of(mode)}"


def _passes_of(mode: str) -> str:
    """Return the passes of a mode as they stand within a sentence."""
    return _MODES[mode].lower().replace("adamw", "AdamW")


def _work(point: Point, analysis: Analysis, profile: Profile, name: str) -> Table:
    """Return the FLOPs and bytes of a pass, and how close it comes to the roofline."""
    columns = ["part", "FLOP", "bytes", "FLOP/byte", "bound by", "FLOP/s"]
    title = f"{name.capitalize()}: work"
    if analysis.roofline_seconds is not None:
        columns.append("of roofline")
        title += ", and the roofline"
    table = Table(title, columns)
    rows = [(part, name) for part in (*point.parts, point.whole)]
    if name == "backward" and point.optimizer is not None:
        rows.append((point.optimizer, "optimizer"))
    for part, pass_name in rows:
        each = part.passes[pass_name]
        cells = [
            model_name(point.size) if part is point.whole else part.name,
            si(each.cost.flops),
            si(each.cost.bytes, "B"),
            number(each.cost.intensity),
            bound(each.cost, profile.ceilings.rates),
            si(each.flops_per_second),
        ]
        if analysis.roofline_seconds is not None:
            cells.append(share(analysis.roofline_fraction(part, pass_name)))
        table.rows.append(cells)
    return table


def _memory(point: Point) -> Table:
    table = Table("Memory", ["part", "kept for backward", "allocated at its peak"])
    for part in point.memory.parts:
        cells = [si(part.kept_bytes, "B"), si(part.peak_added_bytes, "B")]
        table.rows.append([part.name, *cells])
    of_run = point.memory.held.peak_added_bytes
    cells = [si(point.memory.kept_bytes, "B"), si(of_run, "B")]
    table.rows.append([model_name(point.size), *cells])
    return table


def _legend(name: str) -> str:
    """Explain the terms of the tables; `name` is Block or Transformer."""
    return (
        "Times and ratios are medians over the rounds, so a ratio may differ from that of the medians above it.\n"
        "ln1, ln2: the norms before attention and ffn. Residual sums: both additions of a sub-layer's output.\n"
        "Backward is the time of forward and backward minus that of forward, in each round.\n"
        f"{name} minus parts: what no part accounts for. It is below 0 if parts take longer alone than in the {name}.\n"
        "Bytes are the fewest possible. Of roofline: the least possible time divided by the measured time. A value\n"
        "above 100% means that data came from a cache, or that the measured ceiling is too low."
    )


def _sweep(profile: Profile, axis: str) -> list[Section]:
    """Return a line for each size, what loses most, and the times of the parts."""
    sections: list[Section] = [describe(*(point.size for point in profile.points))]
    measured = [point for point in profile.points if isinstance(point, Point)]
    sections.append(_sweep_table(profile, measured, axis))
    if measured:
        sections.append(_sweep_losses(profile, measured, axis))
        sections.append(_sweep_parts(profile, measured, axis))
    return sections


def _sweep_table(profile: Profile, measured: list[Point], axis: str) -> Table:
    mode = profile.settings.mode
    name = model_name(profile.points[0].size)
    medians = [point.whole.passes[mode].seconds.median for point in measured]
    unit, factor = time_unit(min(medians, default=1.0))
    columns = [
        axis,
        f"{mode} {unit}",
        "p20 to p80",
        f"overhead {unit}",
        "tokens/s",
        "MFU",
        f"parts/{name}",
        "kept for backward",
        "peak",
    ]
    title = (
        f"{_MODES[mode]}. Overhead: the same calls on a tiny input.\n"
        f"MFU: {MFU} / measured ceiling, counting only the causal attention scores.\n"
        f"parts/{name}: time of all parts / time of the {name}, both for {_passes_of(_mode_of_parts(mode))}"
    )
    table = Table(title, columns)
    for point in profile.points:
        value = value_on(axis, point.size)
        if isinstance(point, Point):
            cells = _sweep_cells(point, profile, factor)
        else:
            empty = [""] * (len(columns) - 2)
            cells = [point.kind, *empty]
        table.rows.append([value, *cells])
    return table


def _sweep_cells(point: Point, profile: Profile, factor: float) -> list[str]:
    """Return the cells of one size; `factor` turns seconds into the unit of the table."""
    mode = profile.settings.mode
    analysis = analyze(point, profile)
    mfu = analysis.mfu_measured
    return [
        *spread_cells(point.whole.passes[mode].seconds, factor),
        number(factor * point.overhead[mode].median),
        si(analysis.tokens_per_second),
        share(None if mfu is None else mfu.causal),
        number(point.sum_of_parts[_mode_of_parts(mode)].of_whole.median),
        si(point.memory.kept_bytes, "B"),
        si(point.memory.peak_bytes, "B"),
    ]


def _mode_of_parts(mode: str) -> str:
    """Return the mode in which parts are summed: they have no step, because AdamW updates all weights at once."""
    return "forward" if mode == "forward" else "train"


def _sweep_losses(profile: Profile, measured: list[Point], axis: str) -> Table:
    passes = _passes_of(profile.settings.mode)
    title = f"Most time lost against the roofline, as a share of the time of {passes}"
    table = Table(title, [axis, "first", "second", "third"])
    for point in measured:
        losses = analyze(point, profile).losses
        cells = [f"{loss.name} {share(loss.share)}" for loss in losses]
        missing = [""] * (3 - len(cells))
        table.rows.append([value_on(axis, point.size), *cells, *missing])
    return table


def _sweep_parts(profile: Profile, measured: list[Point], axis: str) -> Table:
    train = profile.settings.train
    passes = ("forward", "backward") if train else ("forward",)
    mode = profile.settings.mode
    shortest = min(point.whole.passes[mode].seconds.median for point in measured)
    unit, factor = time_unit(shortest)
    title = f"One run of each part: {' and '.join(passes)}, {unit}, by {axis}"
    values = [value_on(axis, point.size) for point in measured]
    table = Table(title, ["part", *values])
    parts_of_points = [point.parts for point in measured]
    for same_part in zip(*parts_of_points, strict=True):
        cells = []
        for part in same_part:
            seconds = sum(part.passes[name].seconds.median for name in passes)
            cells.append(number(factor * seconds))
        table.rows.append([same_part[0].name, *cells])
    return table


def value_on(axis: str, size: Size) -> str:
    """Return the size's value on the axis of the sweep."""
    return str(getattr(size, axis.replace("-", "_")))
