import torch
from torch import nn


def scaled_dot_product_attention(q, k, v, mask=None):
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = torch.where(mask, scores, -torch.inf)
    return scores.softmax(-1) @ v


class CausalMultiHeadSelfAttention(nn.Module):
    def __init__(self, d_model, num_heads, rope=None):
        super().__init__()
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(d_model, d_model, bias=False)
        self.v_proj = nn.Linear(d_model, d_model, bias=False)
        self.output_proj = nn.Linear(d_model, d_model, bias=False)
        self.num_heads = num_heads
        self.rope = rope

    def forward(self, x, token_positions=None):
        seq = x.shape[-2]
        projected = torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), -1)
        heads = projected.unflatten(-1, (3, self.num_heads, -1))
        q, k, v = heads.movedim((-3, -2), (0, -3))
        if self.rope is not None:
            if token_positions is None:
                token_positions = torch.arange(seq)
            positions = token_positions[..., None, :]
            q, k = self.rope(q, positions), self.rope(k, positions)
        later = torch.ones(seq, seq, dtype=torch.bool).triu(1)
        out = scaled_dot_product_attention(q, k, v, ~later)
        return self.output_proj(out.movedim(-3, -2).flatten(-2))
