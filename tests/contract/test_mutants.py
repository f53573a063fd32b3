"""An edit that breaks a layer is found by the properties that are about it, and by a case that no other edit needs."""

import re
import textwrap

import pytest
from contract.copying import copy_layers, outcomes

from tinyblock.contract.loading import load

F64, HALVES = (
    "equation and gradients in float64",
    "equation and gradients in bfloat16 and float16",
)
COMPILES, AUTOCAST, KEYS = "compiles to one graph", "autocast", "keys of the state dict"
WEIGHTS, RESET, WIDTH = (
    "initial weights",
    "reset_parameters reaches every layer",
    "d_ff is the multiple of 64 nearest",
)
ARGUMENTS, INPUTS = "invalid hyperparameters rejected", "invalid inputs rejected"
GAINS, TABLE = "gains of another dtype", "exact table after every copy, cast and move"
CAUSAL, MASK = "causality", "masks are combined with the causal mask by AND"
RELATIVE, SCORES = "relative positions only", "scores in float32 or wider"
RECOMPUTED, OVERRIDDEN = "activation checkpointing", "attend overridden"
OTHERS, ONE_TABLE, PLACED = (
    "any callable for norm, ffn and attention",
    "one table for all blocks",
    "device and dtype",
)

BEGIN = {  # where code is inserted
    "rmsnorm": "        if x.dtype == weight.dtype:\n",
    "ffn": "        return self.w2(F.silu(",
    "attention": '        split = "',
}
KERNEL = "        out = F.scaled_dot_product_attention("
COMPLEX = "rotated = torch.view_as_real(numbers * torch.view_as_complex(cos_sin))"
HALF_PAIRS = """numbers = torch.complex(*pairs.flatten(-2).chunk(2, dim=-1))
            turned = numbers * torch.view_as_complex(cos_sin)
            rotated = torch.stack((turned.real, turned.imag), dim=-2)"""
CUT, NOT_CUT = (
    "trunc_normal_(linear.weight, std=std, a=-3 * std, b=3 * std)",
    "normal_(linear.weight, std=std)",
)
GATED, DETACHED = (
    "self.w2(F.silu(self.w1(x)) * self.w3(x))",
    "(F.silu(self.w1(x)) * self.w3(x)) @ self.w2.weight.T.detach()",
)
HUGGING_FACE = """if x.dtype.itemsize < 4:
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
    return (self.weight * y.to(x.dtype)).to(x.dtype)"""
BY_HAND = """k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
causal = torch.ones(seq, seq, dtype=torch.bool, device=q.device).tril()
seen = causal if mask is None else mask
weights = {}
return (weights @ v.to(weights.dtype)).to(v.dtype).view(*batch, *q.shape[1:])"""
IN_X_DTYPE = "(q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -math.inf).softmax(-1).masked_fill(~seen, 0)"
MINUS_100 = "(q.double() @ k.mT.double() / q.shape[-1] ** 0.5).masked_fill(~seen, -100).softmax(-1) * seen"
OVERFLOWS = """(q.double() @ k.double().mT / q.shape[-1] ** 0.5).exp() * seen
weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)"""
WINDOW = """seen = torch.ones(seq, seq, dtype=torch.bool, device=q.device).tril().triu(-15)
mask = seen if mask is None else mask & seen"""


def insert(layer, code, *expected, before=None):
    place = before or BEGIN[layer]
    return replace(
        layer,
        place,
        textwrap.indent(code, re.match(" *", place)[0]) + f"\n{place}",
        *expected,
    )


def replace(layer, old, new, *expected):
    return [(layer, old, new)], {*expected}


MUTANTS = {  # edits, and properties that fail
    "eps outside the root": insert(
        "rmsnorm",
        "return x / (x.square().mean(-1, True).sqrt() + self.eps) * weight",
        F64,
        GAINS,
    ),
    "the cast order of Hugging Face": insert("rmsnorm", HUGGING_FACE, HALVES, GAINS),
    "everything in float32": insert(
        "rmsnorm", "if x.dtype == torch.float64: return self(x.float()).double()", F64
    ),
    "an input scaled in place and back": insert(
        "rmsnorm", "x.data.mul_(3.0); x = x / 3", F64
    ),
    "a batch of one lost": insert("rmsnorm", "if len(x) == 1: return self(x[0])", F64),
    "no gradient for gains in bfloat16": insert(
        "rmsnorm", "if x.dtype.itemsize == 2: weight = weight.detach()", HALVES
    ),
    "a message without the value": replace(
        "rmsnorm", "such as 1e-5, got {eps}", "such as 1e-5", ARGUMENTS
    ),
    "GELU by tanh": replace(
        "ffn",
        "F.gelu(x)",
        'F.gelu(x, approximate="tanh")',
        F64,
        "gelu: equation",
        "feed_forward: equ",
    ),
    "d_ff rounded up": replace(
        "ffn",
        "max(1, (d_model + 12) // 24) * 64 if",
        "(8 * d_model + 191) // 192 * 64 if",
        WIDTH,
    ),
    "an unused weight": replace(
        "ffn", "self.w3 = nn.Linear", "self.w4 = self.w3 = nn.Linear", KEYS
    ),
    "a print": insert("ffn", "print(end='')", COMPILES),
    "a loop over the tokens": insert("ffn", "for _ in range(x.numel()): ...", COMPILES),
    "bfloat16 scaled by 1.05": insert(
        "ffn", "x = x * (1.05 if x.dtype == torch.bfloat16 else 1)", HALVES
    ),
    "weights not cut": replace("ffn", CUT, NOT_CUT, WEIGHTS),
    "a weight without a gradient": replace("ffn", GATED, DETACHED, F64, AUTOCAST),
    "a clamp": replace("ffn", GATED, f"{GATED}.clamp(-1e4, 1e4)", F64),
    "halves for pairs": replace("rope", COMPLEX, HALF_PAIRS, F64, HALVES, TABLE),
    "a table built in float32": replace(
        "rope",
        "self.frequencies().view",
        "self.frequencies().float().double().view",
        F64,
        TABLE,
    ),
    "the table follows the dtype": replace(
        "rope", "def _apply(self", "def _apply_not(self", HALVES, TABLE
    ),
    "the table in the state dict": replace(
        "rope", "persistent=False", "persistent=True", KEYS
    ),
    "the table on another device": replace(
        "rope", "torch.empty(shape, device=device,", "torch.empty(shape,", PLACED
    ),
    "float64 lowered": replace(
        "rope", "cos_sin, x.dtype == torch.float64", "cos_sin, False", F64, TABLE
    ),
    "strides that cannot be viewed": replace(
        "rope", "except RuntimeError:  # the", "except IndexError:  # the", F64
    ),
    "integers that are not cast": replace(
        "rope", "token_positions.long()", "token_positions", F64
    ),
    "positions lowered to int32": replace(
        "rope", "token_positions.long()", "token_positions.to(torch.int32)", INPUTS
    ),
    "positions clamped where they are compiled": insert(
        "rope",
        "if torch.compiler.is_compiling(): token_positions = token_positions.clamp(0, self.max_seq_len - 1)",
        INPUTS,
        before="                rows = F.embedding(",
    ),
    "fractions cut off where they are compiled": replace(
        "rope",
        "elif token_positions.dtype",
        "elif not torch.compiler.is_compiling() and token_positions.dtype",
        INPUTS,
    ),
    "a softmax in the dtype of the input": insert(
        "attention", BY_HAND.format(IN_X_DTYPE), SCORES, before=KERNEL
    ),
    "no causality in evaluation": replace(
        "attention",
        "is_causal=mask is None",
        "is_causal=self.training and mask is None",
        F64,
    ),
    "a window of 16": insert("attention", WINDOW, F64, before=KERNEL),
    "masked scores of -100": insert(
        "attention", BY_HAND.format(MINUS_100), F64, CAUSAL, before=KERNEL
    ),
    "a softmax that overflows": insert(
        "attention", BY_HAND.format(OVERFLOWS), F64, before=KERNEL
    ),
    "additive masks read as bool where they are compiled": (
        [
            (
                "attention",
                "if mask.dtype !=",
                "if not torch.compiler.is_compiling() and mask.dtype !=",
            ),
            ("attention", "(mask & causal)", "(mask.bool() & causal)"),
        ],
        {INPUTS},
    ),
    "masks left to torch where they are compiled": replace(
        "attention",
        "if mask.dtype !=",
        "if not torch.compiler.is_compiling() and mask.dtype !=",
        INPUTS,
    ),
    "a print where there is no RoPE": insert(
        "attention", "if self.rope is None: print(end='')", COMPILES
    ),
    "two dtypes for the norm under autocast": replace(
        "attention",
        "self.q_norm(q.to(self.q_norm.weight.dtype)).to(v.dtype)",
        "self.q_norm(q)",
        AUTOCAST,
    ),
    "a rope asked for its table": insert(
        "attention", "if self.rope: assert self.rope.cos_sin is not None", F64
    ),
    "attend of the base class": replace(
        "attention",
        "rearrange(self.attend(",
        "rearrange(CausalMultiHeadSelfAttention.attend(self, ",
        OVERRIDDEN,
    ),
    "a state between calls": insert(
        "attention",
        "self.n = getattr(self, 'n', 0) + 1\nx = x * (1 + 1e-9 * self.n)",
        F64,
        CAUSAL,
        RELATIVE,
    ),
    "an operation in the first call alone": insert(
        "attention",
        "if not hasattr(self, 'called'): x = x.exp().log()\nself.called = True",
        RECOMPUTED,
    ),
    "post-norm": (
        [
            ("block", 'self.attn(_like(x, self.ln1(x), "norm"), ', "self.attn(x, "),
            ("block", "        return x", "        x = self.ln1(x)\n        return x"),
        ],
        {F64},
    ),
    "a residual in place": replace(
        "block", "x = x + _like", "x += _like", F64, CAUSAL, MASK
    ),
    "the mask not passed on": replace(
        "block", "token_positions, mask), ", "token_positions), ", MASK
    ),
    "d_ff not passed on": replace(
        "block", "self.ffn = ffn(d_model, d_ff,", "self.ffn = ffn(d_model, None,", F64
    ),
    "a norm of its own": replace(
        "block", "self.ln1 = norm(", "self.ln1 = RMSNorm(", OTHERS
    ),
    "an attention of its own": replace(
        "block",
        "self.attn = attention(",
        "self.attn = CausalMultiHeadSelfAttention(",
        OTHERS,
    ),
    "a layer left out of the reset": replace(
        "block", "in self.children()", "in (self.ln1, self.attn, self.ffn)", RESET
    ),
    "a reset of our own layers alone": replace(
        "block",
        '"reset_parameters", None)):',
        '"reset_parameters", None)) and "torch" not in module.__module__:',
        RESET,
    ),
    "a table per block": replace(
        "transformer",
        "rope=rope,",
        "rope=__import__('copy').deepcopy(rope),",
        ONE_TABLE,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_an_edit_that_breaks_a_layer_is_found(name, tmp_path):
    edits, expected = MUTANTS[name]
    violations, _ = outcomes(
        load(copy_layers(tmp_path, edits=edits)), edits[0][0], tuple(expected)
    )
    assert {
        start
        for start in expected
        if any(found.startswith(start) for found in violations)
    } == expected, violations
    for message in violations.values():
        assert "\n" not in message
        assert re.search(r"shape \(|[(=]\d|position|tokens", message), message
