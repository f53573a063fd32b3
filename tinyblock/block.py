"""The pre-norm Transformer block: y = x + attention(norm(x)), then y + ffn(norm(y)).

Sources: Xiong et al., "On Layer Normalization in the Transformer Architecture" (arXiv 2002.04745) for the norm before
each sub-layer; Touvron et al., "LLaMA" (arXiv 2302.13971) for RMSNorm, SwiGLU and RoPE in it; CS336 section 3.5.
Convention: each norm is before its sub-layer, and what is added up is never normalized: that is left to a final norm.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from .attention import CausalMultiHeadSelfAttention, Rope
from .ffn import SwiGLU
from .rmsnorm import RMSNorm

__all__ = ["Block"]


class Block(nn.Module):
    """Add causal self-attention, then a feed-forward layer, each to its own input and each after a norm.

    `ffn` is any callable `(d_model, d_ff, device=..., dtype=...) -> nn.Module`: SwiGLU (CS336 2025), FeedForward
    (2024), or `functools.partial(FeedForward, activation=silu)`; d_ff=None leaves the width to it. `norm` is any
    callable `(d_model, eps=..., device=..., dtype=...) -> nn.Module`, such as nn.LayerNorm. `rope` is the one instance
    that all blocks share; None means no positions, the block of 2024. The remaining arguments are those of
    CausalMultiHeadSelfAttention, as are `token_positions` and `mask`. Returns the dtype of the input.

    Raises:
        ValueError: a size, eps or rope that one of its layers refuses.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int | None = None,
        *,
        rope: Rope | None = None,
        ffn: Callable[..., nn.Module] = SwiGLU,
        norm: Callable[..., nn.Module] = RMSNorm,
        num_kv_heads: int | None = None,
        d_head: int | None = None,
        qk_norm: bool = False,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.d_model = d_model
        self.ln1 = norm(d_model, eps=eps, device=device, dtype=dtype)
        self.attn = CausalMultiHeadSelfAttention(
            d_model,
            num_heads,
            num_kv_heads=num_kv_heads,
            d_head=d_head,
            rope=rope,
            qk_norm=qk_norm,
            eps=eps,
            device=device,
            dtype=dtype,
        )
        self.ln2 = norm(d_model, eps=eps, device=device, dtype=dtype)
        self.ffn = ffn(d_model, d_ff, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draw the weights of every layer anew, where the layer knows how to; a rope is its owner's to reset."""
        for layer in self.children():
            reset_parameters(layer)

    def forward(
        self,
        x: Float[Tensor, "*batch seq {self.d_model}"],
        token_positions: Int[Tensor, "*#batch seq"] | None = None,
        mask: Bool[Tensor, "*#batch #seq seq"] | None = None,
    ) -> Float[Tensor, "*batch seq {self.d_model}"]:
        x = x + self.attn(self.ln1(x), token_positions, mask)
        return x + self.ffn(self.ln2(x))


def reset_parameters(module: nn.Module) -> None:
    """Let `module` reset its parameters or, where it has no such method, let its children reset theirs."""
    if callable(reset := getattr(module, "reset_parameters", None)):
        reset()
    else:
        for child in module.children():
            reset_parameters(child)
