import asyncio
import gc
import itertools
import os
import pickle
import subprocess
import sys
import types
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import nn

import tinyblock
from tinyblock.typecheck import typecheck

SOURCE = '''
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Literal
import torch
from beartype.vale import Is
from torch import Tensor, nn
from jaxtyping import Float, Int

calls, checks = [], []

def scale(x: Float[Tensor, "*a d"], weight: Float[Tensor, " d"], *, factor: float = 1.0) -> Float[Tensor, "*a d"]:
    """Scale."""
    calls.append("scale")
    return x * weight * (factor or 1.0)

def first(tensors: list[Float[Tensor, " d"]], default: Float[Tensor, " d"] | None = None) -> Float[Tensor, " d"]:
    return tensors[0]

def watched(x: Annotated[Tensor, Is[lambda x: checks.append(tuple(x.shape)) is None]]) -> None:
    pass

def limited(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    if x.shape[0] > 2:
        raise ValueError(f"{x.shape[0]} is too long")
    return x

def nonzero(x: Float[Tensor, " n"], width: int) -> Float[Tensor, " {width}"]:
    return x[x != 0]

def count(*xs: Float[Tensor, " n"], **options: int) -> int:
    return "many" if xs[0].sum() > 0 else len(options)

def apply(x: Float[Tensor, " n"], function=scale, *, then=scale) -> Float[Tensor, " n"]:
    return then(function(x, x), x)

def named(x: Float[Tensor, " n"], name: Literal["{n}", "x"] = "x") -> dict[str, Float[Tensor, " n"]]:
    return {name: x} if x.sum() > 0 else [x]

@torch.no_grad()
def decorated(x: Float[Tensor, " n"], scale: float = 2.0, *, bias: float = 0.0) -> Float[Tensor, " n"]:
    return x * scale + bias

@contextmanager
def scope(x: Float[Tensor, " n"]) -> Iterator[None]:
    yield

anonymous = lambda x: x

async def later(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    return x

def _private(x: Float[Tensor, " n"]) -> None:
    pass

class Layer(nn.Module):
    def __init__(self, width: int, rate: float = 1.0) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Float[Tensor, "*batch {self.width}"], times: int = 1) -> Float[Tensor, "*batch {self.width}"]:
        return x * (times or 1)
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


@pytest.mark.parametrize(
    "module", [SOURCE, "from __future__ import annotations\n" + SOURCE], indirect=True
)
def test_typecheck_raises_on_every_mismatch_whatever_was_seen_before(module):
    x = torch.ones(2, 3)
    w = torch.ones(3)
    layer = module.Layer(3)
    four_wide = module.Layer(4)
    right = [
        # An int is a float: PEP 484's numeric tower.
        lambda: module.scale(x, w, factor=2),
        lambda: module.scale(x[0], w),
        lambda: module.first([w, w], None),
        lambda: module.nonzero(torch.tensor([1.0, 0.0, 2.0]), 2),
        lambda: module.nonzero(w, 3),
        lambda: module.count(-w),
        lambda: module.count(-w, w, option=1),
        lambda: module.named(w),
        lambda: module.named(w, "{n}"),
        lambda: module.apply(w, function=lambda x, y: x + y),
        lambda: module.decorated(w, bias=1),
        lambda: layer(x, 1),
        lambda: layer(x),
        lambda: four_wide(torch.ones(2, 4)),
    ]
    wrong = [
        lambda: module.scale(x, torch.ones(4)),
        lambda: module.scale(x.long(), w),
        lambda: module.scale(x, w, factor="2"),
        lambda: module.scale(x[0], w, factor=None),  # not the default
        lambda: module.scale([1.0], w),
        lambda: module.scale(None, w),
        lambda: module.first([torch.ones(2)], torch.ones(3)),
        lambda: module.first((w,)),
        lambda: module.first([w.int()]),
        lambda: module.nonzero(w, 2),
        lambda: module.count(w),
        lambda: module.count(-w, torch.ones(4)),
        lambda: module.count(-w, option="no"),
        lambda: module.named(-w),
        lambda: module.named(w, "third"),
        lambda: module.apply(w, then=lambda x, y: x[:2]),
        lambda: module.apply(torch.ones(2, 2)),
        lambda: module.decorated(torch.ones(2, 2)),
        lambda: module.decorated(torch.ones(2), "2"),
        lambda: module.decorated(torch.ones(2), bias="2"),
        lambda: module.Layer("3"),
        lambda: module.Layer(3, rate="fast"),
        lambda: layer(torch.ones(2, 4)),
        lambda: layer(x, None),  # not the default
        lambda: layer(x, 1.0),  # which compares equal to 1
    ]
    for _ in range(2):  # the second time around, valid signatures have been seen
        for call in right:
            call()
        for number, call in enumerate(wrong):
            with pytest.raises(TypeCheckError):
                assert call() is None, f"call {number} passed"


def test_typecheck_message_names_function_argument_shape_and_expected_size(module):
    layer = module.Layer(3)
    for width in (3, 4):  # braces are read anew at each call
        layer.width = width
        layer(torch.ones(2, width))
        with pytest.raises(TypeCheckError) as caught:
            layer(torch.ones(2, 7 - width))
        for part in (
            "users_module.Layer.forward",
            "parameter 'x'",
            f"f32[2,{7 - width}]",
            f"self.width={width}",
        ):
            assert part in str(caught.value)


def test_typecheck_raises_the_message_of_python_for_arguments_that_do_not_bind(module):
    x = torch.ones(3)
    calls = (lambda f: f(x), lambda f: f(x, x, other=1), lambda f: f(x, x, x))
    for call in calls:
        with pytest.raises(TypeError) as of_python:
            call(module.scale.__wrapped__)
        with pytest.raises(TypeError) as checked:
            call(module.scale)
        assert str(checked.value) == str(of_python.value)
    with pytest.raises(
        TypeError,
        match=r"Block\.__init__\(\) got an unexpected keyword argument 'dropout'",
    ):
        tinyblock.Block(64, 4, dropout=0.1)  # type: ignore[call-arg]


def test_typecheck_warns_about_a_module_without_anything_to_check(module):
    typecheck(module)  # a second time, without a warning
    package = types.ModuleType("users_package")
    package.Layer = module.Layer
    with pytest.warns(
        UserWarning, match=r"nothing to check in users_package: pass the modules"
    ):
        typecheck(package)


@pytest.mark.parametrize(
    ("value", "got"),
    [(tinyblock.SwiGLU(8), "SwiGLU"), (tinyblock.Block, "Block"), (3, "int")],
)
def test_typecheck_requires_a_module(value, got):
    expected = (
        f"^module must be a Python module, .* got {got}: pass the module that .*$"
    )
    with pytest.raises(TypeError, match=expected):
        typecheck(value)


def test_typecheck_checks_a_signature_once_and_calls_the_function_each_time(module):
    x = torch.ones(2, 3)
    for _ in range(2):
        module.scale(x, x[0])
    assert module.calls == ["scale"] * 2
    module.watched(x)
    checks = list(module.checks)
    module.watched(torch.zeros(2, 3))
    assert module.checks == checks != []


def test_typecheck_keeps_no_function_alive():
    def rope(x, token_positions):
        return x

    seen = weakref.ref(rope)
    tinyblock.Block(8, 2, rope=rope)
    del rope
    gc.collect()
    assert seen() is None


def test_typecheck_forgets_signatures_beyond_its_bound():
    module = types.ModuleType("users_module")
    exec(SOURCE, module.__dict__)
    typecheck(module, max_signatures=4)
    for length in (
        0,
        1,
        2,
        3,
        0,
        4,
        0,
    ):  # the fifth signature clears the four before it
        module.watched(torch.ones(length))
    assert [length for [length], _ in itertools.groupby(module.checks)] == [
        0,
        1,
        2,
        3,
        4,
        0,
    ]


def test_typecheck_keeps_names_defaults_and_pickles_and_wraps_once(module):
    before = module.scale, module.Layer.forward, module.Layer.__init__
    typecheck(module)
    assert (module.scale, module.Layer.forward, module.Layer.__init__) == before
    assert module.scale.__name__ == module.scale.__code__.co_name == "scale"
    assert module.scale.__doc__ == "Scale."
    assert module.apply.__wrapped__.__defaults__ == (module.scale,)
    assert module.apply.__wrapped__.__kwdefaults__ == {"then": module.scale}
    assert pickle.loads(pickle.dumps(module.scale)) is module.scale


def test_typecheck_never_trusts_a_list(module):
    """One item of a list is looked at, drawn at random: a call that passed once may not be remembered."""
    passed = []
    for _ in range(50):
        try:
            module.first([torch.ones(2), torch.ones(2, 2)])
            passed.append(True)
        except TypeCheckError:
            passed.append(False)
    assert False in passed[passed.index(True) :]


def test_typecheck_leaves_private_foreign_and_asynchronous_functions(module):
    with module.scope("anything"):
        assert module.anonymous(1) == 1
    assert module._private(1) is None
    assert module.nn is nn
    assert asyncio.run(module.later("anything")) == "anything"


def test_compiled_calls_run_unchecked_and_raise_the_error_of_the_function(module):
    for number in range(9):  # dynamo recompiles one code object at most eight times
        exec(
            f'def f{number}(x: Float[Tensor, " n"], plus: int = 0): return x + {number} + plus',
            module.__dict__,
        )
    typecheck(module)
    for number in range(9):
        function = torch.compile(
            getattr(module, f"f{number}"), fullgraph=True, backend="eager"
        )
        assert torch.equal(
            function(torch.ones(3), plus=1), torch.full((3,), number + 2.0)
        )
    assert not torch._dynamo.utils.counters["graph_break"]
    with pytest.raises(
        ValueError, match="3 is too long"
    ):  # in eager mode, where dynamo would trace the checks as well
        torch.compile(module.limited, backend="eager")(torch.ones(3))


X = torch.ones(2, 3, 8)
LAYERS: dict[str, Any] = {
    "RMSNorm": tinyblock.RMSNorm,
    "SwiGLU": tinyblock.SwiGLU,
    "FeedForward": tinyblock.FeedForward,
    "RotaryPositionalEmbedding": lambda size: tinyblock.RotaryPositionalEmbedding(
        10.0, size, 9
    ),
    "CausalMultiHeadSelfAttention": lambda size: tinyblock.CausalMultiHeadSelfAttention(
        size, 2
    ),
    "Block": lambda size: tinyblock.Block(size, 2),
    "Transformer": lambda size: tinyblock.Transformer(1, size, 2, max_seq_len=9),
}
WITH_POSITIONS = list(LAYERS)[3:]
MISFIT_POSITIONS = [
    torch.arange(4),
    torch.zeros(3, 3).long(),
    torch.tensor(1),
    [0, 1, 2],
]


@pytest.mark.parametrize(
    ("names", "named", "arguments"),
    [
        (LAYERS, r"'x'.*\[2,3,7\].*=8", (X[..., :7],)),
        (LAYERS, r"'x'.*\[2,3,8\].*=8", (X.long(),)),
        (LAYERS, r"'x'.*\[2,3,8\].*=8", (X.to(torch.complex64),)),
        (WITH_POSITIONS, "'x'", (torch.ones(8),)),
        *(
            (WITH_POSITIONS, "'token_positions'", (X, positions))
            for positions in MISFIT_POSITIONS
        ),
        (["rms_norm"], "'weight'", (X, torch.ones(7))),
        (["glu"], "'w1'", (X, torch.ones(5, 7), torch.ones(5, 8))),
        (["swiglu"], "'w2'", (X, torch.ones(5, 8), torch.ones(5, 8), torch.ones(5, 8))),
        (["swiglu"], "'w3'", (X, torch.ones(5, 8), torch.ones(8, 5), torch.ones(5, 7))),
        (["feed_forward"], "'w2'", (X, torch.ones(5, 8), torch.ones(5, 8))),
        (["apply_rope"], "'angles'", (X, torch.ones(3, 8))),
        (["scaled_dot_product_attention"], "'k'", (X, X[..., :7], X)),
        (["scaled_dot_product_attention"], "'v'", (X, X, X[:, :2])),
        (["scaled_dot_product_attention"], "'mask'", (X, X, X, torch.ones(3, 2) > 0)),
    ],
)
def test_every_layer_and_equation_names_the_argument_that_does_not_fit(
    names, named, arguments
):
    for name in names:
        call = LAYERS[name](8) if name in LAYERS else getattr(tinyblock, name)
        with pytest.raises(TypeCheckError, match=f"(?s){name}.*parameter {named}"):
            call(*arguments)


@pytest.mark.parametrize("size", [8.0, None])
def test_every_layer_rejects_sizes_of_the_wrong_type(size):
    others = {
        "seq": lambda size: tinyblock.RotaryPositionalEmbedding(10.0, 8, size),
        "heads": lambda size: tinyblock.Block(8, size),
        "layers": lambda size: tinyblock.Transformer(size, 8, 2, max_seq_len=9),
    }
    for build in (LAYERS | others).values():
        with pytest.raises(TypeCheckError):
            build(size)


HEADER = """
from typing import Any
import torch
from jaxtyping import Float
from torch import Tensor, nn
"""


def checked_module(source):
    made = types.ModuleType("users_module")
    exec(HEADER + source, made.__dict__)
    typecheck(made)
    return made


@pytest.mark.parametrize("annotation", ["Any", "'Any'", "nn.Module"])
def test_typecheck_checks_x_at_each_call_when_self_is_annotated(annotation):
    made = checked_module(f"""
class Layer(nn.Module):
    def forward(self: {annotation}, x: Float[Tensor, "batch 3"]):
        return x.sum()  # a result that does not show the shape of x
""")
    layer = made.Layer()
    layer(torch.ones(2, 3))
    with pytest.raises(TypeCheckError):
        layer(torch.ones(2, 4))


@pytest.mark.parametrize("annotation", ["Any", "'Any'"])
def test_typecheck_remembers_calls_whose_other_arguments_are_annotated_as_any(
    annotation,
):
    made = checked_module(f"""
from typing import Annotated
from beartype.vale import Is

checks = []

def watched(
    x: Annotated[Tensor, Is[lambda x: checks.append(x.shape) is None]],
    mask: {annotation} = None,
) -> None:
    pass
""")
    made.watched(torch.ones(3), [])
    count = len(made.checks)
    made.watched(torch.ones(3), [1])
    assert len(made.checks) == count > 0


def test_typecheck_reads_tensors_in_braces_at_each_call():
    made = checked_module("""
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.size = torch.tensor(3)

    def forward(self, x: Float[Tensor, "batch {self.size}"]):
        return x
""")
    layer = made.Layer()
    layer(torch.ones(2, 3))
    layer.size.fill_(4)
    layer(torch.ones(2, 4))
    with pytest.raises(TypeCheckError):
        layer(torch.ones(2, 3))


def test_typecheck_message_shows_the_annotation_of_the_result(module):
    size = {"width": 2}
    expected = {
        lambda: module.scale(torch.ones(3), torch.ones(4)): "Float[Tensor, '*a d']",
        lambda: module.nonzero(torch.ones(3), **size): "Float[Tensor, 'width=2']",
        lambda: module.watched(3): "None",
    }
    for call, annotation in expected.items():
        with pytest.raises(TypeCheckError) as caught:
            call()
        assert f") -> {annotation}.\n" in str(caught.value)
        assert "-> Any" not in str(caught.value)


# A layer, and the layer that its error names.
FLOAT32_LAYERS = {
    "SwiGLU": "SwiGLU",
    "FeedForward": "FeedForward",
    "CausalMultiHeadSelfAttention": "CausalMultiHeadSelfAttention",
    "Block": "CausalMultiHeadSelfAttention",
    "Transformer": "CausalMultiHeadSelfAttention",
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("name", "named"), FLOAT32_LAYERS.items())
def test_layers_name_themselves_and_the_dtypes_that_differ(name, named, dtype):
    layer = LAYERS[name](8)
    with pytest.raises(RuntimeError) as caught:
        layer(x=X.to(dtype))
    assert str(caught.value) == (
        f"{named}: x is {dtype}, but the weights are torch.float32: "
        f"convert one, by x.to(torch.float32) or layer.to({dtype})"
    )
    assert "same dtype" in str(caught.value.__cause__)
    assert layer.to(dtype)(X.to(dtype)).dtype == dtype


RAISES = """
class Layer(nn.Module):
    def __init__(self, error: Any = None) -> None:
        super().__init__()
        self.error = error
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Float[Tensor, "batch 3"]) -> Float[Tensor, "batch 3"]:
        if self.error:
            raise self.error
        return self.linear(x)
"""


def test_typecheck_leaves_other_runtime_errors_as_they_are():
    made = checked_module(RAISES)
    x = torch.ones(2, 3, dtype=torch.float64)
    same = torch.ones(2, 3)
    explained = RuntimeError("of these dtypes")
    explained.__cause__ = ValueError()  # as that of an inner layer has
    calls = [
        (explained, x),
        (RuntimeError("the disk is full"), x),
        (RuntimeError("of these dtypes"), same),
        (torch.OutOfMemoryError("no memory for this dtype"), x),
    ]
    for error, argument in calls:
        with pytest.raises(RuntimeError) as caught:
            made.Layer(error)(argument)
        assert caught.value is error


def test_typecheck_leaves_dtype_errors_of_mixed_layers_and_under_autocast():
    made = checked_module(RAISES)
    x = torch.ones(2, 3, dtype=torch.float64)
    mixed = made.Layer()
    mixed.half = nn.Linear(3, 3, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="same dtype"):
        mixed(x)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(RuntimeError, match="same dtype"),
    ):
        made.Layer()(x)


def in_another_process(arguments, folder, **variables):
    """Run python with these arguments in a folder; return exit code, output and errors."""
    root = Path(tinyblock.__path__[0]).parent
    variables = {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def layers(tmp_path):
    """The folder of a project whose package `layers` has copies that it checks."""
    package = tmp_path / "layers"
    package.mkdir()
    for name in ("rmsnorm", "ffn", "typecheck"):
        source = Path(tinyblock.__path__[0]) / f"{name}.py"
        (package / f"{name}.py").write_text(source.read_text())
    (package / "__init__.py").write_text(
        "from . import ffn, rmsnorm\n"
        "from .typecheck import typecheck\n"
        "for layer in (ffn, rmsnorm):\n"
        "    typecheck(layer)\n"
    )
    return tmp_path


def test_python_o_causes_one_warning_for_the_package_and_one_for_copies(layers):
    (layers / "main.py").write_text("import torch\nimport tinyblock\nimport layers\n")
    ended = in_another_process(["-O", "-W", "always", "main.py"], layers)
    assert ended.returncode == 0, ended.stderr
    warned = [line for line in ended.stderr.splitlines() if "-O turns" in line]
    of_package, of_copies = warned
    assert of_package.startswith(f"{layers / 'main.py'}:2: UserWarning: python -O")
    assert of_copies.startswith(f"{layers / 'layers' / '__init__.py'}:4: UserWarning")


USERS_TESTS = """
import pickle
import pytest
import torch
from jaxtyping import TypeCheckError
from layers import ffn, rmsnorm

x = torch.ones(2, 3, 8)
swiglu, norm, feed_forward = ffn.SwiGLU(8), rmsnorm.RMSNorm(8), ffn.FeedForward(8)

@pytest.mark.parametrize("layer", [swiglu, norm, feed_forward])
def test_layer(layer):
    for _ in range(2):
        assert layer(x).shape == x.shape
        with pytest.raises(TypeCheckError, match="d_model=8"):
            layer(x[..., :7])
    with pytest.raises(TypeCheckError):
        type(layer)("8")
    pickle.loads(pickle.dumps(layer))

def test_function():
    assert rmsnorm.rms_norm(x, x[0, 0]).shape == x.shape
    with pytest.raises(TypeCheckError, match="'weight'"):
        rmsnorm.rms_norm(x, x[0, 0, :7])
"""


def test_typecheck_works_together_with_the_pytest_hook_of_jaxtyping(layers):
    (layers / "test_layers.py").write_text(USERS_TESTS)
    hook = "--jaxtyping-packages=layers,beartype.beartype"
    options = ["-q", "-p", "no:cacheprovider", "-W", "error", hook]
    ended = in_another_process(["-m", "pytest", *options, "test_layers.py"], layers)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "4 passed" in ended.stdout


def test_jaxtyping_disable_leaves_everything_unwrapped_and_needs_no_beartype(tmp_path):
    code = """
import sys
sys.modules["beartype"] = None  # cannot be imported
from tinyblock import Block, rms_norm
if "torch.distributed.tensor" in sys.modules:
    sys.exit("tinyblock imports torch.distributed.tensor, which takes a second")
for function in (rms_norm, Block.forward, Block.__init__):
    if hasattr(function, "__wrapped__"):
        sys.exit(f"{function} is wrapped")
"""
    # -O would cause a warning, if checks were on.
    arguments = ["-O", "-W", "error", "-c", code]
    ended = in_another_process(arguments, tmp_path, JAXTYPING_DISABLE="1")
    assert ended.returncode == 0, ended.stderr
    assert hasattr(tinyblock.Block.forward, "__wrapped__")
