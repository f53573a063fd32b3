"""The acceptance without its parts: rows, what is judged, the summary, and what is left of a part that ends badly."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from acceptance import peers, profiles, summary
from acceptance.rows import Rows
from peers.cases import CUDA_PRESETS, all_cases

SCRIPTS = Path(summary.__file__).parents[1]
RECORDED = Path(__file__).with_name("recorded.jsonl")  # rows of a run with --device cpu --quick


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_summary_of_a_recorded_run(tmp_path, capsys):
    (tmp_path / "results.jsonl").write_text(RECORDED.read_text())
    assert summary.main(tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (tmp_path / "summary.txt").read_text().splitlines() == lines
    rows = rows_of(RECORDED)
    assert lines[-1] == f"0 of {len(rows)} rows failed"
    kernels = [row for row in rows if "no such kernel" in row["detail"]]
    assert sum(f"{kernels[0]['name']} and {len(kernels) - 1} more: torch has no" in line for line in lines) == 1
    for row in rows:
        assert any(line.startswith(f"{row['part']}: ") for line in lines)
        assert (f"{row['name']}: " in "\n".join(lines)) == bool(row["detail"]) or row["status"] == "missing"


def test_summary_shows_what_failed_where_there_is_no_room_for_all(tmp_path):
    fine, bad = Rows(tmp_path / "results.jsonl", "peers"), Rows(tmp_path / "results.jsonl", "right")
    for number in range(60):
        fine.add(f"case {number}", "ok", f"ratio 0.{number:02}")
    bad.add("test_rope", "failed", "off by 1\n" + "x" * 400)
    bad.add("test_norm", "ok")
    assert summary.main(tmp_path) == 1
    lines = (tmp_path / "summary.txt").read_text().splitlines()
    assert len(lines) == summary.LINES
    assert lines[-4] == "right: 1 ok, 1 failed"
    assert lines[-3].startswith("  failed      test_rope: off by 1 xxx")
    assert len(lines[-3]) == summary.WIDTH
    assert lines[-2:] == ["... and 25 lines more, in results.jsonl", "1 of 62 rows failed"]


TESTS = """
import pytest
def test_good(): pass
def test_bad(): assert 0 == 1, "not one"
def test_absent(): pytest.skip("no such thing")
@pytest.fixture
def broken(): raise OSError("gone")
def test_without_its_fixture(broken): pass
"""


def test_plugin_writes_a_row_for_each_test(tmp_path):
    (tmp_path / "test_some_part.py").write_text(TESTS)
    (tmp_path / "test_unimportable.py").write_text("import nothing_of_this_name")
    command = [sys.executable, "-m", "pytest", "-p", "acceptance.rows", "--rows", "rows.jsonl", "."]
    env = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    subprocess.run([*command, "--continue-on-collection-errors"], cwd=tmp_path, env=env, capture_output=True)
    rows = {row["name"]: row for row in rows_of(tmp_path / "rows.jsonl")}
    for name, part, status, detail in [
        ("all of it", "unimportable", "failed", "nothing_of_this_name"),
        ("test_good", "some part", "ok", ""),
        ("test_bad", "some part", "failed", "not one"),
        ("test_absent", "some part", "missing", "no such thing"),
        ("test_without_its_fixture", "some part", "failed", "gone"),
    ]:
        row = rows.pop(name)
        assert (row["part"], row["status"], detail in row["detail"]) == (part, status, True)
    assert not rows


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "name a folder for the results"),
        (["out", "--device", "tpu"], "--device must be cpu or cuda, got tpu"),
        (["out", "--device"], "--device needs a value"),
        (["out", "--fast"], "there is no option --fast"),
    ],
)
def test_script_refuses_in_one_line(options, message, tmp_path):
    command = ["bash", str(SCRIPTS / "cuda_acceptance.sh"), *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"cuda_acceptance.sh: error: {message}; see the head of this file\n"
    assert not (tmp_path / "out").exists()


def test_part_that_ends_badly_is_a_row_and_the_others_go_on(tmp_path):
    python = tmp_path / "python"
    python.write_text(f"""#!/usr/bin/env bash
        case "$*" in
        *acceptance.summary*) exec {sys.executable} "$@" ;;
        *acceptance.profiles*) echo half of it; kill -SEGV $$ ;;
        *on_device*) exit 4 ;;
        *acceptance.peers*) exit 1 ;;
        *contract*) exit 1 ;;
        esac
    """)
    python.chmod(0o755)
    command = ["bash", str(SCRIPTS / "cuda_acceptance.sh"), "out", "--device", "cpu"]
    env = {**os.environ, "PYTHON": str(python)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    rows = [(row["part"], row["detail"]) for row in rows_of(tmp_path / "out" / "results.jsonl")]
    ends = (("right", 4), ("profile", 139), ("peers", 1))
    assert rows == [(name, f"ended with exit code {code}: see log.txt") for name, code in ends]
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "3 of 3 rows failed"
    log = (tmp_path / "out" / "log.txt").read_text()
    assert log.index("== profile ==\nhalf of it") < log.index("== peers ==")


KERNELS = {"count": 50, "busy_fraction": 0.9}
OFF = ["the sum of the parts is more than 10% off"]


@pytest.mark.parametrize(
    ("of_whole", "breaks", "kernels", "wrong"),
    [
        (1.05, None, KERNELS, []),
        (1.11, None, KERNELS, OFF),
        (0.89, None, KERNELS, OFF),
        (1.5, 0, KERNELS, []),
        (1, 2, KERNELS, ["2 graph breaks"]),
        (1, None, None, ["no kernel was counted"]),
    ],
)
def test_profile_is_judged(of_whole, breaks, kernels, wrong):
    point: dict[str, Any] = {"status": "ok", "whole": {"train": {"seconds": {"median": 0.01}}}, "notes": []}
    point |= {"sum_of_parts": {"train": {"of_whole": {"median": of_whole}}}, "mfu": {"causal": {"measured": 0.5}}}
    point |= {"kernels": kernels, "compile": None if breaks is None else {"graph_breaks": breaks}}
    report = {"points": [point], "settings": {"mode": "train"}, "environment": {"command": ""}}
    assert profiles.judge(report, "cuda")[1] == wrong
    report["environment"] = {"command": "profile_block.py --nvtx"}  # beside which no kernels are counted
    assert profiles.judge(report, "cuda")[1] == (wrong if kernels else [])


@pytest.mark.parametrize(
    ("theirs", "peak", "status"),
    [(1.04, 2.0, "ok"), (0.94, None, "failed"), (1.06, 2.0, "failed"), (1.04, 1.03, "failed"), (1.04, None, "ok")],
)
def test_ceilings_are_judged(theirs, peak, status, tmp_path, monkeypatch):
    monkeypatch.setattr(profiles, "independent_ceilings", lambda *given: {"flops_per_second": 1.0})
    ceilings = {"flops_per_second": {"median": theirs}, "datasheet": peak and {"flops_per_second": peak}}
    rows = Rows(tmp_path / "rows.jsonl", "profile")
    profiles.judge_ceilings({"settings": {"dtype": "bfloat16"}, "ceilings": ceilings}, rows, "cuda", quick=False)
    assert [row["status"] for row in rows_of(rows.path)] == [status]


def test_independent_ceilings_are_rates(monkeypatch):
    class HalfASecond(SimpleNamespace):
        def blocked_autorange(self, min_run_time):
            exec(self.statement, self.globals)
            return SimpleNamespace(median=0.5)

    monkeypatch.setattr(profiles, "Timer", lambda statement, **given: HalfASecond(statement=statement, **given))
    rates = profiles.independent_ceilings("cpu", torch.bfloat16, quick=True)
    assert rates == {"flops_per_second": 2 * 2 * 256**3, "bytes_per_second": 2 * 2 * 2**20}


def test_cases_are_judged_and_missing_peers_named_once(tmp_path):
    def measured(peer, ratio, met, saved_met=None):
        row = {"peer": peer, "status": "measured", "target": None if met is None else 1.0, "met": met}
        return row | {"saved_met": saved_met, "ratio": {"median": ratio}, "mfu": {"MFU causal": 0.5}}

    liger = {"peer": "liger", "status": "skipped", "reason": "not installed", "target": 1.0}
    copy = {"peer": "copy", "status": "skipped", "reason": "one token alone", "target": None}
    cases = {
        "train": [measured("transformers", 0.9, True), liger, copy, measured("operations", 1.02, None)],
        "saves": [measured("transformers", 0.9, True, False), liger],
        "token": [measured("copy", 1.2, False)],
        "other": [measured("limit", 1.2, None)],
        "wrong": [{"peer": "litgpt", "status": "disagrees", "reason": "outputs by 1", "target": 1.0}],
    }
    run = {"cases": [{"case": name, "rows": rows} for name, rows in cases.items()]}
    run["cases"].append({"case": "broken", "rows": [], "failure": "out of memory"})
    rows = Rows(tmp_path / "rows.jsonl", "peers")
    peers.judge(run, rows)
    assert [(row["name"], row["status"], row["detail"]) for row in rows_of(rows.path)] == [
        ("train", "ok", "transformers 0.900 (<= 1.00), operations 1.020, MFU causal 50%"),
        ("saves", "failed", "saves more than transformers; transformers 0.900 (<= 1.00), MFU causal 50%"),
        ("token", "failed", "missed copy; copy 1.200 (<= 1.00), MFU causal 50%"),
        ("other", "not judged", "limit 1.200, MFU causal 50%"),
        ("wrong", "failed", "litgpt disagrees: outputs by 1"),
        ("broken", "failed", "out of memory"),
        ("liger", "missing", "not installed"),
    ]


def test_every_case_that_is_asked_for_is_there():
    names = [case.name for case in all_cases(torch.device("cuda"), CUDA_PRESETS)]
    assert all(any(name.startswith(word) for name in names) for word in peers.CASES)
    assert all(name.startswith(tuple(peers.CASES)) for name in names if "llama" in name)
