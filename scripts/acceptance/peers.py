"""Measure the Block beside its peers by compare_peers.py, the most wanted cases first, and judge its figures."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from .options import parse
from .rows import Rows

SCRIPT = Path(__file__).parents[1] / "compare_peers.py"
BIG = "llama-3.1-8b"
# Beginnings of names: those with targets first, then the other sizes, as far as the time goes.
CASES = [f"{work}{how}-bf16-{BIG}-4x2048" for how in ("-compiled", "") for work in ("train", "forward")]
CASES += ["one-token-graphs-bf16", "train-bf16-768", "forward-bf16-768"]
CASES += [f"{work}{how}-bf16-llama" for how in ("-compiled", "", "-graphs") for work in ("train", "forward")]
CASES += ["one-token-bf16", "one-token-compiled-bf16"]
PEERS = "limit,copy,operations,transformers,liger,litgpt,unchecked,control"
QUICK_CASES, QUICK_PEERS = ["train-bf16-768", "one-token-bf16"], "limit,copy,operations,unchecked"


def judge(run: dict[str, Any], rows: Rows) -> None:
    """Add a row for each case, and one for each peer that is missing."""
    for case in run["cases"]:
        wrong, figures, mfu = ([case["failure"]] if "failure" in case else []), [], {}
        for row in case["rows"]:
            peer, target = row["peer"], row["target"]
            if row["status"] in ("failed", "disagrees"):
                wrong.append(f"{peer} {row['status']}: {row['reason']}")
            elif row["status"] == "measured":
                mfu = row.get("mfu", {})
                figures.append(f"{peer} {row['ratio']['median']:.3f}" + (f" (<= {target:.2f})" if target else ""))
                wrong += [f"missed {peer}"] * (row["met"] is False)
                wrong += [f"saves more than {peer}"] * (row["saved_met"] is False)
        figures += [f"{kind} {mfu[kind]:.0%}" for kind in ("MFU causal", "MFU dense") if kind in mfu]
        judged = any(row.get("met") is not None for row in case["rows"])
        status = "failed" if wrong else "ok" if judged else "not judged"
        rows.add(case["case"], status, "; ".join([*wrong, *([", ".join(figures)] if figures else [])]))
    all_rows = [row for case in run["cases"] for row in case["rows"]]
    reasons = {row["peer"]: row["reason"] for row in all_rows if row["status"] == "skipped"}
    for peer in reasons.keys() - {row["peer"] for row in all_rows if row["status"] == "measured"}:
        rows.add(peer, "missing", reasons[peer])


def main() -> int:
    options = parse(__doc__)
    rows, path = Rows(options.out / "results.jsonl", "peers"), options.out / "benchmarks.json"
    command = [sys.executable, str(SCRIPT), "--device", options.device, "--json", str(path)]
    command += ["--write", str(options.out / "benchmarks.md"), "--rounds", "2" if options.quick else "7"]
    cases, peers = (QUICK_CASES, QUICK_PEERS) if options.quick else (CASES, PEERS)
    if os.environ.get("JAXTYPING_DISABLE") == "1":  # then nothing is checked, as the row of the machine says
        peers = peers.replace(",unchecked", "")
    command += ["--case", ",".join(cases), "--peers", peers, *(["--quick"] if options.quick else [])]
    # At an interrupt it writes what it has. A compiler may not listen; the cases until then are written.
    limit = ["timeout", "--foreground", "--signal=INT", "--kill-after=10", str(options.seconds)]
    code = subprocess.run([*limit, *command]).returncode
    if path.exists():
        run = json.loads(path.read_text())
        judge(run, rows)
        if run["interrupted"]:
            rows.add("the cases that follow", "missing", "no time was left")
    elif code:
        rows.add("compare_peers.py", "failed", f"exit code {code}: see log.txt")
    return 0


if __name__ == "__main__":
    sys.exit(main())
