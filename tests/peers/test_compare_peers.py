"""The command on tiny sizes: what it chooses, refuses and writes, and what is left of a run that is cut short."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import compare_peers
import pytest
from isolated import WITHOUT_PACKAGE
from lab.tables import Table
from peers import candidates, projects, report, runs

QUICK = ["--quick", "--rounds", "2", "--threads", "1"]
ONE_TOKEN = [*QUICK, "--case", "one-token-f32", "--peers", "control"]


def patch_control(monkeypatch, function):
    def build(block, size):
        return candidates.Candidate(lambda x: function(block, x), list(block.parameters()))

    monkeypatch.setitem(projects.PEERS, "control", candidates.Peer(build, "control: made up"))


def test_quick_run_measures_and_reports_every_case(tmp_path, capsys):
    path, page = tmp_path / "run.json", tmp_path / "report.md"
    names = ["train-bf16-768", "train-bf16-2048", "one-token-f32"]
    options = [*QUICK, "--case", ",".join(names), "--peers", "limit,control"]
    assert compare_peers.main([*options, "--json", str(path), "--write", str(page)]) == 0
    run = json.loads(path.read_text())
    assert [case["case"] for case in run["cases"]] == names
    assert run["settings"]["shape_checks"]
    assert not run["interrupted"]
    printed, written = capsys.readouterr().out, page.read_text()
    for row in (row for case in run["cases"] for row in case["rows"]):
        (samples,) = row["processes"]
        ratios = sorted(a / b for a, b in zip(samples["tinyblock"], samples["peer"], strict=True))
        assert row["ratio"]["median"] == pytest.approx(sum(ratios) / 2)
        for text in (printed, written):
            assert f"{row['ratio']['median']:.3f}" in text
            assert f"{row['ratio']['p20']:.3f}-{row['ratio']['p80']:.3f}" in text
    for fact in ("torch", "cpu", "threads"):
        assert f"| {fact} | {run['environment'][fact]} |" in written
    assert f"| {run['environment']['date']} | `{run['environment']['command']}` | 2 | 1 | 0 |" in written
    assert "the times mean nothing" in written


def test_page_is_made_from_the_json_with_one_heading_for_a_machine(tmp_path):
    path, later, other_commit = (tmp_path / name for name in ("run.json", "later.json", "other_commit.json"))
    page, second_page = tmp_path / "page.md", tmp_path / "second_page.md"
    assert compare_peers.main([*ONE_TOKEN, "--json", str(path), "--write", str(page)]) == 0
    assert compare_peers.main(["--report", str(path), "--write", str(second_page)]) == 0
    assert second_page.read_text() == page.read_text()
    run = json.loads(path.read_text())
    later.write_text(json.dumps(run | {"environment": run["environment"] | {"date": "later"}}))
    other_commit.write_text(json.dumps(run | {"environment": run["environment"] | {"commit": "abacus"}}))
    paths = [str(path), str(other_commit), str(later)]
    assert compare_peers.main(["--report", *paths, "--write", str(second_page)]) == 0
    first, second = second_page.read_text().split("\n## ")[1:]
    assert "commit abacus" in second.partition("\n")[0]
    assert [part.count(" | 2 | 1 | 0 |") for part in (first, second)] == [2, 1]
    assert [part.count("### one-token-f32") for part in (first, second)] == [2, 1]


def test_disagreement_is_the_exit_code_and_in_the_report(monkeypatch, tmp_path, capsys):
    patch_control(monkeypatch, lambda block, x: 1.01 * block(x))
    page = tmp_path / "report.md"
    assert compare_peers.main([*ONE_TOKEN, "--write", str(page)]) == 1
    for text in (capsys.readouterr().out, page.read_text()):
        assert "control: made up disagrees: outputs by 0.01: above 2e-05" in text


def test_against_and_positions_choose_peers_and_cases(tmp_path):
    (tmp_path / "tinyblock").mkdir()
    (tmp_path / "tinyblock" / "__init__.py").touch()
    options = ["--against", str(tmp_path), "--case", "one-token-f32,accuracy"]
    args, chosen = compare_peers.parse([*options, "--positions"])
    assert list(args.peers) == ["control", "against"]
    assert [(case.name, case.target("limit")) for case in chosen] == [
        ("one-token-f32-positions", None),
        ("accuracy-bf16", None),
    ]
    args, chosen = compare_peers.parse([*options, "--peers", "limit,against", "--dtype", "float32"])
    assert list(args.peers) == ["limit", "against"]
    assert [(case.name, case.target("limit")) for case in chosen] == [("one-token-f32", 1.15)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--case", "nothing"], "no case begins with 'nothing'"),
        (["--case", "one-token-f32", "--dtype", "bfloat16"], "none of these cases is in bfloat16"),
        (["--peers", "nobody"], "unknown peer 'nobody'"),
        (["--peers", "against"], "unknown peer 'against'"),
        (["--against", "no/such/folder"], "--against needs a checkout of tinyblock, and no/such/folder is none"),
        (["--presets", "gpt-7"], "unknown preset 'gpt-7'"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--processes", "-1"], "--processes must be at least 1, got -1"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--device", "abacus"], "no such device: abacus"),
        (["--device", "meta"], "--device must be cpu or cuda, got meta"),
        (["--device", "cuda:99"], "there is no cuda:99 here"),
        (["--json", "no/such/folder/run.json"], "cannot write no/such/folder/run.json: No such file or directory"),
        (["--write", "."], "cannot write ."),
        (["--report", "a.json", "--json", "b.json"], "--report measures nothing"),
        (["--report", "a.json"], "No such file or directory: 'a.json'"),
        (["--report", "other.json"], "other.json is not a run of this script"),
    ],
)
def test_impossible_arguments_are_one_line_and_exit_code_2(options, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("other.json").write_text("{}")
    with pytest.raises(SystemExit) as stop:
        compare_peers.main(options)
    text = capsys.readouterr().err
    assert stop.value.code == 2
    assert message in text
    assert text.count("\n") == 1


def test_help_shows_examples_and_every_peer(capsys):
    with pytest.raises(SystemExit, match="0"):
        compare_peers.main(["--help"])
    text = capsys.readouterr().out
    assert "examples:" in text
    assert all(f"\n  {name} " in text for name in projects.PEERS)


def test_interrupt_keeps_what_was_measured_until_then(monkeypatch, tmp_path):
    def interrupt(block, x):
        raise KeyboardInterrupt

    patch_control(monkeypatch, interrupt)
    path, page = tmp_path / "run.json", tmp_path / "report.md"
    options = [*QUICK, "--case", "one-token-f32,one-token-bf16", "--json", str(path), "--write", str(page)]
    assert compare_peers.main([*options, "--peers", "limit,control"]) == 130
    (case,) = json.loads(path.read_text())["cases"]
    assert [row["peer"] for row in case["rows"]] == ["limit"]
    assert "Interrupted" in page.read_text()
    written = path.read_text()
    assert compare_peers.main([*options, "--peers", "control,limit"]) == 130  # before anything was measured
    assert path.read_text() == written


def test_interrupted_script_keeps_what_its_processes_measured(tmp_path):
    """As a person runs it: not installed, Ctrl-C for the whole group, and nobody who reads the tables."""
    path = tmp_path / "run.json"
    options = ["--quick", "--rounds", "300", "--threads", "1", "--case", "one-token-f32", "--peers", "limit,control"]
    command = [sys.executable, compare_peers.__file__, *options, "--processes", "2", "--json", str(path)]
    read, write = os.pipe()
    os.close(read)
    with subprocess.Popen(
        command,
        stdout=write,
        stderr=subprocess.PIPE,
        env=WITHOUT_PACKAGE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    ) as script:
        os.close(write)
        assert script.stderr is not None
        assert "  control\n" in iter(script.stderr.readline, "")
        os.killpg(script.pid, signal.SIGINT)
        script.stderr.read()
    assert script.returncode == 130
    run = json.loads(path.read_text())
    assert run["interrupted"]
    assert [row["peer"] for row in run["cases"][0]["rows"]] == ["limit"]


@pytest.mark.parametrize(
    ("ends", "code", "pooled"),
    [
        (["", "died", ""], 0, 2),
        (["", "interrupted"], 130, 2),
        (["", MemoryError()], MemoryError, 1),
        (["died", "died", "died"], SystemExit, 0),
    ],
)
def test_processes_that_ended_are_pooled_and_written(ends, code, pooled, monkeypatch, tmp_path, capsys):
    coming, path = iter(ends), tmp_path / "run.json"

    def measure_in_new_process(*what):
        end = next(coming)
        if isinstance(end, Exception):
            raise end
        return (None if end == "died" else list(runs.measure_here(*what))[-1]), end == "interrupted"

    monkeypatch.setattr(runs, "measure_in_new_process", measure_in_new_process)
    options = [*ONE_TOKEN, "--processes", "3", "--json", str(path)]
    if isinstance(code, int):
        assert compare_peers.main(options) == code
    else:
        with pytest.raises(code):
            compare_peers.main(options)
    assert capsys.readouterr().err.count("ended without a result") == ends.count("died")
    assert path.exists() == (pooled > 0)
    if pooled:
        run = json.loads(path.read_text())
        (row,) = run["cases"][0]["rows"]
        assert run["interrupted"] == (code != 0)
        assert run["settings"]["processes"] == len(row["processes"]) == len(row["process_medians"]) == pooled
        assert row["ratio"]["samples"] == 2 * pooled


def test_pool_drops_what_one_process_could_not_measure():
    measured = [{"case": "a", "rows": [{"peer": "control", "status": "measured", "processes": [1]}]}]
    failed = [{"case": "a", "rows": [{"peer": "control", "status": "failed", "reason": "out of memory"}]}]
    assert runs.pool([measured, failed]) == failed
    assert runs.pool([failed, measured]) == failed
    assert runs.pool([measured, measured, []])[0]["rows"][0]["processes"] == [1, 1]


def test_verdicts_and_mfu_are_shown_for_every_peer():
    """On a GPU whose datasheet is known, peer a saves less, b is slower too, c is missing."""

    def row(peer, ours, target):
        row = {"peer": peer, "title": peer, "version": None, "target": target, "saved_bytes": 2**20}
        return row | {"status": "measured", "processes": [{"tinyblock": ours, "peer": [1.0, 1.0]}]}

    rows = [row("a", [1.0, 1.0], 1.0), row("b", [1.1, 1.2], 1.03), row("limit", [2, 2], 2.5)]
    rows.append({"peer": "c", "title": "c", "version": None, "target": 1.0, "status": "skipped", "reason": "r"})
    case = {"case": "train", "describe": "training", "work": "train", "dtype": "float32", "saved_bytes": 2**21}
    case |= {"flops": {"causal": 67e11, "dense": 134e11}, "rows": rows}
    environment = {"device": "NVIDIA H100 80GB HBM3", "commit": "abc", "date": "today", "command": "x", "seed": 0}
    settings = {"rounds": 2, "processes": 1, "quick": False}
    run = {"environment": environment, "settings": settings, "interrupted": False, "cases": [case]}
    judged = runs.summarize(run)
    assert report.verdicts(judged["cases"]) == (
        "2 of 5 targets met",
        [
            "missed: train against a, saves 2.0 MiB for backward, target <= 1.0 MiB",
            "missed: train against b, ratio 1.150, target <= 1.03",
            "missed: train against b, saves 2.0 MiB for backward, target <= 1.0 MiB",
            "not judged: train against c, skipped",
        ],
    )
    table, reasons = report.sections(judged)
    assert isinstance(table, Table)
    assert reasons == "c skipped: r"
    assert table.rows[1][1:6] == ["1.150", "1.120-1.180", "1", "<= 1.03", "missed"]
    assert table.columns[-4:] == ["MFU causal", "peer MFU causal", "MFU dense", "peer MFU dense"]
    assert table.rows[0][-4:] == ["10.0%", "10.0%", "20.0%", "20.0%"]
    assert table.rows[2][-4:] == ["5.0%", "10.0%", "10.0%", "20.0%"]
    written = report.markdown([judged, judged])
    assert "**4 of 10 targets met.**" in written
    assert written.count("- **missed**: train against b, ratio 1.150, target <= 1.03") == 2
    assert "| <= 1.03 | **missed** |" in written
