"""typecheck: right and wrong calls, what a check costs, and where it is off."""

import inspect
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from jaxtyping import Float, TypeCheckError
from torch import Tensor

import tinyblock
from tinyblock.typecheck import typecheck

PACKAGE = Path(tinyblock.__path__[0])
PAGE = PACKAGE.parent / "docs" / "shape_checks.md"
USERS_MODULE = Path(__file__).with_name("users_module.py")
SOURCE = USERS_MODULE.read_text()
POSTPONED = "from __future__ import annotations\n"


@pytest.fixture
def module(request):
    """A user's module, checked."""
    module = types.ModuleType("users_module")
    exec(getattr(request, "param", SOURCE), vars(module))
    typecheck(module)
    return module


@pytest.mark.parametrize(
    "module", [SOURCE, POSTPONED + SOURCE], ids=["plain", "postponed"], indirect=True
)
def test_typecheck_raises_on_every_mismatch_also_after_valid_calls(module):
    x = torch.ones(2, 3)
    w = torch.ones(3)
    layer = module.Layer(3)
    right = [
        lambda: module.scale(x, w, factor=2),  # an int is a float
        lambda: module.scale(x, w),
        lambda: module.scale(x[0], w),
        lambda: module.first([w, w]),
        lambda: module.nonzero(torch.tensor([1.0, 0.0, 2.0])),
        lambda: module.nonzero(w, 3),
        lambda: module.count(-w),
        lambda: module.count(-w, w, option=1),
        lambda: module.named(w),
        lambda: module.named(w, "{n}"),
        lambda: module.halved(w, torch.float32),
        lambda: module.trained(torch.nn.Parameter(w)),
        lambda: module.decorated(w, bias=1),
        lambda: module.Layer(3, 1, tinyblock.RMSNorm),
        lambda: layer(x, 1),
        lambda: layer(x),
    ]
    wrong = [
        lambda: module.scale(x, torch.ones(4)),
        lambda: module.scale(x.long(), w),
        lambda: module.scale(x, w, factor="2"),
        lambda: module.scale(x, w, factor=None),
        lambda: module.halved(w, torch.bfloat16),
        lambda: module.trained(w),
        lambda: module.scale(x.numpy(), w),
        lambda: module.first([w.int()]),  # no list is remembered
        lambda: module.first((w,)),
        lambda: module.nonzero(w),
        lambda: module.count(w),
        lambda: module.count(-w, torch.ones(4)),
        lambda: module.count(-w, option="no"),
        lambda: module.named(-w),
        lambda: module.named(w, "third"),
        lambda: module.decorated(x),
        lambda: module.Layer(3, rate="fast"),
        lambda: module.Layer(3, kind=int),
        lambda: layer(torch.ones(2, 4)),
        lambda: layer(x, None),
        lambda: layer(x, 1.0),  # which equals 1
    ]
    for _ in range(2):
        for call in right:
            call()
        for number, call in enumerate(wrong):
            with pytest.raises(TypeCheckError):
                assert call() is None, f"call {number} passed"


def test_typecheck_message_names_function_argument_shape_and_expected_size(module):
    layer = module.Layer(3)
    for width in (3, 4):  # what is in braces is read at each call
        layer.width = width
        layer(torch.ones(2, width))
        with pytest.raises(TypeCheckError) as caught:
            layer(torch.ones(2, 7 - width))
        message = str(caught.value)
        assert "users_module.Layer.forward" in message
        assert "parameter 'x'" in message
        assert f"f32[2,{7 - width}]" in message
        assert f"self.width={width}" in message


def test_typecheck_raises_pythons_error_for_arguments_that_do_not_bind(module):
    with pytest.raises(TypeError, match=r"^Layer\.forward\(\) missing .* 'x'$"):
        module.Layer(3)()


def test_typecheck_wraps_once_and_warns_where_it_finds_nothing(module):
    before = module.scale
    typecheck(module)
    assert module.scale is before
    package = types.ModuleType("users_package")
    vars(package)["Layer"] = module.Layer
    with pytest.warns(UserWarning, match="nothing to check in users_package: pass its"):
        typecheck(package)


class Node:
    """A class that names itself, checked as a whole."""

    size = 2

    def __init__(self, weight: Float[Tensor, " {self.size}"]) -> None:
        self.weight = weight

    def join(self, other: "Node") -> Float[Tensor, " both"]:
        return torch.cat((self.weight, other.weight))

    def _private(self, x: int) -> Any:
        return x


def test_typecheck_decorates_functions_and_classes():
    @typecheck
    def scores(
        q: Float[Tensor, "*b query d"], k: Float[Tensor, "*b key d"]
    ) -> Float[Tensor, "*b query key"]:
        return q @ k.mT

    q = torch.ones(2, 3, 8)
    assert scores(q, q).shape == (2, 3, 3)
    assert typecheck(scores) is scores
    for _ in range(2):
        with pytest.raises(TypeCheckError, match="'k'"):
            scores(q, q[..., :7])
    assert typecheck(Node) is Node
    node = Node(torch.ones(2))
    assert node.join(node).shape == (4,)
    text: Any = "not checked"
    assert node._private(text) == text
    wrong_calls: Any = (lambda: Node(torch.ones(3)), lambda: node.join(text))
    for wrong in wrong_calls:
        with pytest.raises(TypeCheckError):
            wrong()


@pytest.mark.parametrize("mistake", ["layers", len, staticmethod(len), lambda x: x])
def test_typecheck_says_what_to_pass(mistake):
    with pytest.raises(TypeError, match=r"target must be a .*, got <?"):
        typecheck(mistake)


def test_typecheck_leaves_private_functions_generators_and_coroutines(module):
    module._private(1)
    module.later(1).close()
    with module.scope(1):
        pass


def test_typecheck_checks_the_names_in_all_and_no_others():
    module: Any = types.ModuleType("users_module")
    exec(SOURCE + '__all__ = ["_private"]', vars(module))
    typecheck(module)
    module.named(torch.ones(1), 3)
    with pytest.raises(TypeCheckError):
        module._private(1)


def test_typecheck_remembers_a_bounded_number_of_signatures(module):
    for length in (0, 0, *range(1, 1100), 0):
        module.watched(torch.ones(length))
    # The first 0 and the last one are checked, and the second one is not.
    assert module.looked_at.count(0) == 2 * module.looked_at.count(1) > 0


def test_compiled_calls_run_unchecked_in_one_graph_each(module):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for number in range(9):  # dynamo recompiles one code object at most eight times
        exec(f"def add(x: Tensor): return x + {number}", vars(module))
        typecheck(module)
        add = torch.compile(module.add, fullgraph=True, backend=count)
        for rows in (2, 3):
            module.add(torch.ones(rows))  # a new signature causes no new graph
            assert torch.equal(add(torch.ones(3)), torch.full((3,), number + 1.0))
    assert len(graphs) == 9


def test_function_raises_its_own_error_with_any_keyword(module):
    with pytest.raises(RuntimeError, match="of the function") as caught:
        module.fail(torch.ones(3), layer=1, error=2)
    assert not hasattr(caught.value, "__notes__")


def test_compiled_function_raises_its_own_error(module):
    # The call that raises runs again in eager mode, while dynamo still traces.
    with pytest.raises(ValueError, match="3 is too long"):
        torch.compile(module.limited, backend="eager")(torch.ones(3))


X = torch.ones(2, 3, 8)
LAYERS: list[Any] = [
    tinyblock.RMSNorm(8),
    tinyblock.SwiGLU(8),
    tinyblock.FeedForward(8),
    tinyblock.RotaryPositionalEmbedding(10.0, 8, 9),
    tinyblock.CausalMultiHeadSelfAttention(8, 2),
    tinyblock.Block(8, 2),
    tinyblock.Transformer(1, 8, 2, max_seq_len=9),
]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_every_layer_names_the_argument_that_does_not_fit(layer):
    name = type(layer).__name__
    for x in (X[..., :7], X.long()):
        with pytest.raises(TypeCheckError, match=rf"(?s){name}\.forward.*'x'.*=8"):
            layer(x)
    if LAYERS.index(layer) > 2:
        for positions in (torch.arange(4), torch.zeros(3, 3).long(), [0, 1, 2]):
            with pytest.raises(TypeCheckError, match="'token_positions'"):
                layer(X, positions)


def test_every_equation_is_checked():
    for name in tinyblock.__all__:
        equation = getattr(tinyblock, name)
        if name.islower() and name not in ("parallelize", "typecheck"):
            with pytest.raises(TypeCheckError, match=r"parameter '[xq]'"):
                equation(*[3] * len(inspect.signature(equation).parameters))


def test_errors_of_dtypes_name_the_innermost_layer():
    with pytest.raises(RuntimeError, match="dtype") as caught:
        LAYERS[-1](X.double())
    [note] = caught.value.__notes__
    expected = (
        "CausalMultiHeadSelfAttention must .*torch.float32.*, got .*torch.float64"
    )
    assert re.search(expected, note)


def test_typecheck_works_together_with_the_hook_of_jaxtyping(tmp_path, monkeypatch):
    """The option --jaxtyping-packages of pytest installs the same hook."""
    (tmp_path / "layers").mkdir()
    for name in ("ffn.py", "typecheck.py"):
        shutil.copy(PACKAGE / name, tmp_path / "layers")
    (tmp_path / "layers" / "__init__.py").write_text(
        "from . import ffn, typecheck\ntypecheck.typecheck(ffn)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with jaxtyping.install_import_hook("layers", "beartype.beartype"):
        from layers import ffn  # type: ignore[import-not-found]
    swiglu = ffn.SwiGLU(8)
    for _ in range(2):
        assert swiglu(X).shape == X.shape
        with pytest.raises(TypeCheckError, match="d_model=8"):
            swiglu(X[..., :7])


def errors_of(code, *options, folder=None, **environment):
    """Run code in another process, and return the warnings and errors that it prints."""
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        env=os.environ | environment,
        cwd=folder,
        capture_output=True,
        text=True,
    ).stderr


def test_lines_of_the_page_check_and_compile_with_the_copied_file_alone(tmp_path):
    """A function, a class and a module, in a project with nothing but typecheck.py."""
    shutil.copy(PACKAGE / "typecheck.py", tmp_path)
    [lines] = re.findall(r"```py\n(from typecheck.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "lines.py").write_text(lines)
    shutil.copy(USERS_MODULE, tmp_path / "my_module.py")
    code = """
import torch, lines, my_module
from jaxtyping import TypeCheckError
x = torch.ones(2, 3, 8)
scale = lines.Scale(8)
right = [lambda: lines.scores(x, x), lambda: scale(x), lambda: my_module.limited(x[0, 0, :2])]
wrong = [lambda: lines.scores(x, x[..., :7]), lambda: scale(x[..., :7]), lambda: my_module.limited(x)]
for call in right:
    expected = call()
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    assert torch.equal(compiled(), expected)
for call in wrong:
    try:
        call()
    except TypeCheckError:
        continue
    raise SystemExit("not checked")
"""
    assert errors_of(code, "-Werror", folder=tmp_path) == ""


def test_python_o_causes_one_warning():
    errors = errors_of("import tinyblock", "-O")
    assert errors.count("UserWarning: python -O turns all shape checks off") == 1


def test_jaxtyping_disable_needs_no_beartype():
    code = "import sys; sys.modules['beartype'] = None; import tinyblock, torch; "
    code += "tinyblock.silu(torch.ones(2)); assert tinyblock.typecheck(len) is len"
    assert errors_of(code, "-Werror", JAXTYPING_DISABLE="1") == ""
