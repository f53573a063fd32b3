"""What compare.py compares is equal, and its tables have what it measured."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import Case, compare, count_kept_bytes, errors_of, main, prepare
from lab.sizes import Size
from peers import Peer, control, installed

from tinyblock import Block, RotaryPositionalEmbedding

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
X = torch.randn(2, 5, 32)
TRAINING = Case("training", Size(), torch.float32, train=True, mode="eager")

# Other projects warn when they are imported, and in their layers.
pytestmark = pytest.mark.filterwarnings("ignore")


def build_block():
    """A Block with no option at the default of another project."""
    rope = RotaryPositionalEmbedding(100.0, 16, max_seq_len=5)
    block: Any = Block(32, 4, 48, rope=rope, num_kv_heads=2, d_head=16, eps=0.1)
    for norm in (block.ln1, block.ln2):
        norm.weight.data += 0.1 * torch.randn(32)
    return block


@pytest.mark.parametrize("name", installed(CPU))
def test_each_project_computes_the_block_with_its_own_weights(name):
    block = build_block()
    peer = installed(CPU)[name](block)
    ours = {weight.data_ptr() for weight in block.parameters()}
    assert ours.isdisjoint(weight.data_ptr() for weight in peer.parameters)
    mine = prepare(control(block), X, TRAINING)
    result = compare(mine, prepare(peer, X, TRAINING), TRAINING, rounds=1)
    assert result.differ_by < 2e-6


@pytest.mark.parametrize("factor", [1.0001, float("nan")])
@pytest.mark.parametrize("of", ["outputs", "gradients"])
def test_a_peer_that_disagrees_is_not_timed(of, factor):
    block = build_block()
    peer = control(block)

    def wrong(x):
        out = peer.layers["Block"](x)
        if of == "outputs":
            return factor * out
        out.register_hook(lambda gradient: factor * gradient)
        return out

    mine = prepare(control(block), X, TRAINING)
    theirs = prepare(Peer(peer.parameters, {"Block": wrong}), X, TRAINING)
    with pytest.raises(RuntimeError, match="must be within 2e-05"):
        compare(mine, theirs, TRAINING, rounds=1)


def test_kept_bytes_count_each_storage_once_and_no_weight():
    """x.square keeps x, and the product keeps x.square and the weight."""
    x = torch.randn(5, requires_grad=True)
    weight = torch.randn(5, requires_grad=True)
    _, kept = count_kept_bytes(lambda: x.square() * weight, [weight])
    assert kept == 2 * 5 * 4


def test_errors_are_those_of_roundings_except_in_the_table_of_transformers():
    """Rounding to float32 is off by up to 2^-24, and its table at 131,072 by thousandths."""
    if "transformers" not in installed(CPU):
        pytest.skip("transformers is not installed")
    errors = errors_of(torch.float32, CPU)
    for name, projects in errors.items():
        assert all(error < 2**-24 for error in projects["rounded"]), name
        assert all(error < 16 * 2**-24 for error in projects["tinyblock"]), name
    far = errors["RoPE at 131,072"]
    assert all(error < 2**-24 for error in far["tinyblock"])
    assert all(error > 1e-4 for error in far["transformers"])


def test_the_command_prints_a_row_for_each_case_and_peer(capsys):
    options = ["--cases", "*-f32-tiny-token-eager", "--rounds", "1", "--processes", "1"]
    assert main([*options, "--against", str(ROOT)]) == 0
    _, _, speed, details = capsys.readouterr().out.split("\n\n")
    header, _, row = speed.splitlines()
    peers = {"control", "against", "reading"}
    assert peers <= {cell.strip() for cell in header.split("|")}
    ratios = re.findall(r"([\d.]+) \(([\d.]+)-([\d.]+)\)", row)
    assert len(ratios) == len(header.split("|")) - 3
    for middle, low, high in ratios:
        assert float(low) <= float(middle) <= float(high)
    assert float(ratios[-1][0]) > 1, "a layer reads its weights, and does more"
    for peer in peers:
        assert f"| forward-f32-tiny-token-eager: {peer}" in details
