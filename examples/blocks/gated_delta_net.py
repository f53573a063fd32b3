"""Gated DeltaNet: a memory of fixed size in place of all keys and values.

    q, k, v = silu(conv([W_q x, W_k x, W_v x])),  q and k of length 1 in each head
    decay = exp(-exp(a) softplus(W_a x + b)),  rate = max_rate * sigmoid(W_b x)
    for each token:  memory = decay * memory
                     memory = memory + rate * k (v - memory^T k)
                     read = memory^T q / sqrt(d_key)
    out = W_o (norm(read) * silu(W_g x))

    python examples/blocks/gated_delta_net.py

This command prints how much a change of the first token changes later tokens.

The layer keeps no memory between calls, and takes no cache. So a LanguageModel with such
layers can be trained, but `generate` raises an error.
Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464). In
Qwen3-Next, Qwen3.5 and OLMo Hybrid, 3 of 4 layers are of this kind. OLMo Hybrid has
max_rate=2, after Grazzi et al. (arXiv 2411.12537). Kimi Linear (arXiv 2510.26692) has a
decay for each component of a key.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn

from tinyblock import RMSNorm
from tinyblock.attention import Linear


def delta_rule(
    q: Float[Tensor, "*batch seq d_k"],
    k: Float[Tensor, "*batch seq d_k"],
    v: Float[Tensor, "*batch seq d_v"],
    decay: Float[Tensor, "*batch seq 1"],
    rate: Float[Tensor, "*batch seq 1"],
) -> Float[Tensor, "*batch seq d_v"]:
    """Read q from the memory of the tokens so far, each token in turn (equation 10).

    An update moves what the memory returns at k towards v. Computes in float32 or wider,
    and returns the dtype of `q`. One step per token is readable, not fast:
    `chunk_gated_delta_rule` of flash-linear-attention is.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        *batch, seq, d_k = k.shape
        memory = torch.zeros(*batch, d_k, v.shape[-1], dtype=wide, device=q.device)
        outs = []
        for token in range(seq):
            q_t = q[..., token, :].to(wide)
            k_t = k[..., token, :].to(wide)
            v_t = v[..., token, :].to(wide)
            decay_t = decay[..., token, :, None].to(wide)
            rate_t = rate[..., token, :].to(wide)
            memory = decay_t * memory
            error = v_t - read(memory, k_t)
            update = einsum(k_t, rate_t * error, "... d_k, ... d_v -> ... d_k d_v")
            memory = memory + update
            outs.append(read(memory, q_t))
        return torch.stack(outs, dim=-2).to(q.dtype)


def read(
    memory: Float[Tensor, "*batch d_k d_v"], key: Float[Tensor, "*batch d_k"]
) -> Float[Tensor, "*batch d_v"]:
    """Return memory^T key: what the memory holds at a key."""
    return einsum(memory, key, "... d_k d_v, ... d_k -> ... d_v")


def unit(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """Return vectors of length 1, so that an update does not overshoot."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))  # squares may overflow
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


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
        ValueError: a mask or a cache is passed.
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
            raise ValueError(
                "GatedDeltaNet takes neither a mask nor a cache, so it cannot generate, "
                f"got {mask}"
            )
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
    before, after = layer(x), layer(changed)
    difference = (after - before).norm(dim=-1) / before.norm(dim=-1)
    for token in (0, 10, 100, 999):
        print(f"token {token}: changes by {difference[token]:.0e}")


if __name__ == "__main__":
    main()
