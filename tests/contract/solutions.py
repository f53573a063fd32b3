"""Three right solutions of CS336's assignment, written in three ways, as files."""

RMSNORM = {
    "plain": """
import torch
from torch import nn

class RMSNorm(nn.Module):
    def __init__(self, d_model, eps=1e-5, device=None, dtype=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model, device=device, dtype=dtype))
        self.eps = eps

    def forward(self, x):
        in_dtype = x.dtype
        x = x.to(torch.float32)
        result = x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        return result.to(in_dtype)
""",
    "of torch": """
import torch
from torch import nn

class RMSNorm(nn.Module):
    def __init__(self, d_model, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))
        self.eps = eps

    def forward(self, features):
        wide = nn.functional.rms_norm(features.float(), self.weight.shape, None, self.eps)
        return (wide * self.weight.float()).to(features.dtype)
""",
}
SWIGLU = """
import torch
from torch import nn

class Linear(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d_out, d_in) / d_in**0.5)

    def forward(self, x):
        return x @ self.weight.T

class SwiGLU(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.w1 = Linear(d_model, d_ff)
        self.w2 = Linear(d_ff, d_model)
        self.w3 = Linear(d_model, d_ff)

    def forward(self, x):
        gate = self.w1(x)
        return self.w2(gate * torch.sigmoid(gate) * self.w3(x))
"""
ROPE = {
    "real": """
import torch
from torch import nn

class RotaryPositionalEmbedding(nn.Module):
    def __init__(self, theta, d_k, max_seq_len, device=None):
        super().__init__()
        frequencies = theta ** (-torch.arange(0, d_k, 2, device=device) / d_k)
        angles = torch.outer(torch.arange(max_seq_len, device=device), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x, token_positions=None):
        if token_positions is None:
            token_positions = torch.arange(x.shape[-2])
        cos, sin = self.cos[token_positions], self.sin[token_positions]
        even, odd = x[..., ::2], x[..., 1::2]
        rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        return rotated.flatten(-2)
""",
    "complex": """
import torch
from torch import nn

class RotaryPositionalEmbedding(nn.Module):
    def __init__(self, theta, d_k, max_seq_len):
        super().__init__()
        frequencies = 1.0 / theta ** (torch.arange(0, d_k, 2).float() / d_k)
        angles = torch.outer(torch.arange(max_seq_len).float(), frequencies)
        table = torch.polar(torch.ones_like(angles), angles)
        self.register_buffer("table", table, persistent=False)

    def forward(self, x, token_positions=None):
        if token_positions is None:
            token_positions = torch.arange(x.shape[-2])
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(pairs * self.table[token_positions]).flatten(-2)
""",
}
ATTENTION = {
    "einops": """
import math
import torch
from einops import einsum, rearrange
from torch import nn
from .ffn import Linear

def scaled_dot_product_attention(Q, K, V, mask=None):
    scores = einsum(Q, K, "... q d, ... k d -> ... q k") / math.sqrt(Q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, dim=-1) @ V

class CausalMultiHeadSelfAttention(nn.Module):
    def __init__(self, d_model, num_heads, rope=None):
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "output_proj"):
            self.add_module(name, Linear(d_model, d_model))
        self.num_heads = num_heads
        self.rope = rope

    def forward(self, x, token_positions=None):
        split = "... s (h d) -> ... h s d"
        q = rearrange(self.q_proj(x), split, h=self.num_heads)
        k = rearrange(self.k_proj(x), split, h=self.num_heads)
        v = rearrange(self.v_proj(x), split, h=self.num_heads)
        if self.rope is not None:
            if token_positions is None:
                token_positions = torch.arange(x.shape[-2])
            token_positions = token_positions.unsqueeze(-2)
            q, k = self.rope(q, token_positions), self.rope(k, token_positions)
        causal = torch.ones(x.shape[-2], x.shape[-2]).tril().bool()
        out = scaled_dot_product_attention(q, k, v, causal)
        return self.output_proj(rearrange(out, "... h s d -> ... s (h d)"))
""",
    "b, s, d": """
import torch
import torch.nn.functional as F
from torch import nn
from .rope import RotaryPositionalEmbedding

def scaled_dot_product_attention(Q, K, V, mask=None):
    return F.scaled_dot_product_attention(Q, K, V, mask)

class CausalMultiHeadSelfAttention(nn.Module):
    def __init__(self, d_model, num_heads, max_seq_len=None, theta=None):
        super().__init__()
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(d_model, d_model, bias=False)
        self.v_proj = nn.Linear(d_model, d_model, bias=False)
        self.output_proj = nn.Linear(d_model, d_model, bias=False)
        self.num_heads = num_heads
        self.rope = None
        if theta is not None:
            d_k = d_model // num_heads
            self.rope = RotaryPositionalEmbedding(theta, d_k, max_seq_len)

    def forward(self, in_features, token_positions=None):
        b, s, d = in_features.shape
        if token_positions is None:
            token_positions = torch.arange(s).expand(b, s)
        heads = []
        for proj in (self.q_proj, self.k_proj, self.v_proj):
            heads.append(proj(in_features).view(b, s, self.num_heads, -1).transpose(1, 2))
        q, k, v = heads
        if self.rope is not None:
            q = self.rope(q, token_positions[:, None])
            k = self.rope(k, token_positions[:, None])
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output_proj(out.transpose(1, 2).reshape(b, s, d))
""",
}
BLOCK = """
from torch import nn
from .attention import CausalMultiHeadSelfAttention
from .ffn import SwiGLU
from .rmsnorm import RMSNorm

class Block(nn.Module):
    def __init__(self, d_model, num_heads, d_ff, OPTIONS):
        super().__init__()
        self.ln1 = RMSNorm(d_model)
        self.attn = CausalMultiHeadSelfAttention(d_model, num_heads, OPTIONS)
        self.ln2 = RMSNorm(d_model)
        self.ffn = SwiGLU(d_model, d_ff)

    def forward(self, x, token_positions=None):
        x = x + self.attn(self.ln1(x), token_positions)
        return x + self.ffn(self.ln2(x))
"""
RIGHT = {
    "real tables": {
        "rmsnorm": RMSNORM["plain"],
        "ffn": SWIGLU,
        "rope": ROPE["real"],
        "attention": ATTENTION["einops"],
        "block": BLOCK.replace("OPTIONS", "rope"),
    },
    "complex tables": {
        "rmsnorm": RMSNORM["of torch"],
        "ffn": SWIGLU,
        "rope": ROPE["complex"],
        "attention": ATTENTION["einops"],
        "block": BLOCK.replace("OPTIONS", "rope"),
    },
    "b, s, d = x.shape": {
        "rmsnorm": RMSNORM["plain"],
        "ffn": SWIGLU,
        "rope": ROPE["real"],
        "attention": ATTENTION["b, s, d"],
        "block": BLOCK.replace("OPTIONS", "max_seq_len, theta"),
    },
}


def write(solution, folder):
    """Write the files of a solution, and nothing of tinyblock."""
    for name, text in solution.items():
        (folder / f"{name}.py").write_text(text)
