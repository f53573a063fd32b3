import torch
import torch.nn.functional as F
from torch import nn

from .rope import RotaryPositionalEmbedding


def scaled_dot_product_attention(Q, K, V, mask=None):
    return F.scaled_dot_product_attention(Q, K, V, mask)


class CausalMultiHeadSelfAttention(nn.Module):
    """For x of shape (batch, seq, d_model) only. It constructs its RoPE itself."""

    def __init__(
        self, d_model, num_heads, num_kv_heads=None, max_seq_len=None, theta=None
    ):
        super().__init__()
        self.d_k = d_model // num_heads
        kv_width = self.d_k * (num_kv_heads or num_heads)
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(d_model, kv_width, bias=False)
        self.v_proj = nn.Linear(d_model, kv_width, bias=False)
        self.output_proj = nn.Linear(d_model, d_model, bias=False)
        self.rope = None
        if theta is not None:
            self.rope = RotaryPositionalEmbedding(theta, self.d_k, max_seq_len)

    def forward(self, x, token_positions=None, mask=None):
        b, s, d = x.shape
        q = self.q_proj(x).view(b, s, -1, self.d_k).transpose(1, 2)
        k = self.k_proj(x).view(b, s, -1, self.d_k).transpose(1, 2)
        v = self.v_proj(x).view(b, s, -1, self.d_k).transpose(1, 2)
        if self.rope is not None:
            if token_positions is None:
                token_positions = torch.arange(s).expand(b, s)
            q = self.rope(q, token_positions[:, None])
            k = self.rope(k, token_positions[:, None])
        shown = torch.ones(s, s, dtype=torch.bool).tril()
        if mask is not None:
            shown = shown & mask[:, None]
        out = F.scaled_dot_product_attention(q, k, v, shown, enable_gqa=True)
        return self.output_proj(out.transpose(1, 2).reshape(b, s, d))
