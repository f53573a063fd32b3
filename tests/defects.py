"""Wrong layers, and the tests of the contract that must fail for them."""

import importlib
import inspect
import itertools
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tinyblock.contract import checks, target
from tinyblock.contract.verify import Verify


def replace(path, right, wrong):
    """Replace a part of a file, which must be there."""
    text = path.read_text()
    assert right in text, f"{path.name} must have {right!r}: {text}"
    path.write_text(text.replace(right, wrong))


@dataclass
class Defect:
    """A line of a right layer, the wrong line in its place, and the test that must fail."""

    layer: str
    right: str
    wrong: str
    test: str
    mistake: str = ""  # what the failure names

    def put_into(self, folder):
        replace(folder / f"{self.layer}.py", self.right, self.wrong)

    def require_failure(self, folder):
        self.put_into(folder)
        with layers_in(folder):
            failure = failure_of(self.layer, self.test)
        assert failure, f"{self.test} must fail"
        assert not failure.startswith(("NameError", "SyntaxError")), failure
        assert self.mistake in failure, failure


@contextmanager
def layers_in(folder):
    """Let the contract test the layers of a folder, as `tinyblock verify` does."""
    Verify(folder, []).start(target, checks)
    yield
    target.folder = target.ABOVE


def failure_of(layer, name):
    """Return the first failure of a test of a layer's page, or "" if there is none."""
    page = importlib.import_module(f"tinyblock.contract.test_{layer}")
    [of_every_layer] = (
        member
        for member in vars(page).values()
        if inspect.isclass(member) and member.__name__.startswith("Test")
    )
    test = getattr(of_every_layer(), name, None) or getattr(page, name)
    for arguments in arguments_of(test, only_numbers=target.is_foreign(layer)):
        try:
            test(**arguments)
        except pytest.skip.Exception:
            pass
        except (Exception, pytest.fail.Exception) as failure:
            return f"{type(failure).__name__}: {failure}"
    return ""


def arguments_of(test, only_numbers):
    """Yield the arguments that pytest passes to a test, on the CPU.

    For a layer that is no copy, these are the arguments marked `numbers`, if some are.
    """
    marks = [
        mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"
    ]
    fixtures = inspect.signature(test).parameters
    device = {"device": "cpu"} if "device" in fixtures else {}
    for values in itertools.product(*(values_of(mark, only_numbers) for mark in marks)):
        arguments = dict(device)
        for mark, each in zip(marks, values, strict=True):
            names = mark.args[0]
            names = [names] if isinstance(names, str) else names
            arguments.update(zip(names, each, strict=True))
        yield arguments


def values_of(mark, only_numbers):
    """Return the values of a mark `parametrize`, each as a tuple."""
    values = mark.args[1]
    marked = [value for value in values if getattr(value, "marks", ())]
    values = marked if only_numbers and marked else values
    # pytest.param has its values as a tuple.
    values = [getattr(value, "values", value) for value in values]
    return [value if isinstance(value, tuple) else (value,) for value in values]
