"""How a model is cut: what the parts are called, and what belongs to each."""

import torch
from profiling.parts import parts_of
from torch import nn


def test_layers_of_a_list_share_a_part_if_they_are_alike():
    layers = [
        nn.PReLU(),
        nn.PReLU(2),
        nn.PReLU().bfloat16(),
        nn.PReLU().eval(),
        nn.PReLU().requires_grad_(False),
        nn.ELU(1.0),
        nn.ELU(2.0),
        nn.PReLU(),
    ]
    # A child that is called as a row of the profiler is marked.
    children = {"rest": nn.ReLU(), "AdamW": nn.ReLU(), "list": nn.ModuleList(layers)}
    names = dict.fromkeys(parts_of(nn.ModuleDict(children)).values())
    alike, *others = [f"list.{each}" for each in ("0*", 1, 2, 3, 4, 5, 6)]
    own = ["rest (module)", "AdamW (module)"]
    assert list(names) == ["sums", *own, "list", alike, *others]
    # A model without children is called as its class.
    assert list(parts_of(layers[0]).values()) == ["PReLU"]


class Waits(nn.Module):
    """Takes 3 s without an operation."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def forward(self, x):
        self.clock.time += 3.0
        return x


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


class Doubles(Waits):
    def forward(self, x):
        return Keeps.apply(x, self.clock)


def test_time_without_operations_is_the_parts_and_release_of_the_graph_is_the_rest(
    profile_of, clock
):
    clock.takes = {"mul": 1.0}
    measured = profile_of(nn.Sequential(Waits(clock), Doubles(clock)))
    taken = {row.name: row.total_s for row in measured.rows}
    assert taken == {"0": 3.0, "1": 2.0, "rest": 9.0}
