"""Other attention: a window, both directions, biases, FlexAttention, soft caps.

    python examples/attention_variants.py

This command changes one of 64 tokens and prints, for each class, the range of outputs
that change. The range shows the window and the direction, but not biases or soft caps.

`Transformer(..., attention=SlidingWindow)` builds a model with one of these classes.
Most of them override `attend`, which gets the queries, keys and values of each head
after the rotation, and the `mask` that the model was called with. A mask is a bool
tensor, True where a query may attend to a key, of shape (..., seq, seq) or
(..., 1, seq). FlexAttention and SoftCappedAttention require exactly one batch axis; the
others accept any number.
"""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    flex_attention,
)

from tinyblock import CausalMultiHeadSelfAttention, Transformer

# Uncompiled, flex_attention warns, and stores all scores.
fast_flex_attention: Any = flex_attention
if torch.cuda.is_available():
    fast_flex_attention = torch.compile(flex_attention)


def require_mask(mask: Any, queries: int, keys: int) -> None:
    """Raise ValueError unless the mask is bool and has the right shape.

    torch would add a float mask to the scores. None is accepted.
    """
    if mask is None:
        return
    shapes = ((queries, keys), (1, keys))
    got = type(mask).__name__
    if isinstance(mask, Tensor):
        if mask.dtype == torch.bool and mask.shape[-2:] in shapes:
            return
        got = f"{mask.dtype} of shape {tuple(mask.shape)}"
    raise ValueError(
        f"mask must be a bool tensor of shape (..., {queries}, {keys}) or "
        f"(..., 1, {keys}), got {got}: turn a padding mask into mask[..., None, :], "
        "and an additive mask into mask == 0"
    )


def attend_where(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attend to the keys whose mask is True, the same for all heads.

    None allows all keys.
    """
    require_mask(mask, q.shape[-2], k.shape[-2])
    if mask is not None and mask.dim() > 2:
        mask = mask.unsqueeze(-3)  # the fast kernels take 2 or 4 axes
    # No fast CUDA kernel supports both a mask and shared key heads.
    group = q.shape[-3] // k.shape[-3]
    if group > 1:
        k = k.repeat_interleave(group, dim=-3)
        v = v.repeat_interleave(group, dim=-3)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class SlidingWindow(CausalMultiHeadSelfAttention):
    """Attend to a window of 16 tokens that ends with the token itself.

    Source: Mistral 7B (arXiv 2310.06825).
    """

    window = 16

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        seq = q.shape[-2]
        require_mask(mask, seq, seq)
        token = torch.arange(seq, device=q.device)
        near = token[:, None] - token < self.window
        if mask is not None:
            near = near & mask
        return super().attend(q, k, v, near)


class BidirectionalAttention(CausalMultiHeadSelfAttention):
    """Attend to all tokens that the mask allows, as an encoder does.

    Source: BERT (arXiv 1810.04805).
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return attend_where(q, k, v, mask)


class AttentionWithBiases(CausalMultiHeadSelfAttention):
    """Add a bias to queries, keys and values, as Qwen2 does (arXiv 2407.10671)."""

    def __init__(self, d_model: int, num_heads: int, **options: Any) -> None:
        super().__init__(d_model, num_heads, **options)
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            bias = torch.zeros_like(projection.weight[:, 0])
            projection.bias = nn.Parameter(bias)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            if projection.bias is not None:  # None while super().__init__ runs
                nn.init.zeros_(projection.bias)


class FlexAttention(CausalMultiHeadSelfAttention):
    """Attend causally with FlexAttention, which skips masked blocks of the scores.

    `mask` is a BlockMask of torch's `create_block_mask`, used as it is: include the
    causal condition in it. A bool mask is combined with the causal mask, and None is
    causal. Both build a BlockMask in each layer: for speed, build one and pass it to
    the model. x must have exactly one batch axis.

    On a CPU, torch has no backward pass of FlexAttention: call the model in
    `torch.no_grad()`.
    """

    @staticmethod
    def score_mod(
        score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor
    ) -> Tensor:
        """Return the score that the softmax gets."""
        return score

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | Tensor | None
    ) -> Tensor:
        if q.dim() != 4:
            raise ValueError(
                f"x must have one batch axis for FlexAttention, got {q.dim() - 3}: "
                "pass x[None], or x.flatten(0, -3)"
            )
        if not isinstance(mask, BlockMask):
            mask = causal_block_mask(q, mask)
        return fast_flex_attention(
            q, k, v, score_mod=self.score_mod, block_mask=mask, enable_gqa=True
        )


def causal_block_mask(q: Tensor, mask: Tensor | None) -> BlockMask:
    """Return the causal mask, combined with a bool mask.

    That mask has shape (batch, seq, seq) or (batch, 1, seq).
    """
    batch, _, seq, _ = q.shape
    require_mask(mask, seq, seq)
    if mask is None:
        mask = torch.ones(1, 1, dtype=torch.bool, device=q.device)
    allowed = mask.expand(batch, seq, seq)

    def causal_and_allowed(
        batch: Tensor, head: Tensor, query: Tensor, key: Tensor
    ) -> Tensor:
        return (query >= key) & allowed[batch, query, key]

    return create_block_mask(
        causal_and_allowed, B=batch, H=None, Q_LEN=seq, KV_LEN=seq, device=q.device
    )


class SoftCappedAttention(FlexAttention):
    """Limit scores to (-50, 50) by 50 tanh(score / 50).

    Source: Gemma 2 (arXiv 2408.00118).
    """

    @staticmethod
    def score_mod(
        score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor
    ) -> Tensor:
        return 50 * torch.tanh(score / 50)


@torch.no_grad()
def reach(attention: type[nn.Module], changed: int, seq: int) -> list[int]:
    """Return the tokens whose output depends on one changed token."""
    model = Transformer(
        1, d_model=64, num_heads=4, max_seq_len=seq, attention=attention
    )
    x = torch.randn(1, seq, 64)
    other = x.clone()
    other[:, changed] = torch.randn(64)
    differs = (model(x) != model(other)).any(dim=-1)
    return differs[0].nonzero().flatten().tolist()


def main() -> None:
    # For a few tokens on a CPU, compilation would take longer than it saves.
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    print("a change of token 20 of 64 changes these outputs:")
    for attention in (
        SlidingWindow,
        BidirectionalAttention,
        AttentionWithBiases,
        FlexAttention,
        SoftCappedAttention,
    ):
        tokens = reach(attention, changed=20, seq=64)
        print(f"{attention.__name__:24}{min(tokens)} to {max(tokens)}")


if __name__ == "__main__":
    main()
