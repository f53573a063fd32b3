"""A wrong result is explained by the change of the equation that gives it, or not at all."""

import dataclasses
import inspect
import os
import shutil
from pathlib import Path

import pytest
import torch
from edits import replace

from tinyblock.contract import target, test_attention, test_block, test_ffn
from tinyblock.contract import test_rmsnorm as rmsnorm
from tinyblock.contract import test_rope as rope
from tinyblock.verify import equations, search
from tinyblock.verify.changes import Change, changes_of

SOLUTIONS = Path(__file__).parent / "solutions"
PAGES = {
    "rmsnorm": rmsnorm.TestRMSNorm,
    "ffn": test_ffn.TestFeedForward,
    "rope": rope.TestRoPE,
    "attention": test_attention.TestAttention,
    "block": test_block.TestBlock,
}
# Of sizes that no case of the pages has.
POSITIONS = torch.tensor([[4, 0, 7], [1, 2, 90], [3, 3, 5]])
ELSEWHERE = {
    "RMSNorm": rmsnorm.case(axes=(3, 2), d_model=9, eps=0.2),
    "SwiGLU": test_ffn.swiglu_case(axes=(3,), d_model=10, d_ff=14),
    "RotaryPositionalEmbedding": rope.case(
        axes=(3, 3), d_k=14, theta=9.0, positions=POSITIONS
    ),
    "CausalMultiHeadSelfAttention": test_attention.case(
        axes=(3, 3), d_model=30, num_heads=3, positions=POSITIONS, **test_attention.ROPE
    ),
    "Block": test_block.case(
        axes=(3, 3), d_model=36, num_heads=3, d_ff=96, **test_attention.ROPE
    ),
}


@pytest.fixture
def _float64():
    """The equations compute angles in the default dtype, as students do."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("layer", PAGES)
def test_each_equation_is_that_of_its_page(layer):
    """Also where a page gets an option that its equation lacks: this raises an error."""
    for title, case in PAGES[layer].cases.items():
        for form in search.FORMS.get(case.name, ()):
            module = case.build()
            x, _ = case.arguments()
            expected = case.exact(module, x)
            case = dataclasses.replace(case, formula=form.formula)
            with search.called(form.changed):
                actual = case.exact(module, x)
            compared = actual.isfinite()  # a query without a key is NaN, not 0
            assert compared.sum() >= actual.numel() / 2, title
            actual, expected = actual[compared], expected[compared]
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


# A layer, an expression of a right solution, the wrong one, and the line of the equation
# that has the same meaning.
EXPLAINED = [
    ("rmsnorm", " + self.eps)", ")", "rms = x.square().mean(-1, keepdim=True).sqrt()"),
    (
        "rmsnorm",
        " + self.eps)",
        ") + self.eps",
        "rms = x.square().mean(-1, keepdim=True).sqrt() + eps",
    ),
    (
        "rmsnorm",
        "* self.weight",
        "* (1 + self.weight)",
        "return x / rms * (1 + weight)",
    ),
    (
        "rmsnorm",
        "x.to(torch.float32)",
        "x - x.mean(-1, keepdim=True)",
        "x = x - x.mean(-1, keepdim=True)",
    ),
    (
        "ffn",
        "self.w1(x)",
        "self.w3(x)",
        "hidden = F.silu(x @ w3.T) * (x @ w3.T)",
    ),
    (
        "ffn",
        "torch.sigmoid(gate) * self.w3(x)",
        "self.w3(x) * torch.sigmoid(gate * self.w3(x))",
        "hidden = F.silu(x @ w1.T * (x @ w3.T))",
    ),
    (
        "rmsnorm",
        "mean(-1, keepdim=True)",
        "mean(1, keepdim=True)",
        "rms = (x.square().mean(1, keepdim=True) + eps).sqrt()",
    ),
    ("rope", "-torch.arange", "torch.arange", "frequencies = theta ** (2 * k / d_k)"),
    ("rope", "0, d_k, 2", "2, d_k + 1, 2", "k = torch.arange(d_k // 2) + 1"),
    (
        "rope",
        "x[..., ::2], x[..., 1::2]",
        "x.chunk(2, -1)",
        'x1, x2 = rearrange(x, "... (two pair) -> two ... pair", two=2)',
    ),
    (
        "attention",
        "k = self.split(self.k_proj(x))\n        v = self.split(self.v_proj(x))",
        "v = self.split(self.k_proj(x))\n        k = self.split(self.v_proj(x))",
        "wk, wv = wv, wk",
    ),
    (
        "attention",
        ".tril()",
        "",
        "shown = torch.ones(seq, seq, dtype=torch.bool)",
    ),
    (
        "attention",
        '        scores = scores.masked_fill(~mask, float("-inf"))\n'
        "    shares = softmax(scores, dim=-1)",
        "        pass\n    shares = softmax(scores, dim=-1).masked_fill(~mask, 0)",
        "weights = weights / weights.sum(dim=-1, keepdim=True)\n"
        "if mask is not None:\n"
        "weights = weights.masked_fill(~mask, 0)",
    ),
    (
        "attention",
        ".unsqueeze(-2)",
        "",
        "without positions = positions[..., None, :]",
    ),
    ("block", "self.ln2(y)", "self.ln2(x)", "return y + ffn(norm2(x))"),
    (
        "block",
        "y = x + self.attn(self.ln1(x), token_positions)\n"
        "        return y + self.ffn(self.ln2(y))",
        "y = self.ln1(x + self.attn(x, token_positions))\n"
        "        return self.ln2(y + self.ffn(y))",
        "y = norm1(x + attention(x))\nreturn norm2(y + ffn(y))",
    ),
]


def observations_of(layer, folder, cases):
    """Return what a layer of a folder returns in cases of its class."""
    os.environ[target.VARIABLE] = str(folder)
    try:
        return list(search.observe(cases).values())
    finally:
        del os.environ[target.VARIABLE]


def numbers_of(layer, right, wrong, folder):
    """Change a right solution, and return its numbers and its folder."""
    folder = shutil.copytree(SOLUTIONS / "real_tables", folder / "layers")
    replace(folder / f"{layer}.py", right, wrong)
    cases = {
        title: case
        for title, case in PAGES[layer].cases.items()
        if case.is_common and case.weights is None
    }
    seen = observations_of(layer, folder, cases)
    seen = [each for each in seen if each.result is not None]
    assert any(each.is_wrong for each in seen)
    return seen, folder


@pytest.mark.parametrize(("layer", "right", "wrong", "line"), EXPLAINED)
def test_a_wrong_layer_is_explained_by_a_change(layer, right, wrong, line, tmp_path):
    """The changed equation gives its numbers, also in a case of other sizes."""
    seen, folder = numbers_of(layer, right, wrong, tmp_path)
    change = search.explain(seen)
    assert change
    old, new = ([each.strip() for each in lines] for lines in change.lines())
    assert "\n".join(new or [f"without {each}" for each in old]) == line
    name = next(iter(PAGES[layer].cases.values())).name
    name = "CausalMultiHeadSelfAttention" if layer == "attention" else name
    [other] = observations_of(layer, folder, {"elsewhere": ELSEWHERE[name]})
    assert other.is_wrong
    form = next(form for form in search.FORMS[name] if change.function in form.changed)
    with search.applied([change]):
        assert other.agrees_with(other.of(form.formula))


@pytest.mark.parametrize(
    ("layer", "right", "wrong"),
    [
        # ffn's norm undoes the factor, but for eps: either residual may be twice as large.
        ("block", "return y", "return y + y"),
        # Two changes.
        ("ffn", "gate * torch.sigmoid(gate) * self.w3(x)", "gate + 3 * self.w3(x)"),
    ],
)
def test_nothing_is_said_of_two_changes_or_where_two_explain(
    layer, right, wrong, tmp_path
):
    seen, _ = numbers_of(layer, right, wrong, tmp_path)
    assert search.explain(seen) is None


# Changes that give the same numbers in all cases of a page, and others elsewhere: nothing
# is said of them. The norm undoes a factor, but for eps; the weights of the cases are
# positive.
NOT_TOLD_APART = {
    "rmsnorm": [{"return F.relu(x / rms * weight)", "return F.relu(x) / rms * weight"}],
    "ffn": [],
    "rope": [],
    "attention": [],
    "block": [
        {"y = 2 * (x + attention(norm1(x)))", "return 2 * y + ffn(norm2(y))"},
    ],
}


@pytest.mark.parametrize("layer", NOT_TOLD_APART)
def test_a_page_tells_all_other_changes_apart(layer):
    cases = {
        title: case
        for title, case in PAGES[layer].cases.items()
        if case.is_common and case.weights is None
    }
    seen = observations_of(layer, SOLUTIONS / "real_tables", cases)
    name = seen[0].case.name
    seen = [each for each in seen if each.case.name == name]
    changes = list(changes_in(search.FORMS[name], seen))
    functions = parts_of(changes, search.elsewhere(seen, batch=(3,)), 1e-9)
    groups = [[function[0] for function in functions]]
    members = {function[0][1]: function for function in functions}
    for each in reversed(seen):  # the last alone tells most of them apart
        parts = (part for group in groups for part in parts_of(group, each))
        groups = [part for part in parts if len(part) > 1]
    found = []
    for group in groups:
        form, change = group[0]
        results = [search.result_of(change, form, each) for each in seen]
        is_right = all(
            each.agrees_with(result) for each, result in zip(seen, results, strict=True)
        )
        if not is_right:
            found.append({shortest_line(members[first]) for _, first in group})
    assert found == NOT_TOLD_APART[layer]


def changes_in(forms, seen):
    """Yield the changes of all lines that run in any case."""
    for form in forms:
        runs = [search.lines_run(form, [each]) for each in seen]
        for function in form.changed:
            text = inspect.getsource(getattr(equations, function))
            lines = set().union(*(run.get(function, ()) for run in runs))
            for change in changes_of(function, text, lines):
                yield form, change


def parts_of(group, seen, allowed=search.PRECISION):
    """Return the changes with equal results, without those that raise an error."""
    results = []
    for form, change in group:
        result = search.result_of(change, form, seen)
        if isinstance(result, torch.Tensor):
            result = result.double()
            numbers = result.nan_to_num(0, 0, 0).flatten()
            key = (numbers * torch.arange(len(numbers)).cos()).sum().item()
            near = allowed * len(numbers) ** 0.5 * numbers.norm().item()
            results.append((key, near, result, (form, change)))
    parts = []  # with equal results, equal keys: only neighbors are compared
    for key, near, result, change in sorted(results, key=lambda each: each[0]):
        for other, first, members in reversed(parts):
            if other < key - near:
                parts.append((key, result, [change]))
                break
            if search.is_close(result, first, allowed):
                members.append(change)
                break
        else:
            parts.append((key, result, [change]))
    return [members for _, _, members in parts]


def shortest_line(group):
    change = min((change for _, change in group), key=Change.size)
    return "\n".join(change.lines()[1]).strip()
