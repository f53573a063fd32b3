"""The command on tiny sizes: what it chooses, rejects and writes, and what is left of a run that is cut short."""

import dataclasses
import json
import operator
import statistics
from pathlib import Path
from unittest.mock import Mock

import compare_peers
import pytest
import torch
from lab.environment import environment
from markdown_tables import table_rows
from peers import candidates, measuring, projects, records

QUICK = ["--quick", "--rounds", "2", "--threads", "1"]
ONE_TOKEN = [*QUICK, "--case", "one-token-f32", "--peers", "control"]


def patch_control(monkeypatch, function):
    """Replace the control by a function of the Block and of x."""

    def build(block, size):
        return candidates.Candidate(
            lambda x: function(block, x), list(block.parameters())
        )

    peer = candidates.Peer(build, "control: made up")
    monkeypatch.setitem(projects.PEERS, "control", peer)


def plan_of(*options):
    return compare_peers.plan_of(compare_peers.make_parser().parse_args(options))


def names_of(plan):
    return [case.name for case in plan.cases]


def test_quick_run_measures_and_reports_every_case(tmp_path, capsys):
    path = tmp_path / "run.json"
    page = tmp_path / "report.md"
    names = ["train-bf16-768", "train-bf16-2048", "one-token-f32"]
    options = [*QUICK, "--case", ",".join(names), "--peers", "limit,control"]
    outputs = ["--json", str(path), "--write", str(page)]
    assert compare_peers.main([*options, *outputs]) == 0
    run = records.read(path)
    assert [case.name for case in run.cases] == names
    assert (run.rounds, run.quick, run.shape_checks) == (2, True, True)
    assert not run.interrupted
    printed = capsys.readouterr().out
    written = page.read_text()
    for case in run.cases:
        assert [row.peer for row in case.rows] == ["limit", "control"]
        for row in case.rows:
            assert row.status == "measured"
            ours = row.measurement.block_seconds
            theirs = row.measurement.peer_seconds
            median = statistics.median(map(operator.truediv, ours, theirs))
            assert f" {median:.3f} " in printed
            assert f" {median:.3f} " in written
    facts = table_rows(written)
    assert ["threads", "1"] in facts
    assert ["torch", torch.__version__] in facts
    command = f"`{run.environment.command}`"
    rounds = "2"
    seed = "0"
    assert [command, rounds, seed, run.environment.date] in facts
    assert "the times mean nothing" in written


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Return the JSON file of a run of two cases, and the page that it wrote."""
    folder = tmp_path_factory.mktemp("run")
    path, page = folder / "run.json", folder / "page.md"
    cases = ["--case", "one-token-f32,one-token-tiny-f32", "--peers", "control"]
    outputs = ["--json", str(path), "--write", str(page)]
    assert compare_peers.main([*QUICK, *cases, *outputs]) == 0
    return path, page


def test_report_writes_the_page_of_the_run(measured, tmp_path):
    path, page = measured
    again = tmp_path / "again.md"
    assert compare_peers.main(["--report", str(path), "--write", str(again)]) == 0
    assert again.read_text() == page.read_text()


def test_report_pools_the_runs_of_one_machine_and_commit(measured, capsys):
    path, _ = measured
    run = records.read(path)
    run.environment = dataclasses.replace(run.environment, date="later")
    later = path.with_name("later.json")
    records.write(later, run)
    run.environment = dataclasses.replace(run.environment, commit="abacus")
    changed = path.with_name("changed.json")
    records.write(changed, run)
    paths = [str(each) for each in (path, changed, later)]
    assert compare_peers.main(["--report", *paths]) == 0
    first, second = capsys.readouterr().out.split("\n## All figures: ")[1:]
    assert "commit abacus" in second.partition("\n")[0]
    assert first.count("### one-token-f32") == second.count("### one-token-f32") == 1
    assert (first.count(" later |"), second.count(" later |")) == (1, 1)
    assert " 2: " in first
    assert " 2: " not in second


def test_report_rejects_a_run_that_is_named_twice(measured, capsys):
    path, _ = measured
    copy = path.with_name("copy.json")
    copy.write_bytes(path.read_bytes())
    for again in (path, copy):
        message = f"--report must name each run once: leave out {again}"
        assert message in error_of(["--report", str(path), str(again)], capsys)


def test_report_has_the_chosen_cases_only(measured, capsys):
    path, _ = measured
    options = ["--report", str(path), "--case", "one-token-tiny"]
    assert compare_peers.main(options) == 0
    printed = capsys.readouterr().out
    assert "### one-token-tiny-f32" in printed
    assert "### one-token-f32" not in printed
    with pytest.raises(SystemExit, match="2"):
        compare_peers.main(["--report", str(path), "--case", "train"])
    assert "unknown case 'train'; use one of one-token-f32, " in capsys.readouterr().err


def test_disagreement_is_the_exit_code_and_in_the_report(monkeypatch, tmp_path, capsys):
    patch_control(monkeypatch, lambda block, x: 1.01 * block(x))
    page = tmp_path / "report.md"
    assert compare_peers.main([*ONE_TOKEN, "--write", str(page)]) == 1
    expected = "control disagrees: outputs differ by 0.01 (relative error), more than"
    assert expected in capsys.readouterr().out
    assert expected in page.read_text()


def test_peer_whose_result_is_nan_is_reported_and_the_run_goes_on(
    monkeypatch, tmp_path
):
    patch_control(monkeypatch, lambda block, x: torch.nan * block(x))
    path = tmp_path / "run.json"
    cases = ["--case", "one-token-f32,one-token-tiny", "--peers", "control,limit"]
    assert compare_peers.main([*QUICK, *cases, "--json", str(path)]) == 1
    run = records.read(path)
    assert not run.interrupted
    for case in run.cases:
        control, limit = case.rows
        assert control.status == "disagrees"
        assert control.reason.startswith("outputs differ by nan")
        assert limit.status == "measured"
    assert len(run.cases) == 2


def test_failure_of_the_block_is_the_exit_code_and_in_the_report(monkeypatch, capsys):
    def fail(size, dtype, device, seed):
        raise RuntimeError("no weights")

    monkeypatch.setattr(measuring, "make_block", fail)
    assert compare_peers.main(ONE_TOKEN) == 1
    assert "failed: RuntimeError: no weights" in capsys.readouterr().out


def test_quick_run_of_a_preset_with_few_key_heads_succeeds(capsys):
    name = "one-token-bf16-llama-3.1-70b"
    choice = ["--presets", "llama-3.1-70b", "--case", name, "--peers", "control"]
    assert compare_peers.main([*QUICK, *choice]) == 0
    assert "4 heads, 1 key head," in capsys.readouterr().out


def test_positions_make_cases_of_their_own_without_targets():
    plan = plan_of("--case", "one-token-f32", "--positions")
    assert names_of(plan) == ["one-token-f32-positions"]
    assert plan.cases[0].targets == {}


def test_against_compares_with_another_checkout_and_the_control(tmp_path):
    (tmp_path / "tinyblock").mkdir()
    (tmp_path / "tinyblock" / "__init__.py").touch()
    plan = plan_of("--against", str(tmp_path))
    assert list(plan.peers) == ["control", "against"]
    plan = plan_of("--against", str(tmp_path), "--peers", "limit,against")
    assert list(plan.peers) == ["limit", "against"]


def test_eager_cases_come_first():
    plan = plan_of("--case", "train-compiled,one-token-f32,train-f32")
    assert names_of(plan)[:2] == ["one-token-f32", "train-f32-768"]


def test_patterns_choose_cases():
    plan = plan_of("--case", "*bf16*")
    assert {case.dtype for case in plan.cases} == {torch.bfloat16}


def test_qk_norm_of_a_preset_can_be_left_out():
    plan = plan_of("--presets", "qwen3-8b", "--case", "*qwen3*", "--no-qk-norm")
    assert plan.cases
    assert not any(case.size.qk_norm for case in plan.cases)


def test_kernels_are_counted_when_everything_is_timed(monkeypatch):
    cases = ["--case", "train-f32-768,one-token-f32"]
    options = compare_peers.make_parser().parse_args(cases)
    plan = compare_peers.plan_of(options)
    here = environment(plan.device, seed=0)
    monkeypatch.setattr(compare_peers, "environment", lambda device, seed: here)
    on_gpu = compare_peers.Plan(plan.cases, plan.peers, torch.device("cuda", 0))
    comparison = Mock(late=lambda: False)
    comparison.measure.side_effect = compare_peers.Comparison(
        {}, plan.device, rounds=2, seed=0, quick=True, deadline=0
    ).measure
    monkeypatch.setattr(compare_peers, "Comparison", lambda **settings: comparison)
    assert compare_peers.measure(on_gpu, options) == 0
    calls = [(name, case) for name, (case, *_), _ in comparison.method_calls]
    first, second = plan.cases
    assert calls == [
        ("measure", first),
        ("measure", second),
        ("count_kernels", first),
        ("count_kernels", second),
    ]


def error_of(options, capsys):
    with pytest.raises(SystemExit) as stop:
        compare_peers.main(options)
    text = capsys.readouterr().err
    assert stop.value.code == 2
    assert text.count("\n") == 1
    return text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--case", "no"], "unknown case 'no'; use one of forward-bf16-768,"),
        (["--peers", "no"], "unknown peer 'no'"),
        (["--peers", "against"], "unknown peer 'against'"),
        (["--presets", "gpt-7"], "unknown preset 'gpt-7'"),
        (["--peers", ","], "a peer must be named, got ','"),
        (["--case", ","], "a case must be named, got ','"),
        (["--rounds", "0"], "--rounds: must be an integer of at least 1, got '0'"),
        (["--threads", "0"], "--threads: must be an integer of at least 1, got '0'"),
        (["--seconds", "nan"], "--seconds: must be a number of seconds above 0, got"),
        (["--seed", "x"], "--seed: must be an integer, got 'x'"),
        (["--seed", f"{2**63}"], "--seed: must fit into 64 bits"),
        (["--json", "a", "--write", "a"], "two outputs have the same path: a"),
    ],
)
def test_impossible_choices_are_one_line_and_exit_code_2(options, message, capsys):
    assert message in error_of(options, capsys)


def test_against_must_be_measured(capsys):
    checkout = str(Path(compare_peers.__file__).parents[1])
    options = ["--against", checkout, "--peers", "limit"]
    assert "add against to --peers" in error_of(options, capsys)


def test_against_must_be_a_checkout(capsys):
    message = "--against must be a checkout of tinyblock, got no/such/folder"
    assert message in error_of(["--against", "no/such/folder"], capsys)


@pytest.mark.parametrize(
    "option", ["--quick", "--json=b.json", "--peers=limit", "--no-qk-norm"]
)
def test_report_rejects_options_without_effect(option, capsys):
    expected = f"--report measures nothing: leave out {option.partition('=')[0]}"
    assert expected in error_of(["--report", "a.json", option], capsys)


def test_report_rejects_a_missing_file_and_another_schema(tmp_path, capsys):
    missing = tmp_path / "missing.json"
    message = f"cannot read {missing}: No such file or directory"
    assert message in error_of(["--report", str(missing)], capsys)
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"schema": "tinyblock.compare_peers/3"}))
    message = 'must have the "schema" tinyblock.compare_peers/4, got tinyblock.'
    assert message in error_of(["--report", str(other)], capsys)


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
    outputs = ["--json", str(path), "--write", str(page)]
    assert compare_peers.main([*options, *outputs]) == 130
    assert capsys.readouterr().err == "compare_peers.py: interrupted\n"
    run = records.read(path)
    assert run.interrupted
    assert [case.name for case in run.cases] == ["one-token-f32"]
    assert "Interrupted" in page.read_text()
