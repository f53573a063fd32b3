"""What typecheck guarantees in compiled code beside the cases of calls.py."""

import re
from typing import Any

import pytest
import torch
from jaxtyping import Bool, Float, TypeCheckError
from torch import Tensor, nn
from torch.export import Dim

import tinyblock
from tinyblock.typecheck import typecheck

D = 8
NORM = tinyblock.RMSNorm(D)
ROPE = tinyblock.RotaryPositionalEmbedding(10000.0, D, max_seq_len=20)
BLOCK = tinyblock.Block(D, 1, rope=ROPE)
ones = torch.ones
X = ones(2, 3, D)
POSITIONS = torch.arange(3)

# Without a check, these calls raise no error, because torch broadcasts a wrong argument,
# or, with a Block, another error.
WRONG_CALLS: dict[str, tuple[Any, ...]] = {
    "rms_norm, one gain": (tinyblock.rms_norm, (X, ones(1)), "weight"),
    "rms_norm, one component": (tinyblock.rms_norm, (ones(3, 1), ones(D)), "weight"),
    "RMSNorm of integers": (tinyblock.RMSNorm(D), (X.int(),), "x"),
    "RoPE, one position": (ROPE, (X, POSITIONS[:1]), "token_positions"),
    "RoPE, more positions than tokens": (
        ROPE,
        (X[:, :1], POSITIONS),
        "token_positions",
    ),
    "RoPE, more axes of positions": (
        ROPE,
        (X[0], POSITIONS.expand(2, 3)),
        "token_positions",
    ),
    "attention, k of batch 1": (
        tinyblock.scaled_dot_product_attention,
        (X, X[:1], X),
        "k",
    ),
    "attention, v of batch 1": (
        tinyblock.scaled_dot_product_attention,
        (X, X, X[:1]),
        "v",
    ),
    "Block, width": (BLOCK, (X[..., :1],), "x"),
    "Block, one position": (BLOCK, (X, POSITIONS[:1]), "token_positions"),
}


@pytest.mark.parametrize(
    ("function", "arguments", "name"), WRONG_CALLS.values(), ids=WRONG_CALLS
)
def test_layers_raise_where_torch_would_broadcast(function, arguments, name):
    messages = set()
    for call in (function, torch.compile(function, backend="eager")):
        with pytest.raises(TypeCheckError, match=f"parameter '{name}'") as caught:
            call(*arguments)
        messages.add(str(caught.value))
    assert len(messages) == 1  # the same in both modes


@typecheck
def dot(
    q: Float[Tensor, "*batch query d_k"], k: Float[Tensor, "*batch key d_k"]
) -> Float[Tensor, "*batch query d_k"]:
    return q * k.sum(-2, keepdim=True)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_with_fullgraph_the_message_names_the_axis_and_has_numbers(dynamic):
    @typecheck
    def scaled(x: Float[Tensor, "n m"], n: int, w: Float[Tensor, "2*{n}"]) -> Tensor:
        return x * w.sum()

    compiled = torch.compile(scaled, backend="eager", fullgraph=True, dynamic=dynamic)
    with pytest.raises(RuntimeError) as caught:
        compiled(ones(3, 4), 5, ones(11))
    message = str(caught.value)
    assert "parameter 'w'" in message
    assert "Actual value: f32[11](torch)" in message
    assert "Float[Tensor, '2*n']" in message
    assert re.search(r"dimension size 11 does not equal .* 2\*n=(10|2\*5)\.", message)


def graphs_of(function, calls):
    """Return the graphs that these calls make of a function, as text."""
    graphs = []

    def backend(graph, inputs):
        graphs.append([(node.op, str(node.target)) for node in graph.graph.nodes])
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


def test_checks_add_no_graphs_and_leave_nothing_in_them():
    lengths = [(ones(2, n, D), torch.arange(n)) for n in range(1, 21)]
    batches = [(ones(n, 3, D),) for n in range(1, 10)]
    for layer, calls in ((NORM, batches), (ROPE, lengths)):
        checked = graphs_of(layer, calls)
        unchecked = graphs_of(Unchecked(layer), calls)
        operations = [
            [name for op, name in graph if op != "placeholder"] for graph in checked
        ]
        assert operations == [
            [name for op, name in graph if op != "placeholder"] for graph in unchecked
        ]


def test_broadcast_axes_numbers_and_equal_sizes_add_no_graphs():
    @typecheck
    def rotate(
        x: Float[Tensor, "*batch seq d"],
        angles: Float[Tensor, "*#batch seq d//2"],
        scale: float | Float[Tensor, ""],
        layer: int,
    ) -> Float[Tensor, "*batch seq d"]:
        return x * scale + angles.sum()

    sizes = [(ones(n, n + 1, 8), ones(1, n + 1, 4), 1.5, 0) for n in range(2, 12)]
    numbers = [(ones(2, 3, 8), ones(3, 4), n + 0.5, n) for n in range(6)]
    equal = [(ones(n, D), ones(m, D)) for n, m in ((3, 3), (4, 4), (4, 5), (5, 3))]
    for function, calls in ((rotate, sizes), (rotate, numbers), (dot, equal)):
        checked = graphs_of(function, calls)
        assert 0 < len(checked) <= len(graphs_of(function.__wrapped__, calls))


def test_a_graph_break_in_a_layer_costs_no_other_graph_break():
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.width = D

        def forward(
            self, x: Float[Tensor, "*batch {self.width}"]
        ) -> Float[Tensor, "*batch {self.width}"]:
            x = x + 1
            torch._dynamo.graph_break()
            return x * 2

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Inner() for _ in range(12))

        def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
            for layer in self.layers:
                x = x + layer(x)
            return x

    def count():
        torch._dynamo.utils.counters.clear()
        graphs = graphs_of(Outer(), [(X,), (X + 1,)])
        return len(graphs), torch._dynamo.utils.counters["graph_break"].total()

    unchecked = count()
    typecheck(Inner)
    typecheck(Outer)
    assert count() == unchecked
    with pytest.raises(TypeCheckError):
        torch.compile(Outer(), backend="eager")(X[..., :7])


def test_compiled_code_raises_for_a_wrong_call_after_right_ones():
    compiled = torch.compile(dot, backend="eager")
    for size in (5, 6, 7):
        compiled(ones(2, size), ones(4, size))
    with pytest.raises(TypeCheckError):
        compiled(ones(2, 7), ones(4, 1))
    assert compiled(ones(2, 7), ones(4, 7)).shape == (2, 7)


def test_symbols_are_compared_in_expressions():
    @typecheck
    def rotate(x: Float[Tensor, "n d"], angles: Float[Tensor, "n d//2"]) -> Tensor:
        return x + angles.sum()

    compiled = torch.compile(rotate, backend="eager", dynamic=True)
    compiled(ones(3, 8), ones(3, 4))
    with pytest.raises(TypeCheckError):
        compiled(ones(3, 8), ones(3, 5))


def test_an_axis_can_be_marked_as_dynamic():
    x = ones(5, 3, D)
    torch._dynamo.mark_dynamic(x, (0, 1))
    assert len(graphs_of(ROPE, [(x,), (ones(4, 7, D),)])) == 1


@pytest.mark.parametrize("computes", [True, False])
def test_a_result_after_a_graph_break_is_checked(computes):
    @typecheck
    def cut(x: Float[Tensor, "n m"], count: int) -> Float[Tensor, "n {count}"]:
        torch._dynamo.graph_break()
        return x[:, :2] * 2 if computes else x

    compiled = torch.compile(cut, backend="eager")
    compiled(ones(3, 2), 2)
    with pytest.raises(TypeCheckError, match="return value"):
        compiled(ones(3, 2), 3)


def test_the_compiler_does_not_trace_the_checks():
    """If it did, jaxtyping's code would break the graph, too."""
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(dot, backend="eager")
    with pytest.raises(TypeCheckError):
        compiled(ones(2, 7), ones(4, 1))
    compiled(ones(2, 7), ones(4, 7))
    reasons = torch._dynamo.utils.counters["graph_break"]
    assert not re.search("site-packages/(jaxtyping|beartype)/|disable", f"{reasons}")


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_size_that_depends_on_values_is_not_compared():
    @typecheck
    def mask(
        x: Float[Tensor, "n d"], keep: Bool[Tensor, "n d"]
    ) -> Float[Tensor, "n d"]:
        return x * keep

    def of_positive(x):
        rows = x[x[:, 0] > 0]
        return dot(mask(rows, rows > 0), x)

    x = torch.eye(D)
    compiled = torch.compile(of_positive, backend="eager", fullgraph=True)
    assert compiled(x + 1).shape == (D, D)


@pytest.mark.parametrize("strict", [True, False])
def test_export_takes_dynamic_sizes_and_raises_for_a_wrong_call(strict):
    dims = ({0: Dim("batch"), 1: Dim("seq")}, {0: Dim("seq")})
    exported = torch.export.export(
        ROPE, (X, POSITIONS), dynamic_shapes=dims, strict=strict
    )
    x = torch.randn(4, 5, D)
    positions = torch.arange(5)
    result = exported.module()(x, positions)
    torch.testing.assert_close(result, ROPE(x, positions))
    with pytest.raises((TypeCheckError, RuntimeError), match="parameter 'x'"):
        torch.export.export(
            ROPE, (X[..., :7],), dynamic_shapes=({1: Dim("seq")},), strict=strict
        )


def test_a_call_in_eager_mode_with_other_sizes_causes_no_new_graph():
    fresh = typecheck(dot.__wrapped__)
    compiled = torch.compile(fresh, backend="eager")
    x = ones(2, 5)
    compiled(x, x)
    fresh(x, ones(4, 5))
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(x, x)


@torch._dynamo.config.patch(recompile_limit=1)
def test_each_function_has_its_own_limit_of_recompilations():
    for number in range(2):

        @typecheck
        def add(x: Tensor, number: int = number) -> Tensor:
            return x + number

        compiled = torch.compile(add, backend="eager", fullgraph=True)
        compiled(ones(3))  # beyond the limit, this raises
