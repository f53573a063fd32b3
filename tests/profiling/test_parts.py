"""How a model is cut: what the parts are called, and what belongs to each."""

from contextlib import suppress

import pytest
import torch
from profiling.parts import parts_of
from torch import nn


def pair(first, second):
    return nn.ModuleList([first, second])


def unlike():
    """Return a list of unlike layers, as in x-transformers."""
    return pair(nn.ModuleList([nn.Linear(2, 2)]), nn.LayerNorm(2))


APART = ["sums", "0", "1"]
ALIKE = ["sums", "0*", "1"]
NAMES = {
    "a module without children": (nn.Linear(2, 2), ["Linear"]),
    "paths": (
        nn.ModuleDict({"in": nn.ModuleDict({"up": nn.ReLU()})}),
        ["sums", "in", "in.up"],
    ),
    "equal layers": (pair(unlike(), unlike()), ["sums", "*", "*.0", "*.0.*", "*.1"]),
    "equal layers around another": (
        nn.Sequential(nn.ReLU(), nn.GELU(), nn.ReLU()),
        ALIKE,
    ),
    "other places": (
        nn.ModuleDict({"a": nn.Sequential(nn.ReLU()), "b": nn.Sequential(nn.ReLU())}),
        ["sums", "a", "a.*", "b", "b.*"],
    ),
    "other shapes": (pair(nn.Linear(2, 2), nn.Linear(2, 3)), APART),
    "other options": (pair(nn.Softmax(0), nn.Softmax(1)), APART),
    "frozen": (pair(nn.PReLU(), nn.PReLU().requires_grad_(False)), APART),
    "eval mode": (pair(nn.ReLU(), nn.ReLU().eval()), APART),
    "other dtypes": (pair(nn.PReLU(), nn.PReLU().bfloat16()), APART),
}


def test_names_of_parts():
    for title, (model, names) in NAMES.items():
        assert list(dict.fromkeys(parts_of(model).values())) == names, title


OWN = ["sums", "AdamW", "rest", "GPU idle", "total", "outside of the model"]
OWN += ["weights of no part"]


def test_children_that_are_called_as_rows_of_the_profiler_are_marked(profile_of):
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in OWN})
    model.forward = lambda x: sum(model[name](x) for name in OWN)
    measured = profile_of(model, "step")
    marked = [f"{name} (module)" for name in OWN]
    assert [row.name for row in measured.rows] == [*marked, "sums", "AdamW", "rest"]
    for row in measured.rows[: len(OWN)]:
        assert (row.calls, row.parameters) == (1, 4 * 4 + 4), row.name
        assert row.flops == {"float32": 3 * 2 * 10 * 4 * 4}, row.name


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
    clock.takes = {"mm": 1.0}
    # Two products of up, two of the model, and one of down, in three passes.
    taken = seconds_of(profile_of(Gate()))
    assert taken == {"up": 6.0, "down": 3.0, "sums": 6.0, "rest": 0.0}


class Waits(nn.Module):
    """Takes seconds without an operation."""

    def __init__(self, clock, seconds):
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def forward(self, x):
        self.clock.time += self.seconds
        return x


def test_part_without_operations_is_a_row_from_1_percent_of_the_time_on(
    profile_of, clock
):
    clock.takes = {"addmm": 1.0}
    for seconds, shown in ((5.0, True), (0.011, True), (0.010, False)):
        model = nn.Sequential(Waits(clock, seconds), nn.Linear(4, 4))
        first, *_, rest = profile_of(model, "forward").rows
        assert (first.name == "0") == shown, seconds
        assert rest.total_s == pytest.approx(0.0 if shown else seconds)


class Slow:
    """Takes 9 s to be released."""

    def __init__(self, clock):
        self.clock = clock

    def __del__(self):
        self.clock.time += 9.0


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, clock):
        ctx.kept = Slow(clock)
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient, None


def test_release_of_the_graph_is_in_the_rest_and_in_no_part(profile_of, clock):
    clock.takes = {"mul": 1.0}
    for mode in ("train", "step"):
        taken = seconds_of(profile_of(lambda x: Keeps.apply(x, clock), mode))
        assert (taken["Calls"], taken["rest"]) == (2.0, 9.0), mode


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
    rows = {row.name: row for row in profile_of(Recovers(), "forward").rows}
    assert rows["sums"].flops == {"float32": 2 * 10 * 4 * 4}
    assert rows["sums"].operation("relu").calls == 1
