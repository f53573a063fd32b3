"""Each file prints what its docstring says."""

import ast
import re
import runpy
from pathlib import Path

import pytest

BLOCKS = Path(__file__).parents[3] / "examples" / "blocks"
PRINTS = {
    "bounded_scores": r"score  50.0: 38\.08\nscore 500.0: 50\.00",
    "delta_rule": r"rate 1\.0: writes 1 1 5 5, reads 1\.0 1\.0 5\.0 5\.0",
    "depth_scaled_residual": r"Transformer: 1\.[12]\d, 1\.[67]\d, 3\.[34]\d\nDepth\w+: ((0\.9|1\.0)\d,? ?){3}",
    # Each of 4 experts gets about a quarter of 1000 tokens.
    "experts": r"after 100 steps:( 2\d\d){4}\n.*-97: 0\.7311 0\.2689",
    "gated_delta_net": r"token 0: changes by \de-01\n.*token 999: changes by \de-0[78]",
    "gelu_gate": r"largest difference: 5e-04 at -?2\.7",
    # Before 2 branches of each of 4 blocks, 4 streams of 64 components yield 4 + 4 + 4 * 4 weights, and at
    # the end 4. With biases, and a scale per group: 8 * (24 * (256 + 1) + 3) + 4 * (256 + 1) + 1 = 50397.
    "hyper_connections": r"rows:    (1\.0000 ?){4}\ncolumns: (1\.0000 ?){4}\n.*, of which 50397 weigh",
    "indexer": r"keys per query: 1 2 3 4 5 5 5 5 5 5",
    "joint_qk_norm": r"Self.*x 100: 1\.00\n(JointNormAttention, weights x 10?0?: 0\.49\n){2}",
    "kimi_delta_attention": r"a token forgets 0\.\d% to [4-8]\d\.\d%",
    "latent_attention": r"576 numbers\n.* 5120 numbers",
    "no_positions": r"one by \de-0[12]\nno positions: .* one by (0e\+00|\de-0[789])",
    "norm_without_gain": r"difference: \de-07",
    "output_gate": r"1\.0: the head adds \de-01\n.*-1\.0: the head adds \de-1\d",
    "parallel_branches": r"Block: .* by 2\.\d\nParallelBlock: .* by 0\.0",
    "partial_rope": r"x{8}-{8}",
    "reordered_norm": r"Block: .* add \d\d\.\d .*\nReorderedNormBlock: .* add 1\.4",
    "residual_gate": r"w =    0: keeps 0\.866, takes 0\.500",
    "sandwich_norm": r"Block: .* add \d\d\.\d .*\nSandwichBlock: .* add 1\.4",
    "scaled_residual": r"scale 1\.0: 3\.\d\d\n.*\nscale 0\.25: 1\.\d\d",
    "short_convolution": r"tokens that notice: 0 1 2\n",
    "sinks": r"-5\.0: .* to 0\.99\d\n.*\n.* 5\.0: .* to 0\.0\d\d",
    "squared_relu": r"(49|50|51)% of",
    "windows": r"1 layer: .* 0 to 3\n2 layers: .* 0 to 6\n4 layers: .* 0 to 12",
}


def test_each_file_is_here():
    assert set(PRINTS) == {path.stem for path in BLOCKS.glob("*.py")}


@pytest.mark.parametrize("name", PRINTS)
def test_a_file_prints_what_its_docstring_says(name, capsys):
    runpy.run_path(str(BLOCKS / f"{name}.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert re.search(PRINTS[name], out, re.DOTALL), out


@pytest.mark.parametrize("name", PRINTS)
def test_the_header_names_what_a_copy_must_import_or_take_along(name):
    tree = ast.parse((BLOCKS / f"{name}.py").read_text())
    _, _, header = ast.get_docstring(tree).partition("To copy this file,")
    for statement in tree.body:
        if not isinstance(statement, ast.ImportFrom):
            continue
        if statement.module.partition(".")[0] == "tinyblock":
            for imported in statement.names:
                assert imported.name in header
        elif (BLOCKS / f"{statement.module}.py").exists():
            assert f"{statement.module}.py" in header
