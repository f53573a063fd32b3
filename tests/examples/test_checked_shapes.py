"""What the checked module computes, and what it rejects."""

import checked_shapes
import pytest
import torch
from checked_shapes import AttentionPool


def test_pool_is_a_weighted_mean_of_the_tokens_that_are_kept():
    pool = AttentionPool(d_model=6)
    x = torch.randn(2, 5, 6)
    keep = torch.arange(5) < torch.tensor([[3], [5]])
    weights = (x @ pool.score.weight[0]).exp() * keep
    expected = torch.einsum("bs,bsd->bd", weights, x) / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(pool(x, keep), expected)


def test_pool_of_no_token_is_zero():
    pool = AttentionPool(d_model=6)
    keep = torch.tensor([[True, False], [False, False]])
    x = torch.randn(2, 2, 6)
    out = pool(x, keep)
    torch.testing.assert_close(out, torch.stack((x[0, 0], torch.zeros(6))))


@pytest.mark.parametrize(
    ("x", "keep", "name"),
    [
        (torch.zeros(2, 7, 60), torch.ones(2, 7, dtype=torch.bool), "x"),
        (torch.zeros(2, 7, 64), torch.ones(2, 6, dtype=torch.bool), "keep"),
        (torch.zeros(2, 7, 64), torch.ones(2, 7), "keep"),
    ],
    ids=["size", "sequence", "dtype"],
)
def test_pool_rejects_a_wrong_shape(x, keep, name):
    pool = AttentionPool(d_model=64)
    with pytest.raises(
        TypeError, match=f"(?s)AttentionPool.forward.*parameter '{name}'"
    ):
        pool(x, keep)


def test_checked_shapes_main(capsys):
    checked_shapes.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == [
        "pooled: (2, 64)",
        "Type-check error whilst checking the parameters of checked_shapes.AttentionPool.forward.",
        "The problem arose whilst typechecking parameter 'x'.",
        "Actual value: f32[2,7,60](torch)",
        "Expected type: <class 'Float[Tensor, '*batch seq self.d_model=64']'>.",
    ]
    assert any("'keep': bool[2,7]" in line for line in lines[5:])
