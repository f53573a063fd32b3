"""typecheck: right and wrong calls, what a check costs, and where it is off."""

import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from jaxtyping import TypeCheckError

import tinyblock
from tinyblock.typecheck import typecheck

PACKAGE = Path(tinyblock.__path__[0])
PAGE = PACKAGE.parent / "docs" / "shape_checks.md"
USERS_MODULE = Path(__file__).with_name("users_module.py")
SOURCE = USERS_MODULE.read_text()
POSTPONED = "from __future__ import annotations\n" + SOURCE


@pytest.fixture
def module(request):
    """A user's module, checked."""
    module = types.ModuleType("users_module")
    exec(getattr(request, "param", SOURCE), vars(module))
    typecheck(module)
    return module


@pytest.mark.parametrize(
    "module", [SOURCE, POSTPONED], ids=["plain", "postponed"], indirect=True
)
def test_typecheck_raises_on_every_mismatch_also_after_valid_calls(module):
    x = torch.ones(2, 3)
    w = torch.ones(3)
    parameter = torch.nn.Parameter(w)
    layer = module.Layer(3)
    calls = [  # a function, what it takes, and what it does not take
        (
            module.scale,
            [(x, w, 2), (x, w)],  # an int is a float
            [(x, torch.ones(4)), (x.long(), w), (x, w, "2")],
        ),
        (
            module.nonzero,
            [(torch.tensor([1.0, 0.0, 2.0]),), (w, 3, torch.float32)],
            [(w,), (w, 3, torch.bfloat16)],
        ),
        (module.count, [(w, w)], [(w, torch.ones(4))]),
        (partial(module.count, function="no"), [], [(w, w)]),
        (module.named, [(w,), (w, "{n}")], [(-w,), (w, "third")]),
        (module.decorated, [(parameter,)], [(w,)]),
        (partial(module.decorated, bias=None), [], [(parameter,)]),
        (module.Layer, [(3, tinyblock.RMSNorm)], [(3, int)]),
        (
            layer,
            [(x,), (None,)],
            [(torch.ones(2, 4),), (x, 2), (x, None), (x, 1.0)],  # 1.0 equals 1
        ),
        (layer.unchecked, [()], []),
        (module.generator, [(1,)], []),
        (module._private, [(1,)], []),
    ]
    for _ in range(2):
        for function, right, wrong in calls:
            for arguments in right:
                function(*arguments)
            for arguments in wrong:
                with pytest.raises(TypeCheckError):
                    assert function(*arguments) is None, f"{function} {arguments}"
    module.coroutine(1).close()


def test_typecheck_message_names_function_argument_shape_and_expected_size(module):
    layer = module.Layer(3)
    for width, wrong in ((3, 4), (4, 3)):  # what is in braces is read at each call
        layer.width = width
        layer(torch.ones(2, width))
        message = rf"Layer\.forward.*'x'.*f32\[2,{wrong}\].*self\.width={width}"
        with pytest.raises(TypeCheckError, match=f"(?s)users_module.{message}"):
            layer(torch.ones(2, wrong))
    with pytest.raises(TypeError, match=r"^Layer\.forward\(\) missing .* 'x'$"):
        layer()  # this is Python's own error


def test_typecheck_wraps_once_and_warns_where_it_finds_nothing(module):
    assert typecheck(module.scale) is module.scale
    package = types.ModuleType("users_package")
    vars(package)["Layer"] = module.Layer
    with pytest.warns(UserWarning, match="nothing to check in users_package: pass its"):
        typecheck(package)


@typecheck
class Node:
    """A class that names itself before it exists."""

    def __init__(self, size: int) -> None:
        self.size = size

    def join(self, other: "Node") -> int:
        return self.size + other.size


def test_typecheck_decorates_a_class_and_checks_its_public_methods():
    node = Node(2)
    text: Any = "no node"
    assert node.join(node) == 4
    for call in (Node, node.join):
        with pytest.raises(TypeCheckError):
            call(text)


@pytest.mark.parametrize("mistake", ["layers", len, staticmethod(len), lambda x: x])
def test_typecheck_says_what_to_pass(mistake):
    with pytest.raises(TypeError, match=f"target .*, got {re.escape(repr(mistake))}"):
        typecheck(mistake)


@pytest.mark.parametrize("module", [SOURCE + '__all__ = ["_private"]'], indirect=True)
def test_typecheck_checks_the_names_in_all_and_no_others(module):
    module.named(torch.ones(1), 3)
    with pytest.raises(TypeCheckError):
        module._private(1)


@pytest.fixture
def checks(monkeypatch):
    """A list that grows by one with each check of jaxtyping."""
    done = []

    def counted(function, typechecker):
        check = jaxtyping.jaxtyped(function, typechecker=typechecker)

        def counting(*args, **kwargs):
            done.append(function.__name__)
            return check(*args, **kwargs)

        return counting

    monkeypatch.setattr(sys.modules[typecheck.__module__], "jaxtyped", counted)
    return done


def test_typecheck_remembers_a_bounded_number_of_signatures(checks, module):
    values = (1, 1.0, True, "1", int, torch.float32, torch.device("cpu"), None)
    lengths = (*range(1000), *range(1100), 0)  # no length is new in the second thousand
    for length in lengths:
        module.watched(torch.ones(length), value=values[length % 8], ignored=[])
    assert len(checks) == 2 * 1101  # arguments and result


def test_functions_raise_their_own_errors(module):
    # Where a compiled call raises, it runs again in eager mode, while dynamo traces.
    for limited in (module.limited, torch.compile(module.limited, backend="eager")):
        with pytest.raises(RuntimeError, match="3 is too long") as caught:
            limited(x=torch.ones(3))
        assert not hasattr(caught.value, "__notes__")


X = torch.ones(2, 3, 8)
MODEL: Any = tinyblock.Transformer(1, 8, 1, max_seq_len=9)
LAYERS = {
    type(layer).__name__: layer
    for layer in (*MODEL.modules(), tinyblock.FeedForward(8))
}


@pytest.mark.parametrize("name", sorted(LAYERS.keys() & tinyblock.__all__))
def test_every_layer_names_the_argument_that_does_not_fit(name):
    layer = LAYERS[name]
    for x in (X[..., :7], X.long()):
        with pytest.raises(TypeCheckError, match=rf"(?s){name}\.forward.*'x'.*=8"):
            layer(x)
    if "token_positions" in inspect.signature(layer.forward).parameters:
        for positions in (torch.arange(4), torch.zeros(3, 3).long()):
            with pytest.raises(TypeCheckError, match="'token_positions'"):
                layer(X, positions)


def test_every_equation_is_checked():
    for name in tinyblock.__all__:
        equation = getattr(tinyblock, name)
        if name.islower() and name not in ("parallelize", "typecheck"):
            with pytest.raises(TypeCheckError, match=r"parameter '[xq]'"):
                equation(*[3] * len(inspect.signature(equation).parameters))


def test_typecheck_works_together_with_the_hook_of_jaxtyping(monkeypatch):
    """The option --jaxtyping-packages of pytest installs the same hook."""
    monkeypatch.syspath_prepend(USERS_MODULE.parent)
    with jaxtyping.install_import_hook("users_module", "beartype.beartype"):
        module = importlib.import_module("users_module")
    layer = typecheck(module).Layer(3)
    layer(torch.ones(2, 3))
    with pytest.raises(TypeCheckError, match="width=3"):
        layer(torch.ones(2, 4))


def errors_of(code, *options, **environment):
    """Run code in another process, and return the warnings and errors that it prints."""
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    ).stderr


def test_lines_of_the_page_check_and_compile_with_the_copied_file_alone(
    tmp_path, monkeypatch
):
    """A function, a class and a module, in a project with nothing but typecheck.py."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(PACKAGE / "typecheck.py", ".")
    [lines] = re.findall(r"```py\n(from typecheck.*?)```", PAGE.read_text(), re.DOTALL)
    Path("lines.py").write_text(lines)
    shutil.copy(USERS_MODULE, "my_module.py")
    code = """
import torch, lines, my_module
from jaxtyping import TypeCheckError
x = torch.ones(2, 3, 8)
scale = lines.Scale(8)
right = [lambda: lines.scores(x, x), lambda: scale(x), lambda: my_module.scale(x, x[0, 0])]
wrong = [lambda: lines.scores(x, x[..., :7]), lambda: scale(x[..., :7]), lambda: my_module.scale(x, x)]
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
    assert errors_of(code, "-Werror") == ""


def test_python_o_causes_one_warning():
    warning = "UserWarning: python -O turns all shape checks off"
    assert errors_of("import tinyblock", "-O").count(warning) == 1


def test_jaxtyping_disable_needs_no_beartype():
    code = "import sys; sys.modules['beartype'] = None; import tinyblock, torch; "
    code += "tinyblock.silu(torch.ones(2)); assert tinyblock.typecheck(len) is len"
    assert errors_of(code, "-Werror", JAXTYPING_DISABLE="1") == ""
