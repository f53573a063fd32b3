"""How a model is cut: which modules are one row, and what they are called."""

import pytest
import torch
from profiling.parts import parts_of
from profiling.report import report
from torch import nn


def names(model):
    return list(dict.fromkeys(parts_of(model).values()))


def test_root_is_called_sums_and_others_by_their_path():
    assert names(nn.Module()) == ["sums"]
    model = nn.ModuleDict({"inner": nn.ModuleDict({"up": nn.Linear(2, 2)})})
    assert names(model) == ["sums", "inner", "inner.up"]


@pytest.mark.parametrize("container", [nn.ModuleList, nn.Sequential])
def test_equal_layers_of_a_list_are_one_part(container):
    model = container()
    model.extend(nn.Linear(2, 2) for _ in range(3))
    assert names(model) == ["sums", "*"]


def test_equal_blocks_of_a_sequential_between_others_are_one_part():
    # Enough blocks that the names of some have two digits.
    blocks = [nn.TransformerEncoderLayer(8, 2, 16) for _ in range(12)]
    model = nn.Sequential(nn.Linear(8, 8), *blocks, nn.LayerNorm(8))
    inner = [f"1*.{name}" for name in names(blocks[0])[1:]]
    assert names(model) == ["sums", "0", "1*", *inner, "13"]


def test_equal_layers_of_a_list_are_one_part_around_another():
    layers = nn.ModuleList([nn.ReLU(), nn.GELU(), nn.ReLU()])
    assert names(layers) == ["sums", "0*", "1"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(nn.Linear(2, 2), nn.Linear(2, 3), id="shape"),
        pytest.param(nn.Conv1d(2, 2, 3), nn.Conv1d(2, 2, 3, dilation=2), id="options"),
        pytest.param(
            nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False), id="frozen"
        ),
        pytest.param(nn.Dropout(0.1), nn.Dropout(0.1).eval(), id="eval mode"),
        pytest.param(
            nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16), id="dtype"
        ),
    ],
)
def test_unlike_layers_of_a_list_are_not_merged(first, second):
    assert names(nn.ModuleList([first, second])) == ["sums", "0", "1"]


def test_alternating_layers_are_two_parts():
    # As in x-transformers: a list of lists of norm, layer and residual.
    def attention():
        return nn.ModuleList([nn.LayerNorm(8), nn.MultiheadAttention(8, 2)])

    def feed_forward():
        return nn.ModuleList([nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 8))])

    model = nn.ModuleList([attention(), feed_forward(), attention(), feed_forward()])
    found = names(model)
    assert {"0*.0", "0*.1", "1*.0", "1*.1.*"} <= set(found)
    assert not [name for name in found if name.startswith(("2", "3"))]


def test_equal_layers_in_different_places_are_not_merged():
    model = nn.ModuleDict(
        {"a": nn.ModuleList([nn.ReLU()]), "b": nn.ModuleList([nn.ReLU()])}
    )
    assert names(model) == ["sums", "a", "a.*", "b", "b.*"]


# The rows that the profiler adds to those of modules.
OWN_ROWS = ["sums", "AdamW", "rest", "GPU idle", "total", "outside of the model"]


@pytest.mark.parametrize("own", OWN_ROWS)
def test_only_a_child_of_the_root_is_marked_if_it_is_called_as_a_row_of_the_profiler(
    own,
):
    model = nn.ModuleDict({own: nn.ModuleDict({own: nn.Linear(4, 4)})})
    assert names(model) == ["sums", f"{own} (module)", f"{own}.{own}"]


def multiplied_by_two(own):
    """Return a model whose child is called as a row of the profiler."""
    model = nn.ModuleDict({own: nn.Linear(4, 4)})
    model.forward = lambda x: model[own](x) * 2
    return model


@pytest.mark.parametrize("own", OWN_ROWS)
def test_a_child_that_is_called_as_a_row_of_the_profiler_keeps_its_figures(
    own, profile_of
):
    measured = profile_of(multiplied_by_two(own), (2, 3, 4), "step")
    rows = {row.name: row for row in measured.rows}
    assert set(rows) == {"sums", f"{own} (module)", "AdamW", "rest"}
    child = rows[f"{own} (module)"]
    assert (child.calls, child.parameters) == (1, 4 * 4 + 4)
    # In each of three passes: 2 FLOPs, 6 tokens, a matrix of 4 x 4.
    assert child.flops == measured.whole.flops == {"float32": 3 * 2 * 6 * 4 * 4}
    assert not rows["sums"].flops
    assert not rows["AdamW"].flops


@pytest.mark.parametrize("own", OWN_ROWS)
def test_a_child_that_is_called_as_a_row_of_the_profiler_is_printed_beside_it(
    own, profile_of
):
    text = report(profile_of(multiplied_by_two(own), (2, 3, 4), "step"))
    for name in ("sums", f"{own} (module)", "AdamW", "rest"):
        assert text.count(f"\n{name}  ") == 1, name
