"""Each file prints what its docstring says."""

import re
import runpy
from pathlib import Path

import pytest

BLOCKS = Path(__file__).parents[3] / "examples" / "blocks"
PRINTS = {
    # Each of 4 experts gets about a quarter of 1000 tokens.
    "experts": r"after 100 steps:( 2\d\d){4}\n.*-97: 0\.7311 0\.2689",
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


@pytest.mark.parametrize("name", sorted(path.stem for path in BLOCKS.glob("*.py")))
def test_a_file_prints_what_its_docstring_says(name, capsys):
    runpy.run_path(str(BLOCKS / f"{name}.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert re.search(PRINTS[name], out, re.DOTALL), out
