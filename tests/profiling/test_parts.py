"""How a model is cut: what the parts are called, and what belongs to each."""

from contextlib import suppress

import pytest
import torch
from profiling.parts import parts_of
from torch import nn

SHAPE = (2, 3, 4)
ENCODERS = [nn.TransformerEncoderLayer(8, 2, 16) for _ in range(12)]
INNER = ["self_attn", "self_attn.out_proj", "linear1", "dropout", "linear2"]
INNER += ["norm1", "norm2", "dropout1", "dropout2"]


def pair(first, second):
    return nn.ModuleList([first, second])


def lists():
    """Return two lists of lists of unlike layers, as in x-transformers."""
    attention = [nn.LayerNorm(8), nn.MultiheadAttention(8, 2)]
    feed_forward = [nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 8))]
    return [nn.ModuleList(attention), nn.ModuleList(feed_forward)]


APART = ["sums", "0", "1"]
NAMES = {
    "a module without children": (nn.Linear(2, 2), ["Linear"]),
    "paths": (
        nn.ModuleDict({"inner": nn.ModuleDict({"up": nn.Linear(2, 2)})}),
        ["sums", "inner", "inner.up"],
    ),
    "equal layers of a list": (pair(nn.ReLU(), nn.ReLU()), ["sums", "*"]),
    "equal blocks between others": (
        nn.Sequential(nn.Linear(8, 8), *ENCODERS, nn.LayerNorm(8)),
        ["sums", "0", "1*", *(f"1*.{name}" for name in INNER), "13"],
    ),
    "equal layers around another": (
        nn.ModuleList([nn.ReLU(), nn.GELU(), nn.ReLU()]),
        ["sums", "0*", "1"],
    ),
    "alternating lists": (
        nn.ModuleList([*lists(), *lists()]),
        ["sums", "0*", "0*.0", "0*.1", "0*.1.out_proj", "1*", "1*.0", "1*.1", "1*.1.*"],
    ),
    "other places": (
        nn.ModuleDict({"a": nn.Sequential(nn.ReLU()), "b": nn.Sequential(nn.ReLU())}),
        ["sums", "a", "a.*", "b", "b.*"],
    ),
    "other shapes": (pair(nn.Linear(2, 2), nn.Linear(2, 3)), APART),
    "other options": (pair(nn.Conv1d(2, 2, 3), nn.Conv1d(2, 2, 3, dilation=2)), APART),
    "frozen": (
        pair(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)),
        APART,
    ),
    "eval mode": (pair(nn.Dropout(0.1), nn.Dropout(0.1).eval()), APART),
    "other dtypes": (pair(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()), APART),
}


def test_names_of_parts():
    for title, (model, names) in NAMES.items():
        assert list(dict.fromkeys(parts_of(model).values())) == names, title


OWN = ["sums", "AdamW", "rest", "GPU idle", "total", "outside of the model"]
OWN += ["weights of no part"]


def test_child_that_is_called_as_a_row_of_the_profiler_is_marked(profile_of):
    for own in OWN:
        model = nn.ModuleDict({own: nn.Linear(4, 4)})
        model.forward = lambda x, model=model, own=own: model[own](x) * 2
        measured = profile_of(model, SHAPE, "step")
        rows = {row.name: row for row in measured.rows}
        assert list(rows) == [f"{own} (module)", "sums", "AdamW", "rest"]
        child = rows[f"{own} (module)"]
        assert (child.calls, child.parameters) == (1, 4 * 4 + 4), own
        assert child.flops == measured.whole.flops, own


def seconds_of(measured):
    return {row.name: row.total_s for row in measured.rows}


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8, bias=False)
        self.down = nn.Linear(8, 4, bias=False)

    def forward(self, x):
        gate = self.up(x) @ self.down.weight.T  # before the call of another part
        out = (gate * self.down(self.up(x))) @ self.down.weight
        return out, x.sum()  # backward starts at the first


def test_backward_belongs_to_the_part_that_computed_forward(profile_of, clock):
    clock.takes, clock.other = {"mm": 1.0}, 0.0
    # Two products of up, two of the model, and one of down, in three passes.
    taken = seconds_of(profile_of(Gate(), (2, 5, 4)))
    assert taken == {"up": 6.0, "down": 3.0, "sums": 6.0, "rest": 0.0}


class Waits(nn.Module):
    def __init__(self, clock, seconds):
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def forward(self, x):
        self.clock.time += self.seconds
        return x


def test_part_without_operations_is_a_row_from_1_percent_of_the_time_on(
    profile_of, clock
):
    clock.takes, clock.other = {"addmm": 1.0}, 0.0
    for seconds, shown in ((0.011, True), (0.010, False)):
        model = nn.Sequential(Waits(clock, seconds), nn.Linear(4, 4))
        rows = {row.name: row for row in profile_of(model, SHAPE, "forward").rows}
        assert ("0" in rows) == shown, seconds
        assert rows["rest"].total_s == pytest.approx(0.0 if shown else seconds)
    model = nn.Sequential(Waits(clock, 5.0), nn.Linear(4, 4))
    row = profile_of(model, SHAPE, "forward").rows[0]
    assert (row.calls, row.operations, row.limit) == (1, [], "Python")


class SlowToRelease:
    def __init__(self, clock):
        self.clock = clock

    def __del__(self):
        self.clock.time += 9.0


def test_release_of_the_graph_is_in_the_rest_and_in_no_part(profile_of, clock):
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.kept = SlowToRelease(clock)
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    class Model(nn.Module):
        def forward(self, x):
            return Keeps.apply(x)

    clock.takes, clock.other = {"mul": 1.0}, 0.0
    for mode in ("train", "step"):
        taken = seconds_of(profile_of(Model(), SHAPE, mode))
        assert (taken["Model"], taken["rest"]) == (2.0, 9.0), mode


class Fails(nn.Module):
    def forward(self, x):
        raise NotImplementedError


class Recovers(nn.Module):
    def __init__(self):
        super().__init__()
        self.fails = Fails()
        self.project = nn.Linear(4, 4)

    def forward(self, x):
        with suppress(NotImplementedError):
            return self.fails(x)
        made = nn.ReLU()  # it belongs to its caller
        return made(x @ self.project.weight)


def test_part_that_fails_ends_where_the_model_goes_on(profile_of):
    rows = {row.name: row for row in profile_of(Recovers(), SHAPE, "forward").rows}
    assert rows["sums"].flops == {"float32": 2 * 6 * 4 * 4}
    assert [each.name for each in rows["sums"].operations if each.name == "relu"]
