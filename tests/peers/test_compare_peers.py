"""Each peer computes what the Block computes, with weights of its own, or is not timed."""

import sys
from functools import partial
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
    return compare_peers.main()


@pytest.mark.parametrize("name", [name for name in PEERS if name != "products"])
def test_peer_has_the_outputs_and_gradients_of_the_block(name):
    result = Reference(TRAINING, CPU).compare(maker_of(name), rounds=2)
    assert result.errors.keys() == {"outputs", "gradients"}
    assert max(result.errors.values()) <= TRAINING.tolerance
    assert len(result.block_seconds) == len(result.peer_seconds) == 2
    assert result.block_kept > 0


@pytest.mark.parametrize("name", PEERS)
def test_peer_shares_no_weight_with_the_block(name):
    make = maker_of(name)
    block, _ = own.make_block(SIZE, torch.float32, CPU)
    mine = {weight.data_ptr() for weight in block.parameters()}
    theirs = {weight.data_ptr() for weight in make(block).parameters}
    assert not mine & theirs
    assert len(theirs) >= 4


@pytest.mark.parametrize("name", PROJECTS)
@pytest.mark.parametrize("layer", ["RMSNorm", "SwiGLU", "attention"])
def test_layer_of_a_project_agrees_with_that_of_the_block(name, layer):
    make = maker_of(name)
    block, x = own.make_block(SIZE, torch.float32, CPU)
    expected = own.ours(block).layers[layer](x)
    actual = make(block).layers[layer](x)
    actual = actual[0] if isinstance(actual, tuple) else actual
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
    assert "wrong failed: outputs must agree" in output


def test_command_prints_a_ratio_for_each_case(monkeypatch, capsys):
    root = str(Path(__file__).parents[2])
    options = ["--cases", "forward-*-tiny-token-eager", "--peers", "control"]
    assert run(monkeypatch, *options, "--rounds", "2", "--against", root) == 0
    output = capsys.readouterr().out
    for case in ("forward-f32-tiny-token-eager", "forward-bf16-tiny-token-eager"):
        [row] = [line for line in output.splitlines() if line.startswith(f"| {case} ")]
        ratios = [float(cell.split()[0]) for cell in row.split("|")[2:-1]]
        assert len(ratios) == 2
        assert min(ratios) > 0


@pytest.mark.parametrize("option", ["--cases", "--peers"])
def test_pattern_without_a_match_lists_the_names(option, monkeypatch, capsys):
    with pytest.raises(SystemExit) as exit:
        run(monkeypatch, option, "*,typo")
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert "'typo'" in error
    assert ("train-f32-768-eager" if option == "--cases" else "control") in error


@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
def test_bfloat16_is_left_out_where_it_takes_hours(capability, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    cases = compare_peers.all_cases(CPU)
    usual = compare_peers.select(cases, compare_peers.usual_cases(CPU))
    assert "train-f32-768-eager" in usual
    assert ("train-bf16-768-eager" in usual) == (capability == "AVX512")


def test_kept_bytes_count_each_storage_once_and_no_weight():
    weight = torch.ones(3, requires_grad=True)
    x = torch.ones(3, requires_grad=True)

    def forward():
        scaled = x * weight  # keeps x and weight
        return (scaled * scaled,)  # keeps one product, twice

    _, kept = compare_peers.count_kept_bytes(forward, [weight])
    assert kept == x.nbytes + x.nbytes


def test_compiled_case_trains(monkeypatch):
    traced = partial(torch.compile, backend="eager")  # generating code takes long
    monkeypatch.setattr(torch, "compile", traced)
    case = Case("tiny", SIZE, torch.float32, train=True, mode="compiled")
    result = Reference(case, CPU).compare(own.control, rounds=1)
    assert result.errors["gradients"] <= case.tolerance


def test_cuda_has_the_block_of_llama_3_1_8b():
    case = compare_peers.all_cases(torch.device("cuda"))["train-bf16-llama-8b-graphs"]
    assert (case.size.d_model, case.size.num_kv_heads, case.size.d_ff) == (
        4096,
        8,
        14336,
    )
