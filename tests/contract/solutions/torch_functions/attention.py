import torch
import torch.nn.functional as F
from torch import nn

from .ffn import linear
from .rope import RotaryPositionalEmbedding


def scaled_dot_product_attention(Q, K, V, mask=None):
    return F.scaled_dot_product_attention(Q, K, V, mask)


class CausalMultiHeadSelfAttention(nn.Module):
    """For x of shape (batch, seq, d_model) only. It constructs its RoPE itself."""

    def __init__(self, d_model, num_heads, max_seq_len=None, theta=None):
        super().__init__()
        self.q_proj = linear(d_model, d_model)
        self.k_proj = linear(d_model, d_model)
        self.v_proj = linear(d_model, d_model)
        self.output_proj = linear(d_model, d_model)
        self.num_heads = num_heads
        self.rope = None
        if theta is not None:
            d_k = d_model // num_heads
            self.rope = RotaryPositionalEmbedding(theta, d_k, max_seq_len)

    def forward(self, in_features, token_positions=None):
        b, s, d = in_features.shape
        if token_positions is None:
            token_positions = torch.arange(s).expand(b, s)
        q = self.q_proj(in_features).view(b, s, self.num_heads, -1).transpose(1, 2)
        k = self.k_proj(in_features).view(b, s, self.num_heads, -1).transpose(1, 2)
        v = self.v_proj(in_features).view(b, s, self.num_heads, -1).transpose(1, 2)
        if self.rope is not None:
            q = self.rope(q, token_positions[:, None])
            k = self.rope(k, token_positions[:, None])
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output_proj(out.transpose(1, 2).reshape(b, s, d))
