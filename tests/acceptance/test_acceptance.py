"""The acceptance without its parts: rows, what is judged, the summary, and what is left of a part that ends badly."""

import json
import os
import subprocess
import sys
from pathlib import Path
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
    assert [line.partition(":")[0] for line in lines if line[0] != " "][:-1] == list(
        dict.fromkeys(row["part"] for row in rows)
    )
    kernels = [row for row in rows if row["status"] == "missing" and "no such kernel" in row["detail"]]
    assert len(kernels) > 1
    assert sum(f"{kernels[0]['name']} and {len(kernels) - 1} more: torch has no" in line for line in lines) == 1
    for row in rows:
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
    assert lines[-5].startswith("right: 1 ok, 1 failed") or "right: 1 ok, 1 failed" in lines
    assert any(line.startswith("  failed      test_rope: off by 1 xxx") for line in lines)
    assert all(len(line) <= summary.WIDTH for line in lines)
    assert lines[-2:] == ["... and 25 lines more, in results.jsonl", "1 of 62 rows failed"]


TESTS = """
import pytest
def test_good(): pass
@pytest.mark.parametrize("x", ["a::b"])
def test_bad(x): assert x == 1, "not one"
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
    assert {name: (row["part"], row["status"]) for name, row in rows.items()} == {
        "all of it": ("unimportable", "failed"),
        "test_good": ("some part", "ok"),
        "test_bad[a::b]": ("some part", "failed"),
        "test_absent": ("some part", "missing"),
        "test_without_its_fixture": ("some part", "failed"),
    }
    assert "nothing_of_this_name" in rows["all of it"]["detail"]
    assert "not one" in rows["test_bad[a::b]"]["detail"]
    assert rows["test_absent"]["detail"] == "no such thing"
    assert "gone" in rows["test_without_its_fixture"]["detail"]


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


def report(of_whole=1.0, breaks=None, kernels=None, mode="train", command="profile_block.py"):
    point: dict[str, Any] = {"status": "ok", "whole": {mode: {"seconds": {"median": 0.01}}}, "notes": []}
    point |= {"sum_of_parts": {mode: {"of_whole": {"median": of_whole}}}, "mfu": {"causal": {"measured": 0.5}}}
    point |= {"kernels": kernels, "compile": None if breaks is None else {"graph_breaks": breaks}}
    return {"points": [point], "settings": {"mode": mode}, "environment": {"command": command}}


COUNTED = {"count": 50, "busy_fraction": 0.9}


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ({"kernels": COUNTED}, []),
        ({"kernels": COUNTED, "of_whole": 1.11}, ["the sum of the parts is more than 10% off"]),
        ({"kernels": COUNTED, "of_whole": 0.89}, ["the sum of the parts is more than 10% off"]),
        ({"kernels": COUNTED, "of_whole": 1.5, "breaks": 0}, []),
        ({"kernels": COUNTED, "breaks": 2}, ["2 graph breaks"]),
        ({}, ["no kernel was counted"]),
        ({"command": "profile_block.py --nvtx"}, []),
    ],
)
def test_profile_is_judged(given, wrong):
    assert profiles.judge(report(**given), "cuda")[1] == wrong


@pytest.mark.parametrize(
    ("theirs", "peak", "quick", "status"),
    [
        (1.04, 2.0, False, "ok"),
        (0.94, 2.0, False, "failed"),
        (1.06, 2.0, False, "failed"),
        (1.04, 1.03, False, "failed"),
        (1.04, None, False, "ok"),
        (9.0, 2.0, True, "not judged"),
    ],
)
def test_ceilings_are_judged(theirs, peak, quick, status, tmp_path, monkeypatch):
    monkeypatch.setattr(profiles, "independent_ceilings", lambda *given: {"flops_per_second": 1.0})
    ceilings = {"flops_per_second": {"median": theirs}, "datasheet": peak and {"flops_per_second": peak}}
    rows = Rows(tmp_path / "rows.jsonl", "profile")
    profiles.judge_ceilings({"settings": {"dtype": "bfloat16"}, "ceilings": ceilings}, rows, "cuda", quick)
    assert [row["status"] for row in rows_of(rows.path)] == [status]


def test_independent_ceilings_are_rates(monkeypatch):
    monkeypatch.setattr(profiles, "seconds_of", lambda run, device: 0.5 if run() is not None else 0)
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
