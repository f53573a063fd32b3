"""Kimi delta attention (KDA): the delta rule, with a decay for each component of a key.

    q, k, v = silu(conv([W_q x, W_k x, W_v x])),  q and k of length 1 in each head
    decay = exp(-exp(a) softplus(W_f2 W_f1 x + b)),  rate = sigmoid(W_b x)
    out = W_o (norm(delta_rule(q / sqrt(d), k, v, decay, rate)) * sigmoid(W_g2 W_g1 x))

    python examples/blocks/kimi_delta_attention.py

This command prints the share of a component that a new layer forgets per token.

Each component forgets at its own speed, so the layer knows the order of tokens without
positions.
Source: Kimi Team, "Kimi Linear" (arXiv 2510.26692), where 3 of 4 layers are of this kind.
To copy this file, also copy delta_rule.py, and import Linear and RMSNorm from your copies
of attention.py and rmsnorm.py.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from delta_rule import delta_rule, unit
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from tinyblock import RMSNorm
from tinyblock.attention import Linear


class Forgetting(nn.Module):
    """Compute the decay of each component of a key, between 0 and 1."""

    def __init__(
        self, d_model: int, num_heads: int, d_head: int, **factory: Any
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.down = Linear(d_model, d_head, bias=False, **factory)
        self.up = Linear(d_head, num_heads * d_head, bias=False, **factory)
        self.bias = nn.Parameter(torch.empty(num_heads * d_head, **factory))
        self.log_speed = nn.Parameter(torch.empty(num_heads, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Let a token forget between 0.1% and 80% of a component."""
        self.down.reset_parameters()
        self.up.reset_parameters()
        nn.init.uniform_(self.log_speed, math.log(1), math.log(16))
        # Where bias is small, softplus(bias) is about exp(bias).
        nn.init.uniform_(self.bias, math.log(0.001), math.log(0.1))

    def forward(
        self, x: Float[Tensor, "*batch seq d_model"]
    ) -> Float[Tensor, "*batch heads seq d_head"]:
        wide = torch.promote_types(x.dtype, torch.float32)
        step = F.softplus(self.up(self.down(x)).to(wide) + self.bias)
        split = "... seq (heads d_head) -> ... heads seq d_head"
        step = rearrange(step, split, heads=self.num_heads)
        speed = self.log_speed.to(wide).exp()[:, None, None]
        return torch.exp(-speed * step)


class KimiDeltaAttention(nn.Module):
    """Attention of Kimi Linear, built and called like CausalMultiHeadSelfAttention.

    The convolution reaches `width` tokens. A `rope` and positions are ignored. x has at
    most one batch axis.

    Raises:
        ValueError: a mask is passed.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        d_head: int = 128,
        width: int = 4,
        eps: float = 1e-5,
        rope: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.d_model = d_model
        self.num_heads = num_heads
        inner = num_heads * d_head
        self.q_proj = Linear(d_model, inner, bias=False, **factory)
        self.k_proj = Linear(d_model, inner, bias=False, **factory)
        self.v_proj = Linear(d_model, inner, bias=False, **factory)
        self.conv = nn.Conv1d(
            in_channels=3 * inner,
            out_channels=3 * inner,
            kernel_size=width,
            padding=width - 1,
            groups=3 * inner,
            bias=False,
            **factory,
        )
        self.forgetting = Forgetting(d_model, num_heads, d_head, **factory)
        self.rate_proj = Linear(d_model, num_heads, bias=False, **factory)
        self.gate_down = Linear(d_model, d_head, bias=False, **factory)
        self.gate_up = Linear(d_head, inner, bias=False, **factory)
        self.norm = RMSNorm(d_head, eps, **factory)
        self.output_proj = Linear(inner, d_model, bias=False, **factory)

    def forward(
        self,
        x: Float[Tensor, "*batch seq {self.d_model}"],
        token_positions: Any = None,
        mask: Any = None,
    ) -> Float[Tensor, "*batch seq {self.d_model}"]:
        if mask is not None:
            raise ValueError(f"mask must be None in {type(self).__name__}, got {mask}")
        seq = x.shape[-2]
        qkv = torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), dim=-1)
        # The convolution pads both ends. Without the last outputs, it is causal.
        mixed = F.silu(self.conv(qkv.mT)[..., :seq].mT)
        split = "... seq (heads d) -> ... heads seq d"
        q, k, v = (
            rearrange(part, split, heads=self.num_heads)
            for part in mixed.chunk(3, dim=-1)
        )
        q = unit(q) / q.shape[-1] ** 0.5
        rate = rearrange(self.rate_proj(x).sigmoid(), split, heads=self.num_heads)
        out = self.norm(delta_rule(q, unit(k), v, self.forgetting(x), rate))
        gate = self.gate_up(self.gate_down(x)).sigmoid()
        merged = rearrange(out, "... heads seq d -> ... seq (heads d)")
        return self.output_proj(gate * merged)


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    attention = KimiDeltaAttention(64, 4, d_head=16)
    forgotten = 1 - attention.forgetting(torch.zeros(1, 64))
    print(f"a token forgets {forgotten.min():.1%} to {forgotten.max():.1%}")
    print("shape of the result:", *attention(torch.randn(2, 20, 64)).shape)


if __name__ == "__main__":
    main()
