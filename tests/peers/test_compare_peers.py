"""Each peer computes what the Block computes, with weights of its own, or is not timed."""

import dataclasses
import json
import sys
from pathlib import Path

import compare_peers
import pytest
import torch
from compare_peers import Case, Reference, Size
from peers import own, projects

SIZE = Size(2, 5, d_model=32, num_heads=4, d_ff=48, num_kv_heads=2)
TRAINING = Case("tiny", SIZE, torch.float32, train=True, mode="eager")
CPU = torch.device("cpu")
# Liger's kernels require CUDA.
PROJECTS = {
    name: make for name, make in projects.PROJECTS.items() if "liger" not in name
}
PEERS = own.OWN | PROJECTS

# Other projects warn when they are imported, and in their layers.
pytestmark = pytest.mark.filterwarnings("ignore")


def maker_of(name):
    if name in PROJECTS and not projects.is_installed(name):
        pytest.skip(f"{name} is not installed")
    return PEERS[name]


def run(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["compare_peers.py", *options])
    monkeypatch.setattr(compare_peers, "SAMPLE_SECONDS", 1e-3)
    monkeypatch.setattr(compare_peers, "PROCESSES", 1)
    return compare_peers.main()


@pytest.mark.parametrize("name", PEERS)
def test_peer_has_the_outputs_and_gradients_of_the_block(name):
    result = Reference(TRAINING, CPU).compare(maker_of(name), rounds=2)
    assert result.errors.keys() == {"outputs", "gradients"}
    assert max(result.errors.values()) <= TRAINING.tolerance
    assert len(result.block_seconds) == len(result.peer_seconds) == 2
    assert result.block_kept > 0


@pytest.mark.parametrize("name", PEERS)
def test_layers_of_a_peer_agree_and_share_no_weight(name):
    make = maker_of(name)
    block, x = own.make_block(SIZE, torch.float32, CPU)
    peer = make(block)
    mine = {weight.data_ptr() for weight in block.parameters()}
    theirs = {weight.data_ptr() for weight in peer.parameters}
    assert not mine & theirs
    assert len(theirs) >= 4
    for layer, run in peer.layers.items():
        result = run(x)
        actual = result[0] if isinstance(result, tuple) else result
        expected = own.ours(block).layers[layer](x)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gain", [1.01, torch.nan])
def test_peer_that_disagrees_is_not_timed(gain, monkeypatch, capsys):
    def wrong(block):
        peer = own.control(block)
        peer.layers["RMSNorm"].weight.data *= gain
        return peer

    monkeypatch.setitem(own.OWN, "wrong", wrong)
    options = ["--cases", "forward-f32-tiny-token-eager", "--peers", "wrong,control"]
    assert run(monkeypatch, *options, "--rounds", "1") == 1
    output = capsys.readouterr().out
    [row] = [line for line in output.splitlines() if line.startswith("| forward")][:1]
    assert row.split("|")[-2].strip() == "failed"
    assert "outputs must agree" in output


@pytest.fixture
def runs(monkeypatch):
    """Samplers that take 6 ms in the Block, and 2 ms in peers."""
    runs = []

    def sampler(run, least_seconds):
        seconds = 2e-3 if runs else 6e-3
        runs.append(run)
        return lambda: seconds

    monkeypatch.setattr(compare_peers, "wall_sampler", sampler)
    return runs


def cells(output, row):
    [line] = [line for line in output.splitlines() if line.startswith(f"| {row} ")]
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_table_has_the_ratio_and_the_milliseconds(runs, monkeypatch, capsys):
    case = "forward-bf16-tiny-token-eager"
    root = str(Path(__file__).parents[2])
    run(monkeypatch, "--cases", case, "--peers", "control", "--against", root)
    output = capsys.readouterr().out
    assert cells(output, case) == 2 * ["3.00 (3.00-3.00)"]
    assert cells(output, f"{case}: against")[:2] == ["6.00", "2.00"]


def test_one_token_is_the_median_of_processes(monkeypatch, capsys):
    results = [
        {"block_seconds": [block, 9.0, 0.0], "peer_seconds": [2e-3, 2e-3, 1.0]}
        for block in (4e-3, 1e-3, 3e-3, 5e-3, 2e-3)
    ]
    kept = {"block_kept": 3 * 2**20, "peer_kept": 2**19}
    others = {"errors": {"outputs": 0.0}, **kept}
    printed = iter([json.dumps({"control": {**each, **others}}) for each in results])

    def process(command):
        assert command[-3:] == ["--cases", "forward-f32-token-eager", "--json"]
        return next(printed)

    monkeypatch.setattr(compare_peers.subprocess, "check_output", process)
    options = ["--cases", "forward-f32-token-eager", "--peers", "control"]
    monkeypatch.setattr(sys, "argv", ["compare_peers.py", *options])
    assert compare_peers.main() == 0
    output = capsys.readouterr().out
    assert cells(output, options[1]) == ["1.50 (0.50-2.50)"]
    details = ["3.00", "2.00", "0e+00", "3.0", "0.5"]
    assert cells(output, f"{options[1]}: control") == details


def test_a_process_prints_its_samples(runs, monkeypatch, capsys):
    options = ["--cases", "forward-f32-token-eager", "--peers", "control", "--rounds"]
    run(monkeypatch, *options, "2", "--json")
    found = json.loads(capsys.readouterr().out)["control"]
    assert (found["block_seconds"], found["peer_seconds"]) == ([6e-3] * 2, [2e-3] * 2)


@pytest.mark.parametrize("train", [True, False])
def test_training_times_the_gradients_of_all_weights(train, runs):
    case = dataclasses.replace(TRAINING, train=train)
    Reference(case, CPU).compare(own.control, rounds=1)
    for run in runs:
        shapes = [tuple(result.shape) for result in run()]
        weights = own.make_block(SIZE, torch.float32, CPU)[0].parameters()
        of_weights = [tuple(weight.shape) for weight in weights]
        assert shapes == [(2, 5, 32), *(of_weights if train else [])]


def test_unchecked_block_checks_nothing():
    block, x = own.make_block(SIZE, torch.float32, CPU)
    wrong = x[..., :-1]
    with pytest.raises(TypeError):
        block(wrong)
    with pytest.raises(RuntimeError):
        own.unchecked(block).layers["Block"](wrong)


@pytest.mark.parametrize("option", ["--cases", "--peers"])
def test_pattern_without_a_match_lists_the_names(option, monkeypatch, capsys):
    with pytest.raises(SystemExit) as exit:
        run(monkeypatch, option, "*,typo")
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert "'typo'" in error
    assert ("train-f32-768-eager" if option == "--cases" else "control") in error


def test_kept_bytes_count_each_storage_once_and_no_weight():
    weight = torch.ones(3, requires_grad=True)
    x = torch.ones(3, requires_grad=True)

    def forward():
        scaled = x * weight  # keeps x and weight
        return (scaled * scaled,)  # keeps one product, twice

    _, kept = compare_peers.count_kept_bytes(forward, [weight])
    assert kept == x.nbytes + x.nbytes
