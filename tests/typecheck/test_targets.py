"""What typecheck takes, what it wraps of that, and what it leaves alone."""

import contextlib
import importlib
import inspect
import re
import runpy
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from blamed import blamed
from jaxtyping import Float, TypeCheckError
from pages import block_with
from torch import Tensor, nn

import tinyblock
from tinyblock.typecheck import typecheck

PACKAGE = Path(tinyblock.__path__[0])
FILE = PACKAGE / "typecheck.py"
PAGE = PACKAGE.parent / "docs" / "shape_checks.md"
wrong: "torch.Tensor | str" = "no tensor"  # for mypy, of any type


@pytest.fixture
def module():
    """A module with functions and a class, which are not checked yet."""

    def scale(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        return 2 * x

    def _private(x: Float[Tensor, " n"]) -> None:
        pass

    @contextlib.contextmanager
    def generator(x: Float[Tensor, " n"]) -> Iterator[None]:
        yield

    async def coroutine(x: Float[Tensor, " n"]) -> None:
        pass

    class Layer(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()

        def forward(self, x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
            return x

        def name(self, x: Float[Tensor, " n"]) -> None:
            pass

    module = types.ModuleType(__name__)
    for member in (scale, _private, generator, coroutine, Layer):
        setattr(module, member.__name__, member)
    return module


def test_of_a_module_public_functions_init_and_forward_are_checked(module):
    assert typecheck(module) is module
    for call in (module.scale, module.Layer, module.Layer(3).forward):
        with pytest.raises(TypeCheckError):
            call(wrong)


def test_of_a_module_nothing_else_is_checked(module):
    typecheck(module)
    for call in (module._private, module.generator, module.Layer(3).name):
        call(wrong)
    module.coroutine(wrong).close()


def test_names_in_all_are_checked_and_no_others(module):
    scale = module.scale
    module.__all__ = ["_private"]
    typecheck(module)
    assert module.scale is scale
    with pytest.raises(TypeCheckError):
        module._private(wrong)


def test_of_a_class_init_and_public_methods_are_checked(module):
    layer = typecheck(module.Layer)
    for call in (layer, layer(3).forward, layer(3).name):
        with pytest.raises(TypeCheckError):
            call(wrong)


def test_a_checked_function_is_not_wrapped_again(module):
    typecheck(module)
    assert typecheck(module.scale) is module.scale


def test_a_package_without_functions_of_its_own_causes_a_warning(module):
    package = types.ModuleType("users_package")
    vars(package)["Layer"] = module.Layer
    with pytest.warns(UserWarning, match="nothing to check in users_package: pass its"):
        typecheck(package)


@pytest.mark.parametrize("mistake", ["layers", len, staticmethod(len), lambda x: x])
def test_another_target_is_an_error_that_says_what_to_pass(mistake):
    with pytest.raises(TypeError, match=f"target .*, got {re.escape(repr(mistake))}"):
        typecheck(mistake)


def test_jaxtyping_disable_leaves_functions_unwrapped_and_needs_no_beartype(
    monkeypatch, module
):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    monkeypatch.setitem(sys.modules, "beartype", None)
    file = runpy.run_path(str(FILE))
    assert file["typecheck"](module.scale) is module.scale


@pytest.mark.parametrize(
    ("package", "annotation"),
    [("beartype", list[Tensor]), ("numpy", Float[Tensor, "*#n"])],
)
def test_a_missing_package_is_named_where_an_annotation_needs_it(
    package, annotation, monkeypatch, module
):
    """Without numpy, jaxtyping would reject right calls."""
    monkeypatch.setitem(sys.modules, package, None)
    typecheck(module.scale)(torch.ones(3))
    module.scale.__annotations__["x"] = annotation
    with pytest.raises(ModuleNotFoundError, match=package):
        typecheck(module.scale)


def test_what_the_hook_of_jaxtyping_checks_is_left_to_it(tmp_path, monkeypatch):
    """The option --jaxtyping-packages of pytest installs the same hook."""
    shutil.copy(PACKAGE / "rmsnorm.py", tmp_path / "hooked_rmsnorm.py")
    monkeypatch.syspath_prepend(tmp_path)
    with jaxtyping.install_import_hook("hooked_rmsnorm", "beartype.beartype"):
        module = importlib.import_module("hooked_rmsnorm")
    norm = typecheck(module).RMSNorm(3)
    norm(torch.ones(2, 3))
    with pytest.raises(TypeCheckError):
        norm(torch.ones(2, 4))


def test_the_lines_of_the_page_check_with_the_copied_file_alone(tmp_path, monkeypatch):
    shutil.copy(FILE, tmp_path)
    shutil.copy(PACKAGE / "rmsnorm.py", tmp_path / "my_module.py")
    lines = tmp_path / "lines.py"
    lines.write_text(block_with(PAGE, "from typecheck import"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "tinyblock", None)  # it cannot be imported
    for name in ("typecheck", "my_module"):
        monkeypatch.setitem(sys.modules, name, None)  # undone at the end
        del sys.modules[name]
    copied = runpy.run_path(str(lines))
    x, gain = torch.ones(2, 3, 8), torch.ones(8)
    for function, right, wrong in (
        (copied["scores"], (x, x), (x, x[..., :7])),
        (copied["Scale"](8), (x,), (x[..., :7],)),
        (copied["my_module"].rms_norm, (x, gain), (x, gain[:1])),
    ):
        torch.compile(function, fullgraph=True, backend="eager")(*right)
        with pytest.raises(TypeCheckError):
            function(*wrong)


# tinyblock's layers -----------------------------------------------------------------------

D = 8
X = torch.ones(2, 3, D)
ONE_POSITION, OTHER_BATCH = torch.arange(1), torch.zeros(3, 3).long()
ROPE = tinyblock.RotaryPositionalEmbedding(10000, D, max_seq_len=9)
TAKE_POSITIONS: dict[str, nn.Module] = {
    "Transformer": tinyblock.Transformer(1, D, 1, rope=ROPE, max_seq_len=9),
    "Block": tinyblock.Block(D, 1, rope=ROPE),
    "CausalMultiHeadSelfAttention": tinyblock.CausalMultiHeadSelfAttention(
        D, 1, rope=ROPE
    ),
    "RotaryPositionalEmbedding": ROPE,
}
LAYERS = {
    **TAKE_POSITIONS,
    "SwiGLU": tinyblock.SwiGLU(D),
    "FeedForward": tinyblock.FeedForward(D),
    "RMSNorm": tinyblock.RMSNorm(D),
}
# Without a check, torch broadcasts most of these, or raises an error of its own.
WRONG_CALLS: list[tuple[Any, tuple[Tensor, ...], str]] = [
    *((layer, (X[..., :1],), "x") for layer in LAYERS.values()),
    *((layer, (X.long(),), "x") for layer in LAYERS.values()),
    *(
        (layer, (X, ONE_POSITION), "token_positions")
        for layer in TAKE_POSITIONS.values()
    ),
    *(
        (layer, (X, OTHER_BATCH), "token_positions")
        for layer in TAKE_POSITIONS.values()
    ),
    (ROPE, (X[0], torch.arange(3).expand(2, 3)), "token_positions"),
    (tinyblock.rms_norm, (X, torch.ones(1)), "weight"),
    (tinyblock.rms_norm, (X[..., :1], torch.ones(D)), "weight"),
    (tinyblock.scaled_dot_product_attention, (X, X[:1], X), "k"),
    (tinyblock.scaled_dot_product_attention, (X, X, X[:1]), "v"),
]


def test_calls_of_all_layers_and_equations_are_checked():
    for name in {*tinyblock.__all__} - {"parallelize", "typecheck"}:
        target = LAYERS.get(name, getattr(tinyblock, name))
        # Each argument is a number in place of a tensor.
        function = target.forward if isinstance(target, nn.Module) else target
        numbers = [3] * len(inspect.signature(function).parameters)
        with pytest.raises(TypeCheckError) as caught:
            target(*numbers)
        assert blamed(caught.value) in ("x", "q")


def test_layers_raise_the_same_error_in_eager_mode_and_in_compiled_code():
    for function, arguments, name in WRONG_CALLS:
        messages = set()
        for call in (function, torch.compile(function, backend="eager")):
            with pytest.raises(TypeCheckError) as caught:
                call(*arguments)
            assert blamed(caught.value) == name
            messages.add(str(caught.value))
        assert len(messages) == 1, name
