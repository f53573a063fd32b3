"""The command on tiny sizes: what it chooses, refuses and writes, and what is left of a run that is cut short."""

import json
import os
import signal
import subprocess
import sys

import compare_peers
import pytest
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
    path, other_path, page, second_page = (tmp_path / name for name in ("a.json", "b.json", "a.md", "b.md"))
    assert compare_peers.main([*ONE_TOKEN, "--json", str(path), "--write", str(page)]) == 0
    assert compare_peers.main(["--report", str(path), "--write", str(second_page)]) == 0
    assert second_page.read_text() == page.read_text()
    run = json.loads(path.read_text())
    run["environment"] |= {"commit": "abacus", "date": "today"}
    other_path.write_text(json.dumps(run))
    assert compare_peers.main(["--report", *map(str, (path, other_path, path)), "--write", str(second_page)]) == 0
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
    assert [(case.name, case.to_limit) for case in chosen] == [
        ("one-token-f32-positions", None),
        ("accuracy-bf16", None),
    ]
    args, chosen = compare_peers.parse([*options, "--peers", "limit,against", "--dtype", "float32"])
    assert list(args.peers) == ["limit", "against"]
    assert [(case.name, case.to_limit) for case in chosen] == [("one-token-f32", 1.15)]


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
    ],
)
def test_impossible_arguments_are_one_line_and_exit_code_2(options, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        compare_peers.main(options)
    text = capsys.readouterr().err
    assert stop.value.code == 2
    assert message in text
    assert text.count("\n") == 1


def test_report_of_another_file_is_one_line_and_exit_code_2(tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_text("{}")
    assert compare_peers.main(["--report", str(path)]) == 2
    assert "is not a run of this script" in capsys.readouterr().err


def test_help_shows_examples_and_every_peer(capsys):
    with pytest.raises(SystemExit) as stop:
        compare_peers.main(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
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


def test_interrupted_script_keeps_the_process_that_ended_without_a_reader(tmp_path):
    """As a person runs it: not installed, Ctrl-C for the whole group, and nobody who reads the tables."""
    path = tmp_path / "run.json"
    command = [sys.executable, compare_peers.__file__, *ONE_TOKEN, "--processes", "2", "--json", str(path)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    read, write = os.pipe()
    os.close(read)
    script = subprocess.Popen(
        command, stdout=write, stderr=subprocess.PIPE, env=environment, text=True, start_new_session=True
    )
    os.close(write)
    with script:
        lines = iter(script.stderr.readline, "")
        assert any(line == "process 2 of 2\n" for line in lines)
        os.killpg(script.pid, signal.SIGINT)
        rest = script.stderr.read()
    assert script.returncode == 130, rest
    run = json.loads(path.read_text())
    assert run["interrupted"]
    assert run["settings"]["processes"] == len(run["cases"][0]["rows"][0]["processes"]) == 1


@pytest.fixture
def run_processes(monkeypatch, tmp_path):
    """Return a function that measures in processes, each with a given end, and returns exit code and run."""

    def run(*ends):
        given, path = iter(ends), tmp_path / "run.json"

        def measure_in_new_process(*what):
            end = next(given)
            if isinstance(end, Exception):
                raise end
            return (None if end == "died" else list(runs.measure_here(*what))[-1]), end == "interrupted"

        monkeypatch.setattr(runs, "measure_in_new_process", measure_in_new_process)
        try:
            code = compare_peers.main([*ONE_TOKEN, "--processes", "3", "--json", str(path)])
        except (MemoryError, SystemExit) as error:
            code = error
        return code, json.loads(path.read_text()) if path.exists() else None

    return run


@pytest.mark.parametrize(
    ("ends", "code", "pooled"),
    [
        (["", "", ""], 0, 3),
        (["", "died", ""], 0, 2),
        (["", "interrupted"], 130, 2),
        (["", MemoryError()], None, 1),
    ],
)
def test_processes_that_ended_are_pooled_and_written(ends, code, pooled, run_processes):
    actual, run = run_processes(*ends)
    (row,) = run["cases"][0]["rows"]
    assert isinstance(actual, MemoryError) if code is None else actual == code
    assert run["interrupted"] == (code != 0)
    assert run["settings"]["processes"] == len(row["processes"]) == len(row["process_medians"]) == pooled
    assert row["ratio"]["samples"] == 2 * pooled


def test_processes_without_a_result_are_an_error(run_processes, capsys):
    error, run = run_processes("died", "died", "died")
    assert "no process came to an end" in str(error)
    assert run is None
    assert "process 3 ended without a result" in capsys.readouterr().err


def test_pool_drops_what_one_process_could_not_measure():
    measured = [{"case": "a", "rows": [{"peer": "control", "status": "measured", "processes": [1]}]}]
    failed = [{"case": "a", "rows": [{"peer": "control", "status": "failed", "reason": "out of memory"}]}]
    assert runs.pool([measured, failed]) == failed
    assert runs.pool([failed, measured]) == failed
    assert runs.pool([measured, measured, []])[0]["rows"][0]["processes"] == [1, 1]


@pytest.fixture
def judged():
    """Return a run on a GPU whose datasheet is known: peer a saves less, b is slower too, c is missing."""

    def row(peer, ours, target):
        row = {"peer": peer, "title": peer, "version": None, "target": target, "saved_bytes": 2**20}
        return row | {"status": "measured", "processes": [{"tinyblock": ours, "peer": [1.0, 1.0]}]}

    case = {"case": "train", "describe": "training", "work": "train", "dtype": "float32", "saved_bytes": 2**21}
    case["flops"] = {"causal": 67e11, "dense": 134e11}
    case["rows"] = [row("a", [1.0, 1.0], 1.0), row("b", [1.1, 1.2], 1.03), row("limit", [2, 2], 2.5)]
    case["rows"].append({"peer": "c", "title": "c", "version": None, "target": 1.0, "status": "skipped", "reason": "r"})
    environment = {"device": "NVIDIA H100 80GB HBM3", "commit": "abc", "date": "today", "command": "x", "seed": 0}
    settings = {"rounds": 2, "processes": 1, "quick": False}
    run = {"environment": environment, "settings": settings, "interrupted": False, "cases": [case]}
    return runs.summarize(run)


def test_verdicts_name_the_missed_targets(judged):
    summary, lines = report.verdicts(judged["cases"])
    assert summary == "2 of 5 targets met"
    assert lines == [
        "missed: train against a, saves 2.0 MiB for backward, target <= 1.0 MiB",
        "missed: train against b, ratio 1.150, target <= 1.03",
        "missed: train against b, saves 2.0 MiB for backward, target <= 1.0 MiB",
        "not judged: train against c, skipped",
    ]
    table, reasons = report.sections(judged)
    assert table.rows[1][1:6] == ["1.150", "1.120-1.180", "1", "<= 1.03", "missed"]
    assert reasons == "c skipped: r"
    written = report.markdown([judged, judged])
    assert "**4 of 10 targets met.**" in written
    assert written.count("- **missed**: train against b, ratio 1.150, target <= 1.03") == 2
    assert "| <= 1.03 | **missed** |" in written


def test_mfu_is_named_by_its_flops(judged):
    table = report.sections(judged)[0]
    assert table.columns[-4:] == ["MFU causal", "peer MFU causal", "MFU dense", "peer MFU dense"]
    assert table.rows[0][-4:] == ["10.0%", "10.0%", "20.0%", "20.0%"]
    assert table.rows[2][-4:] == ["5.0%", "10.0%", "10.0%", "20.0%"]
    assert len(table.rows[3]) == len(table.columns)
