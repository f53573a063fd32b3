"""Gated DeltaNet: the delta rule, with one decay per head.

    q, k, v = silu(conv([W_q x, W_k x, W_v x])),  q and k of length 1 in each head
    decay = exp(-exp(a) softplus(W_a x + b)),  rate = max_rate * sigmoid(W_b x)
    out = W_o (norm(delta_rule(q / sqrt(d_key), k, v, decay, rate)) * silu(W_g x))

    python examples/blocks/gated_delta_net.py

This command prints how much a change of the first token changes later tokens.

Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464). In
Qwen3-Next, Qwen3.5 and OLMo Hybrid, 3 of 4 layers are of this kind. OLMo Hybrid has
max_rate=2, after Grazzi et al. (arXiv 2411.12537).
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


class HeadDecay(nn.Module):
    """Compute the decay of each head, between 0 and 1."""

    def __init__(self, d_model: int, num_heads: int, **factory: Any) -> None:
        super().__init__()
        self.proj = Linear(d_model, num_heads, bias=False, **factory)
        self.bias = nn.Parameter(torch.empty(num_heads, **factory))
        self.log_speed = nn.Parameter(torch.empty(num_heads, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Let a token forget between 0.1% and 80% of what a head remembers."""
        self.proj.reset_parameters()
        nn.init.uniform_(self.log_speed, math.log(1), math.log(16))
        # Where bias is small, softplus(bias) is about exp(bias).
        nn.init.uniform_(self.bias, math.log(0.001), math.log(0.1))

    def forward(
        self, x: Float[Tensor, "*batch seq d_model"]
    ) -> Float[Tensor, "*batch heads seq 1"]:
        wide = torch.promote_types(x.dtype, torch.float32)
        step = F.softplus(self.proj(x).to(wide) + self.bias)
        decay = torch.exp(-self.log_speed.to(wide).exp() * step)
        return rearrange(decay, "... seq heads -> ... heads seq 1")


class GatedDeltaNet(nn.Module):
    """A layer that is built and called like CausalMultiHeadSelfAttention.

    - `d_head` is the size of a value, and `d_key` of a query and a key (default: d_head).
    - `num_key_heads` heads of queries and keys are shared by groups of value heads
      (default: num_heads).

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
        d_key: int | None = None,
        num_key_heads: int | None = None,
        max_rate: float = 1.0,
        width: int = 4,
        eps: float = 1e-6,
        rope: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.d_model = d_model
        self.num_heads = num_heads
        self.num_key_heads = num_heads if num_key_heads is None else num_key_heads
        self.max_rate = max_rate
        self.key_width = self.num_key_heads * (d_head if d_key is None else d_key)
        value_width = num_heads * d_head
        self.q_proj = Linear(d_model, self.key_width, bias=False, **factory)
        self.k_proj = Linear(d_model, self.key_width, bias=False, **factory)
        self.v_proj = Linear(d_model, value_width, bias=False, **factory)
        conv_width = 2 * self.key_width + value_width
        self.conv = nn.Conv1d(
            in_channels=conv_width,
            out_channels=conv_width,
            kernel_size=width,
            padding=width - 1,
            groups=conv_width,
            bias=False,
            **factory,
        )
        self.decay = HeadDecay(d_model, num_heads, **factory)
        self.rate_proj = Linear(d_model, num_heads, bias=False, **factory)
        self.gate_proj = Linear(d_model, value_width, bias=False, **factory)
        self.norm = RMSNorm(d_head, eps, **factory)
        self.output_proj = Linear(value_width, d_model, bias=False, **factory)

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
        q, k, v = mixed.tensor_split([self.key_width, 2 * self.key_width], dim=-1)
        split = "... seq (heads d) -> ... heads seq d"
        q = unit(rearrange(q, split, heads=self.num_key_heads))
        k = unit(rearrange(k, split, heads=self.num_key_heads))
        v = rearrange(v, split, heads=self.num_heads)
        group = self.num_heads // self.num_key_heads
        q = q.repeat_interleave(group, dim=-3) / q.shape[-1] ** 0.5
        k = k.repeat_interleave(group, dim=-3)
        rate = self.max_rate * self.rate_proj(x).sigmoid()
        rate = rearrange(rate, "... seq heads -> ... heads seq 1")
        out = self.norm(delta_rule(q, k, v, self.decay(x), rate))
        merged = rearrange(out, "... heads seq d -> ... seq (heads d)")
        return self.output_proj(merged * F.silu(self.gate_proj(x)))


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    layer = GatedDeltaNet(64, 4, d_head=16)
    x = torch.randn(1000, 64)
    changed = x.clone()
    changed[0] += 1
    difference = (layer(x) - layer(changed)).norm(dim=-1) / layer(x).norm(dim=-1)
    for token in (0, 10, 100, 999):
        print(f"token {token}: changes by {difference[token]:.0e}")


if __name__ == "__main__":
    main()
