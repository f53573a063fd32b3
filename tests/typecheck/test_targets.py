"""What typecheck takes, what it wraps of that, and what it leaves alone."""

import importlib
import inspect
import re
import runpy
import sys
import types
from pathlib import Path

import jaxtyping
import pytest
import torch
from jaxtyping import Float, TypeCheckError
from torch import Tensor, nn
from typecheck.conftest import USERS_MODULE

import tinyblock
from tinyblock.typecheck import typecheck

FILE = Path(tinyblock.__path__[0], "typecheck.py")
wrong: "torch.Tensor | str" = "no tensor"  # for mypy, of any type


def test_a_checked_function_is_not_wrapped_again(module):
    assert typecheck(module.scale) is module.scale


def test_a_package_without_functions_of_its_own_causes_a_warning(module):
    package = types.ModuleType("users_package")
    vars(package)["Layer"] = module.Layer
    with pytest.warns(UserWarning, match="nothing to check in users_package: pass its"):
        typecheck(package)


@pytest.mark.parametrize("name", ["_private", "generator", "coroutine"])
def test_private_functions_generators_and_coroutines_are_not_checked(name, module):
    result = getattr(module, name)(wrong)
    if inspect.iscoroutine(result):
        result.close()


def test_in_a_module_other_methods_than_forward_are_not_checked(module):
    assert module.Layer(3).unchecked() == "text"


def test_names_in_all_are_checked_and_no_others(module):
    unchecked = types.ModuleType("users_module")
    vars(unchecked)["_private"] = module._private
    vars(unchecked)["scale"] = scale = inspect.unwrap(module.scale)
    vars(unchecked)["__all__"] = ["_private"]
    typecheck(unchecked)
    assert unchecked.scale is scale
    with pytest.raises(TypeCheckError):
        unchecked._private(wrong)


@typecheck
class Node:
    def __init__(self, size: int) -> None:
        self.size = size

    def join(self, other: "Node") -> int:
        return self.size + other.size


@pytest.mark.parametrize("call", [Node, Node(2).join], ids=["__init__", "join"])
def test_in_a_class_init_and_public_methods_are_checked(call):
    with pytest.raises(TypeCheckError):
        call(wrong)


def test_a_method_may_take_an_instance_of_its_own_class():
    assert Node(2).join(Node(3)) == 5


def test_under_python_o_a_function_stays_unchecked_with_a_warning(module):
    optimized = types.ModuleType("optimized")
    code = compile(FILE.read_text(), FILE, "exec", optimize=1)  # as python -O
    exec(code, vars(optimized))
    with pytest.warns(UserWarning, match="python -O turns all shape checks off"):
        assert optimized.typecheck(module._private) is module._private


def test_jaxtyping_disable_leaves_functions_unwrapped_and_needs_no_beartype(
    monkeypatch,
):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    monkeypatch.setitem(sys.modules, "beartype", None)
    file = runpy.run_path(str(FILE))
    assert file["typecheck"](len) is len


@pytest.mark.parametrize("package", ["beartype", "numpy"])
def test_a_missing_package_is_named_at_the_first_call(package, monkeypatch):
    """Without numpy, jaxtyping would reject right calls."""

    @typecheck
    def first(x: Float[Tensor, "*batch n"], y: Float[Tensor, "*#batch n"]) -> Tensor:
        return x

    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=package):
        first(torch.ones(2, 3), torch.ones(3))


@pytest.mark.parametrize("mistake", ["layers", len, staticmethod(len), lambda x: x])
def test_another_target_is_an_error_that_says_what_to_pass(mistake):
    with pytest.raises(TypeError, match=f"target .*, got {re.escape(repr(mistake))}"):
        typecheck(mistake)


def test_typecheck_works_together_with_the_hook_of_jaxtyping(monkeypatch):
    """The option --jaxtyping-packages of pytest installs the same hook."""
    monkeypatch.syspath_prepend(USERS_MODULE.parent)
    monkeypatch.delitem(sys.modules, "hooked_module", raising=False)
    with jaxtyping.install_import_hook("hooked_module", "beartype.beartype"):
        module = importlib.import_module("hooked_module")
    hooked = module.Scale(3)
    with pytest.raises(TypeCheckError):  # the hook alone also checks
        hooked(torch.ones(2, 4))
    layer = typecheck(module).Scale(3)
    layer(torch.ones(2, 3))
    with pytest.raises(TypeCheckError, match="width=3"):
        layer(torch.ones(2, 4))


D = 8
X = torch.ones(2, 3, D)
ROPE = tinyblock.RotaryPositionalEmbedding(10000.0, D, max_seq_len=9)
BUILT: dict[str, nn.Module] = {
    "Transformer": tinyblock.Transformer(1, D, 1, rope=ROPE, max_seq_len=9),
    "Block": tinyblock.Block(D, 1, rope=ROPE),
    "CausalMultiHeadSelfAttention": tinyblock.CausalMultiHeadSelfAttention(
        D, 1, rope=ROPE
    ),
    "SwiGLU": tinyblock.SwiGLU(D),
    "FeedForward": tinyblock.FeedForward(D),
    "RMSNorm": tinyblock.RMSNorm(D),
    "RotaryPositionalEmbedding": ROPE,
}
TAKE_POSITIONS = [
    "Transformer",
    "Block",
    "CausalMultiHeadSelfAttention",
    "RotaryPositionalEmbedding",
]
EQUATIONS = [
    "apply_rope",
    "causal_multi_head_self_attention",
    "feed_forward",
    "gelu",
    "glu",
    "rms_norm",
    "scaled_dot_product_attention",
    "silu",
    "swiglu",
]


def test_these_lists_name_all_that_is_public():
    others = ["parallelize", "typecheck"]
    assert sorted([*BUILT, *EQUATIONS, *others]) == sorted(tinyblock.__all__)


@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize("x", [X[..., :7], X.long()], ids=["width", "dtype"])
def test_every_layer_names_an_input_that_does_not_fit(name, x):
    with pytest.raises(TypeCheckError, match=rf"(?s){name}\.forward.*'x'.*=8"):
        BUILT[name](x)


@pytest.mark.parametrize("name", TAKE_POSITIONS)
@pytest.mark.parametrize(
    "positions",
    [torch.arange(4), torch.zeros(3, 3).long()],
    ids=["too many", "another batch"],
)
def test_every_layer_names_positions_that_do_not_fit(name, positions):
    with pytest.raises(
        TypeCheckError, match=rf"(?s){name}\.forward.*'token_positions'"
    ):
        BUILT[name](X, positions)


@pytest.mark.parametrize("name", EQUATIONS)
def test_every_equation_is_checked(name):
    equation = getattr(tinyblock, name)
    numbers = [3] * len(inspect.signature(equation).parameters)
    with pytest.raises(TypeCheckError, match=r"parameter '[xq]'"):
        equation(*numbers)
