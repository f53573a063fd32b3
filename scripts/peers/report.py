"""Report runs: a table of projects, what misses its target, and a table for each case, as on docs/benchmarks.md."""

from collections.abc import Sequence
from dataclasses import dataclass

from lab.tables import markdown, number, share

from .pooling import PooledCase, PooledRow, Timing, by_machine, pool, shared_facts
from .records import Measurement, Needs, Run

INTRODUCTION = """\
# Benchmarks

How long does tinyblock's Block take, compared with the layers of other projects? Each cell is the Block's time divided
by the project's time. A ratio below 1 means that the Block is faster. It is a median, with the 20th and 80th percentile
in parentheses. The last column divides the Block's time by that of a second copy of the Block, and shows the noise. The
lines below the table list the targets that are missed. In these lines, limit means the matrix products and attention of
the Block alone, and transformers means Hugging Face's layer. [performance.md](performance.md) explains the misses."""
METHOD = """\
## How the times were measured

- The Block and the other layer have the same weights, inputs, dtype and number of threads, and take turns in one
  process. The Block's shape checks are on. Outputs and, in training, input gradients agreed before anything was timed.
- A ratio is the median over the turns, with the 20th and 80th percentile. The column "processes" shows how many
  processes ran and, if there are several, the range of their medians.
- Training is a forward and a backward pass, which differentiates with respect to the input and all weights. All other
  cases are a forward pass without gradients.
- `limit` runs only the Block's matrix products and `scaled_dot_product_attention`.
- `copy` (one-token cases only) copies half of the weights, so its reads and writes together are as many bytes as the
  weights have.
- `operations` runs the Block's operations inline, without modules, checks or options.
- `control` is a second copy of the Block. Its ratios show how large the noise is.
- `unchecked` is the Block without shape checks.
- `transformers` is Hugging Face's `LlamaDecoderLayer`, or `Qwen3DecoderLayer` if the Block has a q/k norm.
- "Block keeps MiB" and "peer keeps MiB" are the memory kept for the backward pass, without weights. The Block must not
  keep more than any other project.
- MFU, on GPUs only, is the FLOP/s of the matrix products as a share of the peak FLOP/s on the datasheet. "Causal"
  counts the scores that a causal mask leaves, and "dense" counts all scores.

`scripts/compare_peers.py` generates this page from the JSON files of its runs, so edits by hand are lost."""
CONTROL = "control"
VERDICTS = {True: "met", False: "**missed**", None: ""}


def page(runs: Sequence[Run]) -> str:
    """Return docs/benchmarks.md: first the conclusions for each machine, then the method, then all figures."""
    return page_of([Machine.of(group) for group in by_machine(runs)])


def page_of(machines: Sequence["Machine"]) -> str:
    parts = [INTRODUCTION]
    parts += [machine.conclusions() for machine in machines]
    parts.append(METHOD)
    parts += [machine.details() for machine in machines]
    return "\n\n".join(parts) + "\n"


@dataclass(frozen=True)
class Machine:
    """The runs of one machine and one commit, which are pooled, and their heading."""

    heading: str
    runs: Sequence[Run]
    cases: Sequence[PooledCase]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "Machine":
        facts = shared_facts(runs[0])
        heading = str(facts["device"])
        if "commit" in facts:
            heading += f", commit {facts['commit']}"
        return cls(heading, runs, pool(runs))

    def conclusions(self) -> str:
        parts = [f"## {self.heading}"]
        if self.runs[0].quick:
            parts.append(
                "**Tiny sizes, which only test the script; the times mean nothing.**"
            )
        if any(run.interrupted for run in self.runs):
            parts.append("**Interrupted: some cases are missing.**")
        # Training comes first, because it matters most.
        cases = sorted(self.cases, key=lambda case: case.result.work != "train")
        parts += [overview(cases), verdicts(cases)]
        return "\n\n".join(parts)

    def details(self) -> str:
        facts = [[key, str(fact)] for key, fact in shared_facts(self.runs[0]).items()]
        parts = [
            f"## All figures: {self.heading}",
            markdown(["", ""], facts),
            commands_of(self.runs),
        ]
        parts += [text_of(case) for case in self.cases]
        return "\n\n".join(parts)


def commands_of(runs: Sequence[Run]) -> str:
    """Return the commands of runs as a table."""
    rows = []
    for run in runs:
        found = run.environment
        command = f"`{found.command}`"
        rows.append([command, str(run.rounds), str(found.seed), found.date])
    return markdown(["command", "rounds", "seed", "date"], rows)


# --- Conclusions -----------------------------------------------------------------------------------------------------


def overview(cases: Sequence[PooledCase]) -> str:
    """Return the table of ratios: a row for each case, and a column for each project and for the control."""
    titles: dict[str, str] = {}
    for case in cases:
        for pooled in case.rows:
            if pooled.row.project and pooled.timing is not None:
                titles[pooled.row.peer] = f"{pooled.row.peer} {pooled.row.version}"
    titles[CONTROL] = "noise: Block / Block"
    rows = []
    for case in cases:
        name = f"`{case.result.name}`: {case.result.summary}"
        rows.append([name, *(_ratio_of(case, peer) for peer in titles)])
    return markdown(["Block / project", *titles.values()], rows)


def _ratio_of(case: PooledCase, peer: str) -> str:
    for pooled in case.rows:
        if pooled.row.peer == peer and pooled.timing is not None:
            ratio = pooled.timing.ratio
            return f"{ratio.median:.2f} ({ratio.p20:.2f}-{ratio.p80:.2f})"
    return ""


@dataclass(frozen=True)
class Verdict:
    """Whether a target is met, and the target in words; `met` is None if it was not judged."""

    met: bool | None
    text: str


def verdicts(cases: Sequence[PooledCase]) -> str:
    """Return the number of targets met, and a line for each one missed or not judged."""
    found = times_of(cases) + memories_of(cases)
    judged = [verdict for verdict in found if verdict.met is not None]
    lines = ["**Nothing was judged.**"]
    if judged:
        met = sum(verdict.met is True for verdict in judged)
        lines = [f"**{met} of {len(judged)} targets are met.**"]
    missed = [verdict.text for verdict in judged if not verdict.met]
    if missed:
        lines += ["", "Missed:", "", *missed]
    open_ones = [verdict.text for verdict in found if verdict.met is None]
    if open_ones:
        lines += ["", "Not judged:", "", *dict.fromkeys(open_ones)]
    return "\n".join(lines)


def times_of(cases: Sequence[PooledCase]) -> list[Verdict]:
    """Return the verdicts on the ratios, and why a target was not judged."""
    found = []
    for case in cases:
        name = case.result.name
        found += [Verdict(None, f"- {name}: {failure}") for failure in case.failures]
        for pooled in case.rows:
            row = pooled.row
            if row.target is None:
                continue
            if pooled.timing is None:
                text = f"- {row.peer} {row.status}: {row.reason}"
            else:
                ratio = pooled.timing.ratio
                times = f"{ratio.median:.3f} times ({ratio.p20:.3f}-{ratio.p80:.3f})"
                target = f"at most {row.target:.2f}"
                text = (
                    f"- {name}: takes {times} as long as {row.peer}; target: {target}"
                )
            found.append(Verdict(pooled.meets_target, text))
    return found


def memories_of(cases: Sequence[PooledCase]) -> list[Verdict]:
    """Return the verdicts on the bytes kept for backward."""
    found = []
    for case in cases:
        for pooled in case.rows:
            if pooled.keeps_no_more is None:
                continue
            ours = kept(case.result.needs)
            theirs = kept(pooled.needs)
            target = f"at most {theirs}, as {pooled.row.peer} does"
            name = case.result.name
            text = f"- {name}: keeps {ours} MiB for backward; target: {target}"
            found.append(Verdict(pooled.keeps_no_more, text))
    return found


# --- All figures of a case -------------------------------------------------------------------------------------------

HEADINGS = (
    "peer",
    "ratio",
    "20%-80%",
    "processes",
    "target",
    "verdict",
    "Block ms",
    "peer ms",
    "outputs differ by",
    "Block keeps MiB",
    "peer keeps MiB",
    "kept: verdict",
    "Block peak MiB",
    "peer peak MiB",
    "Block kernels",
    "peer kernels",
    "Block MFU causal",
    "peer MFU causal",
    "Block MFU dense",
    "peer MFU dense",
)


def text_of(case: PooledCase) -> str:
    """Return a case as Markdown: a table, and the reasons for what was not measured.

    Columns without any figure are left out.
    """
    rows = [cells_of(case, pooled) for pooled in case.rows]
    filled: set[str] = set()
    for row in rows:
        filled.update(name for name, cell in row.items() if cell)
    shown = [name for name in HEADINGS if name in filled]
    parts = [f"### {case.result.name}", f"{case.result.description}."]
    if rows:
        lines = []
        for row in rows:
            lines.append([row.get(name, "") for name in shown])
        parts.append(markdown(shown, lines))
    reasons = reasons_of(case)
    if reasons:
        parts.append("\n".join(reasons))
    return "\n\n".join(parts)


def reasons_of(case: PooledCase) -> list[str]:
    """Return a line for each failure, for each peer that was not measured, and for kernels that were not counted."""
    lines = [f"- failed: {failure}" for failure in case.failures]
    counted = [("the Block", case.result.needs)]
    for pooled in case.rows:
        if pooled.timing is None:
            lines.append(
                f"- {pooled.row.peer} {pooled.row.status}: {pooled.row.reason}"
            )
        counted.append((pooled.row.peer, pooled.needs))
    for name, needs in counted:
        if needs is not None and needs.kernels_error is not None:
            lines.append(f"- kernels of {name} not counted: {needs.kernels_error}")
    return lines


def title_of(pooled: PooledRow) -> str:
    return f"{pooled.row.title} {pooled.row.version or ''}".strip()


def cells_of(case: PooledCase, pooled: PooledRow) -> dict[str, str]:
    """Return the cells of a peer by heading."""
    target = pooled.row.target
    cells = {
        "peer": title_of(pooled),
        "ratio": pooled.row.status,
        "target": "" if target is None else f"<= {target:.2f}",
    }
    if pooled.timing is None or pooled.row.measurement is None:
        return cells
    return {
        **cells,
        **time_cells(pooled, pooled.timing),
        **need_cells(case, pooled.row.measurement),
        **kept_cells(case, pooled),
        **mfu_cells(case, pooled.timing),
    }


def time_cells(pooled: PooledRow, timing: Timing) -> dict[str, str]:
    ratio = timing.ratio
    medians = timing.run_ratios
    processes = str(len(medians))
    if len(medians) > 1:
        processes += f": {min(medians):.3f}-{max(medians):.3f}"
    return {
        "ratio": f"{ratio.median:.3f}",
        "20%-80%": f"{ratio.p20:.3f}-{ratio.p80:.3f}",
        "processes": processes,
        "verdict": VERDICTS[pooled.meets_target],
        "Block ms": number(1e3 * timing.block_seconds, 4),
        "peer ms": number(1e3 * timing.peer_seconds, 4),
    }


def need_cells(case: PooledCase, measurement: Measurement) -> dict[str, str]:
    """Return the error, and what each layer needs on a GPU."""
    block, peer = case.result.needs, measurement.needs
    errors = measurement.errors
    differ = "not compared" if errors is None else f"{errors['outputs']:.1e}"
    cells = {"outputs differ by": differ}
    if block is not None:
        cells["Block peak MiB"] = mib(block.peak_bytes)
        cells["Block kernels"] = str(block.kernels or "")
    cells["peer peak MiB"] = mib(peer.peak_bytes)
    cells["peer kernels"] = str(peer.kernels or "")
    return cells


def kept_cells(case: PooledCase, pooled: PooledRow) -> dict[str, str]:
    """Return what each layer keeps for backward, in training."""
    if case.result.work != "train":
        return {}
    return {
        "Block keeps MiB": kept(case.result.needs),
        "peer keeps MiB": kept(pooled.needs),
        "kept: verdict": VERDICTS[pooled.keeps_no_more],
    }


def mfu_cells(case: PooledCase, timing: Timing) -> dict[str, str]:
    """Return shares of the datasheet's FLOP/s, if that is known."""
    if case.peak is None:
        return {}
    causal = case.result.causal_flops / case.peak
    dense = case.result.dense_flops / case.peak
    return {
        "Block MFU causal": share(causal / timing.block_seconds),
        "peer MFU causal": share(causal / timing.peer_seconds),
        "Block MFU dense": share(dense / timing.block_seconds),
        "peer MFU dense": share(dense / timing.peer_seconds),
    }


def kept(needs: Needs | None) -> str:
    """Return the MiB kept for backward."""
    return mib(None if needs is None else needs.saved_bytes)


def mib(count: int | None) -> str:
    return "" if count is None else f"{count / 2**20:.1f}"
