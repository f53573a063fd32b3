"""Commands print what they are there to show, and their parts compute what they claim."""

import copy
import re
import runpy
from pathlib import Path
from typing import Any

import check_shapes
import checkpointing
import compile_and_export
import pytest
import torch
from pages import block_with, require_shown
from torch import nn

from tinyblock import Transformer

ROOT = Path(__file__).parents[2]
# torch's compiler and torchao's imports warn of themselves.
pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")
# What each command shows, as a regular expression that finds it in what is printed.
SHOWN = {
    "check_shapes": r"eager: 2 3 5 7\n.*is 3 in q\n.*compiled: 2 3 5 5\n.*is 3 in q",
    "checkpointing": r"included: \d{7} bytes\nwith checkpointing: \d{6} bytes",
    "int8": r"output: 0\.0(0[89]|1[0-2])\d\n",  # with one layer of two: 0.007
    "language_model": r"d: 7 8 9 .* 19\n.*d: 20 21 .* 30\n.*d: 45 46 47 48 49 0 .* 6\n$",
    "lora": r"params: 20,480 .*merged Transformer: \de-0[678]",
    "merged": r"logits: (0e\+00|\de-0[678])\ntime of a token, merged / before: \d\.\d\d\n$",
    "packing": r"^(with [a-z ]+: \de-0[678]\n){2}$",
    "scaled_rope": r"Llama31Rope: 29 kept, 29 divided, of 64\nYarnRope: 19 kept, 29 d",
    "static_cache": r"^((growing|static|compiled) +\d+ tokens/s, equal: True\n){3}$",
    # In blocks/. Of 1000 tokens, some of 4 experts first get fewer than 200, or more than 299.
    "experts": r" 0 steps:.* (1|3)\d\d.*100 steps:( 2\d\d){4}\n.*-97: 0\.7311 0\.2689",
    "gated_delta_net": r"token 0: changes by \de-01\n.*token 999: changes by \de-0[78]",
    "indexer": r"keys per query: 1 2 3 4 5 5 5 5 5 5",
    "latent_attention": r"576 numbers\n.* 5120 numbers",
    "output_gate": r"1\.0: the head adds \de-01\n.*-1\.0: the head adds \de-1\d",
    "parallel_branches": r"Block: .* by 2\.\d\nParallelBlock: .* by 0\.0",
    "partial_rope": r"x{8}-{8}",
    "sandwich_norm": r"Block: .* add \d\d\.\d .*\nSandwichBlock: .* add 1\.4",
    "sinks": r"-5\.0: .* to 0\.99\d\n.*\n.* 5\.0: .* to 0\.0\d\d",
    "windows": r"1 layer: .* 0 to 3\n2 layers: .* 0 to 6\n4 layers: .* 0 to 12",
}


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("name", SHOWN)
def test_a_command_prints_what_it_is_there_to_show(name, capsys):
    module: Any = pytest.importorskip(name, reason="requires the extra examples")
    assert not capsys.readouterr().out, "an import must print nothing"
    runpy.run_path(module.__file__, run_name="__main__")
    out = capsys.readouterr().out
    assert re.search(SHOWN[name], out, re.DOTALL), out


def test_the_readme_shows_the_error_of_check_shapes(capsys, counted):
    block = block_with(ROOT / "README.md", "examples/check_shapes.py")
    command, _, shown = block.partition("\n")
    check_shapes.main()
    printed = capsys.readouterr().out
    require_shown(shown, printed, command)
    assert counted.graphs > 0
    unchecked = check_shapes.scores.__wrapped__
    shape = tuple(unchecked(torch.ones(2, 3, 5, 8), torch.ones(2, 1, 7, 8)).shape)
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"wrong scores of shape {shape} without" in readme


def test_one_graph_runs_both_blocks_at_both_lengths(capsys, counted):
    compile_and_export.main()
    assert (counted.graphs, counted.runs) == (1, 2 * 2)
    rows = r"(\d+ tokens, (compiled|exported): (0e\+00|\de-0[678])\n){4}"
    assert re.fullmatch(rows, capsys.readouterr().out)


def test_the_model_to_profile_takes_a_batch_of_sequences():
    import profile_a_model

    model: Any = profile_a_model.build().eval()
    x = torch.randn(2, 3, 256)
    torch.testing.assert_close(model(x)[:1], model(x[:1]))


# --- checkpointing ------------------------------------------------------------------------


def test_recomputed_blocks_keep_less_and_have_the_same_gradients_and_keys():
    """Also those of a copy, which recomputes its own blocks."""
    plain = Transformer(2, 32, 4, max_seq_len=16, dtype=torch.float64)
    model = copy.deepcopy(plain)
    checkpointing.recompute(model)
    recomputed = copy.deepcopy(model)
    for weight in model.parameters():
        weight.data.zero_()
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    kept = [checkpointing.kept_bytes(each, x) for each in (recomputed, plain)]
    assert kept[0] < kept[1]
    gradients = []
    for each in (recomputed, plain):
        loss = each(x).square().sum()
        gradients.append(torch.autograd.grad(loss, list(each.parameters())))
    torch.testing.assert_close(*gradients)


def test_kept_bytes_count_each_storage_once():
    """Kept are x, what the first of two equal layers returns, and their one weight."""
    layer = nn.Linear(10, 10, bias=False)
    x = torch.ones(3, 10, requires_grad=True)
    kept = checkpointing.kept_bytes(nn.Sequential(layer, layer), x)
    assert kept == 4 * (3 * 10 + 3 * 10 + 10 * 10)
