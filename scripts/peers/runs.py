"""A whole run: its cases one after another, in this process or in several, and what follows from their samples."""

import copy
import dataclasses
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import Any

import jaxtyping
from lab.environment import environment
from lab.machine import datasheet
from lab.timing import Spread, paired_ratio

from .candidates import Peer
from .cases import DTYPES, Case
from .measuring import Settings, measure_case

SCHEMA = "tinyblock.compare_peers/2"
Cases = list[dict[str, Any]]


def measure(
    cases: Sequence[Case], peers: Mapping[str, Peer], settings: Settings, save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Measure all cases; after Ctrl-C return what was measured until then.

    `save` is called with what there is after every case or process: a machine that goes down loses only the last one.
    """
    checked = not jaxtyping.config.jaxtyping_disable
    run: dict[str, Any] = {
        "schema": SCHEMA,
        "environment": environment(settings.device, settings.seed),
        "settings": {"rounds": settings.rounds, "processes": 1, "quick": settings.quick, "shape_checks": checked},
        "interrupted": True,  # until it is over
        "cases": [],
    }
    results: Cases = []

    def save_results() -> None:
        run["cases"] = [case for case in results if case.get("rows") or "failure" in case]
        if run["cases"]:  # else an earlier report is left alone
            save(summarize(run))

    try:
        for measured in (measure_here if settings.processes == 1 else measure_in_processes)(cases, peers, settings):
            results = measured
            save_results()
        run["interrupted"] = False
    except KeyboardInterrupt:
        pass
    save_results()
    return run


def measure_here(cases: Sequence[Case], peers: Mapping[str, Peer], settings: Settings) -> Iterator[Cases]:
    """Yield the results before each case, which fills the last of them, and at the end."""
    settings.apply()
    results: Cases = []
    for index, case in enumerate(cases, 1):
        print(f"[{index}/{len(cases)}] {case.name}", file=sys.stderr, flush=True)
        results.append({})
        yield results
        measure_case(case, peers, settings, results[-1])
    yield results


def measure_in_processes(cases: Sequence[Case], peers: Mapping[str, Peer], settings: Settings) -> Iterator[Cases]:
    """Yield what the processes that came to an end have measured, pooled, after each of them."""
    finished: list[Cases] = []
    for index in range(1, settings.processes + 1):
        print(f"process {index} of {settings.processes}", file=sys.stderr, flush=True)
        timed = [case for case in cases if case.work != "accuracy" or index == 1]  # which is the same in all of them
        results, interrupted = measure_in_new_process(timed, peers, settings)
        if results is None:
            print(f"process {index} ended without a result", file=sys.stderr)
        else:
            finished.append(results)
            yield pool(finished)
        if interrupted:
            raise KeyboardInterrupt
    if not finished:
        sys.exit("compare_peers.py: error: no process came to an end")


def measure_in_new_process(*what: Any) -> tuple[Cases | None, bool]:
    """Return what another process has measured, or None if it died, and whether Ctrl-C, which reaches both, came."""
    interrupted = False
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor, suppress(BrokenProcessPool):
        future = executor.submit(measure_until_interrupted, *what)
        try:
            return future.result(), False
        except KeyboardInterrupt:
            interrupted = True
            return future.result(), True
    return None, interrupted


def measure_until_interrupted(*what: Any) -> Cases:
    results: Cases = []
    with suppress(KeyboardInterrupt):
        for measured in measure_here(*what):
            results = measured
    return results


def pool(processes: Sequence[Cases]) -> Cases:
    """Join the same cases measured in several processes; a row that one process could not measure is not measured."""
    pooled = copy.deepcopy(processes[0])
    for results in processes[1:]:
        rows = {(case["case"], row["peer"]): row for case in results for row in case.get("rows", [])}
        for case in pooled:
            for row in case.get("rows", []):
                more = rows.get((case["case"], row["peer"]))
                if more is None or row["status"] != "measured":
                    continue
                if more["status"] == "measured":
                    row["processes"] += more["processes"]
                else:
                    del row["processes"]
                    row.update(more)
    return pooled


def summarize(run: dict[str, Any]) -> dict[str, Any]:
    """Add to a run what follows from its samples: medians, ratios with their spread, and the targets met."""
    peak = datasheet(str(run["environment"]["device"]))
    for case in run["cases"]:
        flops_per_second = peak.flops_per_second(DTYPES[case["dtype"]]) if peak else None
        for row in case["rows"]:
            if row["status"] != "measured":
                continue
            run["settings"]["processes"] = max(run["settings"]["processes"], len(row["processes"]))
            samples = {who: [s for p in row["processes"] for s in p[who]] for who in ("tinyblock", "peer")}
            row["ratio"] = dataclasses.asdict(paired_ratio(samples["tinyblock"], samples["peer"]))
            row["process_medians"] = [paired_ratio(p["tinyblock"], p["peer"]).median for p in row["processes"]]
            row["medians"] = {who: Spread.of(values).median for who, values in samples.items()}
            if flops_per_second and "flops" in case:
                row["mfu"] = {
                    f"{prefix}MFU {kind}": flops / seconds / flops_per_second
                    for kind, flops in case["flops"].items()
                    for prefix, seconds in zip(("", "peer "), row["medians"].values(), strict=True)
                }
            row["met"] = None if row["target"] is None else row["ratio"]["median"] <= row["target"]
            # Only where something is saved, and by a peer that could not save less without computing it again.
            judged = case["work"] == "train" and row["target"] is not None and row["peer"] != "limit"
            row["saved_met"] = case["saved_bytes"] <= row["saved_bytes"] if judged else None
    return run


def load_run(path: Path) -> dict[str, Any]:
    run = json.loads(path.read_text())
    if not isinstance(run, dict) or run.get("schema") != SCHEMA:
        raise ValueError(f"{path} is not a run of this script, whose schema is {SCHEMA}")
    return summarize(run)
