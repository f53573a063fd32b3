"""Multi-head latent attention (MLA): keys and values of all heads from one small vector.

    q_latent = norm(W_dq x),  kv_latent = norm(W_dkv x)
    q = [W_uq q_latent, RoPE(W_qr q_latent)]
    k = [W_uk kv_latent, RoPE(W_kr x)],  v = W_uv kv_latent

    python examples/blocks/latent_attention.py

This command prints how many numbers per token a cache needs, compared with the keys and
values of all heads.

All heads share the key that W_kr yields. So a cache can hold kv_latent and this key.
Source: DeepSeek-AI, "DeepSeek-V2" (arXiv 2405.04434), equations 37 to 47. DeepSeek-V3 and
Kimi K2 have it, too.
Here, a cache in `attend` would hold the keys and values of all heads.
"""

from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Integer
from torch import Tensor, nn

from tinyblock import (
    CausalMultiHeadSelfAttention,
    RMSNorm,
    RotaryPositionalEmbedding,
)
from tinyblock.attention import Linear


class LatentAttention(CausalMultiHeadSelfAttention):
    """Attention whose queries come from q_rank numbers, and keys and values from kv_rank.

    - `d_head` is the size of a value, and of the part of queries and keys that does not
      rotate.
    - `rope` rotates the other part, whose size is the attribute rope.d_k.
    - `score_scale` multiplies the scores. The factors of YarnRope multiply the rotated
      part only. With YaRN and `mscale_all_dim`, a config of DeepSeek means
      score_scale = s^2 and attention_factor = (0.1 * mscale * ln(factor) + 1) / s,
      where s = 0.1 * mscale_all_dim * ln(factor) + 1.
    """

    rope: Any

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        rope: Any,
        d_head: int = 128,
        q_rank: int = 1536,
        kv_rank: int = 512,
        score_scale: float = 1.0,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)  # not the base's, which builds other projections
        self.d_model = d_model
        self.num_heads = num_heads
        self.num_kv_heads = num_heads
        self.d_head = d_head
        self.score_scale = score_scale
        self.rope = rope
        self.d_rotated = rope.d_k
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_down = nn.Sequential(
            Linear(d_model, q_rank, bias=False, **factory),
            RMSNorm(q_rank, eps, **factory),
        )
        q_width = num_heads * (d_head + self.d_rotated)
        self.q_up = Linear(q_rank, q_width, bias=False, **factory)
        self.kv_down = Linear(d_model, kv_rank + self.d_rotated, bias=False, **factory)
        self.kv_norm = RMSNorm(kv_rank, eps, **factory)
        self.kv_up = Linear(kv_rank, num_heads * 2 * d_head, bias=False, **factory)
        self.output_proj = Linear(num_heads * d_head, d_model, bias=False, **factory)

    def project(
        self,
        x: Float[Tensor, "*batch seq {self.d_model}"],
        token_positions: Integer[Tensor, "*#batch seq"] | None,
    ) -> tuple[
        Float[Tensor, "*batch heads seq {self.d_head}+{self.d_rotated}"],
        Float[Tensor, "*batch heads seq {self.d_head}+{self.d_rotated}"],
        Float[Tensor, "*batch heads seq {self.d_head}"],
    ]:
        split = "... seq (heads d) -> ... heads seq d"
        q = rearrange(self.q_up(self.q_down(x)), split, heads=self.num_heads)
        plain_q, rotated_q = q.tensor_split([self.d_head], dim=-1)
        latent, shared_k = self.kv_down(x).tensor_split([-self.d_rotated], dim=-1)
        kv = self.kv_up(self.kv_norm(latent))
        plain_k, v = rearrange(kv, split, heads=self.num_heads).chunk(2, dim=-1)

        if token_positions is not None:  # the heads of a token share its position
            token_positions = token_positions.unsqueeze(-2)
        rotated_q = self.rope(rotated_q, token_positions)
        rotated_k = self.rope(shared_k.unsqueeze(-3), token_positions)
        q = self.score_scale * torch.cat((plain_q, rotated_q), dim=-1)
        k = torch.cat((plain_k, rotated_k.expand_as(rotated_q)), dim=-1)
        return q, k, v


def main() -> None:
    rope = RotaryPositionalEmbedding(10000.0, 64, max_seq_len=20)
    attention = LatentAttention(512, 16, rope=rope)
    print(f"kv_latent and shared key: {attention.kv_down.out_features} numbers")
    _, k, v = attention.project(torch.randn(1, 512), None)
    print(f"keys and values of all heads: {k.numel() + v.numel()} numbers")


if __name__ == "__main__":
    main()
