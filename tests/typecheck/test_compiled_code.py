"""typecheck in code that torch.compile or torch.export traces."""

import linecache
import re

import pytest
import torch
from jaxtyping import Float, TypeCheckError
from torch import Tensor, nn
from torch.export import Dim
from typecheck.calls import (
    CALLS,
    KINDS,
    LEFT_OUT,
    Case,
    Gain,
    couple,
    dot,
    mask_out,
    pair,
    rotate,
    scaled,
    six_times,
    to_gray,
)

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
BROADCASTING_CALLS = {
    "rms_norm, one gain": Case(
        tinyblock.rms_norm, (X, ones(D)), (X, ones(1)), "'weight'"
    ),
    "rms_norm, one component": Case(
        tinyblock.rms_norm, (X, ones(D)), (ones(3, 1), ones(D)), "'weight'"
    ),
    "RMSNorm of integers": Case(tinyblock.RMSNorm(D), (X,), (X.int(),), "'x'"),
    "RoPE, one position": Case(
        ROPE, (X, POSITIONS), (X, POSITIONS[:1]), "'token_positions'"
    ),
    "RoPE, more positions than tokens": Case(
        ROPE, (X[:, :1], POSITIONS[:1]), (X[:, :1], POSITIONS), "'token_positions'"
    ),
    "RoPE, more axes of positions": Case(
        ROPE, (X[0], POSITIONS), (X[0], POSITIONS.expand(2, 3)), "'token_positions'"
    ),
    "attention, k of batch 1": Case(
        tinyblock.scaled_dot_product_attention, (X, X, X), (X, X[:1], X), "'k'"
    ),
    "attention, v of batch 1": Case(
        tinyblock.scaled_dot_product_attention, (X, X, X), (X, X, X[:1]), "'v'"
    ),
    "Block, width": Case(BLOCK, (X,), (X[..., :1],), "'x'"),
    "Block, one position": Case(
        BLOCK, (X, POSITIONS), (X, POSITIONS[:1]), "'token_positions'"
    ),
}


def call(function, arguments):
    """Call with arguments, of which the last may be a dict of keywords."""
    if isinstance(arguments[-1], dict):
        return function(*arguments[:-1], **arguments[-1])
    return function(*arguments)


def each(cases):
    return pytest.mark.parametrize("case", cases.values(), ids=cases)


@each(CALLS | BROADCASTING_CALLS)
def test_eager_mode_raises_for_a_wrong_call_after_a_right_one(case):
    call(case.call, case.right)
    with pytest.raises(TypeCheckError):
        call(case.call, case.wrong)


def compiled_with_symbols(function):
    """Compile to one graph, in which sizes of 2 and more are symbols.

    In the other tests, sizes are numbers, about which a comparison knows more.
    """
    return torch.compile(function, backend="eager", fullgraph=True, dynamic=True)


@each(CALLS)
def test_compiled_code_takes_a_right_call_and_is_one_graph(case):
    expected = call(case.call, case.right)
    result = call(compiled_with_symbols(case.call), case.right)
    torch.testing.assert_close(result, expected)


@each(LEFT_OUT)
def test_compiled_code_takes_a_right_call_that_it_does_not_check(case):
    function, *arguments = case
    expected = function(*arguments)
    result = torch.compile(function, backend="eager", fullgraph=True)(*arguments)
    torch.testing.assert_close(result, expected)


@each({kind: CALLS[kind] for kind in KINDS})
def test_compiled_code_raises_the_error_of_eager_mode(case):
    with pytest.raises(TypeCheckError) as eager:
        call(case.call, case.wrong)
    with pytest.raises(TypeCheckError) as compiled:
        call(torch.compile(case.call, backend="eager"), case.wrong)
    assert str(compiled.value) == str(eager.value)


@each({kind: CALLS[kind] for kind in ("named axis", "result that is no tuple")})
def test_after_an_error_the_compiler_does_not_trace_the_checks(case):
    """If it did, jaxtyping's code would break the graph."""
    torch._dynamo.utils.counters.clear()
    with pytest.raises(TypeCheckError):
        call(torch.compile(case.call, backend="eager"), case.wrong)
    assert not torch._dynamo.utils.counters["graph_break"]


@each(CALLS)
def test_with_fullgraph_the_error_names_the_argument(case):
    with pytest.raises(
        RuntimeError, match=f"TypeCheckError.*{case.where} of .* must be"
    ):
        call(compiled_with_symbols(case.call), case.wrong)


@each(BROADCASTING_CALLS)
def test_compiled_layers_raise_where_torch_would_broadcast(case):
    with pytest.raises(TypeCheckError, match=f"parameter {case.where}"):
        call(torch.compile(case.call, backend="eager"), case.wrong)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_the_message_names_function_argument_expected_sizes_and_what_it_got(dynamic):
    compiled = torch.compile(dot, backend="eager", fullgraph=True, dynamic=dynamic)
    with pytest.raises(RuntimeError) as caught:
        compiled(ones(2, 5), ones(4, 1))
    assert (
        "parameter 'k' of typecheck.calls.dot must be Float[Tensor, '*batch key d_k'] "
        "where query=2, d_k=5, *batch=[], key=4, got float32[4,1]"
    ) in str(caught.value)


def test_the_message_has_the_value_of_braces():
    compiled = torch.compile(Gain(3), backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"must be .* where self\.width=3, got"):
        compiled(ones(2, 1))


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (to_gray, (2,), "Float[Tensor, 'color=3 height width'], got int"),
        (
            mask_out,
            (ones(4, 3), 2),
            "Bool[Tensor, '#query key'] | NoneType where query=4, key=3, got int",
        ),
        (
            couple,
            (ones(3), list),
            "tuple[jaxtyping.Float[Tensor, 'n'], torch.Tensor] where n=3, got list",
        ),
        (
            pair,
            (ones(3), 1),
            "tuple[torch.Tensor, jaxtyping.Float[Tensor, 'n']] where n=3, got (float32[3])",
        ),
    ],
    ids=["tensor", "union", "tuple", "length of a tuple"],
)
def test_the_message_describes_what_is_not_a_tensor(function, arguments, message):
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=f" must be {re.escape(message)}"):
        compiled(*arguments)


def test_the_source_of_a_wrapper_can_be_read():
    source = "".join(linecache.getlines("<wrapper of typecheck.calls.dot>"))
    assert "def __wrapper(q, k):" in source


def graphs_of(function, calls):
    """Compile a function, and return how many graphs these calls make."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(function, backend=backend)
    for arguments in calls:
        compiled(*arguments)
    torch._dynamo.reset()
    return len(graphs)


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        pytest.param(NORM, [(ones(n, 3, D),) for n in range(1, 10)], id="batches"),
        pytest.param(
            ROPE, [(ones(2, n, D), torch.arange(n)) for n in range(1, 21)], id="lengths"
        ),
    ],
)
def test_checks_cause_no_more_graphs(layer, inputs, monkeypatch):
    checked = graphs_of(layer, inputs)
    monkeypatch.setattr(type(layer), "forward", type(layer).forward.__wrapped__)
    assert 0 < checked <= graphs_of(layer, inputs)


def test_sizes_that_are_equal_by_chance_bind_no_later_call():
    calls = [(ones(n, D), ones(m, D)) for n, m in ((3, 3), (4, 4), (4, 5), (5, 3))]
    assert 0 < graphs_of(dot, calls) <= graphs_of(dot.__wrapped__, calls)


def test_compiled_code_raises_for_a_wrong_call_after_right_ones():
    compiled = torch.compile(dot, backend="eager")
    for size in (5, 6, 7):
        compiled(ones(2, size), ones(4, size))
    with pytest.raises(TypeCheckError):
        compiled(ones(2, 7), ones(4, 1))


def test_an_axis_can_be_marked_as_dynamic():
    x = ones(5, 3, D)
    torch._dynamo.mark_dynamic(x, (0, 1))
    assert graphs_of(ROPE, [(x,), (ones(4, 7, D),)]) == 1


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


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_size_that_depends_on_values_is_not_compared():
    def of_positive(x):
        rows = x[x[:, 0] > 0]
        rotate(rows, x[:, :4])
        mask_out(rows, rows > 0)
        scaled(rows, by=x[:1])
        return dot(rows, x)

    x = torch.eye(D)
    compiled = torch.compile(of_positive, backend="eager", fullgraph=True)
    assert compiled(x + 1).shape == (D, D)


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_message_shows_a_size_that_depends_on_values_as_a_symbol():
    def of_positive(x):
        return dot(x[x[:, 0] > 0], x[:, :1])

    compiled = torch.compile(of_positive, backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"'k' of .* where query=u\d+, d_k=8"):
        compiled(torch.eye(D))


@pytest.mark.parametrize("strict", [True, False])
def test_export_raises_for_a_wrong_result(strict):
    class SixTimes(nn.Module):
        def forward(self, x):
            return six_times(x, 2, 2)

    with pytest.raises(
        (TypeCheckError, RuntimeError), match=r"the result of .*must be"
    ):
        torch.export.export(
            SixTimes(), (ones(3),), dynamic_shapes=({0: Dim("n")},), strict=strict
        )


@pytest.mark.parametrize("strict", [True, False])
def test_export_takes_dynamic_sizes(strict):
    dims = ({0: Dim("batch"), 1: Dim("seq")}, {0: Dim("seq")})
    exported = torch.export.export(
        ROPE, (X, POSITIONS), dynamic_shapes=dims, strict=strict
    )
    x = torch.randn(4, 5, D)
    positions = torch.arange(5)
    result = exported.module()(x, positions)
    torch.testing.assert_close(result, ROPE(x, positions))


@pytest.mark.parametrize("strict", [True, False])
def test_export_raises_for_a_wrong_call(strict):
    with pytest.raises((TypeCheckError, RuntimeError), match=r"'x'.*must be"):
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
