"""Every example runs as its docstring says."""

import re
from functools import partial

import pytest
import torch

# torch's compiler and torchao's imports warn of themselves.
pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")
PRINTS = {
    "checkpointing": r"included: \d{7} bytes\nwith checkpointing: \d{6} bytes",
    "compile_and_export": r"(\d+ tokens, \w+: (0e\+00|\de-0[678])\n){6}",
    "int8": r"output: 0\.0[01]\d\d\n",
    "language_model": r"7 8 9 10 11 .* 45 46 47 48 49 0 1 2",
    "lora": r"merged Transformer: \de-0[678]",
    "packing": r"left: \de-0[678]\npacked: \de-0[678]",
    "scaled_rope": r"Llama31Rope: 29 kept, 29 divided, of 64\n",
    "static_cache": r"(equal: True\n.*){3}",
}


@pytest.mark.parametrize("name", PRINTS)
def test_an_example_prints_what_its_docstring_says(name, capsys, monkeypatch):
    # Generating code takes most of the time; tests/layers does so once.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    pytest.importorskip(name).main()
    assert re.search(PRINTS[name], capsys.readouterr().out, re.DOTALL)
