"""An edit that breaks a layer is found by the properties that are about it, and by a case that no other edit needs."""

import re

import pytest
from contract.copying import LAYERS, copy_layers

from tinyblock.contract.harness import PROPERTIES, Violation
from tinyblock.contract.loading import load

F64, HALVES = "equation and gradients in float64", "equation and gradients in bfloat16 and float16"
COMPILES, AUTOCAST, KEYS = "compiles to one graph", "autocast", "keys of the state dict"
WEIGHTS, RESET = "initial weights", "reset_parameters reaches every layer"
REJECTED = "invalid hyperparameters rejected"
ROUNDING, TABLE = "one rounding, without overflow of the squares", "exact table after every copy, cast and move"
STRIDES, OUT_OF_RANGE = "any strides", "positions out of range rejected"
INTEGERS, BOOL = "positions that are not integers rejected", "masks that are not bool rejected"
CAUSAL, MASK = "causality", "masks are combined with the causal mask by AND"
RELATIVE, SCORES = "relative positions only", "scores in float32 or wider"
RECOMPUTED, OVERRIDDEN = "activation checkpointing", "attend overridden"
OTHERS, ONE_TABLE = "any callable for norm, ffn and attention", "one table for all blocks"

NORM = "        if x.dtype == weight.dtype:\n"
GATED = "        return self.w2(F.silu(self.w1(x)) * self.w3(x))"
ROWS = "                rows = F.embedding("
INDICES = "token_positions.long()"
COMPLEX = "rotated = torch.view_as_real(numbers * torch.view_as_complex(cos_sin))"
TURN = "q, k = rope(q, token_positions), rope(k, token_positions)"
SPLIT = '        split = "'
KERNEL = "        out = F.scaled_dot_product_attention("
BY_HAND = (
    "        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))\n"
    "        causal = torch.ones(seq, seq, dtype=torch.bool, device=q.device).tril()\n"
    "        seen = causal if mask is None else mask\n"
    "{weights}"
    "        return (weights @ v.to(weights.dtype)).to(v.dtype).view(*batch, *q.shape[1:])\n"
)


def by_hand(weights):
    return {KERNEL: BY_HAND.format(weights=f"        weights = {weights}\n") + KERNEL}


MUTANTS = {  # name: layer, edits, properties that fail
    "eps outside the root": (
        "rmsnorm",
        {NORM: f"        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps) * self.weight\n{NORM}"},
        {F64, ROUNDING},
    ),
    "the cast order of Hugging Face": (
        "rmsnorm",
        {
            NORM: "        if x.dtype.itemsize < 4:\n            y = x.float()\n"
            "            y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)\n"
            f"            return (self.weight * y.to(x.dtype)).to(x.dtype)\n{NORM}"
        },
        {HALVES, ROUNDING},
    ),
    "everything in float32": (
        "rmsnorm",
        {NORM: f"        if x.dtype == torch.float64:\n            return self(x.float()).double()\n{NORM}"},
        {F64},
    ),
    "an input scaled in place and back": (
        "rmsnorm",
        {NORM: f"        x.data.mul_(3.0)\n        x = x / 3\n{NORM}"},
        {F64},
    ),
    "a batch of one lost": (
        "rmsnorm",
        {NORM: f"        if len(x) == 1:\n            return self(x[0])\n{NORM}"},
        {F64},
    ),
    "no gradient for the gains in bfloat16": (
        "rmsnorm",
        {NORM: f"        if x.dtype == torch.bfloat16:\n            return rms_norm(x, self.weight.detach())\n{NORM}"},
        {HALVES},
    ),
    "a message without the value": ("rmsnorm", {"such as 1e-5, got {eps}": "such as 1e-5"}, {REJECTED}),
    "GELU by tanh": (
        "ffn",
        {"return F.gelu(x)": 'return F.gelu(x, approximate="tanh")'},
        {F64, "gelu: equation and gradients", "feed_forward: equation and gradients"},
    ),
    "d_ff rounded up": (
        "ffn",
        {"max(1, (d_model + 12) // 24) * 64 if": "(8 * d_model + 191) // 192 * 64 if"},
        {"d_ff is the multiple of 64 nearest to 8/3 d_model"},
    ),
    "an unused weight": ("ffn", {"self.w3 = nn.Linear": "self.w4 = self.w3 = nn.Linear"}, {KEYS}),
    "a print": ("ffn", {GATED: f"        print(end='')\n{GATED}"}, {COMPILES}),
    "a loop over the tokens": ("ffn", {GATED: f"        for _ in range(x.numel()): ...\n{GATED}"}, {COMPILES}),
    "bfloat16 scaled by 1.05": ("ffn", {GATED: f"{GATED} * (1.05 if x.dtype == torch.bfloat16 else 1)"}, {HALVES}),
    "weights not cut": (
        "ffn",
        {"trunc_normal_(linear.weight, std=std, a=-3 * std, b=3 * std)": "normal_(linear.weight, std=std)"},
        {WEIGHTS},
    ),
    "a weight without a gradient": (
        "ffn",
        {GATED: "        return (F.silu(self.w1(x)) * self.w3(x)) @ self.w2.weight.T.to(x.dtype).detach()"},
        {F64, AUTOCAST},
    ),
    "a clamp": ("ffn", {GATED: f"{GATED}.clamp(-1e4, 1e4)"}, {F64}),
    "halves for pairs": (
        "rope",
        {
            COMPLEX: "numbers = torch.complex(*pairs.flatten(-2).chunk(2, dim=-1))\n"
            "            turned = numbers * torch.view_as_complex(cos_sin)\n"
            "            rotated = torch.stack((turned.real, turned.imag), dim=-2)"
        },
        {F64, HALVES, STRIDES, TABLE},
    ),
    "a table built in float32": (
        "rope",
        {"self.frequencies().view": "self.frequencies().float().double().view"},
        {F64, TABLE},
    ),
    "the table follows the dtype": ("rope", {"def _apply(self": "def _apply_not(self"}, {HALVES, TABLE}),
    "the table in the state dict": ("rope", {"persistent=False": "persistent=True"}, {KEYS}),
    "float64 lowered": ("rope", {"cos_sin, x.dtype == torch.float64": "cos_sin, False"}, {F64, TABLE}),
    "strides that cannot be viewed": ("rope", {"except RuntimeError:  # the": "except IndexError:  # the"}, {STRIDES}),
    "integers that are not cast": ("rope", {INDICES: "token_positions"}, {F64}),
    "positions lowered to int32": ("rope", {INDICES: "token_positions.to(torch.int32)"}, {OUT_OF_RANGE}),
    "positions clamped where they are compiled": (
        "rope",
        {
            ROWS: "                if torch.compiler.is_compiling():\n"
            f"                    token_positions = token_positions.clamp(0, self.max_seq_len - 1)\n{ROWS}"
        },
        {OUT_OF_RANGE},
    ),
    "fractions cut off where they are compiled": (
        "rope",
        {"elif token_positions.dtype": "elif not torch.compiler.is_compiling() and token_positions.dtype"},
        {INTEGERS},
    ),
    "a softmax in the dtype of the input": (
        "attention",
        by_hand("(q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -math.inf).softmax(-1).masked_fill(~seen, 0)"),
        {SCORES},
    ),
    "no causality in evaluation": (
        "attention",
        {"is_causal=mask is None": "is_causal=mask is None and self.training"},
        {F64},
    ),
    "a window of 16": (
        "attention",
        {
            KERNEL: "        seen = torch.ones(seq, seq, dtype=torch.bool, device=q.device).tril().triu(-15)\n"
            f"        mask = seen if mask is None else mask & seen\n{KERNEL}"
        },
        {F64, CAUSAL},
    ),
    "masked scores of -100": (
        "attention",
        by_hand("(q.double() @ k.mT.double() / q.shape[-1] ** 0.5).masked_fill(~seen, -100).softmax(-1) * seen"),
        {F64, CAUSAL},
    ),
    "a softmax that overflows": (
        "attention",
        by_hand(
            "(q.double() @ k.double().mT / q.shape[-1] ** 0.5).exp() * seen\n"
            "        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)"
        ),
        {F64},
    ),
    "additive masks read as bool where they are compiled": (
        "attention",
        {
            "if mask.dtype != torch.bool or": "if not torch.compiler.is_compiling() and mask.dtype != torch.bool or",
            "(mask & causal)": "(mask.bool() & causal)",
        },
        {BOOL},
    ),
    "a print where there is no RoPE": (
        "attention",
        {KERNEL: f"        if self.rope is None:\n            print(end='')\n{KERNEL}"},
        {COMPILES},
    ),
    "two dtypes for the norm under autocast": (
        "attention",
        {"self.q_norm(q.to(self.q_norm.weight.dtype)).to(v.dtype)": "self.q_norm(q)"},
        {AUTOCAST},
    ),
    "a rope asked for its table": (
        "attention",
        {TURN: f"assert self.rope.cos_sin is not None\n            {TURN}"},
        {F64},
    ),
    "attend of the base class": (
        "attention",
        {"rearrange(self.attend(": "rearrange(CausalMultiHeadSelfAttention.attend(self, "},
        {OVERRIDDEN},
    ),
    "a state between calls": (
        "attention",
        {
            SPLIT: "        self.calls = getattr(self, 'calls', 0) + 1\n"
            f"        x = x * (1 + 1e-9 * self.calls)\n{SPLIT}"
        },
        {F64, CAUSAL, RELATIVE},
    ),
    "an operation in the first call alone": (
        "attention",
        {
            SPLIT: "        if not hasattr(self, 'called'):\n            x = x.exp().log()\n"
            f"        self.called = True\n{SPLIT}"
        },
        {RECOMPUTED},
    ),
    "post-norm": (
        "block",
        {
            'self.attn(_like(x, self.ln1(x), "norm"), ': "self.attn(x, ",
            "        return x": "        x = self.ln1(x)\n        return x",
        },
        {F64},
    ),
    "a residual in place": ("block", {"x = x + _like": "x += _like"}, {F64, CAUSAL, MASK}),
    "the mask not passed on": ("block", {"token_positions, mask), ": "token_positions), "}, {MASK}),
    "d_ff not passed on": ("block", {"self.ffn = ffn(d_model, d_ff,": "self.ffn = ffn(d_model, None,"}, {F64}),
    "a norm of its own": ("block", {"self.ln1 = norm(": "self.ln1 = RMSNorm("}, {OTHERS}),
    "an attention of its own": (
        "block",
        {"self.attn = attention(": "self.attn = CausalMultiHeadSelfAttention("},
        {OTHERS},
    ),
    "a layer left out of the reset": ("block", {"in self.children()": "in (self.ln1, self.attn, self.ffn)"}, {RESET}),
    "a table per block": ("transformer", {"rope=rope,": "rope=__import__('copy').deepcopy(rope),"}, {ONE_TABLE}),
}


def violations(modules, layer, names):
    """Run the properties of a layer, known by their names without "(of which class)"; return their messages."""
    found = {}
    for prop in PROPERTIES:
        name = prop.name.partition(" (")[0]
        if prop.layer == layer and name in names and name not in found:
            try:
                prop.run(LAYERS | modules)
            except Violation as violation:
                found[name] = str(violation)
    return found


@pytest.mark.parametrize("name", MUTANTS)
def test_an_edit_that_breaks_a_layer_is_found(name, tmp_path):
    layer, edits, expected = MUTANTS[name]
    modules = load(copy_layers(tmp_path, edits=[(layer, *edit) for edit in edits.items()]))
    found = violations(modules, layer, expected)
    assert found.keys() == expected, found
    for message in found.values():
        assert "\n" not in message
        assert re.search(r"shape \(|[(=]\d|position|tokens", message), message
