"""The contract finds what an edit breaks, names the input, lets harmless edits pass, and runs wherever copies lie."""

import importlib
import re
import shutil
import subprocess
import sys
import unittest
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from isolated import REFUSE_TINYBLOCK_AND_BEARTYPE, WITHOUT_PACKAGE

import tinyblock
from tinyblock import contract

PACKAGE = Path(tinyblock.__file__).parent
OWN = {layer: importlib.import_module(f"tinyblock.{layer}") for layer in contract.LAYERS}
CUDA = "no CUDA here"
SLOW = {"compiles to one graph", "positions off the table", "autocast"}  # run where they are to fail


@pytest.fixture(autouse=True)
def _leave_imports_as_they_were(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if not name.startswith(("torch", "sympy", "numpy")):
            del sys.modules[name]


def copies(folder, layers=tuple(contract.LAYERS), edits=()):
    """Copy layers to a folder, with edits (layer, old, new) of text that is there once."""
    folder.mkdir(parents=True, exist_ok=True)
    for layer in layers:
        text = (PACKAGE / f"{layer}.py").read_text(encoding="utf-8")
        for _, old, new in (edit for edit in edits if edit[0] == layer):
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (folder / f"{layer}.py").write_text(text, encoding="utf-8")
    return folder


def outcomes(modules, layer, slow=frozenset()):
    """Run the properties of a layer; return what they said, by their names without "(of which class)"."""
    violations, skipped = {}, {}
    for held in contract.PROPERTIES:
        name = held.name.partition(" (")[0]
        if held.layer == layer and name not in SLOW - slow:
            try:
                held.run(OWN | modules)
            except contract.Violation as violation:
                violations.setdefault(name, str(violation))
            except unittest.SkipTest as skip:
                skipped[name] = str(skip)
    return violations, skipped


LOW = "equation in bfloat16 and float16"
EQUATION = {"equation in float64", "equation in float32", LOW, "gradients"}
KEYS, PLACED = "keys of the state dict", "device and dtype of the parameters"
ROUNDING = "rounds once, and no square overflows"
ROTATION = {*EQUATION, "any strides", "positions broadcast, in every integer dtype", "table survives"}
REFUSED = "CausalMultiHeadSelfAttention: bad hyperparameters refused"
MASK = "mask narrows causality and never lifts it"
ALONG = {"causality", "prefill against one-shot", MASK, "relative positions only"}
FORWARD = "        traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]\n"
FFN = "        return self.w2(F.silu(self.w1(x)) * self.w3(x))"
ATTEND = (
    "        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=shares)\n"
)
ATTENTION = "CausalMultiHeadSelfAttention"
ONE_TABLE = "one table for all blocks, and in float32"
SCORES = "scores in float32 or wider"
TURN = "q, k = rope.rotate(q, cos_sin), rope.rotate(k, cos_sin)"
MUTANTS = {  # name: layer, edits, properties that fail
    "eps outside the root": (
        "rmsnorm",
        {FORWARD: f"        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps) * self.weight\n{FORWARD}"},
        {*EQUATION, ROUNDING},
    ),
    "the cast order of Hugging Face": (
        "rmsnorm",
        {
            FORWARD: "        if x.dtype.itemsize < 4:\n"
            "            wide = x.float()\n"
            "            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)\n"
            f"            return (self.weight * wide.to(x.dtype)).to(x.dtype)\n{FORWARD}"
        },
        {LOW, ROUNDING},
    ),
    "everything in float32": (
        "rmsnorm",
        {FORWARD: f"        if x.dtype == torch.float64:\n            return self(x.float()).double()\n{FORWARD}"},
        {"equation in float64", "gradients"},
    ),
    "rms_norm in the dtype of x": (
        "rmsnorm",
        {"wide = x.to(torch.promote_types(x.dtype, torch.float32))\n    mean": "wide = x\n    mean"},
        {f"rms_norm: {ROUNDING}"},
    ),
    "RMSNorm scales its input in place": (
        "rmsnorm",
        {FORWARD: f"        x.data.div_(2)\n{FORWARD}"},
        {*EQUATION, ROUNDING, "inputs not modified"},
    ),
    "gains in the default dtype": (
        "rmsnorm",
        {"torch.empty(d_model, device=device, dtype=dtype)": "torch.empty(d_model)"},
        {PLACED},
    ),
    "a batch of one lost": (
        "rmsnorm",
        {FORWARD: f"        if len(x) == 1:\n            return self(x[0])\n{FORWARD}"},
        EQUATION,
    ),
    "gains of 0": ("rmsnorm", {"nn.init.ones_": "nn.init.zeros_"}, {"RMSNorm: initial weights"}),
    "no gradient for the gains in bfloat16": (
        "rmsnorm",
        {
            "_KeepInputs.apply(x, self.weight, self.eps)": "_KeepInputs.apply(\n"
            "                x, self.weight.detach() if x.dtype == torch.bfloat16 else self.weight, self.eps)"
        },
        {"gradients"},
    ),
    "eps may be 0": ("rmsnorm", {"0 < eps": "0 <= eps"}, {"RMSNorm: bad hyperparameters refused"}),
    "w1 and w3 swapped": (
        "ffn",
        {"F.silu(self.w1(x)) * self.w3(x)": "F.silu(self.w3(x)) * self.w1(x)"},
        EQUATION,
    ),
    "GELU by tanh": (
        "ffn",
        {"return F.gelu(x)": 'return F.gelu(x, approximate="tanh")'},
        {*EQUATION - {LOW}, "silu, gelu: equation", "feed_forward: equation and gradients"},
    ),
    "d_ff rounded up": (
        "ffn",
        {"max(1, (d_model + 12) // 24) * 64 if": "(8 * d_model + 191) // 192 * 64 if"},
        {"d_ff is the multiple of 64 nearest to 8/3 d_model"},
    ),
    "w3 renamed": (
        "ffn",
        {
            "self.w3 = nn.Linear": "self.up = nn.Linear",
            "* self.w3(x)": "* self.up(x)",
            "self.w1, self.w2, self.w3": "self.w1, self.w2, self.up",
        },
        {*EQUATION, "d_ff is the multiple of 64 nearest to 8/3 d_model"},
    ),
    "the activation ignored": ("ffn", {"self.w2(self.activation(": "self.w2(gelu("}, EQUATION),
    "a print": (
        "ffn",
        {"        return self.w2(F.silu(": "        print(end='')\n        return self.w2(F.silu("},
        {"compiles to one graph"},
    ),
    "a loop over the tokens": (
        "ffn",
        {"        return self.w2(F.silu(": "        for _ in range(x.numel()): ...\n        return self.w2(F.silu("},
        {"compiles to one graph"},
    ),
    "no gradient for x in bfloat16": (
        "ffn",
        {FFN: f"        x = x.detach() if x.dtype == torch.bfloat16 else x\n{FFN}"},
        {"gradients"},
    ),
    "bfloat16 scaled by 1.05": (
        "ffn",
        {FFN: f"{FFN} * (1.05 if x.dtype == torch.bfloat16 else 1)"},
        {LOW, "gradients"},
    ),
    "weights not cut": (
        "ffn",
        {"trunc_normal_(linear.weight, std=std, a=-3 * std, b=3 * std)": "normal_(linear.weight, std=std)"},
        {"SwiGLU: initial weights", "FeedForward: initial weights"},
    ),
    "weights that look at their input alone": (
        "ffn",
        {"(2 / (linear.in_features + linear.out_features)) ** 0.5": "linear.in_features**-0.5"},
        {"SwiGLU: initial weights", "FeedForward: initial weights"},
    ),
    "a product of two dtypes under autocast": (
        "ffn",
        {FFN: "        return (F.silu(self.w1(x)) * self.w3(x)) @ self.w2.weight.T.to(x.dtype).detach()"},
        {"gradients", "autocast"},
    ),
    "an error under autocast": (
        "ffn",
        {FFN: f"        assert self.w1(x).dtype == x.dtype\n{FFN}"},
        {"autocast"},
    ),
    "a clamp": ("ffn", {FFN: f"{FFN}.clamp(-1e4, 1e4)"}, EQUATION),
    "halves for pairs": (
        "rope",
        {
            "numbers = torch.view_as_complex(pairs)": "numbers = torch.complex(*pairs.flatten(-2).chunk(2, dim=-1))",
            "return torch.view_as_real(numbers * cos_sin).flatten(-2).to(x.dtype)": "turned = numbers * cos_sin\n"
            "        return torch.cat((turned.real, turned.imag), dim=-1).to(x.dtype)",
        },
        ROTATION,
    ),
    "the other direction": ("rope", {"positions[..., None] * self": "-positions[..., None] * self"}, ROTATION),
    "positions from 1": ("rope", {"positions[..., None] * self": "(positions[..., None] + 1) * self"}, ROTATION),
    "a table built in float32": (
        "rope",
        {"self.theta**-exponents": "(self.theta**-exponents).float()"},
        {*ROTATION - {"equation in float32", LOW, "any strides"}, "norms preserved", "relative positions only"},
    ),
    "the table follows the dtype": (
        "rope",
        {
            "def _apply(self": "def _apply_not(self",
            "table = self.cos_sin\n        if table": "table = self.cos_sin.float()\n        if table",
        },
        {LOW, "table survives"},
    ),
    "the table in the state dict": ("rope", {"persistent=False": "persistent=True"}, {"keys of the state dict: none"}),
    "float64 lowered": (
        "rope",
        {"(x if x.dtype == torch.float64 else x.float())": "x.float()"},
        {
            *("equation in float64", "gradients", "table survives"),
            *("norms preserved", "positions broadcast, in every integer dtype"),
        },
    ),
    "a result in float32": (
        "rope",
        {"(numbers * cos_sin).flatten(-2).to(x.dtype)": "(numbers * cos_sin).flatten(-2)"},
        {LOW},
    ),
    "strides that cannot be viewed": (
        "rope",
        {"except RuntimeError:  # the strides": "except IndexError:  # the strides"},
        {"any strides"},
    ),
    "positions past the table taken": (
        "rope",
        {"low < 0 or high >= self": "low < 0 or high > self"},
        {"positions off the table"},
    ),
    "unread positions clamped": (
        "rope",
        {"(index != positions).unsqueeze(-1)": "(index < 0).unsqueeze(-1)"},
        {"positions off the table"},
    ),
    "a softmax in the dtype of the input": (
        "attention",
        {
            ATTEND: "        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))\n"
            "        causal = torch.ones(seq, seq, dtype=torch.bool, device=q.device).tril()\n"
            "        seen = causal if mask is None else mask\n"
            "        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -math.inf)\n"
            "        out = scores.softmax(-1).masked_fill(~seen, 0) @ v\n"
        },
        {SCORES},
    ),
    "no causality in evaluation": (
        "attention",
        {"is_causal=mask is None": "is_causal=mask is None and self.training"},
        EQUATION - {"gradients"},
    ),
    "no causality without gradients": (
        "attention",
        {"is_causal=mask is None": "is_causal=mask is None and torch.is_grad_enabled()"},
        {*EQUATION - {"gradients"}, SCORES},
    ),
    "dropout in evaluation": (
        "attention",
        {"enable_gqa=shares)": "enable_gqa=shares, dropout_p=0.0 if self.training else 0.5)"},
        EQUATION - {"gradients"},
    ),
    "a window of 16": (
        "attention",
        {
            ATTEND: "        seen = torch.ones(seq, seq, dtype=torch.bool, device=q.device).tril().triu(-15)\n"
            "        mask, is_causal = seen if mask is None else mask & seen, False\n"
            + ATTEND.replace("is_causal=mask is None", "is_causal=False")
        },
        {*EQUATION, "causality", MASK},
    ),
    "a mask for 64 tokens": (
        "attention",
        {
            "causal = torch.ones(seq, seq, dtype=torch.bool, device=q.device).tril()": "causal = torch.ones("
            "64, 64, dtype=torch.bool).tril()[:seq, :seq]",
            "        if mask is not None:\n": "        mask = mask if mask is not None else torch.tensor(True)\n"
            "        if mask is not None:\n",
        },
        {*EQUATION, "causality", "prefill against one-shot", MASK, "inputs not modified"},
    ),
    "a scale for small heads": (
        "attention",
        {"enable_gqa=shares)": "enable_gqa=shares, scale=min(self.d_head, 32) ** -0.5)"},
        {*EQUATION, SCORES},
    ),
    "masked scores of -100": (
        "attention",
        {
            ATTEND: "        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))\n"
            "        causal = torch.ones(seq, seq, dtype=torch.bool, device=q.device).tril()\n"
            "        seen = causal if mask is None else mask\n"
            "        scores = (q.float() if q.dtype.itemsize < 4 else q) @ k.mT.to(q.dtype if q.dtype.itemsize > 2 "
            "else torch.float32) / q.shape[-1] ** 0.5\n"
            "        weights = scores.masked_fill(~seen, -100.0).softmax(-1).masked_fill(~seen, 0)\n"
            "        out = (weights @ v.to(weights.dtype)).to(v.dtype)\n"
        },
        {"equation in float64", "gradients", "prefill against one-shot"},
    ),
    "a softmax that overflows": (
        "attention",
        {
            ATTEND: "        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))\n"
            "        causal = torch.ones(seq, seq, dtype=torch.bool, device=q.device).tril()\n"
            "        seen = causal if mask is None else mask\n"
            "        wide = torch.promote_types(q.dtype, torch.float32)\n"
            "        weights = (q.to(wide) @ k.to(wide).mT / q.shape[-1] ** 0.5).exp() * seen\n"
            "        sums = weights.sum(-1, keepdim=True).clamp(min=1e-30)\n"
            "        out = (weights / sums @ v.to(wide)).to(v.dtype)\n"
        },
        {"equation in float64", "gradients", SCORES},
    ),
    "no causality": (
        "attention",
        {"is_causal=mask is None": "is_causal=False"},
        {*EQUATION, *ALONG - {"relative positions only"}, SCORES},
    ),
    "the mask dropped": (
        "attention",
        {"        batch, seq, group": "        mask = None\n        batch, seq, group"},
        {*EQUATION, MASK},
    ),
    "the mask alone": ("attention", {"(mask & causal)": "mask"}, {*EQUATION, MASK, "prefill against one-shot"}),
    "a print where there is no RoPE": (
        "attention",
        {ATTEND: f"        if self.rope is None:\n            print(end='')\n{ATTEND}"},
        {"compiles to one graph"},
    ),
    "weights of the default": (
        "attention",
        {"nn.init.trunc_normal_(linear.weight, std=std, a=-3 * std, b=3 * std)": "pass"},
        {f"{ATTENTION}: initial weights"},
    ),
    "two dtypes for the norm under autocast": (
        "attention",
        {"self.q_norm(q.to(self.q_norm.weight.dtype)).to(v.dtype)": "self.q_norm(q)"},
        {"autocast"},
    ),
    "no scale": (
        "attention",
        {"enable_gqa=shares)": "enable_gqa=shares, scale=1.0)"},
        {*EQUATION, "causality", MASK, SCORES},
    ),
    "key heads dealt out in turn": (
        "attention",
        {
            "shares = group > 1 and (flash or not q.is_cuda)": "shares = False",
            "k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)": (
                "k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1)"
            ),
        },
        EQUATION,
    ),
    "keys not rotated": ("attention", {TURN: "q = rope.rotate(q, cos_sin)"}, {*EQUATION, "relative positions only"}),
    "positions ignored": (
        "attention",
        {
            "        rope, outside = self.rope, None\n": "        rope, outside = self.rope, None\n"
            "        token_positions = token_positions if rope is None else None\n"
        },
        {*EQUATION, "relative positions only", "positions off the table"},
    ),
    "a marked token hidden": ("attention", {"if outside is not None:": "if False:"}, {"positions off the table"}),
    "a state between calls": (
        "attention",
        {
            "        projections = (self": "        self.calls = getattr(self, 'calls', 0) + 1\n"
            "        x = x * (1 + 1e-9 * self.calls)\n        projections = (self"
        },
        {*EQUATION - {"equation in float32", LOW}, *ALONG, "inputs not modified"},
    ),
    "post-norm": (
        "block",
        {"x + self.attn(self.ln1(x), token_positions, mask)": "self.ln1(x + self.attn(x, token_positions, mask))"},
        EQUATION,
    ),
    "a print where there is no gate": (
        "block",
        {
            "        x = x + self.attn": "        if not hasattr(self.ffn, 'w3'):\n            print(end='')\n"
            "        x = x + self.attn"
        },
        {"compiles to one graph"},
    ),
    "no residual": ("block", {"return x + self.ffn": "return self.ffn"}, EQUATION),
    "a residual in place": (
        "block",
        {"x = x + self.attn": "x += self.attn"},
        {"gradients", "inputs not modified", *ALONG},
    ),
    "the mask not passed on": (
        "block",
        {"token_positions, mask)\n        r": "token_positions)\n        r"},
        {*EQUATION, MASK},
    ),
    "a fixed eps": ("block", {"self.ln2 = RMSNorm(d_model, eps": "self.ln2 = RMSNorm(d_model, 1e-6"}, EQUATION - {LOW}),
    "an option not passed on": ("block", {"            qk_norm=qk_norm,\n": ""}, {KEYS}),
    "eps not passed on": ("block", {"            eps=eps,\n": ""}, EQUATION - {LOW}),
    "no final norm": ("transformer", {"return self.ln_final(x)": "return x"}, {*EQUATION, ONE_TABLE}),
    "a table per block": (
        "transformer",
        {"attn.rope = self.rope": "attn.rope = RotaryPositionalEmbedding(theta, self.rope.d_k, max_seq_len)"},
        {ONE_TABLE},
    ),
    "no limit": (
        "transformer",
        {"if token_positions is None and x.shape[-2] > self": "if False and x.shape[-2] > self"},
        {"a sequence longer than max_seq_len is refused"},
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_an_edit_that_breaks_a_layer_is_found(name, tmp_path):
    layer, edits, expected = MUTANTS[name]
    modules = contract.load(copies(tmp_path, edits=[(layer, *edit) for edit in edits.items()]))
    violations, _ = outcomes(modules, layer, expected)
    assert violations.keys() == expected, violations
    for message in violations.values():
        assert "\n" not in message
        assert re.search(r"shape \(|\(\d|linspace|position|tokens", message), message


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "post-norm",
            r"Block\(24, 4, 40, rope=RotaryPositionalEmbedding\(.*\)\) of x of shape \(2, 7, 24\), seed 0, "
            r"torch.float64: largest error [\d.]+e\+00 at \[\d, \d, \d+\]: got -?[\d.]+, "
            r"expected -?[\d.]+; allowed [\d.]+e-12",
        ),
        (
            "a table built in float32",
            r".*x of shape \(2, 3, 11, 8\), seed 0, torch.float64: largest error .*e-0\d at \[",
        ),
        ("w3 renamed", r".*: no 'w3.weight' in the state dict, which has w1.weight, w2.weight, up.weight"),
    ],
)
def test_a_violation_says_at_which_input_and_what_came_out(name, said, tmp_path):
    layer, edits, _ = MUTANTS[name]
    modules = contract.load(copies(tmp_path, edits=[(layer, *edit) for edit in edits.items()]))
    [equation] = [
        held for held in contract.PROPERTIES if held.layer == layer and held.name.startswith("equation in float64")
    ][:1]
    with pytest.raises(contract.Violation, match=said):
        equation.run(OWN | modules)


def test_a_violation_names_the_line_of_the_copy_that_raised(tmp_path):
    edit = "attention", "        q, k, v = (projection", "        q, k, v = (projections"
    modules = contract.load(copies(tmp_path, edits=[(*edit[:2], "        x[0, 0, 99]\n" + edit[1])]))
    line = (tmp_path / "attention.py").read_text().splitlines().index("        x[0, 0, 99]") + 1
    message = outcomes(modules, "attention")[0]["equation in float64"]
    assert re.search(rf"seed 0, torch.float64: IndexError: .* \(attention.py, line {line}\)$", message)


def test_harmless_edits_pass(tmp_path):
    copies(
        tmp_path,
        edits=[("rope", "Computed in float32 or wider, returned in the dtype of the input.", "Ours, since May.")],
    )
    rope = (tmp_path / "rope.py").read_text()
    start, end = rope.index("def apply_rope"), rope.index("class RotaryPositionalEmbedding")
    rope = (
        (rope[:start] + rope[end:])
        .replace('"apply_rope"', "")
        .replace("cos_sin, outside = self.look_up", "turns, outside = self.look_up")
    )
    rope = rope.replace("self.rotate(x, cos_sin)", "self.rotate(x, turns)")
    (tmp_path / "rope.py").write_text(rope)
    ffn = (tmp_path / "ffn.py").read_text()
    (tmp_path / "ffn.py").write_text(ffn.replace("FeedForward", "Plain"))
    modules = contract.load(tmp_path)
    violations, skipped = outcomes(modules, "rope", SLOW)
    assert (violations, set(skipped.values()) - {CUDA}) == ({}, {"apply_rope is not in this copy"})
    violations, skipped = outcomes(modules, "ffn")
    assert (violations, set(skipped.values()) - {CUDA}) == ({}, {"FeedForward is not in this copy"})
    assert outcomes(modules, "transformer")[0] == {}


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        ([], set()),
        (["        num_kv_heads: int | None = None,\n", "num_kv_heads=num_kv_heads", "num_kv_heads=None"], set()),
        (["        qk_norm: bool = False,\n", "qk_norm=qk_norm", "qk_norm=False"], set()),
        (["        eps: float = 1e-5,\n", "eps=eps", "eps=1e-5"], set()),
        (
            [
                '        mask: Bool[Tensor, "*#batch #seq seq"] | None = None,\n',
                "token_positions, mask)",
                "token_positions)",
            ],
            {"forward of Block has no mask in this copy"},
        ),
        (
            ["        rope: nn.Module | None = None,\n", "rope=rope", "rope=None"],
            {"Block has no rope in this copy"},
        ),
    ],
    ids=["nothing", "num_kv_heads", "qk_norm", "eps", "mask", "rope"],
)
def test_a_copy_may_drop_an_option_and_the_rest_is_still_checked(edits, said, tmp_path):
    text = (copies(tmp_path) / "block.py").read_text()
    if edits:
        option, passed, default = edits
        if passed == "eps=eps":
            text = text.replace("RMSNorm(d_model, eps,", "RMSNorm(d_model, 1e-5,")
        text = text.replace(option, "").replace(passed, default)
    (tmp_path / "block.py").write_text(text)
    violations, skipped = outcomes(contract.load(tmp_path), "block")
    assert (violations, set(skipped.values()) - {CUDA}) == ({}, said)
    (tmp_path / "block.py").write_text(text.replace("return x + self.ffn(", "return self.ffn("))
    violations, _ = outcomes(contract.load(copies(tmp_path / "broken", edits=[])) | contract.load(tmp_path), "block")
    assert violations.keys() >= EQUATION


def test_a_correct_transformer_may_hold_other_buffers(tmp_path):
    """Two causal masks of the same values, and a table in float64."""
    table = "torch.empty(shape, device=device, dtype=torch.float32), persistent=False)"
    mask = "        self.max_seq_len = max_seq_len\n"
    folder = copies(
        tmp_path,
        edits=[
            ("rope", table, table.replace("float32", "float64")),
            (
                "transformer",
                mask,
                f"{mask}        for name in ('causal', 'seen'):\n"
                "            causal = torch.ones(9, 9, dtype=torch.bool).tril()\n"
                "            self.register_buffer(name, causal, persistent=False)\n",
            ),
        ],
    )
    violations, _ = outcomes(contract.load(folder), "transformer")
    assert ONE_TABLE not in violations, violations


@pytest.mark.parametrize(
    "edit",
    [
        ("self.theta**-exponents", "(self.theta**-exponents).float()"),
        ("def _apply(self", "def _apply_not(self"),
    ],
    ids=["built in float32", "rounded with the weights"],
)
def test_a_table_that_loses_digits_is_found_in_the_transformer(edit, tmp_path):
    violations, _ = outcomes(contract.load(copies(tmp_path, edits=[("rope", *edit)])), "transformer")
    assert ONE_TABLE in violations


@pytest.mark.parametrize("host", ["meta", "no_grad", "float64", "inference", "autocast"])
def test_the_contract_does_not_depend_on_its_host(host):
    fast = [held for held in contract.PROPERTIES if held.layer in ("rmsnorm", "ffn", "attention")]
    fast = [held for held in fast if not any(held.name.startswith(name) for name in (*SLOW, "equation on"))]
    try:
        with {
            "meta": nullcontext(),
            "no_grad": torch.no_grad(),
            "float64": nullcontext(),
            "inference": torch.inference_mode(),
            "autocast": torch.autocast("cpu", torch.bfloat16),
        }[host]:
            torch.set_default_device("meta" if host == "meta" else None)
            torch.set_default_dtype(torch.float64 if host == "float64" else torch.float32)
            expected = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
            for held in fast:
                held.run(OWN)
            found = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
            assert found == expected
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def test_the_equation_is_checked_on_cuda_where_there_is_one(monkeypatch, tmp_path):
    """Here the CPU stands for it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(torch.nn.Module, "cuda", lambda self: self)
    broken = contract.load(copies(tmp_path, edits=[("attention", "(mask & causal)", "mask")]))
    held = [it for it in contract.PROPERTIES if it.name.startswith("equation on CUDA") and it.layer == "attention"]
    for it in held:
        it.run(OWN)
        with pytest.raises(contract.Violation, match=r"mask_of\(.*\), torch.float64, on CUDA: gradients on: largest"):
            it.run(OWN | broken)
    assert len(held) == 2


def test_a_violation_says_how_long_inputs_were_made(tmp_path):
    edit = ("attention", "(mask & causal)", "mask")
    message = outcomes(contract.load(copies(tmp_path, edits=[edit])), "attention")[0]["equation in float64"]
    assert "seed 0, mask mask_of(2, 7, 7), torch.float64: " in message
    edit = ("rope", "[cos, -sin, sin, cos]", "[cos, sin, -sin, cos]")
    message = outcomes(contract.load(copies(tmp_path / "b", edits=[edit])), "rope")[0][
        "apply_rope: equation and gradients"
    ]
    assert "apply_rope of (2, 3, 5, 8) seed 0, angles_of(torch.tensor([0, 1, 5, 100, 131071]), 8, 100.0), " in message
    assert contract.show(torch.tensor([0.5, 1.0])) == "[0.5, 1.0]"


def test_a_copy_may_drop_device_and_dtype(tmp_path):
    text = (PACKAGE / "rmsnorm.py").read_text().replace(", device=device, dtype=dtype", "")
    text = re.sub(r"        device: .*\n        dtype: .*\n", "", text)
    (tmp_path / "rmsnorm.py").write_text(text)
    violations, skipped = outcomes(contract.load(tmp_path), "rmsnorm")
    assert (violations, {*skipped.values()} - {CUDA}) == ({}, {"RMSNorm has no device and dtype in this copy"})


def test_a_property_leaves_the_random_numbers_of_its_caller_alone():
    before = torch.get_rng_state()
    for held in contract.PROPERTIES:
        if held.name.startswith("keys"):
            held.run(OWN)
    assert torch.equal(torch.get_rng_state(), before)


# Where the copies lie.


def origins(modules):
    return {layer: Path(module.__file__).name for layer, module in modules.items()}


def test_load_of_our_own_folder_gives_the_checked_modules():
    assert contract.load(PACKAGE) == OWN
    assert contract.load("tinyblock") == OWN
    assert contract.load("tinyblock.rope") == {"rope": tinyblock.rope}
    assert contract.load(PACKAGE / "ffn.py") == {"ffn": tinyblock.ffn}


@pytest.mark.parametrize("name", ["layers", "my layers", "v1.2", "Schichten-\u00fc\u03b8", "class", "[a]*"])
@pytest.mark.parametrize("package", [False, True])
def test_load_takes_any_folder(name, package, tmp_path):
    folder = copies(tmp_path / name)
    if package:
        (folder / "__init__.py").touch()
    modules = contract.load(str(folder))
    assert list(modules) == list(contract.LAYERS)
    assert modules["block"].RMSNorm is modules["rmsnorm"].RMSNorm
    assert [module.__file__ for module in modules.values()] == [str(folder / f"{layer}.py") for layer in modules]
    assert list(contract.load(folder / "rope.py")) == ["rope"]


def test_load_keeps_two_folders_apart(tmp_path):
    first, second = (
        contract.load(copies(tmp_path / name, edits=edits))
        for name, edits in {"a": [], "b": [("rmsnorm", "eps={self.eps}", "epsilon={self.eps}")]}.items()
    )
    assert "epsilon=" not in repr(first["block"].Block(8, 2).ln1)
    assert "epsilon=" in repr(second["block"].Block(8, 2).ln1)


def test_load_imports_a_package_as_its_project_does(tmp_path):
    folder = copies(tmp_path / "host_project" / "layers")
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    (folder.parent / "settings.py").write_text("EPS = 1e-5")
    text = (folder / "block.py").read_text().replace("from .rmsnorm", "from host_project.layers.rmsnorm")
    (folder / "block.py").write_text(text.replace("from .ffn", "from ..settings import EPS\nfrom .ffn"))
    modules = contract.load(folder)
    assert modules["block"].__name__ == "host_project.layers.block"
    assert contract.load("host_project.layers") == modules
    assert contract.load("host_project.layers.rope") == {"rope": modules["rope"]}


def test_load_finds_namespace_packages_from_the_current_folder(tmp_path, monkeypatch):
    folder = copies(tmp_path / "host_space" / "layers")
    text = (folder / "block.py").read_text().replace("from .rmsnorm", "from host_space.layers.rmsnorm")
    (folder / "block.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert list(contract.load("host_space/layers")) == list(contract.LAYERS)
    assert contract.load("host_space.layers")["rope"].__name__ == "host_space.layers.rope"


def test_load_knows_renamed_files_and_imports_no_other(tmp_path):
    folder = copies(tmp_path, layers=["rmsnorm", "rope", "ffn"])
    (folder / "rope.py").rename(folder / "rotary.py")
    (folder / "ffn.py").write_text((folder / "ffn.py").read_text() + (folder / "rmsnorm.py").read_text())
    (folder / "rmsnorm.py").unlink()
    (folder / "ffn.py").rename(folder / "__init__.py")
    (folder / "vision.py").write_text("class Block:\n    def __init__(self, channels): ...\nraise SystemExit")
    (folder / "broken.py").write_text("class RMSNorm(:")
    (folder / "test_it.py").write_text("class Block:\n    d_model = 3\nraise SystemExit")
    assert origins(contract.load(folder)) == {"rmsnorm": "__init__.py", "ffn": "__init__.py", "rope": "rotary.py"}
    assert origins(contract.load(folder / "rotary.py")) == {"rope": "rotary.py"}
    monkey = folder / "rope.py"
    monkey.write_text("def rope(length): ...")
    assert origins(contract.load(folder))["rope"] == "rotary.py"


def test_load_does_not_choose_between_two_files(tmp_path):
    folder = copies(tmp_path, layers=["rope"])
    text = (folder / "rope.py").read_text()
    (folder / "old.py").write_text(text)
    assert origins(contract.load(folder)) == {"rope": "rope.py"}
    (folder / "rope.py").rename(folder / "new.py")
    with pytest.raises(LookupError, match=r"new, old all define RotaryPositionalEmbedding .*give the one file"):
        contract.load(folder)
    assert origins(contract.load(folder / "old.py")) == {"rope": "old.py"}


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nowhere/layers", "nowhere/layers is not there: give a folder"),
        ("nowhere.layers", "there is no module nowhere.layers: go to the folder of the project"),
        ("tinyblock.nothing", "there is no module tinyblock.nothing"),
        ("tinyblock.typecheck", "tinyblock.typecheck holds no layer: it defines none of RMSNorm"),
        ("no layer", "no layer holds no layer"),
        ("no layer/other.py", "holds no layer"),
    ],
)
def test_load_says_in_one_line_what_it_did_not_find(target, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("no layer").mkdir()
    Path("no layer/other.py").write_text("x = 1")
    with pytest.raises(LookupError, match=re.escape(said)) as caught:
        contract.load(target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("raise RuntimeError('not\\ntoday')", r"rope.py, line 1: RuntimeError: not today$"),
        ("import not_installed", r"rope.py, line 1: ModuleNotFoundError: No module named 'not_installed'$"),
        ("raise SystemExit(3)", r"rope.py, line 1: SystemExit: 3$"),
        ("<<<<<<< mine", r"rope.py, line 1: SyntaxError: invalid syntax"),
        ("from .helper import x", r"helper.py, line 2: ZeroDivisionError: division by zero$"),
        ("from ..above import x", r"rope.py, line 1: ImportError: attempted relative import beyond top-level package$"),
    ],
)
@pytest.mark.parametrize("way", ["folder", "file", "name"])
def test_load_says_in_one_line_why_a_copy_cannot_be_imported(line, said, way, tmp_path, monkeypatch):
    folder = copies(tmp_path / "host_broken", layers=["rope"])
    (folder / "helper.py").write_text("y = 0\nx = 1 / y")
    (folder / "rope.py").write_text(f"{line}\n{(folder / 'rope.py').read_text()}")
    monkeypatch.chdir(tmp_path)
    target = {"folder": folder, "file": folder / "rope.py", "name": "host_broken.rope"}[way]
    with pytest.raises(ImportError, match=said) as caught:
        contract.load(target)
    assert "\n" not in str(caught.value)


def test_load_does_not_take_one_package_for_another(tmp_path):
    for project in ("a", "b"):
        (copies(tmp_path / project / "host_layers", layers=["rope"]) / "__init__.py").touch()
    contract.load(tmp_path / "a" / "host_layers")
    with pytest.raises(
        LookupError, match=r"is the package host_layers, but here that is another, with .*a.host_layers"
    ):
        contract.load(tmp_path / "b" / "host_layers")


# The contract beside the copies, in a project without tinyblock.


@pytest.mark.parametrize("package", [False, True], ids=["folder", "package"])
@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_the_contract_runs_beside_the_copies(package, mode, tmp_path):
    edits = [("rmsnorm", "0 < eps", "0 <= eps")]
    folder = copies(tmp_path / "my_project" / "layers", ["rmsnorm", "ffn", "attention", "block"], edits)
    for name in ("contract.py", "test_contract.py"):
        shutil.copy(PACKAGE / name, folder)
    if package:
        for path in (folder, folder.parent):
            (path / "__init__.py").touch()
    (tmp_path / "conftest.py").write_text(REFUSE_TINYBLOCK_AND_BEARTYPE)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-W",
        "error",
        "-p",
        "no:cacheprovider",
        "-q",
        "-rs",
        "--import-mode",
        mode,
    ]
    chosen = "keys or float64 or refused"
    done = subprocess.run(
        [*command, "my_project", "-k", chosen], cwd=tmp_path, capture_output=True, text=True, env=WITHOUT_PACKAGE
    )
    assert "1 failed, " in done.stdout, done.stdout + done.stderr
    assert "Violation: RMSNorm(4, 0.0): was accepted, expected a ValueError" in done.stdout
    assert "test_contract[rmsnorm: RMSNorm: bad hyperparameters refused]" in done.stdout
    assert "it needs rope in this folder too" in done.stdout
