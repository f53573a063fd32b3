import asyncio
import os
import pickle
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from isolated import refuse
from jaxtyping import TypeCheckError

import tinyblock
from tinyblock import typecheck as checks
from tinyblock.typecheck import typecheck

ROOT = Path(__file__).parents[2]
SOURCE = '''
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal
import torch
from torch import Tensor, nn
from jaxtyping import Float, Int

calls = []

def scale(x: Float[Tensor, "*a d"], weight: Float[Tensor, " d"], *, factor: float = 1.0) -> Float[Tensor, "*a d"]:
    """Scale."""
    calls.append("scale")
    return x * weight * factor

def first(tensors: list[Float[Tensor, " d"]], default: Float[Tensor, " d"] | None = None) -> Float[Tensor, " d"]:
    return tensors[0]

def nonzero(x: Float[Tensor, " n"], width: int) -> Float[Tensor, " {width}"]:
    return x[x != 0]

def count(x: Float[Tensor, " n"]) -> int:
    return "many" if x.sum() > 0 else 0

def variadic(*xs: Float[Tensor, " n"], **options: int) -> int:
    return len(xs) + len(options)

def apply(x: Float[Tensor, " n"], function=scale) -> Float[Tensor, " n"]:
    return function(x, x)

def by_name(x: Float[Tensor, " n"], *, function=scale) -> Float[Tensor, " n"]:
    return function(x, x)

def named(x: Float[Tensor, " n"]) -> dict[str, Float[Tensor, " n"]]:
    return {"x": x} if x.sum() > 0 else [x]

@torch.no_grad()
def decorated(x: Float[Tensor, " n"], scale: float = 2.0, *, bias: float = 0.0) -> Float[Tensor, " n"]:
    return x * scale + bias

@contextmanager
def scope(x: Float[Tensor, " n"]) -> Iterator[None]:
    yield

anonymous = lambda x: x

def literal(x: Float[Tensor, " n"], mode: Literal["{n}", "other"] = "other") -> Float[Tensor, " n"]:
    return x

def total(*tensors: Float[Tensor, " n"], extra: list[Float[Tensor, " n"]]) -> Float[Tensor, ""]:
    return sum(t.sum() for t in (*tensors, *extra))

async def later(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    return x

def _private(x: Float[Tensor, " n"]) -> None:
    pass

class Layer(nn.Module):
    def __init__(self, width: int, rate: float = 1.0) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Float[Tensor, "*batch {self.width}"], times: int = 1) -> Float[Tensor, "*batch {self.width}"]:
        return x * times
'''


@pytest.fixture
def module(request):
    """A module of a user's, checked."""
    made = types.ModuleType("users_module")
    sys.modules["users_module"] = made
    exec(getattr(request, "param", SOURCE), made.__dict__)
    typecheck(made)
    yield made
    del sys.modules["users_module"]


@pytest.mark.parametrize("module", [SOURCE, "from __future__ import annotations\n" + SOURCE], indirect=True)
def test_typecheck_raises_on_every_mismatch(module):
    x, w = torch.ones(2, 3), torch.ones(3)
    wrong = [
        lambda: module.scale(x, torch.ones(4)),
        lambda: module.scale(x.long(), w),
        lambda: module.scale(x, w, factor="2"),
        lambda: module.scale([1.0], w),
        lambda: module.scale(None, w),
        lambda: module.scale(x.to(torch.complex64), w),
        lambda: module.first([torch.ones(2, 2)]),
        lambda: module.first([torch.ones(2)], torch.ones(3)),
        lambda: module.count(torch.ones(3)),
        lambda: module.variadic(torch.ones(3), torch.ones(4)),
        lambda: module.variadic(torch.ones(3), option="no"),
        lambda: module.decorated(torch.ones(2, 2)),
        lambda: module.decorated(torch.ones(2), "2"),
        lambda: module.decorated(torch.ones(2), bias="2"),
        lambda: module.literal(torch.ones(2, 2)),
        lambda: module.literal(torch.ones(2), "third"),
        lambda: module.Layer("3"),
        lambda: module.Layer(3, rate="fast"),
        lambda: module.Layer(3)(torch.ones(2, 4)),
        lambda: module.Layer(3)(torch.ones(2, 3), times=1.5),
    ]
    for turn in range(2):  # the second time around, valid signatures have been seen
        for number, call in enumerate(wrong):
            with pytest.raises(TypeCheckError):
                assert call() is None, f"call {number} passed in turn {turn}"
        assert torch.equal(module.scale(x, w, factor=2), 2 * x)  # an int is a float: PEP 484's numeric tower
        assert module.scale(x[0], w).shape == (3,)
        assert module.first([w, w], None) is w
        assert module.count(-w) == 0
        assert module.variadic(w, w, option=1) == 3
        assert module.Layer(3)(x, times=2).shape == (2, 3)
        assert torch.equal(module.decorated(w, bias=1), 3 * w)
        assert module.literal(w, "{n}") is w


def test_typecheck_message_names_function_argument_shape_and_expected_size(module):
    with pytest.raises(TypeCheckError) as caught:
        module.Layer(3)(torch.ones(2, 4))
    for part in ("users_module.Layer.forward", "parameter 'x'", "f32[2,4]", "self.width=3"):
        assert part in str(caught.value)


def test_typecheck_tells_missing_arguments_as_python_does(module):
    with pytest.raises(TypeError, match="weight"):
        module.scale(torch.ones(3))
    with pytest.raises(TypeError, match=r"unexpected|other"):
        module.scale(torch.ones(3), torch.ones(3), other=1)


def test_typecheck_reads_what_the_braces_read(module):
    layer = module.Layer(3)
    layer(torch.ones(2, 3))
    layer.width = 4
    with pytest.raises(TypeCheckError, match=r"self\.width=4"):
        layer(torch.ones(2, 3))
    with pytest.raises(TypeCheckError):
        module.Layer(5)(torch.ones(2, 4))
    layer(torch.ones(2, 4))


def test_typecheck_looks_at_each_result(module):
    assert module.nonzero(torch.tensor([1.0, 0.0, 2.0]), 2).shape == (2,)
    with pytest.raises(TypeCheckError, match="width=2"):
        module.nonzero(torch.tensor([1.0, 3.0, 2.0]), 2)
    assert module.nonzero(torch.tensor([1.0, 3.0, 2.0]), 3).shape == (3,)
    assert module.count(torch.tensor([-1.0])) == 0
    with pytest.raises(TypeCheckError):
        module.count(torch.tensor([1.0]))


def test_typecheck_always_looks_at_what_it_cannot_sign(module):
    for _ in range(2):
        assert list(module.named(torch.ones(2))) == ["x"]
        with pytest.raises(TypeCheckError):
            module.named(-torch.ones(2))
    assert module.apply(torch.ones(3), function=lambda x, y: x + y).tolist() == [2, 2, 2]
    with pytest.raises(TypeCheckError):
        module.apply(torch.ones(3), function=lambda x, y: x[:2])


def test_typecheck_tells_apart_what_compares_equal(module):
    layer, x = module.Layer(3), torch.ones(2, 3)
    layer(x, 1)
    with pytest.raises(TypeCheckError):
        layer(x, 1.0)
    layer(x, times=1)
    with pytest.raises(TypeCheckError):
        layer(x, times=1.0)


def test_typecheck_tells_apart_tensor_subclasses_and_containers(module):
    class Named(torch.Tensor):
        pass

    w = torch.ones(3)
    assert module.first([w]) is w
    assert type(module.first([w.as_subclass(Named)])) is Named
    assert type(module.first([torch.nn.Parameter(w)])) is torch.nn.Parameter
    with pytest.raises(TypeCheckError):
        module.first((w,))
    with pytest.raises(TypeCheckError):
        module.first([w.int()])


def test_typecheck_calls_the_function_once(module):
    for _ in range(3):
        module.scale(torch.ones(3), torch.ones(3))
    assert module.calls == ["scale"] * 3


def test_typecheck_checks_a_signature_once(module, monkeypatch):
    layer, x = module.Layer(3), torch.ones(2, 3)
    layer(x)
    module.decorated(x[0], bias=1)
    module.apply(x[0], torch.add)
    tinyblock.feed_forward(torch.ones(2, 3), torch.ones(4, 3), torch.ones(3, 4), torch.relu)
    monkeypatch.setattr("jaxtyping._decorator.push_shape_memo", lambda *_: pytest.fail("checked again"))
    module.decorated(x[0], bias=1)
    module.apply(x[0], torch.add)
    tinyblock.feed_forward(torch.ones(2, 3), torch.ones(4, 3), torch.ones(3, 4), torch.relu)
    layer(torch.zeros(2, 3))
    module.Layer.forward(layer, x)
    monkeypatch.undo()
    with pytest.raises(TypeCheckError):
        layer(torch.ones(2, 5))


def test_typecheck_forgets_signatures_beyond_its_bound(module, monkeypatch):
    monkeypatch.setattr(checks, "_MAX_SIGNATURES", 4)
    layer = module.Layer(3)
    cells = dict(zip(layer.forward.__code__.co_freevars, layer.forward.__func__.__closure__, strict=True))
    sizes = set()
    for length in range(12):
        layer(torch.ones(length, 3))
        sizes.add(cells["count"].cell_contents())
    assert sizes == {1, 2, 3, 4}


def test_typecheck_keeps_names_defaults_and_pickles(module):
    assert module.scale.__name__ == "scale"
    assert module.scale.__doc__ == "Scale."
    assert module.apply.__wrapped__.__defaults__ == (module.scale,)
    assert module.by_name.__wrapped__.__kwdefaults__ == {"function": module.scale}
    assert pickle.loads(pickle.dumps(module.scale)) is module.scale
    with pytest.raises(TypeCheckError):
        module.apply(torch.ones(2, 2))
    assert module.by_name(torch.ones(2)).shape == (2,)


def test_typecheck_twice_changes_nothing(module):
    before = module.scale, module.Layer.forward, module.Layer.__init__
    typecheck(module)
    assert (module.scale, module.Layer.forward, module.Layer.__init__) == before


def test_typecheck_never_trusts_a_list(module):
    """One item of a list is looked at, drawn at random: a call that passed once may not be remembered."""
    outcomes = set()
    for _ in range(200):
        try:
            module.total(extra=[torch.ones(2), torch.ones(2, 2)])
            outcomes.add("passed")
        except TypeCheckError:
            outcomes.add("raised")
    assert "raised" in outcomes


def test_typecheck_leaves_private_foreign_and_asynchronous_functions(module):
    with module.scope("anything"):
        assert module.anonymous(1) == 1
    assert module._private(1) is None
    assert module.nn is torch.nn
    assert asyncio.run(module.later("anything")) == "anything"


def test_typecheck_with_symbolic_sizes(module):
    from torch.fx.experimental.proxy_tensor import make_fx

    traced = make_fx(module.Layer(3), tracing_mode="symbolic")(torch.ones(2, 3))
    assert torch.equal(traced(torch.ones(5, 3)), torch.ones(5, 3))
    with pytest.raises(TypeCheckError):
        make_fx(module.Layer(3), tracing_mode="symbolic")(torch.ones(2, 4))


def test_typecheck_wraps_each_function_in_code_of_its_own(module):
    names = [name for name in vars(module) if hasattr(getattr(module, name), "__typechecked__")]
    assert len({id(getattr(module, name).__code__) for name in names}) == len(names) >= 6
    assert module.scale.__code__.co_name == "scale"


MANY = "\n".join(
    ["from torch import Tensor", "from jaxtyping import Float"]
    + [f'def f{n}(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]: return x + {n}' for n in range(12)]
)


@pytest.mark.parametrize("module", [MANY], indirect=True)
def test_compile_does_not_count_one_function_against_another(module):
    for number in range(12):  # dynamo recompiles one code object at most eight times
        function = torch.compile(getattr(module, f"f{number}"), fullgraph=True, backend="eager")
        assert torch.equal(function(torch.ones(3)), torch.ones(3) + number)
    assert not torch._dynamo.utils.counters["graph_break"]


def test_compiled_calls_do_not_depend_on_what_was_seen(module):
    layer = module.Layer(3)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for length in (2, 3, 4, 5, 6):
        compiled(torch.ones(length, 3))
        layer(torch.ones(length, 3))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


WIDTHS = {
    "RMSNorm": lambda: tinyblock.RMSNorm(8),
    "SwiGLU": lambda: tinyblock.SwiGLU(8),
    "FeedForward": lambda: tinyblock.FeedForward(8),
    "RotaryPositionalEmbedding": lambda: tinyblock.RotaryPositionalEmbedding(10.0, 8, 9),
    "CausalMultiHeadSelfAttention": lambda: tinyblock.CausalMultiHeadSelfAttention(8, 2),
    "Block": lambda: tinyblock.Block(8, 2),
    "Transformer": lambda: tinyblock.Transformer(1, 8, 2, max_seq_len=9),
}


@pytest.mark.parametrize("name", WIDTHS)
def test_every_module_names_a_wrong_width(name):
    module = WIDTHS[name]()
    for bad in (
        torch.ones(2, 3, 7),
        torch.ones(2, 3, 8, dtype=torch.int64),
        torch.ones(2, 3, 8, dtype=torch.complex64),
    ):
        with pytest.raises(TypeCheckError) as caught:
            module(bad)
        for part in (f"{name}.forward", "parameter 'x'", f"[2,3,{bad.shape[-1]}]", "=8"):
            assert part in str(caught.value)
    assert module(torch.ones(2, 3, 8)).shape == (2, 3, 8)


@pytest.mark.parametrize("name", ["RotaryPositionalEmbedding", "CausalMultiHeadSelfAttention", "Block", "Transformer"])
def test_every_module_with_a_sequence_wants_its_axis(name):
    with pytest.raises(TypeCheckError, match="parameter 'x'"):
        WIDTHS[name]()(torch.ones(8))


@pytest.mark.parametrize("name", ["RotaryPositionalEmbedding", "CausalMultiHeadSelfAttention", "Block", "Transformer"])
@pytest.mark.parametrize(
    "positions",
    [
        torch.arange(3.0),
        torch.arange(4),
        torch.zeros(3, 3, dtype=torch.long),
        torch.tensor(1),
        torch.ones(3) > 0,
        [0, 1, 2],
    ],
    ids=["float", "too many", "wrong batch", "no axis", "bool", "list"],
)
def test_every_module_rejects_misshaped_positions(name, positions):
    with pytest.raises(TypeCheckError, match="parameter 'token_positions'"):
        WIDTHS[name]()(torch.ones(2, 3, 8), positions)


@pytest.mark.parametrize("name", ["CausalMultiHeadSelfAttention", "Block", "Transformer"])
@pytest.mark.parametrize(
    "mask",
    [torch.ones(3, 3), torch.ones(3, 4) > 0, torch.ones(2, 3) > 0, torch.ones(3, 3, 3) > 0, torch.ones(3) > 0],
    ids=["float", "too many keys", "too few queries", "wrong batch", "no query axis"],
)
def test_every_module_rejects_a_misshaped_mask(name, mask):
    with pytest.raises(TypeCheckError, match="parameter 'mask'"):
        WIDTHS[name]()(torch.ones(2, 3, 8), None, mask)


def test_every_equation_rejects_a_misshaped_weight():
    x, good, bad = torch.ones(2, 3, 8), torch.ones(5, 8), torch.ones(5, 7)
    calls = {
        "parameter 'weight'": lambda: tinyblock.rms_norm(x, torch.ones(7)),
        "glu.*parameter 'w1'": lambda: tinyblock.glu(x, bad, good),
        "swiglu.*parameter 'w2'": lambda: tinyblock.swiglu(x, good, good, good),
        "swiglu.*parameter 'w3'": lambda: tinyblock.swiglu(x, good, good.T, bad),
        "feed_forward.*parameter 'w2'": lambda: tinyblock.feed_forward(x, good, good),
        "apply_rope.*parameter 'angles'": lambda: tinyblock.apply_rope(x, torch.ones(3, 8)),
        "parameter 'k'": lambda: tinyblock.scaled_dot_product_attention(x, x[..., :7], x),
        "parameter 'v'": lambda: tinyblock.scaled_dot_product_attention(x, x, x[:, :2]),
        "parameter 'mask'": lambda: tinyblock.scaled_dot_product_attention(x, x, x, torch.ones(3, 2) > 0),
    }
    for named, call in calls.items():
        with pytest.raises(TypeCheckError, match=f"(?s){named}"):
            call()


@pytest.mark.parametrize("size", [8.0, "8", None, 8.5, float("nan")])
def test_every_module_rejects_sizes_of_the_wrong_type(size):
    rope = tinyblock.RotaryPositionalEmbedding
    for build in (
        lambda: tinyblock.RMSNorm(size),
        lambda: tinyblock.SwiGLU(size),
        lambda: tinyblock.FeedForward(size),
        lambda: rope(10.0, size, 9),
        lambda: rope(10.0, 8, size),
        lambda: tinyblock.CausalMultiHeadSelfAttention(size, 2),
        lambda: tinyblock.Block(8, size),
        lambda: tinyblock.Transformer(size, 8, 2, max_seq_len=9),
        lambda: tinyblock.Transformer(1, 8, 2, max_seq_len=size),
    ):
        with pytest.raises(TypeCheckError):
            build()
    for make, arguments in ((tinyblock.RMSNorm, (8, "1")), (rope, ("10", 8, 9)), (rope, (None, 8, 9))):
        with pytest.raises(TypeCheckError):
            make(*arguments)


def python(code, **environment):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


def test_jaxtyping_disable_leaves_everything_unwrapped_and_needs_no_beartype():
    code = (
        refuse("beartype")
        + """
import tinyblock
assert not hasattr(tinyblock.rms_norm, "__typechecked__")
assert not hasattr(tinyblock.Block.forward, "__typechecked__")
assert not hasattr(tinyblock.Block.__init__, "__typechecked__")
"""
    )
    done = python(code, JAXTYPING_DISABLE="1")
    assert done.returncode == 0, done.stderr
    assert "beartype is not to be had here" in python(code, JAXTYPING_DISABLE="0").stderr
