"""Runs as tables, as verdicts, and as the page of Markdown that is docs/benchmarks.md."""

import copy
import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lab.machine import datasheet
from lab.tables import markdown, number, share
from lab.timing import Spread, paired_ratio

from .cases import DTYPES

SCHEMA = "tinyblock.compare_peers/3"
VERDICTS = {True: "met", False: "**missed**", None: ""}
INTRODUCTION = """\
# Benchmarks

Written by `scripts/compare_peers.py`; changes by hand are lost.

Each ratio is the time of tinyblock's Block, shape checks included, divided by the peer's: below 1 the Block is faster.
Both have the same weights, inputs, dtype and threads, and take turns in one process. The ratio is the median over
the turns, with the 20th and 80th percentile; over several processes, the range of their medians follows. Outputs and,
in training, input gradients agreed before anything was timed; the table shows the relative error of the outputs.
Training differentiates with respect to the input and all weights.

- The limit is the bare matrix products and `scaled_dot_product_attention`.
- The copy, for one token, moves as many bytes as the weights have.
- The operations are the Block's own, one after another, without modules, checks or options.
- The control is a second copy of the Block, and shows the noise.
- Saved MiB are kept for backward, weights not counted; the Block must not save more than any peer.
- MFU is the FLOP/s of the matrix products as a share of the datasheet's: with the scores that a causal mask leaves
  ("causal"), or with every score of the attention ("dense").
"""


def load_run(path: Path) -> dict[str, Any]:
    """Read the JSON file of a run.

    Raises:
        ValueError: it cannot be read, or is another kind of file.
    """
    try:
        run = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    if not isinstance(run, dict) or run.get("schema") != SCHEMA:
        raise ValueError(f"{path} is not a run of this script, whose schema is {SCHEMA}")
    return run


def summarize(*runs: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cases of runs of one machine, with medians, ratios and their spread, MFU, and the targets met."""
    peak = datasheet(str(runs[0]["environment"]["device"]))
    cases = _pool(runs)
    for case in cases:
        flops_per_second = peak.flops_per_second(DTYPES[case["dtype"]]) if peak else None
        for row in (row for row in case["rows"] if row["status"] == "measured"):
            ours, theirs = ([s for process in row["processes"] for s in process[who]] for who in ("tinyblock", "peer"))
            row["ratio"] = dataclasses.asdict(paired_ratio(ours, theirs))
            row["process_medians"] = [paired_ratio(p["tinyblock"], p["peer"]).median for p in row["processes"]]
            row["medians"] = {"": Spread.of(ours).median, "peer ": Spread.of(theirs).median}
            row["mfu"] = {
                f"{who}MFU {kind}": flops / seconds / flops_per_second
                for kind, flops in case["flops"].items()
                for who, seconds in row["medians"].items()
                if flops_per_second
            }
            row["met"] = None if row["target"] is None else row["ratio"]["median"] <= row["target"]
            # Only where something is saved, and by a peer that could not save less without computing it again.
            judged = case["work"] == "train" and row["target"] is not None and row["peer"] != "limit"
            row["saved_met"] = case["saved_bytes"] <= row["saved_bytes"] if judged else None
    return cases


def _pool(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the same cases of several processes; a row that one of them could not measure is not measured."""
    pooled: dict[str, dict[str, Any]] = {}
    for case in copy.deepcopy([case for run in runs for case in run["cases"]]):
        rows = {row["peer"]: row for row in pooled.setdefault(case["case"], case)["rows"]}
        for row in case["rows"]:
            known = rows.setdefault(row["peer"], row)
            if known is row:
                continue
            if known["status"] == row["status"] == "measured":
                known["processes"] += row["processes"]
            elif known["status"] == "measured":
                rows[row["peer"]] = row
        pooled[case["case"]]["rows"] = list(rows.values())
    return list(pooled.values())


def text_of(case: dict[str, Any]) -> str:
    """Return a summarized case as Markdown: a table, and why rows of it were not measured."""
    rows = [_cells(case, row) for row in case["rows"]]
    columns = list(max(rows, key=lambda row: len(row), default=["peer"]))
    table = markdown(columns, [[row.get(column, "") for column in columns] for row in rows])
    reasons = [f"- failed: {case['failure']}"] if "failure" in case else []
    reasons += [f"- {row['title']} {row['status']}: {row['reason']}" for row in case["rows"] if "reason" in row]
    return "\n\n".join([f"### {case['case']}", f"{case['describe']}.", table, *filter(None, ["\n".join(reasons)])])


def _cells(case: dict[str, Any], row: dict[str, Any]) -> dict[str, str]:
    cells = {"peer": f"{row['title']} {row['version'] or ''}".strip()}
    if row["status"] != "measured":
        return cells | {"ratio": row["status"], "target": _target(row)}
    ratio, processes = row["ratio"], row["process_medians"]
    cells |= {"ratio": f"{ratio['median']:.3f}", "p20-p80": f"{ratio['p20']:.3f}-{ratio['p80']:.3f}"}
    among = f": {min(processes):.3f}-{max(processes):.3f}" if len(processes) > 1 else ""
    cells |= {"processes": f"{len(processes)}{among}", "target": _target(row), "verdict": VERDICTS[row["met"]]}
    cells |= {f"{who}ms": number(1e3 * seconds, 4) for who, seconds in row["medians"].items()}
    cells["outputs differ"] = f"{row['errors']['outputs']:.1e}" if "errors" in row else "not compared"
    if case["work"] == "train":
        cells |= {"saved MiB": _mib(case["saved_bytes"]), "peer MiB": _mib(row["saved_bytes"])}
        cells["saved verdict"] = VERDICTS[row["saved_met"]]
    for who, counted in (("", case), ("peer ", row)):
        cells |= {f"{who}peak MiB": _mib(counted["peak_bytes"])} if "peak_bytes" in counted else {}
        cells |= {f"{who}kernels": str(counted["kernels"])} if counted.get("kernels") else {}
    return cells | {name: share(value) for name, value in row["mfu"].items()}


def _target(row: dict[str, Any]) -> str:
    return "" if row["target"] is None else f"<= {row['target']:.2f}"


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f}"


def verdicts(cases: Iterable[dict[str, Any]]) -> str:
    """Return how many targets were met, and a line for each that was missed or could not be judged."""
    met, missed, unjudged = 0, [], []
    for case in cases:
        unjudged += [f"{case['case']}, {case['failure']}"] if "failure" in case else []
        for row in case["rows"]:
            what = f"{case['case']} against {row['peer']}"
            if row["target"] is not None and row["status"] != "measured":
                unjudged.append(f"{what}, {row['status']}")
            met += (row.get("met") is True) + (row.get("saved_met") is True)
            if row.get("met") is False:
                missed.append(f"{what}, ratio {row['ratio']['median']:.3f}, target {_target(row)}")
            if row.get("saved_met") is False:
                saved, target = _mib(case["saved_bytes"]), _mib(row["saved_bytes"])
                missed.append(f"{what}, saves {saved} MiB for backward, target <= {target} MiB")
    judged = met + len(missed)
    lines = [f"- missed: {line}" for line in missed] + [f"- not judged: {line}" for line in unjudged]
    return "\n".join([f"**{met} of {judged} targets met**" if judged else "**Nothing was judged**", "", *lines]).strip()


def page(runs: Sequence[dict[str, Any]]) -> str:
    """Return docs/benchmarks.md: everything in it comes from the runs, those of one machine and commit pooled."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault(json.dumps(_machine(run)), []).append(run)
    return "\n\n".join([INTRODUCTION.strip(), *(part for group in groups.values() for part in _group(group))]) + "\n"


def _machine(run: dict[str, Any]) -> dict[str, Any]:
    """Return what one heading of the page stands for: what remains when date, command, rounds and seed differ."""
    facts = run["environment"] | run["settings"]
    return {key: fact for key, fact in facts.items() if key not in ("date", "command", "seed", "rounds")}


def _group(runs: Sequence[dict[str, Any]]) -> list[str]:
    machine = _machine(runs[0])
    cases = summarize(*runs)
    facts = [run["environment"] | run["settings"] for run in runs]
    commands = [[f"`{fact['command']}`", *(str(fact[key]) for key in ("rounds", "seed", "date"))] for fact in facts]
    parts = [
        f"## {machine['device']}" + (f", commit {machine['commit']}" if machine["commit"] else ""),
        markdown(["", ""], [[key.replace("_", " "), str(fact)] for key, fact in machine.items() if fact is not None]),
        markdown(["command", "rounds", "seed", "date"], commands),
        "**Tiny sizes, which show that everything works: the times mean nothing.**" * machine["quick"],
        "**Interrupted: some cases are missing.**" * any(run["interrupted"] for run in runs),
        verdicts(cases),
        *map(text_of, cases),
    ]
    return list(filter(None, parts))
