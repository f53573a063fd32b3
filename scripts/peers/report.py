"""A run as tables for the terminal, as verdicts, and as the page of Markdown that is docs/benchmarks.md."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from lab.tables import Section, Table, number, share

VERDICTS = {True: "met", False: "missed", None: ""}

INTRODUCTION = """\
# Benchmarks

Written by `scripts/compare_peers.py`; changes by hand are lost.

Each ratio is the time of tinyblock's Block, shape checks included, divided by the peer's: below 1 the Block
is faster. Both have the same weights, inputs, dtype and threads, and take turns in one process; the ratio is
the median of those of single turns, with their 20th and 80th percentile, and over several processes the
range of their medians. Outputs and, in training, input gradients agreed before anything was timed; the table
shows the relative error of the outputs. Training differentiates with respect to the input and all weights.
The limit is the bare matrix products and `scaled_dot_product_attention`; the copy, for one token, moves as many
bytes as the weights have; the operations are the Block's own,
one after another, without modules, checks or options; the control is a second copy of the Block,
and shows the noise. Saved MiB are kept for backward, weights not counted, and the Block is to save no more
than any peer. MFU is the share of the datasheet's FLOP/s that the FLOPs of the matrix products make:
those that a causal mask leaves ("causal"), or with every score of the attention ("dense").
"""


def sections(run: dict[str, Any]) -> list[Section]:
    """Return a table for each case of a summarized run, each followed by why rows of it were not measured."""
    shown: list[Section] = []
    for case in run["cases"]:
        rows = [_cells(case, row) for row in case["rows"]]
        longest: dict[str, str] = max([{"peer": ""}, *rows], key=len)
        columns = list(longest)
        table = Table(f"{case['case']}: {case['describe']}", columns)
        table.rows = [[row.get(column, "") for column in columns] for row in rows]
        reasons = [f"Failed: {case['failure']}"] if "failure" in case else []
        reasons += [f"{row['title']} {row['status']}: {row['reason']}" for row in case["rows"] if "reason" in row]
        shown += [table, "\n".join(reasons)] if reasons else [table]
    return shown


def _cells(case: dict[str, Any], row: dict[str, Any]) -> dict[str, str]:
    cells = {"peer": f"{row['title']} {row['version'] or ''}".strip()}
    if row["status"] != "measured":
        return cells | {"ratio": row["status"], "target": _target(row)}
    ratio, medians, processes = row["ratio"], row["medians"], row["process_medians"]
    cells["ratio"] = f"{ratio['median']:.3f}"
    cells["p20-p80"] = f"{ratio['p20']:.3f}-{ratio['p80']:.3f}"
    among = f": {min(processes):.3f}-{max(processes):.3f}" if len(processes) > 1 else ""
    cells |= {"processes": f"{len(processes)}{among}", "target": _target(row), "verdict": VERDICTS[row["met"]]}
    if case["work"] == "accuracy":
        return cells | {"error": f"{medians['tinyblock']:.1e}", "peer error": f"{medians['peer']:.1e}"}
    cells |= {"ms": number(1e3 * medians["tinyblock"], 4), "peer ms": number(1e3 * medians["peer"], 4)}
    cells["outputs differ"] = f"{row['errors']['outputs']:.1e}" if "errors" in row else "not compared"
    if case["work"] == "train":
        cells |= {"saved MiB": _mib(case), "peer MiB": _mib(row), "saved verdict": VERDICTS[row["saved_met"]]}
    for name, counted in (("", case), ("peer ", row)):
        if "peak_bytes" in counted:
            cells[f"{name}peak MiB"] = f"{counted['peak_bytes'] / 2**20:.1f}"
            cells[f"{name}kernels"] = str(counted["kernels"] or "")
    return cells | {name: share(value) for name, value in row.get("mfu", {}).items()}


def _target(row: dict[str, Any]) -> str:
    return "" if row["target"] is None else f"<= {row['target']:.2f}"


def _mib(counted: dict[str, Any]) -> str:
    return f"{counted['saved_bytes'] / 2**20:.1f}"


def verdicts(cases: Iterable[dict[str, Any]]) -> tuple[str, list[str]]:
    """Return how many targets were met, and a line for each that was missed or could not be judged."""
    met, lines = 0, []
    for case in cases:
        if "failure" in case:
            lines.append(f"not judged: {case['case']}, {case['failure']}")
        for row in case["rows"]:
            what = f"{case['case']} against {row['peer']}"
            if row["target"] is not None and row["status"] != "measured":
                lines.append(f"not judged: {what}, {row['status']}")
            met += (row.get("met") is True) + (row.get("saved_met") is True)
            if row.get("met") is False:
                lines.append(f"missed: {what}, ratio {row['ratio']['median']:.3f}, target {_target(row)}")
            if row.get("saved_met") is False:
                lines.append(f"missed: {what}, saves {_mib(case)} MiB for backward, target <= {_mib(row)} MiB")
    judged = met + sum(line.startswith("missed") for line in lines)
    return f"{met} of {judged} targets met" if judged else "Nothing was judged", lines


def markdown(runs: Sequence[dict[str, Any]]) -> str:
    """Return docs/benchmarks.md: everything in it comes from the runs, those of one machine and commit together."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault(json.dumps(_machine(run)), []).append(run)
    return "\n".join([INTRODUCTION, *(line for group in groups.values() for line in _group(group))])


def _machine(run: dict[str, Any]) -> dict[str, Any]:
    """Return what one heading of the report stands for: what remains when date, command and repetitions differ."""
    of_run = ("date", "command", "seed", "rounds", "processes")
    return {key: value for key, value in (run["environment"] | run["settings"]).items() if key not in of_run}


def _group(runs: Sequence[dict[str, Any]]) -> list[str]:
    machine = _machine(runs[0])
    lines = [f"## {machine['device']}" + (f", commit {machine['commit']}" if machine["commit"] else ""), ""]
    facts = [[key.replace("_", " "), str(fact)] for key, fact in machine.items() if fact is not None]
    lines += _markdown_table(["", ""], facts)
    settings = [run["environment"] | run["settings"] for run in runs]
    lines += _markdown_table(
        ["date", "command", "rounds", "processes", "seed"],
        [[s["date"], f"`{s['command']}`", *(str(s[key]) for key in ("rounds", "processes", "seed"))] for s in settings],
    )
    if machine["quick"]:
        lines += ["**Tiny sizes, which show that everything works: the times mean nothing.**", ""]
    if any(run["interrupted"] for run in runs):
        lines += ["**Interrupted: some of what was asked for is missing.**", ""]
    summary, failed = verdicts(case for run in runs for case in run["cases"])
    lines += [f"**{summary}.**", ""]
    lines += [f"- **{verdict}**:{text}" for verdict, _, text in (line.partition(":") for line in failed)]
    lines += [""] if failed else []
    for section in (section for run in runs for section in sections(run)):
        if isinstance(section, str):
            lines += [*(f"- {line}" for line in section.split("\n")), ""]
        else:
            name, _, description = section.title.partition(": ")
            lines += [f"### {name}", "", f"{description[0].upper()}{description[1:]}.", ""]
            lines += _markdown_table(section.columns, section.rows)
    return lines


def _markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    rule = ["---", *["--:"] * (len(columns) - 1)]
    return [*(f"| {' | '.join(map(_markdown_cell, row))} |" for row in (columns, rule, *rows)), ""]


def _markdown_cell(text: str) -> str:
    return f"**{text}**" if text == VERDICTS[False] else text.replace("|", "\\|")
