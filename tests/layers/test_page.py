"""docs/layers.md says what the docstrings say, and its masks hide what it says."""

import importlib
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from jaxtyping import Float
from pages import block_with, tables, text_of
from torch import nn

from tinyblock import CausalMultiHeadSelfAttention, RMSNorm, rms_norm

PAGE = text_of(Path(__file__).parents[2] / "docs" / "layers.md")
BATCH, SEQ = 2, 6
DOCUMENT = [0, 0, 0, 1, 1, 1]
LENGTHS = [6, 4]  # of the sequences, without padding


def in_window(_, query, key):
    return key > query - 3


def is_real(sequence, _, key):
    return key < LENGTHS[sequence]


# What a query may attend to besides the causal mask, for the expression in each row.
ALLOWED = {
    "keep[..., None, :]": is_real,
    "attention_mask.bool()[..., None, :]": is_real,
    "document[:, None] == document": lambda _, query, key: (
        DOCUMENT[query] == DOCUMENT[key]
    ),
    "torch.ones(seq, seq, dtype=torch.bool).triu(-2)": in_window,
    "additive == 0": in_window,
    "four_axes[..., 0, :, :]": in_window,
    "~hidden": in_window,
    "rows[None]": in_window,
}


def names():
    """Return what the rows of the page have."""
    keep = torch.arange(SEQ) < torch.tensor(LENGTHS)[:, None]
    window = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(-2)
    return {
        "torch": torch,
        "seq": SEQ,
        "keep": keep,
        "attention_mask": keep.long(),
        "document": torch.tensor(DOCUMENT),
        "additive": torch.zeros(SEQ, SEQ).masked_fill(~window, -1e9),
        "four_axes": window.expand(BATCH, 1, SEQ, SEQ),
        "hidden": ~window,
        "rows": window,
    }


def column(name):
    """Return a column of the page."""
    rows = [row for table in tables(PAGE) for row in table]
    return [row[name] for row in rows if name in row]


def test_the_page_has_these_masks():
    assert column("mask") == list(ALLOWED)


@pytest.mark.parametrize("mask", ALLOWED)
def test_a_mask_hides_what_the_page_says(mask):
    """The result equals torch's function with a mask that is made by hand."""
    layer = CausalMultiHeadSelfAttention(d_model=32, num_heads=4)
    x = torch.randn(BATCH, SEQ, 32)
    allowed = torch.zeros(BATCH, SEQ, SEQ, dtype=torch.bool)
    for sequence, query, key in product(range(BATCH), range(SEQ), range(SEQ)):
        is_allowed = key <= query and ALLOWED[mask](sequence, query, key)
        allowed[sequence, query, key] = is_allowed
    q, k, v = (
        rearrange(project(x), "batch seq (heads d) -> batch heads seq d", heads=4)
        for project in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    out = F.scaled_dot_product_attention(q, k, v, allowed[:, None])
    expected = layer.output_proj(
        rearrange(out, "batch heads seq d -> batch seq (heads d)")
    )
    torch.testing.assert_close(layer(x, mask=eval(mask, names())), expected)


def test_with_as_many_sequences_as_tokens_a_mask_for_all_needs_a_leading_axis():
    layer = CausalMultiHeadSelfAttention(d_model=32, num_heads=4)
    x = torch.randn(SEQ, SEQ, 32)
    rows = names()["rows"]
    found = layer(x, mask=rows[None])
    torch.testing.assert_close(found[:2], layer(x[:2], mask=rows))
    with pytest.raises(ValueError, match="mask"):
        layer(x, mask=rows)


def test_equations_and_names_are_those_of_the_files():
    for link, equation, functions, class_name in zip(
        *map(column, ("file", "equation", "function", "module")), strict=True
    ):
        [name] = re.findall(r"(\w+)\.py\)", link)  # [rope.py](../tinyblock/rope.py)
        file = importlib.import_module(f"tinyblock.{name}")
        assert equation in str(file.__doc__)
        named = re.findall(r"\w+", f"{functions} {class_name}")
        assert named
        assert set(named) <= set(file.__all__)


def test_the_readme_shows_an_abridged_norm_that_gives_equal_numbers():
    """Its class has no constructor, so its forward runs on a layer of tinyblock."""
    readme = Path(__file__).parents[2] / "README.md"
    shown: Any = {"torch": torch, "F": F, "nn": nn, "reduce": reduce, "Float": Float}
    shown["Tensor"] = torch.Tensor
    exec(block_with(readme, "class RMSNorm"), shown)
    x, weight = torch.randn(2, 3, 5), torch.randn(5)
    expected = rms_norm(x, weight)
    assert torch.equal(shown["rms_norm"](x, weight), expected)
    layer = RMSNorm(5)
    layer.weight.data = weight
    torch.testing.assert_close(shown["RMSNorm"].forward(layer, x), expected)
