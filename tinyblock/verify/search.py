"""Explain wrong results: find the change of an equation that gives the same numbers.

The statement is about numbers, so it is true whatever the layer's code looks like. A
change must give the layer's numbers in every case that gave numbers, right ones included.
If two different functions do, nothing is said.
"""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from . import equations
from .changes import Change, changes_of

PRECISION = 16 * torch.finfo(torch.float32).eps  # as in the contract's checks.py


@dataclasses.dataclass(frozen=True)
class Form:
    """An equation: a function with its page's arguments, and the functions to change."""

    formula: Callable[..., Tensor]
    changed: Sequence[str]


FORMS = {
    "RMSNorm": [Form(equations.of_rms_norm, ["rms_norm"])],
    "SwiGLU": [
        Form(equations.of_swiglu, ["swiglu"]),
        Form(equations.of_swiglu, ["swiglu_with_sigmoid"]),
    ],
    "RotaryPositionalEmbedding": [
        Form(equations.of_rope, ["rope"]),
        Form(equations.of_rope, ["rope_with_a_wide_table"]),
    ],
    "scaled_dot_product_attention": [
        Form(equations.of_function, ["attend"]),
        Form(equations.of_function, ["attend_with_exponentials"]),
    ],
    "CausalMultiHeadSelfAttention": [
        Form(equations.of_attention, ["self_attention", "attend"]),
        Form(equations.of_attention, ["attend_with_exponentials"]),
    ],
    "Block": [Form(equations.of_block, ["block"])],  # its parts have pages of their own
}
# The function that each of these writes in another way.
IN_PLACE_OF = {
    "swiglu_with_sigmoid": "swiglu",
    "rope_with_a_wide_table": "rope",
    "attend_with_exponentials": "attend",
}


@dataclasses.dataclass
class Observation:
    """What a layer returned in a case, in float64, and what it should have returned."""

    case: Any  # a Case of the contract
    x: Tensor
    weights: Any
    result: Tensor | None  # None for an exception
    is_wrong: bool
    compared: Tensor  # not where a query has no key, which is NaN in equations.py

    def agrees_with(self, result: Tensor) -> bool:
        """Return whether the layer returned this, where that is compared."""
        if self.result is None or result.shape != self.result.shape:
            return False
        compared = result.isfinite()  # torch's own attention returns 0, others NaN
        if self.compared.shape == result.shape:  # otherwise the layer's shape is wrong
            compared &= self.compared
        if compared.sum() < result.numel() / 2:
            return False
        return is_close(self.result.where(compared, 0), result.where(compared, 0))

    def of(self, formula: Callable[..., Tensor]) -> Tensor:
        """Return what a formula gives for the same input."""
        named = [self.weights] if self.case.weights is None else self.weights.values()
        inputs = self.case.inputs | self.case.options
        with torch.no_grad():
            return formula(self.x, *named, **inputs)


def observe(cases: dict[str, Any]) -> dict[str, Observation]:
    """Run a layer in each case that has an equation here."""
    found = {}
    for title, case in cases.items():
        if case.name not in FORMS:
            continue
        try:
            module = case.build(dtype=torch.float32)
        except (Exception, pytest.skip.Exception):
            continue
        x = case.arguments()[0].detach()
        weights = {
            name: weight.detach().cpu().double()
            for name, weight in module.named_parameters()
        }
        seen = Observation(case, x, weights, None, False, torch.tensor(True))
        try:
            right = seen.of(FORMS[case.name][0].formula)
        except (KeyError, TypeError):
            # Its weights have other names, or an edited page has another option.
            continue
        seen.compared = right.isfinite()
        with contextlib.suppress(Exception):
            result = case.run(module=module)[0].detach().cpu().double()
            if result.isfinite().any():
                seen.result = result
                seen.is_wrong = not seen.agrees_with(right)
        found[title] = seen
    return found


def explain(observations: Sequence[Observation]) -> Change | None:
    """Return the shortest change that gives all results, or None if none or two do."""
    ordered = sorted(observations, key=lambda seen: (not seen.is_wrong, seen.x.numel()))
    forms = FORMS[observations[0].case.name]
    found = []
    for form in forms:
        run = lines_run(form, [seen for seen in ordered if seen.is_wrong])
        for name in form.changed:
            if name not in run:
                continue
            text = inspect.getsource(getattr(equations, name))
            for change in changes_of(name, text, run[name]):
                if agrees(form, [change], ordered):
                    found.append((change, form))
    if not found:
        return None
    # A change may only fit where there is one batch axis, or as many sequences as heads.
    for batch in ((3,), (6,), (2, 3)):
        other = elsewhere(observations, batch)
        first, *others = (result_of(*each, other) for each in found)
        if not all(is_close(each, first, 1e-9) for each in others):
            return None
    # Where all functions are the same, the first way of writing is said before the second,
    # and a step of the layer itself before one of a function that it calls.
    best, _ = min(
        found,
        key=lambda each: (
            forms.index(each[1]),
            each[1].changed.index(each[0].function),
            each[0].size(),
        ),
    )
    return best


def lines_run(form: Form, wrong: Sequence[Observation]) -> dict[str, set[int]]:
    """Return the lines of each function that run in all wrong cases.

    Others are not the cause.
    """
    each_case = []
    for seen in wrong:
        run: dict[str, set[int]] = defaultdict(set)

        def trace(frame: FrameType, event: str, _: Any, run: Any = run) -> Any:
            code = frame.f_code
            if event == "line" and code.co_filename == equations.__file__:
                run[code.co_name].add(frame.f_lineno - code.co_firstlineno)
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            with called(form.changed):
                seen.of(form.formula)
        finally:
            sys.settrace(before)
        each_case.append(run)
    first, *others = each_case
    return {
        name: lines.intersection(*(run[name] for run in others))
        for name, lines in first.items()
        if all(name in run for run in others)
    }


def explained_by(
    changes: Sequence[Change], observations: Sequence[Observation]
) -> Sequence[Change]:
    """Return those of the changes that together give all results, or none of them."""
    form = FORMS[observations[0].case.name][0]
    for size in range(len(changes), 0, -1):
        for some in itertools.combinations(changes, size):
            if agrees(form, some, observations):
                return some
    return ()


def raises(changes: Sequence[Change], seen: Observation) -> bool:
    """Return whether these changes do not fit a case in which the layer raised an error."""
    if seen.result is not None:
        return False
    form = FORMS[seen.case.name][0]
    try:
        with applied(changes):
            seen.of(form.formula)
    except Exception:
        return True
    return False


# Two layers may have one equation, and so the same changes.
compiled = functools.cache(compile)


@contextlib.contextmanager
def applied(changes: Sequence[Change]) -> Iterator[None]:
    """Change functions of equations.py, which also call each other."""
    functions = vars(equations)
    before = {change.function: functions[change.function] for change in changes}
    try:
        for change in changes:
            text = "\n".join(change.after)
            exec(compiled(text, change.function, "exec"), functions)
        with called([change.function for change in changes]):
            yield
    finally:
        functions.update(before)


@contextlib.contextmanager
def called(names: Iterable[str]) -> Iterator[None]:
    """Let all others call the functions of these names that write one in another way."""
    functions = vars(equations)
    before = dict(functions)
    try:
        for name in names:
            functions[IN_PLACE_OF.get(name, name)] = functions[name]
        yield
    finally:
        functions.update(before)


def agrees(
    form: Form, changes: Sequence[Change], observations: Iterable[Observation]
) -> bool:
    """Return whether an equation with these changes gives all results."""
    try:
        with applied(changes):
            return all(seen.agrees_with(seen.of(form.formula)) for seen in observations)
    except Exception:  # a change may not fit the shapes of a case
        return False


def result_of(change: Change, form: Form, seen: Observation) -> Tensor | None:
    """Return what the changed equation gives in float64, or None for an exception."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # of angles
    try:
        with applied([change]):
            return seen.of(form.formula)
    except Exception:
        return None
    finally:
        torch.set_default_dtype(before)


def is_close(
    actual: Tensor | None, expected: Tensor | None, allowed: float = PRECISION
) -> bool:
    if actual is None or expected is None:
        return actual is expected
    if actual.shape != expected.shape:
        return False
    finite = expected.isfinite()
    if not torch.equal(actual.isfinite(), finite):
        return False
    error = (actual - expected).where(finite, 0).norm()
    return bool(error <= allowed * expected.where(finite, 0).norm())


# Of the inputs that tell functions apart, by option. No size follows from the others.
OTHER_SIZES = {
    "d_model": 60,
    "d_ff": 22,
    "d_k": 14,
    "num_heads": 6,
    "num_kv_heads": 3,
    "d_head": 16,
    "max_seq_len": 50,
    "eps": 0.3,
}


def elsewhere(
    observations: Sequence[Observation], batch: tuple[int, ...]
) -> Observation:
    """Return inputs of other sizes, with each option and input that a case has."""
    case = observations[0].case
    options: dict[str, Any] = {}
    names = set()
    for seen in observations:
        options |= {name: each for name, each in seen.case.options.items() if each}
        names |= set(seen.case.inputs)
    options |= {name: OTHER_SIZES[name] for name in OTHER_SIZES if name in options}
    if "theta" in options:
        options["theta"] = 20.0
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    if case.weights is None:
        x = numbers(*batch, 9, options.get("d_model") or options["d_k"])
        shapes = shapes_of(case.name, options)
    else:  # scaled_dot_product_attention
        x = numbers(*batch, 2, 7, 10)
        shapes = {"k": (*batch, 2, 9, 10), "v": (*batch, 2, 9, 5)}
    inputs = {}
    if "token_positions" in names:
        inputs["token_positions"] = torch.randint(
            0, 50, (*batch, 9), generator=generator
        )
    if "mask" in names:
        inputs["mask"] = (numbers(*batch, 9, 9) < 0.5) | (torch.eye(9) > 0)
    if "mask" in names and case.weights is not None:
        inputs["mask"] = inputs["mask"][..., None, :7, :]
    case = dataclasses.replace(case, options=options, inputs=inputs)
    weights = {  # which keep lengths, so that no softmax is 0 or 1
        name: numbers(*shape) / shape[-1] ** 0.5 for name, shape in shapes.items()
    }
    return Observation(case, x, weights, x, False, x.isfinite())


def shapes_of(name: str, options: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's weights, by their names."""
    size, hidden = options.get("d_model", 0), options.get("d_ff", 0)
    if name == "RMSNorm":
        return {"weight": (size,)}
    if name == "SwiGLU":
        up, down = (hidden, size), (size, hidden)
        return {"w1.weight": up, "w2.weight": down, "w3.weight": up}
    if name == "Block":
        parts = {
            "ln1": "RMSNorm",
            "attn": "CausalMultiHeadSelfAttention",
            "ln2": "RMSNorm",
            "ffn": "SwiGLU",
        }
        return {
            f"{part}.{weight}": shape
            for part, layer in parts.items()
            for weight, shape in shapes_of(layer, options).items()
        }
    if name == "RotaryPositionalEmbedding":
        return {}
    heads = options["num_heads"]
    d_head = options.get("d_head") or size // heads
    width = heads * d_head
    of_keys = (options.get("num_kv_heads") or heads) * d_head
    shapes: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (width, size),
        "k_proj.weight": (of_keys, size),
        "v_proj.weight": (of_keys, size),
        "output_proj.weight": (size, width),
    }
    if options.get("qk_norm"):
        shapes |= {"q_norm.weight": (d_head,), "k_norm.weight": (d_head,)}
    return shapes
