"""An edit that breaks a layer is found by the properties that are about it."""

import re

import pytest
from contract.copying import LAYERS, copy_layers

from tinyblock.contract.harness import PROPERTIES, Violation
from tinyblock.contract.loading import load

FLOAT64, FLOAT32, HALVES = (f"equation and gradients in {it}" for it in ("float64", "float32", "bfloat16 and float16"))
PLACED, KEYS, WEIGHTS = "device and dtype of the parameters", "keys of the state dict", "initial weights"
REFUSED, COMPILES, AUTOCAST = "bad hyperparameters refused", "compiles to one graph", "autocast"
ROUNDING, SURVIVES = "rounds once, and no square overflows", "table survives"
STRIDES, BROADCAST = "any strides", "positions broadcast, in every signed integer dtype"
CAUSAL, PREFILL, MASK = "causality", "prefill against one-shot", "mask narrows causality and never lifts it"
RELATIVE, OFF_TABLE = "relative positions only", "positions off the table are refused"
SCORES, RECOMPUTED = "scores in float32 or wider", "activation checkpointing"
ANY_ROPE, ANY_LAYERS = "any callable serves as rope", "any norm and any ffn serve"
ONE_TABLE = "one table for all blocks, and in float32"

NORM = "        if x.dtype == self.weight.dtype:\n"
GATED = "        return self.w2(F.silu(self.w1(x)) * self.w3(x))"
INDICES = "token_positions.to(torch.promote_types(token_positions.dtype, torch.int32))"
NUMBERS = "        return torch.view_as_real(numbers * torch.view_as_complex(cos_sin)).flatten(-2).to(x.dtype)"
TURN = "q, k = self.rope(q, token_positions), self.rope(k, token_positions)"
PROJECTED = "        projected = self.q_proj(x)"
GROUPS = "        batch, seq, group"
KERNEL = (
    "        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=shares)\n"
)
BY_HAND = (
    "        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))\n"
    "        causal = torch.ones(seq, seq, dtype=torch.bool, device=q.device).tril()\n"
    "        seen = causal if mask is None else mask\n"
)
ATTEND = "        x = x + self.attn"
MUTANTS = {  # name: layer, edits, properties that fail
    "eps outside the root": (
        "rmsnorm",
        {NORM: f"        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps) * self.weight\n{NORM}"},
        {FLOAT64, FLOAT32, ROUNDING},
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
        {FLOAT64},
    ),
    "rms_norm in the dtype of x": (
        "rmsnorm",
        {"x.to(torch.promote_types(x.dtype, torch.float32))\n": "x\n"},
        {ROUNDING},
    ),
    "an input scaled in place and back": (
        "rmsnorm",
        {NORM: f"        x.data.mul_(3.0)\n        x = x / 3\n{NORM}"},
        {FLOAT64},
    ),
    "gains in the default dtype": (
        "rmsnorm",
        {"torch.empty(d_model, device=device, dtype=dtype)": "torch.empty(d_model)"},
        {PLACED},
    ),
    "a batch of one lost": (
        "rmsnorm",
        {NORM: f"        if len(x) == 1:\n            return self(x[0])\n{NORM}"},
        {FLOAT64},
    ),
    "gains of 0": ("rmsnorm", {"nn.init.ones_": "nn.init.zeros_"}, {WEIGHTS}),
    "no gradient for the gains in bfloat16": (
        "rmsnorm",
        {NORM: f"        if x.dtype == torch.bfloat16:\n            return rms_norm(x, self.weight.detach())\n{NORM}"},
        {HALVES},
    ),
    "eps may be 0": ("rmsnorm", {"0 < eps": "0 <= eps"}, {REFUSED}),
    "w1 and w3 swapped": ("ffn", {"F.silu(self.w1(x)) * self.w3(x)": "F.silu(self.w3(x)) * self.w1(x)"}, {FLOAT64}),
    "GELU by tanh": (
        "ffn",
        {"return F.gelu(x)": 'return F.gelu(x, approximate="tanh")'},
        {FLOAT64, FLOAT32, "silu, gelu: equation", "feed_forward: equation and gradients"},
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
        {FLOAT64, "d_ff is the multiple of 64 nearest to 8/3 d_model"},
    ),
    "the activation ignored": ("ffn", {"self.w2(self.activation(": "self.w2(gelu("}, {FLOAT64}),
    "a print": ("ffn", {GATED: f"        print(end='')\n{GATED}"}, {COMPILES}),
    "a loop over the tokens": ("ffn", {GATED: f"        for _ in range(x.numel()): ...\n{GATED}"}, {COMPILES}),
    "no gradient for x in bfloat16": (
        "ffn",
        {GATED: f"        x = x.detach() if x.dtype == torch.bfloat16 else x\n{GATED}"},
        {HALVES},
    ),
    "bfloat16 scaled by 1.05": ("ffn", {GATED: f"{GATED} * (1.05 if x.dtype == torch.bfloat16 else 1)"}, {HALVES}),
    "weights not cut": (
        "ffn",
        {"trunc_normal_(linear.weight, std=std, a=-3 * std, b=3 * std)": "normal_(linear.weight, std=std)"},
        {WEIGHTS},
    ),
    "a weight without a gradient": (
        "ffn",
        {GATED: "        return (F.silu(self.w1(x)) * self.w3(x)) @ self.w2.weight.T.to(x.dtype).detach()"},
        {FLOAT64, AUTOCAST},
    ),
    "a clamp": ("ffn", {GATED: f"{GATED}.clamp(-1e4, 1e4)"}, {FLOAT64}),
    "halves for pairs": (
        "rope",
        {
            NUMBERS: "        numbers = torch.complex(*pairs.flatten(-2).chunk(2, dim=-1))\n"
            "        turned = numbers * torch.view_as_complex(cos_sin)\n"
            "        return torch.cat((turned.real, turned.imag), dim=-1).to(x.dtype)"
        },
        {FLOAT64, FLOAT32, HALVES, STRIDES, BROADCAST, SURVIVES},
    ),
    "the other direction": ("rope", {"return self.theta**-exponents": "return -(self.theta**-exponents)"}, {FLOAT64}),
    "positions from 1": (
        "rope",
        {"torch.arange(self.max_seq_len, ": "torch.arange(1, self.max_seq_len + 1, "},
        {FLOAT64},
    ),
    "a table built in float32": (
        "rope",
        {"return self.theta**-exponents": "return (self.theta**-exponents).float().double()"},
        {FLOAT64, SURVIVES},
    ),
    "the table follows the dtype": (
        "rope",
        {"def _apply(self": "def _apply_not(self", "else self.cos_sin\n": "else self.cos_sin.float()\n"},
        {HALVES, SURVIVES},
    ),
    "the table in the state dict": ("rope", {"persistent=False": "persistent=True"}, {"keys of the state dict: none"}),
    "float64 lowered": (
        "rope",
        {"in_float64 = x.dtype == torch.float64": "in_float64 = False"},
        {FLOAT64, SURVIVES, BROADCAST, "norms preserved"},
    ),
    "a result in float32": ("rope", {"cos_sin)).flatten(-2).to(x.dtype)": "cos_sin)).flatten(-2)"}, {HALVES}),
    "strides that cannot be viewed": (
        "rope",
        {"except RuntimeError:  # the strides": "except IndexError:  # the strides"},
        {STRIDES},
    ),
    "integers that are not cast": (
        "rope",
        {INDICES: "token_positions"},
        {BROADCAST},
    ),
    "positions clamped": (
        "rope",
        {INDICES: f"{INDICES}.clamp(0, self.max_seq_len - 1)"},
        {OFF_TABLE},
    ),
    "negative positions counted from the end": (
        "rope",
        {"F.embedding(indices, table.flatten(1))": "table.flatten(1)[indices]"},
        {OFF_TABLE},
    ),
    "positions lowered to int32": ("rope", {INDICES: "token_positions.to(torch.int32)"}, {OFF_TABLE}),
    "positions clamped where they are compiled": (
        "rope",
        {
            "            try:  # an": "            if torch.compiler.is_compiling():\n"
            "                indices = indices.clamp(0, self.max_seq_len - 1)\n            try:  # an"
        },
        {OFF_TABLE},
    ),
    "a refusal without the range": (
        "rope",
        {'raise ValueError(f"token_positions must be {limits}': 'raise ValueError(f"token_positions'},
        {OFF_TABLE},
    ),
    "a softmax in the dtype of the input": (
        "attention",
        {
            KERNEL: f"{BY_HAND}        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -math.inf)\n"
            "        out = scores.softmax(-1).masked_fill(~seen, 0) @ v\n"
        },
        {SCORES},
    ),
    "no causality in evaluation": (
        "attention",
        {"is_causal=mask is None": "is_causal=mask is None and self.training"},
        {FLOAT64},
    ),
    "dropout in evaluation": (
        "attention",
        {"enable_gqa=shares)": "enable_gqa=shares, dropout_p=0.0 if self.training else 0.5)"},
        {FLOAT64},
    ),
    "a window of 16": (
        "attention",
        {
            KERNEL: "        seen = torch.ones(seq, seq, dtype=torch.bool, device=q.device).tril().triu(-15)\n"
            "        mask, is_causal = seen if mask is None else mask & seen, False\n"
            + KERNEL.replace("is_causal=mask is None", "is_causal=False")
        },
        {FLOAT64, CAUSAL},
    ),
    "masked scores of -100": (
        "attention",
        {
            KERNEL: f"{BY_HAND}        scores = q.double() @ k.mT.double() / q.shape[-1] ** 0.5\n"
            "        weights = scores.masked_fill(~seen, -100.0).softmax(-1).masked_fill(~seen, 0)\n"
            "        out = (weights @ v.double()).to(v.dtype)\n"
        },
        {FLOAT64, PREFILL},
    ),
    "a softmax that overflows": (
        "attention",
        {
            KERNEL: f"{BY_HAND}        weights = (q.double() @ k.double().mT / q.shape[-1] ** 0.5).exp() * seen\n"
            "        sums = weights.sum(-1, keepdim=True).clamp(min=1e-30)\n"
            "        out = (weights / sums @ v.double()).to(v.dtype)\n"
        },
        {FLOAT64},
    ),
    "no causality": ("attention", {"is_causal=mask is None": "is_causal=False"}, {FLOAT64, CAUSAL, PREFILL, MASK}),
    "the mask dropped": ("attention", {GROUPS: f"        mask = None\n{GROUPS}"}, {FLOAT64, MASK}),
    "the mask alone": ("attention", {"(mask & causal)": "mask"}, {FLOAT64, MASK, PREFILL}),
    "a print where there is no RoPE": (
        "attention",
        {KERNEL: f"        if self.rope is None:\n            print(end='')\n{KERNEL}"},
        {COMPILES},
    ),
    "weights of the default": (
        "attention",
        {"nn.init.trunc_normal_(linear.weight, std=std, a=-3 * std, b=3 * std)": "pass"},
        {WEIGHTS},
    ),
    "two dtypes for the norm under autocast": (
        "attention",
        {"self.q_norm(q.to(self.q_norm.weight.dtype)).to(v.dtype)": "self.q_norm(q)"},
        {AUTOCAST},
    ),
    "no scale": ("attention", {"enable_gqa=shares)": "enable_gqa=shares, scale=1.0)"}, {FLOAT64, SCORES}),
    "key heads dealt out in turn": (
        "attention",
        {
            "shares = group > 1 and (flash or not q.is_cuda)": "shares = False",
            "k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)": (
                "k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1)"
            ),
        },
        {FLOAT64},
    ),
    "keys not rotated": ("attention", {TURN: "q = self.rope(q, token_positions)"}, {FLOAT64, RELATIVE, ANY_ROPE}),
    "positions ignored": (
        "attention",
        {TURN: "q, k = self.rope(q, None), self.rope(k, None)"},
        {FLOAT64, RELATIVE, OFF_TABLE, ANY_ROPE},
    ),
    "a rope asked for its table": (
        "attention",
        {TURN: f"assert self.rope.cos_sin is not None\n            {TURN}"},
        {ANY_ROPE},
    ),
    "a rope that is not checked": (
        "attention",
        {'if name == "rope":': 'if name == "never":'},
        {"a RoPE of another head size is refused"},
    ),
    "positions without a rope taken": (
        "attention",
        {"        elif token_positions is not None:": "        elif False:"},
        {"positions without a RoPE are refused"},
    ),
    "a state between calls": (
        "attention",
        {
            PROJECTED: "        self.calls = getattr(self, 'calls', 0) + 1\n"
            f"        x = x * (1 + 1e-9 * self.calls)\n{PROJECTED}"
        },
        {FLOAT64, CAUSAL, PREFILL, RELATIVE},
    ),
    "an operation in the first call alone": (
        "attention",
        {
            PROJECTED: "        if not hasattr(self, 'called'):\n            x = x.exp().log()\n"
            f"        self.called = True\n{PROJECTED}"
        },
        {RECOMPUTED},
    ),
    "post-norm": (
        "block",
        {"x + self.attn(self.ln1(x), token_positions, mask)": "self.ln1(x + self.attn(x, token_positions, mask))"},
        {FLOAT64},
    ),
    "no residual": ("block", {"return x + self.ffn": "return self.ffn"}, {FLOAT64, FLOAT32, HALVES}),
    "a residual in place": ("block", {"x = x + self.attn": "x += self.attn"}, {FLOAT64, CAUSAL, PREFILL, MASK}),
    "the mask not passed on": ("block", {"token_positions, mask)\n        r": "token_positions)\n        r"}, {MASK}),
    "a fixed eps": ("block", {"self.ln2 = norm(d_model, eps=eps": "self.ln2 = norm(d_model, eps=1e-6"}, {FLOAT64}),
    "an option not passed on": ("block", {"            qk_norm=qk_norm,\n": ""}, {KEYS}),
    "eps not passed on": ("block", {"            eps=eps,\n": ""}, {FLOAT64}),
    "a norm of its own": ("block", {"self.ln1 = norm(": "self.ln1 = RMSNorm("}, {ANY_LAYERS}),
    "no reset of children": (
        "block",
        {"            reset_parameters(child)": "            pass"},
        {ANY_LAYERS},
    ),
    "a layer left out of the reset": (
        "block",
        {"for layer in self.children()": "for layer in (self.ln1, self.attn, self.ffn)"},
        {WEIGHTS, ANY_LAYERS},
    ),
    "no final norm": ("transformer", {"return self.ln_final(x)": "return x"}, {FLOAT64, ONE_TABLE}),
    "a final norm of its own": ("transformer", {"self.ln_final = norm(": "self.ln_final = RMSNorm("}, {ANY_LAYERS}),
    "a table per block": (
        "transformer",
        {"rope=rope,": "rope=__import__('copy').deepcopy(rope),"},
        {ONE_TABLE},
    ),
    "a rope that is not passed on": (
        "transformer",
        {"if rope is None and theta is not None": "if theta is not None"},
        {f"{ANY_ROPE}, for all blocks"},
    ),
    "no limit": (
        "transformer",
        {"if token_positions is None and x.shape[-2] > self": "if False and x.shape[-2] > self"},
        {"a sequence longer than max_seq_len is refused"},
    ),
}


def violations(modules, layer, names):
    """Run the properties of a layer, known by their names without "(of which class)"; return what they said."""
    found = {}
    for promised in PROPERTIES:
        name = promised.name.partition(" (")[0]
        if promised.layer == layer and name in names and name not in found:
            try:
                promised.run(LAYERS | modules)
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
        assert re.search(r"shape \(|\(\d|linspace|position|tokens", message), message


def test_an_edit_of_the_table_is_found_in_the_transformer(tmp_path):
    for number, edit in enumerate(
        [
            ("return self.theta**-exponents", "return (self.theta**-exponents).float().double()"),
            ("def _apply(self", "def _apply_not(self"),
        ]
    ):
        modules = load(copy_layers(tmp_path / str(number), edits=[("rope", *edit)]))
        assert violations(modules, "transformer", {ONE_TABLE}), edit
