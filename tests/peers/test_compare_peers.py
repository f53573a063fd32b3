"""Each peer computes what the Block computes, with weights of its own, or is not timed."""

import dataclasses
import json
import sys
from itertools import cycle

import compare_peers
import pytest
import torch
from compare_peers import Case, Reference, Size
from peers import own, projects
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

SIZE = Size(2, 5, d_model=32, num_heads=4, d_ff=48, num_kv_heads=2)
TRAINING = Case("tiny", SIZE, torch.float32, train=True, mode="eager")
TOKEN = "forward-bf16-tiny-token-eager"
CPU = torch.device("cpu")
# Liger's kernels require CUDA.
PROJECTS = {
    name: make for name, make in projects.PROJECTS.items() if "liger" not in name
}
PEERS = own.OWN | PROJECTS

# Other projects warn when they are imported, and in their layers.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs the command, and returns its exit code and output."""

    def run(*options):
        monkeypatch.setattr(sys, "argv", ["compare_peers.py", *options])
        return compare_peers.main(), capsys.readouterr().out

    monkeypatch.setattr(compare_peers, "SAMPLE_SECONDS", 1e-3)
    monkeypatch.setattr(compare_peers, "PROCESSES", 1)
    return run


def cells(output, row):
    [line] = [line for line in output.splitlines() if line.startswith(f"| {row} ")]
    return [cell.strip() for cell in line.split("|")[2:-1]]


@pytest.mark.parametrize("name", PEERS)
def test_peer_computes_what_the_block_computes_with_its_own_weights(name):
    if name in PROJECTS and not projects.is_installed(name):
        pytest.skip(f"{name} is not installed")
    block, x = own.make_block(SIZE, torch.float32, CPU)
    assert block.ln1.weight.std() > 0.05
    peer = PEERS[name](block)
    mine = {weight.data_ptr() for weight in block.parameters()}
    theirs = {weight.data_ptr() for weight in peer.parameters}
    assert not mine & theirs
    for layer, layer_of_peer in peer.layers.items():
        result = layer_of_peer(x)
        actual = result[0] if isinstance(result, tuple) else result
        expected = own.ours(block).layers[layer](x)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    result = Reference(TRAINING, CPU).compare(PEERS[name], rounds=1)
    assert result.errors.keys() == {"outputs", "gradients"}
    assert result.block_kept > 0


@pytest.mark.parametrize("gain", [1.1, torch.nan, None])
def test_peer_that_disagrees_or_fails_is_not_timed(gain, run, monkeypatch):
    def wrong(block):
        peer = own.control(block)
        assert gain is not None  # an error without a message
        peer.layers["RMSNorm"].weight.data *= gain
        return peer

    monkeypatch.setitem(own.OWN, "wrong", wrong)
    code, output = run("--cases", TOKEN, "--peers", "wrong,control", "--rounds", "1")
    assert code == 1
    assert cells(output, TOKEN)[1] == "failed"
    assert f"wrong failed: {'Runtime' if gain else 'Assertion'}Error(" in output


@pytest.fixture
def runs(monkeypatch):
    """Samplers that take 6, 9 and 3 ms in the Block, and 2, 1 and 3 ms in peers."""
    runs = []

    def sampler(run, least_seconds):
        seconds = cycle([2e-3, 1e-3, 3e-3] if runs else [6e-3, 9e-3, 3e-3])
        runs.append(run)
        return seconds.__next__

    monkeypatch.setattr(compare_peers, "wall_sampler", sampler)
    return runs


def test_table_has_the_ratio_and_the_milliseconds(runs, run, tmp_path):
    source = tmp_path / "tinyblock" / "__init__.py"
    source.parent.mkdir()
    source.write_text("from tinyblock import *\nis_other = True\n")
    options = ["--cases", TOKEN, "--peers", "control", "--rounds", "3"]
    _, output = run(*options, "--against", str(tmp_path))
    assert sys.modules["tinyblock_against"].is_other
    assert cells(output, TOKEN) == 2 * ["3.00 (1.00-9.00)"]
    assert cells(output, f"{TOKEN}: against")[:2] == ["6.00", "2.00"]


def test_one_token_is_the_median_of_processes(run, monkeypatch):
    results = [
        {"block_seconds": [block, 9.0, 0.0], "peer_seconds": [2e-3, 2e-3, 1.0]}
        for block in (4e-3, 1e-3, 3e-3, 5e-3, 2e-3)
    ]
    others = {"errors": {"outputs": 0.0}, "block_kept": 3 * 2**20, "peer_kept": 2**19}

    def process(command):
        assert command[-3:] == ["--cases", TOKEN, "--json"]
        failed = "ValueError()" if len(results) == 3 else {**results[0], **others}
        return json.dumps(
            {"control": {**results.pop(0), **others}, "unchecked": failed}
        )

    monkeypatch.setattr(compare_peers.subprocess, "check_output", process)
    monkeypatch.setattr(compare_peers, "PROCESSES", 5)
    _, output = run("--cases", TOKEN, "--peers", "control,unchecked")
    assert cells(output, TOKEN) == ["1.50 (0.50-2.50)", "failed"]
    details = ["3.00", "2.00", "0e+00", "3.0", "0.5"]
    assert cells(output, f"{TOKEN}: control") == details


def test_a_name_says_what_a_case_is():
    cases = compare_peers.all_cases(CPU)
    assert cases[TOKEN].dtype == torch.bfloat16
    trained = {name.split("-")[2] for name, case in cases.items() if case.train}
    assert trained == {"768"}


@pytest.mark.parametrize("train", [True, False])
def test_what_is_timed_are_outputs_or_gradients(train, runs):
    case = dataclasses.replace(TRAINING, train=train)
    Reference(case, CPU).compare(own.control, rounds=1)
    block, x = own.make_block(SIZE, torch.float32, CPU)
    out = block(x.requires_grad_())
    expected: tuple[torch.Tensor, ...] = (out,)
    if train:
        torch.manual_seed(1)
        leaves = [x, *block.parameters()]
        expected = torch.autograd.grad(out, leaves, torch.randn_like(out))
    called = []
    for timed in runs:
        with register_module_forward_hook(lambda *args: called.append(type(args[0]))):
            results = timed()
        assert called.pop() is type(block)
        for result, value in zip(results, expected, strict=True):
            torch.testing.assert_close(result, value)


def test_unchecked_block_checks_nothing():
    block, x = own.make_block(SIZE, torch.float32, CPU)
    wrong = x[..., :-1]
    with pytest.raises(TypeError):
        block(wrong)
    with pytest.raises(RuntimeError):
        own.unchecked(block).layers["Block"](wrong)


@pytest.mark.parametrize("option", ["--cases", "--peers"])
def test_pattern_without_a_match_lists_the_names(option, run, capsys):
    with pytest.raises(SystemExit):
        run(option, "*,typo")
    listed = "train-f32-768-eager" if option == "--cases" else "control"
    assert f"'typo' matches none of: {listed}" in capsys.readouterr().err


def test_kept_bytes_are_those_of_each():
    def frugal(block):
        peer = own.control(block)
        layer = peer.layers["Block"]
        return own.Peer(
            peer.parameters,
            {"Block": lambda x: checkpoint(layer, x, use_reentrant=False)},
        )

    result = Reference(TRAINING, CPU).compare(frugal, rounds=1)
    assert result.peer_kept < result.block_kept


def test_kept_bytes_count_each_storage_once_and_no_weight():
    x, weight = torch.ones(2, 3, requires_grad=True)

    def forward():
        scaled = x * weight  # keeps x and weight, which have one storage
        return (scaled * scaled,)  # keeps one product, twice

    assert compare_peers.count_kept_bytes(forward, [weight])[1] == 12
    assert compare_peers.count_kept_bytes(forward, [])[1] == 24 + 12
