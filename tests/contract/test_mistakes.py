"""A failure names a usual mistake. Each wrong layer is written apart from its formula."""

import shutil
from pathlib import Path

import pytest
from defects import Defect

RIGHT = Path(__file__).parent / "solutions" / "real_tables"

# Parts of the right layers.
MEAN = "x.pow(2).mean(-1, keepdim=True)"
ROOT = f"rms = torch.sqrt({MEAN} + self.eps)"
GAINS = "result = x / rms * self.weight"
SWIGLU = "return self.w2(gate * torch.sigmoid(gate) * self.w3(x))"
PAIRS = "(even * cos - odd * sin, even * sin + odd * cos), dim=-1)"
SPLIT_PAIRS = "even, odd = x[..., ::2], x[..., 1::2]"
STACK = f"rotated = torch.stack({PAIRS}\n        return rotated.flatten(-2)"
EXPONENTS = "-torch.arange(0, d_k, 2, device=device) / d_k"
TABLE = "cos, sin = self.cos[token_positions], self.sin[token_positions]"
SCALE = "/ math.sqrt(Q.shape[-1])"
HIDE = 'scores = scores.masked_fill(~mask, float("-inf"))'
RESULT = 'return einsum(softmax(scores, dim=-1), V, "... q k, ... k d -> ... q d")'
SPLIT = 'split = "... s (h d) -> ... h s d"'
MERGE = 'rearrange(out, "... h s d -> ... s (h d)")'
V = "v = rearrange(self.v_proj(x), split, h=self.num_heads)\n"
ROTATE = "k = self.rope(k, token_positions)\n"
ROTATE_BOTH = f"q = self.rope(q, token_positions)\n            {ROTATE}"
WITHOUT_TRANSPOSE = """\
v = rearrange(self.v_proj(x), split, h=self.num_heads)
        heads = (*x.shape[:-2], self.num_heads, x.shape[-2], -1)
        q = self.q_proj(x).reshape(heads)
        k = self.k_proj(x).reshape(heads)
        v = self.v_proj(x).reshape(heads)
"""
WRONG_LINEAR = """\
from .ffn import Linear as RightLinear


class Linear(RightLinear):
    def forward(self, x):
        return x @ self.weight
"""
# As y.view(batch, heads, seq, d_k) splits, and out.view(batch, seq, d_model) merges.
VIEW = """\
def rearrange(y, pattern, h=None):
            if h is None:
                return y.reshape(x.shape)
            return y.reshape(*y.shape[:-2], h, y.shape[-2], -1)
"""
OTHER_ROPE = """\
from .rope import RotaryPositionalEmbedding
        if rope is not None:
            rope = RotaryPositionalEmbedding(10000.0, d_model // num_heads, 200)
"""
ROPE_OVER_D_MODEL = """\
from .rope import RotaryPositionalEmbedding
            over_d_model = RotaryPositionalEmbedding(50.0, x.shape[-1], 200)
            positions = token_positions.squeeze(-2)
            q = over_d_model(self.q_proj(x), positions)
            k = over_d_model(self.k_proj(x), positions)
            q = rearrange(q, split, h=self.num_heads)
            k = rearrange(k, split, h=self.num_heads)
"""
ATTEND = "x = x + self.attn(self.ln1(x), token_positions)\n"
FEED = "return x + self.ffn(self.ln2(x))"


def norm(right, wrong, mistake):
    return Defect("rmsnorm", right, wrong, "test_equation", mistake)


def ffn(wrong, mistake):
    return Defect("ffn", SWIGLU, f"return {wrong}", "test_equation", mistake)


def rope(right, wrong, mistake):
    return Defect("rope", right, wrong, "test_equation", mistake)


def attention(right, wrong, mistake):
    return Defect("attention", right, wrong, "test_equation", mistake)


def block(right, wrong, mistake):
    return Defect("block", right, wrong, "test_equation", mistake)


DEFECTS = [
    norm(" + self.eps", " + 1e-5", "eps is not the one that is passed, but 1e-5"),
    norm(" + self.eps", " + 1e-6", "eps is not the one that is passed, but 1e-6"),
    norm(" + self.eps", " + 1e-8", "eps is not the one that is passed, but 1e-8"),
    norm(" + self.eps", "", "eps is missing"),
    norm(" + self.eps)", ") + self.eps", "eps is added to the root, not below it"),
    norm(GAINS, "result = x / rms", "the gains are missing"),
    norm(GAINS, "result = x / rms + self.weight", "the gains are added"),
    norm(GAINS, "result = x / rms * (1 + self.weight)", "the gains are 1 + weight"),
    norm(ROOT, f"x = x - x.mean(-1, keepdim=True)\n        {ROOT}", "is subtracted"),
    norm(ROOT, "rms = x.std(-1, keepdim=True) + self.eps", "x.std()"),
    norm(".mean(-1", ".sum(-1", "is not divided by d_model"),
    norm("torch.sqrt(x.pow(2)", "(x.pow(2)", "the root is missing"),
    norm(".mean(-1", ".mean(-2", "over the tokens in place"),
    norm(".mean(-1", ".mean(0", "over the first axis"),
    norm(".mean(-1", ".mean((-2, -1)", "over tokens and d_model"),
    norm(".mean(-1, keepdim=True)", ".mean()", "over all axes"),
    ffn("self.w2(nn.SiLU()(self.w3(x)) * gate)", "w1 and w3 are swapped"),
    ffn("self.w2(nn.SiLU()(self.w3(x)) * self.w3(x))", "w1 is missing"),
    ffn("self.w2(nn.SiLU()(gate) * gate)", "w1 stands in place of w3"),
    ffn("self.w2(nn.SiLU()(gate))", "w3 is missing"),
    ffn("self.w2(nn.SiLU()(gate) + self.w3(x))", "w3 is added"),
    ffn("self.w2(nn.Sigmoid()(gate) * self.w3(x))", "a sigmoid in place of SiLU"),
    ffn("self.w2(nn.GELU()(gate) * self.w3(x))", "a GELU in place of SiLU"),
    ffn("self.w2(nn.GELU('tanh')(gate) * self.w3(x))", "the GELU with tanh"),
    ffn("self.w2(nn.ReLU()(gate) * self.w3(x))", "a ReLU in place of SiLU"),
    ffn("self.w2(gate * self.w3(x))", "the gate has no activation"),
    ffn("self.w2(nn.SiLU()(gate * self.w3(x)))", "applied to the product"),
    ffn("x + self.w2(nn.SiLU()(gate) * self.w3(x))", "x is added"),
    rope("arange(max_seq_len", "arange(1, max_seq_len + 1", "positions start at 1"),
    rope("[token_positions]", "[: x.shape[-2]]", "token_positions are ignored"),
    rope(
        "[token_positions]",
        "[token_positions.reshape(-1, x.shape[-2])[0]]",
        "all sequences get the positions of the first",
    ),
    rope(
        TABLE,
        f"token_positions = token_positions[..., :1] + torch.arange(x.shape[-2])\n        {TABLE}",
        "positions count on",
    ),
    rope("frequencies = theta", "frequencies = 1e4", "is passed, but 10000"),
    rope(SPLIT_PAIRS, f"{SPLIT_PAIRS}\n        sin = -sin", "sine has the wrong sign"),
    rope(SPLIT_PAIRS, f"{SPLIT_PAIRS}\n        cos, sin = sin, cos", "are swapped"),
    rope("even * cos - odd * sin", "even * cos + odd * sin", "both sines are added"),
    rope("even * sin + odd", "-even * sin + odd", "both sines are subtracted"),
    rope(
        f"{SPLIT_PAIRS}\n        {STACK}",
        f"even, odd = x.chunk(2, dim=-1)\n        return torch.cat({PAIRS}",
        "halves are rotated in place of consecutive pairs",
    ),
    rope(
        f"{SPLIT_PAIRS}\n        {STACK}",
        f"x = x.clone()\n        {SPLIT_PAIRS}\n"
        "        x[..., ::2] = even * cos - odd * sin\n"
        "        x[..., 1::2] = even * sin + odd * cos\n"
        "        return x",
        "from the first after its rotation",
    ),
    rope(
        f"{SPLIT_PAIRS}\n        {STACK}",
        f"{SPLIT_PAIRS}\n        turned = torch.stack((-odd, even), dim=-1).flatten(-2)\n"
        "        return x * torch.cat((cos, cos), -1) + turned * torch.cat((sin, sin), -1)",
        "the table is of halves",
    ),
    rope(
        f"{SPLIT_PAIRS}\n        {STACK}",
        "first, second = x.chunk(2, dim=-1)\n"
        "        cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)\n"
        "        return x * cos + torch.cat((-second, first), -1) * sin",
        "the table is of consecutive pairs",
    ),
    rope(SPLIT_PAIRS, "even, odd = x.chunk(2, dim=-1)", "halves of x are paired"),
    rope(STACK, f"return torch.cat({PAIRS}", "the result has its pairs as halves"),
    rope("0, d_k, 2,", "d_k // 2,", "the exponent is -k/d_k"),
    rope(EXPONENTS, f"2 * {EXPONENTS}", "the exponent is -4k/d_k"),
    rope("-torch.arange", "torch.arange", "the exponent has no minus"),
    rope("0, d_k, 2,", "2, d_k + 1, 2,", "k counts from 1"),
    rope(EXPONENTS, f"0 * {EXPONENTS}", "all pairs turn by the same angle"),
    rope(TABLE, "return x", "nothing is rotated"),
    rope(
        TABLE,
        f"{TABLE}\n        cos, sin = cos[..., None, :, :], sin[..., None, :, :]",
        "RoPE inserts an axis for heads",
    ),
    attention(SCALE, "", "not divided by sqrt(d_k)"),
    attention(SCALE, "/ Q.shape[-1]", "divided by d_k in place"),
    attention(SCALE, "* math.sqrt(Q.shape[-1])", "multiplied by sqrt(d_k)"),
    attention(SCALE, "/ math.sqrt(K.shape[-2])", "the root of the number of keys"),
    attention("softmax(scores, dim=-1)", "softmax(scores, dim=-2)", "over the queries"),
    attention(
        "softmax(scores, dim=-1)", "scores.nan_to_num(neginf=0)", "softmax is missing"
    ),
    attention("(~mask,", "(mask,", "the mask is inverted"),
    attention("if mask is not None:", "if False:", "the mask is ignored"),
    attention(
        HIDE,
        f"return softmax(scores, dim=-1) * mask @ V\n    {RESULT}",
        "the mask is applied after the softmax",
    ),
    attention('float("-inf")', "0.0", "hidden scores are 0"),
    attention(HIDE, "scores = scores + mask", "added to the scores as 0 and 1"),
    attention(".tril()", "", "each token attends to all tokens"),
    attention(".tril()", ".triu()", "to itself and to later tokens"),
    attention(".tril()", ".tril(1)", "also attends to the next one"),
    attention(".tril()", ".tril(-1)", "a token does not attend to itself"),
    attention(".tril()", ".triu(1)", "to later tokens only"),
    attention(V, f"{V}        q = q / self.num_heads**0.5\n", "sqrt(d_model) in place"),
    attention(SPLIT, SPLIT.replace("(h d)", "(d h)"), "are split as (d_k heads)"),
    attention(MERGE, MERGE.replace("(h d)", "(d h)"), "are merged as (d_k heads)"),
    attention("(h d)", "(d h)", "are split and merged as (d_k heads)"),
    attention(SPLIT, f"{VIEW}        {SPLIT}", "split and merged without a transpose"),
    attention(V, WITHOUT_TRANSPOSE, "heads are split without a transpose"),
    attention(MERGE, "out.reshape(x.shape)", "heads are merged without a transpose"),
    attention("self.num_heads = num_heads", "self.num_heads = 1", "there is one head"),
    attention(
        "return self.output_proj(", "return (", "the output projection is missing"
    ),
    attention("self.q_proj(x)", "self.k_proj(x)", "k_proj stands in place of q_proj"),
    attention("self.v_proj(x)", "self.k_proj(x)", "k_proj stands in place of v_proj"),
    attention(
        "out = scaled_dot_product_attention(q, k, v",
        "out = scaled_dot_product_attention(q, v, k",
        "k_proj and v_proj are swap",
    ),
    attention("from .ffn import Linear", WRONG_LINEAR, "multiply by W"),
    attention("return self.output_proj(", "return x + self.output_proj(", "x is added"),
    attention(ROTATE_BOTH, "pass\n", "RoPE is missing"),
    attention("if token_positions is None:", "if True:", "token_positions are ignored"),
    attention(
        "self.rope = rope",
        f"{OTHER_ROPE}        self.rope = rope",
        "in RoPE, theta is not the one that is passed, but 10000",
    ),
    attention(
        "token_positions.unsqueeze(-2)", "token_positions", "of a sequence rotate"
    ),
    attention(
        ROTATE,
        f"{ROTATE}            v = self.rope(v, token_positions)\n",
        "RoPE also rotates v",
    ),
    attention(ROTATE, "v = self.rope(v, token_positions)\n", "rotates v in place of k"),
    attention(ROTATE, "pass\n", "RoPE does not rotate k"),
    attention(
        ROTATE_BOTH,
        ROPE_OVER_D_MODEL,
        "RoPE rotates q and k before they are split into heads",
    ),
    attention("q = self.rope(q, token_positions)", "pass", "RoPE does not rotate q"),
    attention(ROTATE, f"{ROTATE}            {ROTATE_BOTH}", "RoPE is applied twice"),
    block(
        ATTEND,
        "x = self.ln1(x + self.attn(x, token_positions))\n",
        "around attention, the norm is after the addition",
    ),
    block(
        FEED,
        "return x + self.ln2(self.ffn(x))",
        "around ffn, the norm is after the layer",
    ),
    block("self.ln1(x)", "x", "around attention, the norm is missing"),
    block(
        FEED,
        "x = self.ln2(x)\n        return x + self.ffn(x)",
        "around ffn, the residual adds what is normalized",
    ),
    block(
        f"{ATTEND}        {FEED}",
        "return self.ffn(self.ln2(self.attn(self.ln1(x), token_positions)))",
        "around attention and around ffn, the residual is missing",
    ),
    block(
        FEED,
        "x = x + self.ffn(self.ln2(x)) + x\n        return x",
        "around ffn, the residual is added twice",
    ),
    block(
        f"{ATTEND}        {FEED}",
        "y = x + self.attn(self.ln1(x), token_positions)\n"
        "        return x + self.ffn(self.ln2(y))",
        "the residual of ffn adds x",
    ),
    block(
        f"{ATTEND}        {FEED}",
        "return x + self.attn(self.ln1(x), token_positions) + self.ffn(self.ln2(x))",
        "ffn reads x",
    ),
    block(
        f"{ATTEND}        {FEED}",
        "x = x + self.ffn(self.ln2(x))\n"
        "        return x + self.attn(self.ln1(x), token_positions)",
        "ffn comes before attention: ",
    ),
    block(
        f"{ATTEND}        {FEED}",
        "x = x + self.ffn(self.ln1(x))\n"
        "        return x + self.attn(self.ln2(x), token_positions)",
        "ffn comes before attention, and the norms are swapped",
    ),
    block(
        f"{ATTEND}        {FEED}",
        "x = x + self.attn(self.ln2(x), token_positions)\n"
        "        return x + self.ffn(self.ln1(x))",
        "ln1 and ln2 are swapped",
    ),
    block("self.ln2(x)", "self.ln1(x)", "ln1 stands in place of ln2"),
    block("self.ln1(x)", "self.ln2(x)", "ln2 stands in place of ln1"),
    block(
        "super().__init__()",
        f"{OTHER_ROPE}        super().__init__()",
        "in its attention, in RoPE, theta is not the one that is passed, but 10000",
    ),
    block("rope)\n", "None)\n", "in its attention, RoPE is missing"),
]


# In a layer with a mask and with shared key heads.
DEFECTS_OF_GROUPED = [
    attention("causal & mask", "causal", "the mask that is passed is ignored"),
    attention("causal & mask", "causal & ~mask", "that is passed is inverted"),
    attention("causal & mask", "mask", "that is passed replaces the causal mask"),
    attention(
        "repeat_interleave(self.group, dim=-3)",
        "repeat(1, self.group, 1, 1)",
        "query head h reads key head h % num_kv_heads",
    ),
]


def names(defect):
    return defect.mistake


@pytest.mark.parametrize("defect", DEFECTS, ids=names)
def test_the_failure_names(defect, tmp_path):
    defect.require_failure(shutil.copytree(RIGHT, tmp_path / "layers"))


@pytest.mark.parametrize("defect", DEFECTS_OF_GROUPED, ids=names)
def test_the_failure_of_grouped_attention_names(defect, tmp_path):
    grouped = RIGHT.with_name("grouped")
    defect.require_failure(shutil.copytree(grouped, tmp_path / "layers"))
