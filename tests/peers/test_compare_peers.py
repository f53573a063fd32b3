"""The command on tiny sizes: what it chooses, rejects and writes, and what is left of a run that is cut short."""

import json
from pathlib import Path
from unittest.mock import Mock

import compare_peers
import pytest
import torch
from peers import candidates, cases, projects, report

QUICK = ["--quick", "--rounds", "2", "--threads", "1"]
ONE_TOKEN = [*QUICK, "--case", "one-token-f32", "--peers", "control"]


def patch_control(monkeypatch, function):
    def build(block, size):
        return candidates.Candidate(
            lambda x: function(block, x), list(block.parameters())
        )

    monkeypatch.setitem(
        projects.PEERS, "control", candidates.Peer(build, "control: made up")
    )


def chosen(*options):
    return compare_peers.parse(options)[1]


def test_quick_run_measures_and_reports_every_case(tmp_path, capsys):
    path, page = tmp_path / "run.json", tmp_path / "report.md"
    names = ["train-bf16-768", "train-bf16-2048", "one-token-f32"]
    options = [*QUICK, "--case", ",".join(names), "--peers", "limit,control"]
    assert (
        compare_peers.main([*options, "--json", str(path), "--write", str(page)]) == 0
    )
    run, printed, written = (
        json.loads(path.read_text()),
        capsys.readouterr().out,
        page.read_text(),
    )
    assert [case["case"] for case in run["cases"]] == names
    assert run["settings"] == {"rounds": 2, "quick": True, "shape_checks": True}
    assert not run["interrupted"]
    for row in (row for case in run["cases"] for row in case["rows"]):
        (samples,) = row["processes"]
        ratios = sorted(
            a / b for a, b in zip(samples["tinyblock"], samples["peer"], strict=True)
        )
        assert row["ratio"]["median"] == pytest.approx(sum(ratios) / 2)
        cells = f" {row['ratio']['median']:.3f} | {row['ratio']['p20']:.3f}-{row['ratio']['p80']:.3f} "
        assert all(cells in " ".join(text.split()) for text in (printed, written))
    facts = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in written.splitlines()
    ]
    assert ["threads", "1"] in facts
    assert ["torch", torch.__version__] in facts
    assert [
        f"`{run['environment']['command']}`",
        "2",
        "0",
        run["environment"]["date"],
    ] in facts
    assert "the times mean nothing" in written


def test_report_pools_the_runs_of_one_machine_under_one_heading(tmp_path):
    path, slower, other_commit, page, second_page = (
        tmp_path / name for name in ("1", "2", "3", "page", "second_page")
    )
    assert (
        compare_peers.main([*ONE_TOKEN, "--json", str(path), "--write", str(page)]) == 0
    )
    assert compare_peers.main(["--report", str(path), "--write", str(second_page)]) == 0
    assert second_page.read_text() == page.read_text()
    run = json.loads(path.read_text())
    other_commit.write_text(
        json.dumps(run | {"environment": run["environment"] | {"commit": "abacus"}})
    )
    (row,) = run["cases"][0]["rows"]
    median = row["ratio"]["median"]
    row["processes"][0]["tinyblock"] = [
        3 * seconds for seconds in row["processes"][0]["tinyblock"]
    ]
    slower.write_text(
        json.dumps(run | {"environment": run["environment"] | {"date": "later"}})
    )
    paths = [str(path), str(other_commit), str(slower)]
    assert compare_peers.main(["--report", *paths, "--write", str(second_page)]) == 0
    first, second = second_page.read_text().split("\n## ")[1:]
    assert "commit abacus" in second.partition("\n")[0]
    assert [part.count("### one-token-f32") for part in (first, second)] == [1, 1]
    assert [part.count("`python ") for part in (first, second)] == [2, 1]
    assert f" 2: {median:.3f}-{3 * median:.3f} " in first


def test_disagreement_is_the_exit_code_and_in_the_report(monkeypatch, tmp_path, capsys):
    patch_control(monkeypatch, lambda block, x: 1.01 * block(x))
    page = tmp_path / "report.md"
    assert compare_peers.main([*ONE_TOKEN, "--write", str(page)]) == 1
    for text in (capsys.readouterr().out, page.read_text()):
        assert "control: made up disagrees: outputs by 0.01: above 2e-05" in text


def test_against_and_positions_choose_peers_and_cases(tmp_path):
    (tmp_path / "tinyblock").mkdir()
    (tmp_path / "tinyblock" / "__init__.py").touch()
    options = ["--against", str(tmp_path), "--case", "one-token-f32"]
    args = chosen(*options, "--positions")
    assert list(args.peers) == ["control", "against"]
    assert [(case.name, case.targets.get("limit")) for case in args.cases] == [
        ("one-token-f32-positions", None)
    ]
    args = chosen(*options, "--peers", "limit,against")
    assert list(args.peers) == ["limit", "against"]
    assert [(case.name, case.targets.get("limit")) for case in args.cases] == [
        ("one-token-f32", 1.15)
    ]


def test_eager_cases_come_first_and_on_a_gpu_the_slowest():
    args = chosen("--case", "train-compiled,one-token-f32,train-f32")
    assert [case.name for case in args.cases][:2] == ["one-token-f32", "train-f32-768"]
    assert {case.dtype for case in chosen("--case", "*bf16*").cases} == {torch.bfloat16}
    on_gpu = [
        case
        for case in cases.all_cases(torch.device("cuda"), cases.CUDA_PRESETS)
        if case.how == "eager"
    ]
    assert on_gpu[0].name == "train-bf16-llama-3.1-8b-1x8192"
    assert on_gpu[-1].name == "one-token-tiny-f32"


def test_kernels_are_counted_when_everything_is_timed(monkeypatch):
    args = chosen("--case", "train-f32-768,one-token-f32")
    facts = compare_peers.environment(args.device, args.seed)
    args.device = torch.device("cuda", 0)
    comparison = Mock(late=lambda: False)
    comparison.measure.side_effect = lambda case: case.facts() | {"rows": []}
    monkeypatch.setattr(compare_peers, "environment", lambda device, seed: facts)
    monkeypatch.setattr(compare_peers, "Comparison", lambda *settings: comparison)
    assert compare_peers.measure(args) == 0
    calls = [(name, case) for name, (case, *_), _ in comparison.method_calls]
    assert calls == [
        (name, case) for name in ("measure", "count_kernels") for case in args.cases
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--case", "nothing"], "unknown case 'nothing'; use one of forward-bf16-768,"),
        (["--peers", "nobody"], "unknown peer 'nobody'"),
        (["--peers", "against"], "unknown peer 'against'"),
        (
            ["--against", "no/such/folder"],
            "--against must be a checkout of tinyblock, got no/such/folder",
        ),
        (["--presets", "gpt-7"], "unknown preset 'gpt-7'"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--json", "a", "--write", "a"], "two outputs have the same path: a"),
        (
            ["--report", "a.json", "--json", "b.json"],
            "argument --json: not allowed with argument --report",
        ),
        (["--report", "a.json"], "cannot read a.json: No such file or directory"),
        (
            ["--report", "other.json"],
            'other.json must have the "schema" tinyblock.compare_peers/',
        ),
    ],
)
def test_impossible_arguments_are_one_line_and_exit_code_2(
    options, message, capsys, tmp_path, monkeypatch
):
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


def test_interrupted_script_keeps_the_finished_cases(monkeypatch, tmp_path, capsys):
    def interrupt(block, x):
        if x.dtype == torch.bfloat16:
            raise KeyboardInterrupt
        return block(x)

    patch_control(monkeypatch, interrupt)
    options = [*QUICK, "--case", "one-token-f32,one-token-bf16", "--peers", "control"]
    path, page = tmp_path / "run.json", tmp_path / "page.md"
    assert (
        compare_peers.main([*options, "--json", str(path), "--write", str(page)]) == 130
    )
    assert capsys.readouterr().err == "compare_peers.py: interrupted\n"
    run = json.loads(path.read_text())
    assert run["interrupted"]
    assert [case["case"] for case in run["cases"]] == ["one-token-f32"]
    assert "Interrupted" in page.read_text()


def test_verdicts_and_mfu_are_shown_for_every_peer():
    """On a GPU whose datasheet is known, peer a saves less, b is slower too, c is missing in one of two processes."""

    def row(peer, ours, target):
        row = {
            "peer": peer,
            "title": peer,
            "version": None,
            "target": target,
            "saved_bytes": 2**20,
        }
        return row | {
            "status": "measured",
            "processes": [{"tinyblock": ours, "peer": [1.0, 1.0]}],
        }

    rows = [
        row("a", [1.0, 1.0], 1.0),
        row("b", [1.1, 1.2], 1.03),
        row("limit", [2, 2], 2.5),
        row("c", [1, 1], 1.0),
    ]
    case = {
        "case": "train",
        "describe": "training",
        "work": "train",
        "dtype": "float32",
        "saved_bytes": 2**21,
    }
    case |= {"flops": {"causal": 67e11, "dense": 134e11}, "rows": rows}
    environment = {
        "device": "NVIDIA H100 80GB HBM3",
        "commit": "abc",
        "date": "today",
        "command": "x",
        "seed": 0,
    }
    settings = {"rounds": 2, "quick": False, "shape_checks": True}
    run = {
        "environment": environment,
        "settings": settings,
        "interrupted": False,
        "cases": [case],
    }
    other = run | {
        "cases": [case | {"rows": [rows[3] | {"status": "skipped", "reason": "r"}]}]
    }
    assert [row["status"] for row in report.summarize(other, run)[0]["rows"]] == [
        "skipped",
        *["measured"] * 3,
    ]
    (judged,) = report.summarize(run, other)
    assert report.verdicts([judged]).splitlines() == [
        "**2 of 5 targets met**",
        "",
        "- missed: train against a, saves 2.0 MiB for backward, target <= 1.0 MiB",
        "- missed: train against b, ratio 1.150, target <= 1.03",
        "- missed: train against b, saves 2.0 MiB for backward, target <= 1.0 MiB",
        "- not judged: train against c, skipped",
    ]
    lines = report.text_of(judged).splitlines()
    columns, _, a, b, limit = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in lines[4:9]
    )
    assert lines[-1] == "- c skipped: r"
    assert b[1:6] == ["1.150", "1.120-1.180", "1", "<= 1.03", "**missed**"]
    assert columns[-4:] == [
        "MFU causal",
        "peer MFU causal",
        "MFU dense",
        "peer MFU dense",
    ]
    assert (a[-4:], limit[-4:]) == (
        ["10.0%", "10.0%", "20.0%", "20.0%"],
        ["5.0%", "10.0%", "10.0%", "20.0%"],
    )
    assert "**2 of 5 targets met**" in report.page([run, other])
