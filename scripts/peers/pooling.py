"""Ratios and verdicts from the records of one run, or of several runs of one machine."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from lab.machine import DATASHEETS
from lab.timing import Spread, paired_ratio

from .records import CaseResult, Measurement, Needs, Row, Run


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Times of the Block beside a peer, over all rounds of all runs.

    `ratio` is the Block's time divided by the peer's, round by round; `run_ratios` has the median of each run. The
    seconds are medians per call.
    """

    ratio: Spread
    run_ratios: list[float]
    block_seconds: float
    peer_seconds: float

    @classmethod
    def of(cls, measurements: Sequence[Measurement]) -> "Timing":
        block_seconds: list[float] = []
        peer_seconds: list[float] = []
        run_ratios = []
        for each in measurements:
            ours = list(each.block_seconds)
            theirs = list(each.peer_seconds)
            block_seconds += ours
            peer_seconds += theirs
            run_ratios.append(paired_ratio(ours, theirs).median)
        return cls(
            ratio=paired_ratio(block_seconds, peer_seconds),
            run_ratios=run_ratios,
            block_seconds=Spread.of(block_seconds).median,
            peer_seconds=Spread.of(peer_seconds).median,
        )


@dataclass(frozen=True, kw_only=True)
class PooledRow:
    """A peer in a case. `timing` is None unless every run measured the peer; then `row` is the one that has the reason.

    `meets_target` and `keeps_no_more` (bytes for backward than the peer) are None where they are not judged.
    """

    row: Row
    timing: Timing | None
    meets_target: bool | None
    keeps_no_more: bool | None

    @property
    def needs(self) -> Needs | None:
        return None if self.row.measurement is None else self.row.measurement.needs


@dataclass(frozen=True, kw_only=True)
class PooledCase:
    """A case of several runs. `peak` is the FLOP/s of the device's datasheet in this dtype, None if it is unknown."""

    result: CaseResult
    failures: list[str]
    rows: list[PooledRow]
    peak: float | None


def pool(runs: Sequence[Run]) -> list[PooledCase]:
    """Return the cases of runs of one machine."""
    device = runs[0].environment.device
    by_name: dict[str, list[CaseResult]] = {}
    for run in runs:
        for result in run.cases:
            by_name.setdefault(result.name, []).append(result)
    return [_pooled_case(results, device) for results in by_name.values()]


def _pooled_case(results: Sequence[CaseResult], device: str) -> PooledCase:
    succeeded = [result for result in results if result.failure is None]
    shown = succeeded[0] if succeeded else results[0]
    failures = [result.failure for result in results if result.failure is not None]
    by_peer: dict[str, list[Row]] = {}
    for result in results:
        for row in result.rows:
            by_peer.setdefault(row.peer, []).append(row)
    rows = [_pooled_row(shown, same) for same in by_peer.values()]
    peak = peak_of(device, shown.dtype)
    return PooledCase(result=shown, failures=failures, rows=rows, peak=peak)


def _pooled_row(result: CaseResult, rows: Sequence[Row]) -> PooledRow:
    for row in rows:
        if row.measurement is None:
            return PooledRow(
                row=row, timing=None, meets_target=None, keeps_no_more=None
            )
    row = rows[0]
    timing = Timing.of([row.measurement for row in rows if row.measurement])
    meets_target = None
    if row.target is not None:
        meets_target = timing.ratio.median <= row.target
    return PooledRow(
        row=row,
        timing=timing,
        meets_target=meets_target,
        keeps_no_more=keeps_no_more(result, row),
    )


def keeps_no_more(result: CaseResult, row: Row) -> bool | None:
    """Return whether the Block keeps no more bytes for backward than a peer.

    It is judged in training, beside peers with a target. The limit is left out: it has no norm, activation or residual
    whose inputs must be kept.
    """
    judged = result.work == "train" and row.target is not None and row.peer != "limit"
    if not judged or result.needs is None or row.measurement is None:
        return None
    return result.needs.saved_bytes <= row.measurement.needs.saved_bytes


def peak_of(device: str, dtype: torch.dtype) -> float | None:
    """Return the FLOP/s of a device's datasheet; None if it is not known."""
    datasheet = DATASHEETS.get(device)
    if datasheet is None:
        return None
    return datasheet.flops_per_second(dtype)


def shared_facts(run: Run) -> dict[str, object]:
    """Return what runs under one heading have in common: all facts except date, command, seed and rounds."""
    facts = {
        key.replace("_", " "): fact
        for key, fact in dataclasses.asdict(run.environment).items()
        if key not in ("date", "command", "seed") and fact is not None
    }
    facts["tiny sizes"] = run.quick
    facts["shape checks"] = run.shape_checks
    return facts


def by_machine(runs: Iterable[Run]) -> list[list[Run]]:
    """Return the runs in groups of one machine, one commit and the same versions."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps(shared_facts(run)), []).append(run)
    return list(groups.values())
