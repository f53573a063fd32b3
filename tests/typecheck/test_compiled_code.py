"""What typecheck costs compiled code: no graph, no operation and no graph break."""

import re

import pytest
import torch
from blamed import blamed
from jaxtyping import Bool, Float, TypeCheckError
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.export import Dim

import tinyblock
from tinyblock.typecheck import typecheck

D = 8
ROPE = tinyblock.RotaryPositionalEmbedding(10000.0, D, max_seq_len=20)
ones = torch.ones
X = ones(2, 3, D)


@typecheck
def dot(q: Float[Tensor, "query d"], k: Float[Tensor, "key d"]) -> Tensor:
    return q * k.sum(-2, keepdim=True)


@typecheck
def rotate(
    x: Float[Tensor, "*batch seq d"],
    angles: Float[Tensor, "*#batch seq d//2"],
    scale: float | Float[Tensor, ""],
    layer: int,
) -> Float[Tensor, "*batch seq d"]:
    return x * scale + angles.sum()


def graphs_of(function, calls):
    """Return the operations of the graphs that these calls make of a function."""
    graphs = []

    def backend(graph, inputs):
        nodes = [node for node in graph.graph.nodes if node.op != "placeholder"]
        graphs.append([str(node.target) for node in nodes])
        return graph.forward

    compiled = torch.compile(function, backend=backend)
    for arguments in calls:
        compiled(*arguments)
    torch._dynamo.reset()
    return graphs


class Unchecked(nn.Module):
    """A layer without the checks of its call."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args):
        return type(self.layer).forward.__wrapped__(self.layer, *args)


# Arguments of calls that differ in their sizes, in their numbers, in whether two sizes are
# equal, and in the number of tokens.
SIZES = [(ones(n, n + 1, D), ones(1, n + 1, 4), 1.5, 0) for n in range(2, 9)]
NUMBERS = [(ones(2, 3, D), ones(3, 4), n + 0.5, n) for n in range(6)]
EQUAL_SIZES = [(ones(n, D), ones(m, D)) for n, m in ((3, 3), (4, 4), (4, 5), (5, 3))]
LENGTHS = [(ones(2, n, D), torch.arange(n)) for n in range(1, 9)]


def test_checks_add_no_graphs_and_leave_nothing_in_them():
    for checked, unchecked, calls in (
        (rotate, rotate.__wrapped__, SIZES),
        (rotate, rotate.__wrapped__, NUMBERS),
        (dot, dot.__wrapped__, EQUAL_SIZES),
        (ROPE, Unchecked(ROPE), LENGTHS),
    ):
        assert graphs_of(checked, calls) == graphs_of(unchecked, calls)


def test_a_graph_break_in_a_layer_costs_no_other_graph_break():
    class Inner(nn.Module):
        def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
            x = x + 1
            torch._dynamo.graph_break()
            return x * 2

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Inner() for _ in range(4))

        def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
            for layer in self.layers:
                x = x + layer(x)
            return x

    def count():
        counters.clear()
        graphs = graphs_of(Outer(), [(X,), (X + 1,)])
        return len(graphs), counters["graph_break"].total()

    unchecked = count()
    typecheck(Inner)
    typecheck(Outer)
    assert count() == unchecked


@pytest.mark.parametrize("computes", [True, False])
def test_a_result_after_a_graph_break_is_checked(computes):
    """Also where nothing is left to compute after the break."""

    @typecheck
    def cut(x: Float[Tensor, "n m"], count: int) -> Float[Tensor, "n {count}"]:
        torch._dynamo.graph_break()
        return x[:, :2] * 2 if computes else x

    compiled = torch.compile(cut, backend="eager")
    compiled(ones(3, 2), 2)
    with pytest.raises(TypeCheckError, match="return value"):
        compiled(ones(3, 2), 3)


def test_a_wrong_call_after_right_ones_raises_and_the_compiler_traces_no_checks():
    """If the compiler did, jaxtyping's code would break the graph, too."""
    counters.clear()
    compiled = torch.compile(dot, backend="eager")
    for size in (5, 6, 7):
        compiled(ones(2, size), ones(4, size))
    with pytest.raises(TypeCheckError):
        compiled(ones(2, 7), ones(4, 1))
    compiled(ones(2, 7), ones(5, 7))
    reasons = f"{counters['graph_break']}"
    assert not re.search("site-packages/(jaxtyping|beartype)/|disable", reasons)


def test_an_axis_can_be_marked_as_dynamic():
    x = ones(5, 3, D)
    torch._dynamo.mark_dynamic(x, (0, 1))
    assert len(graphs_of(ROPE, [(x,), (ones(4, 7, D),)])) == 1


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_checks_do_not_compare_a_size_that_depends_on_values():
    """The compiler does not know how many rows are positive."""

    @typecheck
    def mask(
        x: Float[Tensor, "n d"], keep: Bool[Tensor, "n d"]
    ) -> Float[Tensor, "n d"]:
        return x * keep

    def of_positive(x):
        rows = x[x[:, 0] > 0]
        return dot(mask(rows, rows > 0), x)

    compiled = torch.compile(of_positive, backend="eager", fullgraph=True)
    assert compiled(torch.eye(D) + 1).shape == (D, D)


@pytest.mark.parametrize("strict", [True, False])
def test_export_takes_dynamic_sizes_and_raises_for_a_wrong_call(strict):
    dims = ({0: Dim("batch"), 1: Dim("seq")}, {0: Dim("seq")})
    exported = torch.export.export(
        ROPE, (X, torch.arange(3)), dynamic_shapes=dims, strict=strict
    )
    x, positions = torch.randn(4, 5, D), torch.arange(5)
    torch.testing.assert_close(exported.module()(x, positions), ROPE(x, positions))
    with pytest.raises((TypeCheckError, RuntimeError)) as caught:
        torch.export.export(ROPE, (X[..., :7],), strict=strict)
    assert blamed(caught.value) == "x"


def test_a_call_in_eager_mode_causes_no_recompilation():
    fresh = typecheck(dot.__wrapped__)
    compiled = torch.compile(fresh, backend="eager")
    x = ones(2, 5)
    compiled(x, x)
    fresh(x, ones(4, 5))
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(x, x)


def test_torch_reports_a_recompilation_by_the_name_of_the_function():
    compiled = torch.compile(dot, backend="eager")
    compiled(X[0], X[0])
    message = rf"recompile.*{__name__}\.dot"
    never = torch.compiler.set_stance("fail_on_recompile")
    with never, pytest.raises(RuntimeError, match=message):
        compiled(X[0, :2], X[0])


@torch._dynamo.config.patch(recompile_limit=1)
def test_each_function_has_its_own_limit_of_recompilations():
    """Though all of them are wrapped by the same code."""
    for number in range(2):

        @typecheck
        def add(x: Tensor, number: int = number) -> Tensor:
            return x + number

        compiled = torch.compile(add, backend="eager", fullgraph=True)
        compiled(ones(3))  # beyond the limit, this raises
