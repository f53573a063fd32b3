"""compare_peers.py on tiny sizes: agreement is checked, every peer ends in a row, and reports say what was measured."""

import dataclasses
import gc
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import compare_peers
import pytest
import torch
from peers import candidates as peers
from profiling.presets import Size

import tinyblock
from tinyblock import Block

BUILT_IN = "limit,control"
needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="no transformers")
CASES = {case.name: compare_peers.shrink(case) for case in compare_peers.all_cases(torch.device("cpu"), ())}
CASE = CASES["train-f32-768"]
SETTINGS = compare_peers.Settings(torch.device("cpu"), rounds=2, sample_seconds=0.0, seed=0)


def rows(case=CASE, names=("control",)):
    candidates = {name: peers.PEERS[name] for name in names}
    return compare_peers.measure_case(case, candidates, SETTINGS, lambda text: None)["rows"]


def grouped(case=CASE):
    return dataclasses.replace(case, size=dataclasses.replace(case.size, num_kv_heads=2))


def limit_that(function):
    """Return a peer whose call is `function` of the Block and of x."""

    def make(block, seq_len):
        return peers.Candidate(lambda x: function(block, x), list(block.parameters()))

    return peers.Peer(make, "made up")


def test_quick_run_measures_and_reports_every_case(tmp_path, capsys):
    path, report = tmp_path / "run.json", tmp_path / "report.md"
    cases = "train-bf16-768,train-f32-768,train-bf16-2048,one-token-f32,one-token-bf16"
    options = ["--quick", "--rounds", "2", "--case", cases, "--peers", BUILT_IN]
    assert compare_peers.main([*options, "--json", str(path), "--write", str(report)]) == 0
    run = json.loads(path.read_text())
    assert [case["case"] for case in run["cases"]] == cases.split(",")
    assert run["settings"]["shape_checks"]
    printed, written = capsys.readouterr().out, report.read_text()
    for case in run["cases"]:
        assert [row["status"] for row in case["rows"]] == ["measured", "measured"]
        for row in case["rows"]:
            (samples,) = row["processes"]
            assert len(samples["tinyblock"]) == len(samples["peer"]) == 2
            ratios = sorted(a / b for a, b in zip(samples["tinyblock"], samples["peer"], strict=True))
            assert row["ratio"]["median"] == pytest.approx(sum(ratios) / 2)
            for text in (printed, written):
                assert f"{row['ratio']['median']:.3f}" in text
                assert f"{row['ratio']['p20']:.3f}-{row['ratio']['p80']:.3f}" in text
    for fact in ("torch", "cpu", "threads"):
        assert f"| {fact} | {run['environment'][fact]} |" in written
    assert f"| {run['environment']['date']} | `{run['environment']['command']}` | 2 | 1 | 0 |" in written
    assert "the times mean nothing" in written


def test_markdown_is_made_from_the_json_alone(tmp_path):
    path, first, second = tmp_path / "run.json", tmp_path / "first.md", tmp_path / "second.md"
    options = ["--quick", "--rounds", "2", "--case", "one-token-f32", "--peers", BUILT_IN]
    assert compare_peers.main([*options, "--json", str(path), "--write", str(first)]) == 0
    assert compare_peers.main(["--report", str(path), "--write", str(second)]) == 0
    assert first.read_text() == second.read_text()
    assert compare_peers.main(["--report", str(path), str(path), "--write", str(second)]) == 0
    assert second.read_text().count("### one-token-f32") == 2


def test_report_has_one_heading_for_a_machine_and_lists_every_run(tmp_path):
    paths, report = [tmp_path / f"{name}.json" for name in "abc"], tmp_path / "report.md"
    for path, case in zip(paths, ("one-token-f32", "one-token-bf16", "train-f32"), strict=True):
        options = ["--quick", "--rounds", "2", "--case", case, "--peers", BUILT_IN]
        assert compare_peers.main([*options, "--json", str(path)]) == 0
    other = json.loads(paths[2].read_text())
    other["environment"]["commit"] = "abacus"
    other["environment"]["date"] = "today"
    paths[2].write_text(json.dumps(other))
    assert compare_peers.main(["--report", *map(str, paths), "--write", str(report)]) == 0
    lines = report.read_text().splitlines()
    headings = [line for line in lines if line.startswith("## ")]
    assert [heading.endswith(", commit abacus") for heading in headings] == [False, True]
    first, second = lines[: lines.index(headings[1])], lines[lines.index(headings[1]) :]
    assert sum(" | 2 | 1 | 0 |" in line for line in first) == 2
    assert [line for line in first if line.startswith("### ")] == ["### one-token-f32", "### one-token-bf16"]
    assert [line for line in second if line.startswith("### ")] == ["### train-f32-768"]


def test_processes_are_pooled(tmp_path):
    path = tmp_path / "run.json"
    options = ["--quick", "--rounds", "2", "--case", "one-token-f32", "--peers", "control", "--processes", "2"]
    assert compare_peers.main([*options, "--json", str(path)]) == 0
    run = json.loads(path.read_text())
    (row,) = run["cases"][0]["rows"]
    assert len(row["processes"]) == len(row["process_medians"]) == 2
    assert row["ratio"]["samples"] == 4
    assert run["settings"]["processes"] == 2
    assert not run["interrupted"]


def test_every_finished_process_is_written(monkeypatch, tmp_path):
    """A run that is cut short after the first of two processes leaves that one, on paper and in JSON."""
    run_to_its_end, calls = compare_peers.run_to_its_end, []
    path, report = tmp_path / "run.json", tmp_path / "report.md"

    def killed_after_the_first(command, variables):
        calls.append(command)
        if len(calls) > 1:
            raise MemoryError
        return run_to_its_end(command, variables)

    monkeypatch.setattr(compare_peers, "run_to_its_end", killed_after_the_first)
    options = ["--quick", "--rounds", "2", "--case", "one-token-f32", "--peers", "control", "--processes", "2"]
    with pytest.raises(MemoryError):
        compare_peers.main([*options, "--json", str(path), "--write", str(report)])
    run = json.loads(path.read_text())
    assert run["interrupted"]
    assert len(run["cases"][0]["rows"][0]["processes"]) == run["settings"]["processes"] == 1
    assert "Interrupted" in report.read_text()


@pytest.mark.parametrize("code", [0, 130])
def test_interrupted_process_is_reported(code, monkeypatch, tmp_path):
    path, run_to_its_end = tmp_path / "run.json", compare_peers.run_to_its_end

    def interrupted(command, variables):
        run_to_its_end(command, variables)
        return code, code == 0  # Ctrl-C came here, or there

    monkeypatch.setattr(compare_peers, "run_to_its_end", interrupted)
    options = ["--quick", "--rounds", "2", "--case", "one-token-f32", "--peers", "control", "--processes", "9"]
    assert compare_peers.main([*options, "--json", str(path)]) == 130
    assert json.loads(path.read_text())["settings"]["processes"] == 1


def test_closed_pipe_loses_no_files(tmp_path):
    path = tmp_path / "run.json"
    options = ["--quick", "--rounds", "2", "--case", "one-token-f32", "--peers", "control", "--json", str(path)]
    command = [sys.executable, compare_peers.__file__, *options]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=environment, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "[1/1] one-token-f32: control\n")
    assert json.loads(path.read_text())["cases"][0]["rows"][0]["status"] == "measured"


def test_processes_without_a_result_are_an_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(SystemExit, match="no process came to an end"):
        compare_peers.main(["--quick", "--case", "one-token-f32", "--processes", "2"])
    assert "process 2 ended with exit code 1 and no result" in capsys.readouterr().err


def test_pool_drops_what_one_process_could_not_measure():
    def run(status):
        row = {"peer": "control", "status": status}
        row |= {"processes": [status]} if status == "measured" else {"reason": "out of memory"}
        return {"cases": [{"case": "a", "rows": [row]}]}

    (row,) = compare_peers.pool([run("measured"), run("failed")])["cases"][0]["rows"]
    assert row == {"peer": "control", "status": "failed", "reason": "out of memory"}
    (row,) = compare_peers.pool([run("measured"), run("measured"), {"cases": []}])["cases"][0]["rows"]
    assert row["processes"] == ["measured", "measured"]


@pytest.mark.parametrize("weight", ["attn.q_proj", "attn.output_proj", "ffn.w2", "ln2"])
def test_perturbed_weight_disagrees_and_is_not_timed(weight, monkeypatch, tmp_path):
    build_copy = peers.PEERS["control"].build

    def build_perturbed(block, seq_len):
        candidate = build_copy(block, seq_len)
        with torch.no_grad():
            candidate.call.get_submodule(weight).weight[0].add_(0.1)
        return candidate

    monkeypatch.setitem(peers.PEERS, "control", peers.Peer(build_perturbed, "perturbed"))
    (row,) = rows()
    assert row["status"] == "disagrees"
    assert "processes" not in row


def test_disagreement_is_the_exit_code_and_in_the_report(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(peers.PEERS, "control", limit_that(lambda block, x: 1.01 * block(x)))
    report = tmp_path / "report.md"
    options = ["--quick", "--rounds", "2", "--case", "one-token-f32", "--peers", BUILT_IN, "--write", str(report)]
    assert compare_peers.main(options) == 1
    for text in (capsys.readouterr().out, report.read_text()):
        assert "disagrees" in text
        assert "relative error 0.01, above 2e-05" in text


def test_wrong_gradient_disagrees(monkeypatch):
    def detour(block, x):
        y = block(x)
        return y.detach() + 2 * (y - y.detach())

    monkeypatch.setitem(peers.PEERS, "control", limit_that(detour))
    (row,) = rows()
    assert row["error"] < 1e-6
    assert row["status"] == "disagrees"


def test_not_a_number_disagrees(monkeypatch):
    monkeypatch.setitem(peers.PEERS, "control", limit_that(lambda block, x: block(x) * torch.nan))
    assert rows()[0]["status"] == "disagrees"


def test_crash_of_a_peer_is_a_row_and_the_rest_goes_on(monkeypatch):
    def crash(block, x):
        raise RuntimeError("out of memory\nsecond line")

    monkeypatch.setitem(peers.PEERS, "limit", limit_that(crash))
    first, second = rows(names=("limit", "control"))
    assert (first["status"], first["reason"]) == ("failed", "RuntimeError: out of memory")
    assert second["status"] == "measured"


def test_missing_peer_is_a_message(monkeypatch, capsys):
    monkeypatch.setitem(peers.PEERS, "control", dataclasses.replace(peers.PEERS["control"], package="no-such-peer"))
    options = ["--quick", "--rounds", "2", "--case", "one-token-f32", "--peers", BUILT_IN]
    assert compare_peers.main(options) == 0
    assert "not installed: pip install no-such-peer" in capsys.readouterr().out


def test_peer_that_does_not_import_is_a_message(monkeypatch):
    def broken(block, seq_len):
        raise ImportError("no module\n   named x")

    monkeypatch.setitem(peers.PEERS, "control", peers.Peer(broken, "broken", package="torch"))
    (row,) = rows()
    assert (row["status"], row["reason"]) == ("skipped", "torch does not import: no module named x")


def test_block_of_a_checkout_runs_its_code_with_our_weights_and_positions(tmp_path):
    shutil.copytree(Path(tinyblock.__file__).parent, tmp_path / "tinyblock")
    path = tmp_path / "tinyblock" / "block.py"
    line = "        x = x + self.attn("
    assert line in path.read_text()
    refusal = '        if token_positions is None:\n            raise RuntimeError("none given")\n'
    path.write_text(path.read_text().replace(line, refusal + line))
    peer = {"against": peers.block_of(tmp_path)}
    (row,) = compare_peers.measure_case(compare_peers.with_positions(CASE), peer, SETTINGS, print)["rows"]
    assert (row["status"], row["error"], row["gradient_error"]) == ("measured", 0, 0)
    (row,) = compare_peers.measure_case(CASE, peer, SETTINGS, print)["rows"]
    assert row["reason"] == "RuntimeError: none given"


def test_peer_for_cuda_alone_is_skipped_on_a_cpu():
    (row,) = rows(names=("liger",))
    assert (row["status"], row["reason"]) == ("skipped", "liger-kernel needs CUDA")


@pytest.mark.parametrize("case", [CASE, grouped()], ids=["heads", "shared key heads"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@needs_transformers
@pytest.mark.filterwarnings("default")  # transformers' own
def test_hugging_face_agrees(case, dtype):
    (row,) = rows(dataclasses.replace(case, dtype=dtype), ["transformers"])
    assert row["status"] == "measured", row["reason"]
    assert max(row["error"], row["gradient_error"]) <= compare_peers.tolerance(dtype)


@needs_transformers
@pytest.mark.filterwarnings("default")
def test_patching_a_private_copy_leaves_hugging_face_alone(monkeypatch):
    from transformers.models.llama import modeling_llama

    patched = peers.private_copy(modeling_llama.__name__)
    monkeypatch.setattr(patched, "apply_rotary_pos_emb", lambda q, k, cos, sin: (0 * q, k))
    (block,), x = compare_peers.make_blocks(CASE.size, torch.float32, SETTINGS.device, seed=0)
    plain = peers.build(peers.PEERS["transformers"], block, CASE.size.seq_len)
    other = peers._hugging_face_layer(patched, block, CASE.size.seq_len)
    with torch.no_grad():
        assert compare_peers.relative_error(plain.call(x, **plain.keywords), block(x)) < 2e-5
        assert compare_peers.relative_error(other.call(x, **other.keywords), block(x)) > 1e-2


@needs_transformers
@pytest.mark.filterwarnings("default")
def test_accuracy_compares_stacks_with_their_own_float64_runs(tmp_path):
    path = tmp_path / "run.json"
    assert compare_peers.main(["--quick", "--case", "accuracy", "--json", str(path)]) == 0
    (case,) = json.loads(path.read_text())["cases"]
    eps = torch.finfo(torch.bfloat16).eps
    assert case["status"] == "measured"
    assert all(eps / 10 < error < 10 * eps for errors in case["errors"].values() for error in errors)
    assert case["ratio"]["samples"] == 5


def test_limit_runs_the_products_of_the_block_and_nothing_else():
    (block,), x = compare_peers.make_blocks(CASE.size, torch.float32, SETTINGS.device, seed=0)
    limit = peers.build(peers.PEERS["limit"], block, CASE.size.seq_len)
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        limit.call(x)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["aten::linear"] == 7
    assert counts["aten::scaled_dot_product_attention"] == 1
    assert not {"aten::mul", "aten::add", "aten::silu", "aten::rms_norm", "aten::copy_"} & set(counts)


def test_saved_bytes_count_each_storage_once_and_no_weights():
    size = Size(1, 4, 8, 1, 1, 8, 8)
    case = dataclasses.replace(CASE, size=size)
    x = compare_peers.make_blocks(size, torch.float32, SETTINGS.device, seed=0)[1]
    weight = torch.nn.Parameter(torch.eye(8))
    square = peers.Candidate(lambda x: (x @ weight) * x * x, [weight])  # keeps x, x @ weight, and (x @ weight) * x
    assert compare_peers.Contestant(square, x, case, seed=0).saved_bytes == 3 * x.nbytes


@pytest.mark.parametrize("name", ["limit", "operations", "control"])
def test_contestant_frees_its_graph_and_parameters(name):
    (block,), x = compare_peers.make_blocks(CASE.size, torch.float32, SETTINGS.device, seed=0)
    contestant = compare_peers.Contestant(peers.build(peers.PEERS[name], block, CASE.size.seq_len), x, CASE, seed=0)
    contestant.run()
    references = [weakref.ref(parameter) for parameter in contestant.candidate.parameters]
    del contestant, block
    gc.collect()
    assert all(reference() is None for reference in references)


def test_half_split_rope_is_a_permutation_of_the_rows_of_each_head():
    weight = torch.arange(8.0)[:, None]
    assert peers._split_halves(weight, d_head=4).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--case", "nothing"], "no case begins with 'nothing'"),
        (["--case", "one-token-f32", "--dtype", "bfloat16"], "none of these cases is in bfloat16"),
        (["--peers", "nobody"], "unknown peer 'nobody'"),
        (["--presets", "gpt-7"], "unknown preset 'gpt-7'"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--processes", "-1"], "--processes must be at least 1, got -1"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--device", "abacus"], "no such device: abacus"),
        (["--device", "meta"], "--device must be cpu or cuda, got meta"),
        (["--device", "cuda:99"], "there is no cuda:99 here"),
        (["--json", "no/such/folder/run.json"], "cannot write no/such/folder/run.json"),
        (["--write", "."], "cannot write ."),
        (["--write", "no/such/folder/report.md"], "cannot write no/such/folder/report.md: No such file or directory"),
        (["--against", "no/such/folder"], "--against needs a checkout of tinyblock, and no/such/folder is none"),
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


def test_interrupt_writes_what_was_measured(monkeypatch, tmp_path):
    measure_case, report = compare_peers.measure_case, tmp_path / "report.md"

    def interrupted(case, *rest):
        if case.name == "one-token-bf16":
            raise KeyboardInterrupt
        return measure_case(case, *rest)

    monkeypatch.setattr(compare_peers, "measure_case", interrupted)
    options = ["--quick", "--rounds", "2", "--case", "one-token-f32,one-token-bf16", "--peers", "limit"]
    assert compare_peers.main([*options, "--write", str(report)]) == 130
    assert "### one-token-f32" in report.read_text()
    assert "Interrupted" in report.read_text()


@pytest.fixture
def judged():
    """Return a run on a GPU whose datasheet is known: peer a saves less, b is slower too, c is missing."""

    def row(peer, ours, target):
        samples = {"tinyblock": ours, "peer": [1.0, 1.0]}
        row = {"peer": peer, "title": peer, "version": None, "target": target, "saved_bytes": 2**20}
        return row | {"status": "measured", "processes": [samples]}

    case = {"case": "train", "describe": "training", "train": True, "dtype": "float32", "saved_bytes": 2**21}
    case |= {"matmul_flops": 67e11, "dense_matmul_flops": 134e11}
    case["rows"] = [row("a", [1.0, 1.0], 1.0), row("b", [1.1, 1.2], 1.03), row("limit", [2, 2], 2.5)]
    case["rows"].append({"peer": "c", "title": "c", "version": None, "target": 1.0, "status": "skipped", "reason": "r"})
    environment = {"device": "NVIDIA H100 80GB HBM3", "commit": "abc", "date": "today", "command": "x", "seed": 0}
    settings = {"rounds": 2, "processes": 1, "quick": False}
    run = {"environment": environment, "settings": settings, "interrupted": False, "cases": [case]}
    return compare_peers.summarize(run)


def test_interrupt_keeps_the_peers_of_the_case_until_then(monkeypatch, tmp_path):
    def interrupted(block, x):
        raise KeyboardInterrupt

    monkeypatch.setitem(peers.PEERS, "control", limit_that(interrupted))
    path = tmp_path / "run.json"
    options = ["--quick", "--rounds", "2", "--case", "one-token-f32,one-token-bf16", "--json", str(path)]
    assert compare_peers.main([*options, "--peers", "limit,control"]) == 130
    (case,) = json.loads(path.read_text())["cases"]
    assert [row["peer"] for row in case["rows"]] == ["limit"]
    written = path.read_text()
    assert compare_peers.main([*options, "--peers", "control,limit"]) == 130  # before anything was measured
    assert path.read_text() == written


def test_chosen_gpu_is_the_one_that_is_synchronized(monkeypatch):
    chosen = []

    def measured(args, cases, save):
        assert chosen == [torch.device("cuda:1")]
        return {"interrupted": False, "cases": []}

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(compare_peers, "measure", measured)
    assert compare_peers.main(["--device", "cuda:1"]) == 0


def test_verdicts_name_the_missed_targets(judged):
    summary, lines = compare_peers.verdicts(judged["cases"])
    assert summary == "2 of 5 targets met"
    assert lines == [
        "missed: train against a, saves 2.0 MiB for backward, target <= 1.0 MiB",
        "missed: train against b, ratio 1.150, target <= 1.03",
        "missed: train against b, saves 2.0 MiB for backward, target <= 1.0 MiB",
        "not judged: train against c, skipped",
    ]
    table, reasons = compare_peers.sections(judged)
    assert table.rows[1][1:6] == ["1.150", "1.120-1.180", "1", "<= 1.03", "missed"]
    assert reasons == "c skipped: r"
    written = compare_peers.markdown([judged, judged])
    assert "**4 of 10 targets met.**" in written
    assert written.count("- **missed**: train against b, ratio 1.150, target <= 1.03") == 2
    assert "| <= 1.03 | **missed** |" in written


def test_mfu_is_named_by_its_flops(judged):
    table = compare_peers.sections(judged)[0]
    assert table.columns[-4:] == ["MFU causal", "peer's", "MFU dense", "peer's"]
    assert table.rows[0][-4:] == ["10.0%", "10.0%", "20.0%", "20.0%"]
    assert table.rows[2][-4:] == ["5.0%", "10.0%", "10.0%", "20.0%"]


def test_costs_are_those_of_the_pass_that_is_measured():
    train = compare_peers.measure_case(CASE, {}, SETTINGS, lambda text: None)
    forward = compare_peers.measure_case(dataclasses.replace(CASE, train=False), {}, SETTINGS, lambda text: None)
    for flops in compare_peers.MFU.values():
        assert train[flops] == 3 * forward[flops]
    assert train["matmul_flops"] < train["dense_matmul_flops"]


def test_make_blocks_is_reproducible_and_leaves_the_global_seed_alone():
    state = torch.get_rng_state()
    (first,), x = compare_peers.make_blocks(CASE.size, torch.float32, SETTINGS.device, seed=3)
    (second,), same_x = compare_peers.make_blocks(CASE.size, torch.float32, SETTINGS.device, seed=3)
    assert isinstance(first, Block)
    assert torch.equal(x, same_x)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())


def test_help_shows_examples_and_every_peer(capsys):
    with pytest.raises(SystemExit) as stop:
        compare_peers.main(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert "examples:" in text
    assert all(f"\n  {name} " in text for name in peers.PEERS)
