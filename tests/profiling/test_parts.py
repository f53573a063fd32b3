"""How a model is cut: what the parts are called, and what belongs to each."""

from profiling.parts import parts_of
from torch import nn

# Layers of one list, and the names of their parts.
LIST = [
    (nn.PReLU(), "0*"),
    (nn.PReLU(2), "1"),
    (nn.PReLU().bfloat16(), "2"),
    (nn.PReLU().eval(), "3"),
    (nn.PReLU().requires_grad_(False), "4"),
    (nn.ELU(1.0), "5"),
    (nn.ELU(2.0), "6"),
    (nn.PReLU(), "0*"),
]


def test_layers_of_a_list_share_a_part_if_they_are_alike():
    layers, names = zip(*LIST, strict=True)
    assert list(parts_of(nn.Sequential(*layers)).values()) == ["Sequential", *names]


def test_modules_that_are_called_as_rows_are_marked():
    names = ["rest", "AdamW", "ModuleDict"]
    model = nn.ModuleDict({name: nn.ReLU() for name in names})
    assert list(parts_of(model).values()) == [
        "ModuleDict (model)",
        "rest (module)",
        "AdamW (module)",
        "ModuleDict",
    ]


class Slow:
    """Takes 9 s to be released."""

    def __init__(self, clock):
        self.clock = clock

    def __del__(self):
        self.clock.time += 9.0


def test_time_without_operations_is_the_parts_and_release_of_the_graph_is_the_rest(
    profile_of, clock
):
    def wait(x):
        clock.time += 3.0
        return x

    def double(x):
        doubled = 2 * x
        doubled.grad_fn.metadata["held"] = Slow(clock)  # until its graph is released
        return doubled

    waits, doubles = nn.Module(), nn.Module()
    waits.forward, doubles.forward = wait, double
    model = nn.ModuleDict({"waits": waits, "doubles": doubles})
    model.forward = lambda x: doubles(waits(x))
    clock.takes = {"mul": 1.0}  # in forward and in backward
    taken = {row.name: row.total_s for row in profile_of(model).rows}
    assert taken == {"waits": 3.0, "doubles": 2.0, "rest": 9.0}
