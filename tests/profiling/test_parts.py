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


def test_equal_layers_of_a_list_are_one_part():
    for container in (nn.ModuleList, lambda layers: nn.Sequential(*layers)):
        model = container([nn.Linear(2, 2) for _ in range(3)])
        assert names(model) == ["sums", "*"]


def test_equal_blocks_of_a_sequential_between_others_are_one_part():
    blocks = [nn.TransformerEncoderLayer(8, 2, 16) for _ in range(12)]
    model = nn.Sequential(nn.Linear(8, 8), *blocks, nn.LayerNorm(8))
    found = names(model)
    outer = [name for name in found if "." not in name]
    assert outer == ["sums", "0", "1*", "13"]
    assert "1*.self_attn.out_proj" in found
    assert len(found) == 1 + 1 + len(names(blocks[0])) + 1


def test_unlike_layers_of_a_list_are_not_merged():
    def layers(*kinds):
        return names(nn.ModuleList(kinds))[1:]

    assert layers(nn.ReLU(), nn.GELU(), nn.ReLU()) == ["0*", "1"]
    assert layers(nn.Linear(2, 2), nn.Linear(2, 3)) == ["0", "1"]
    assert layers(nn.Conv1d(2, 2, 3), nn.Conv1d(2, 2, 3, dilation=2)) == ["0", "1"]
    frozen = nn.Linear(2, 2).requires_grad_(False)
    assert layers(nn.Linear(2, 2), frozen) == ["0", "1"]
    assert layers(nn.Dropout(0.1), nn.Dropout(0.1).eval()) == ["0", "1"]
    low = nn.Linear(2, 2, dtype=torch.bfloat16)
    assert layers(nn.Linear(2, 2), low) == ["0", "1"]


def test_alternating_layers_are_two_parts():
    # As in x-transformers: a list of lists of norm, layer and residual.
    def attention():
        return nn.ModuleList([nn.LayerNorm(8), nn.MultiheadAttention(8, 2)])

    def feed_forward():
        return nn.ModuleList([nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 8))])

    layers = [make() for make in (attention, feed_forward) for _ in range(2)]
    model = nn.ModuleList([layers[0], layers[2], layers[1], layers[3]])
    found = names(model)
    assert {"0*.0", "0*.1", "1*.0", "1*.1.*"} <= set(found)
    assert not [name for name in found if name.startswith(("2", "3"))]


def test_layers_with_equal_names_in_other_places_are_not_merged():
    model = nn.ModuleDict({"a": nn.ModuleList([nn.ReLU()]), "b": nn.ReLU()})
    assert names(model) == ["sums", "a", "a.*", "b"]


OWN_ROWS = ["sums", "AdamW", "rest", "GPU idle", "total", "outside of the model"]


def test_children_that_are_called_as_a_row_of_ours_are_marked():
    for own in OWN_ROWS:
        model = nn.ModuleDict({own: nn.ModuleDict({own: nn.Linear(4, 4)})})
        assert names(model) == ["sums", f"{own} (module)", f"{own}.{own}"]


@pytest.mark.parametrize("own", OWN_ROWS)
def test_child_that_is_called_as_a_row_of_ours_has_its_own_row(own, profile_of):
    model = nn.ModuleDict({own: nn.Linear(4, 4)})
    model.forward = lambda x: model[own](x) * 2
    measured = profile_of(model, (2, 3, 4), "step")
    rows = {row.name: row for row in measured.rows}
    assert set(rows) == {"sums", f"{own} (module)", "AdamW", "rest"}
    child = rows[f"{own} (module)"]
    assert (child.calls, child.parameters) == (1, 20)
    assert child.flops == measured.whole.flops == {"float32": 3 * 2 * 6 * 4 * 4}
    assert not rows["sums"].flops
    assert not rows["AdamW"].flops
    text = report(measured)
    for name in rows:
        assert text.count(f"\n{name}  ") == 1
