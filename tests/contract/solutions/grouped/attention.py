import torch
from torch import nn


class CausalMultiHeadSelfAttention(nn.Module):
    """Query heads share key and value heads. There is no RoPE."""

    def __init__(self, d_model, num_heads, num_kv_heads=None):
        super().__init__()
        d_head = d_model // num_heads
        num_kv_heads = num_kv_heads or num_heads
        self.q_proj = nn.Linear(d_model, num_heads * d_head, bias=False)
        self.k_proj = nn.Linear(d_model, num_kv_heads * d_head, bias=False)
        self.v_proj = nn.Linear(d_model, num_kv_heads * d_head, bias=False)
        self.output_proj = nn.Linear(num_heads * d_head, d_model, bias=False)
        self.d_head = d_head
        self.group = num_heads // num_kv_heads

    def split(self, x):
        return x.unflatten(-1, (-1, self.d_head)).transpose(-3, -2)

    def forward(self, x, mask=None):
        q = self.split(self.q_proj(x))
        k = self.split(self.k_proj(x)).repeat_interleave(self.group, dim=-3)
        v = self.split(self.v_proj(x)).repeat_interleave(self.group, dim=-3)
        seq = torch.arange(x.shape[-2])
        causal = seq[:, None] >= seq
        if mask is not None:
            mask = mask.unsqueeze(-3)
            causal = causal & mask
        scores = (q @ k.mT / self.d_head**0.5).masked_fill(~causal, -torch.inf)
        out = scores.softmax(-1) @ v
        return self.output_proj(out.transpose(-3, -2).flatten(-2))
