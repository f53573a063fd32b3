import math

import torch
from einops import einsum, rearrange
from torch import nn

from .ffn import Linear


def softmax(x, dim):
    exponentials = torch.exp(x - x.amax(dim, keepdim=True))
    return exponentials / exponentials.sum(dim, keepdim=True)


def scaled_dot_product_attention(Q, K, V, mask=None):
    scores = einsum(Q, K, "... q d, ... k d -> ... q k") / math.sqrt(Q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    shares = softmax(scores, dim=-1)
    return einsum(shares, V, "... q k, ... k d -> ... q d")


class CausalMultiHeadSelfAttention(nn.Module):
    def __init__(self, d_model, num_heads, rope=None):
        super().__init__()
        self.q_proj = Linear(d_model, d_model)
        self.k_proj = Linear(d_model, d_model)
        self.v_proj = Linear(d_model, d_model)
        self.output_proj = Linear(d_model, d_model)
        self.num_heads = num_heads
        self.rope = rope

    def split(self, y):
        return rearrange(y, "... s (h d) -> ... h s d", h=self.num_heads)

    def forward(self, x, token_positions=None):
        q = self.split(self.q_proj(x))
        k = self.split(self.k_proj(x))
        v = self.split(self.v_proj(x))
        if self.rope is not None:
            if token_positions is None:
                token_positions = torch.arange(x.shape[-2])
            token_positions = token_positions.unsqueeze(-2)
            q = self.rope(q, token_positions)
            k = self.rope(k, token_positions)
        causal = torch.ones(x.shape[-2], x.shape[-2]).tril().bool()
        out = scaled_dot_product_attention(q, k, v, causal)
        return self.output_proj(rearrange(out, "... h s d -> ... s (h d)"))
