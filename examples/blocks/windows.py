"""Windows: a token attends only to the last `window` tokens, of which it is one.

    query i attends to key j  if  i - window < j <= i

    python examples/blocks/windows.py

This command changes the first token, and prints which tokens notice, with one layer and
with more.

Sources: Jiang et al., "Mistral 7B" (arXiv 2310.06825), section 2, where all layers have
windows; Gemma Team, "Gemma 3" (arXiv 2503.19786), where every 6th layer attends to all
tokens, with a larger theta.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tinyblock import CausalMultiHeadSelfAttention, Transformer


class WindowAttention(CausalMultiHeadSelfAttention):
    """Causal attention to the last `window` tokens, or to all with window=None.

    This is a mask, so it saves no time. Keys outside of the window need not be kept.

    Raises:
        ValueError: window is below 1.
    """

    def __init__(
        self, d_model: int, num_heads: int, *, window: int | None, **options: Any
    ) -> None:
        super().__init__(d_model, num_heads, **options)
        if window is not None and window < 1:
            raise ValueError(f"window must be at least 1, or None, got {window}")
        self.window = window

    def attend(
        self,
        q: Float[Tensor, "*batch heads query d_head"],
        k: Float[Tensor, "*batch kv_heads key d_head"],
        v: Float[Tensor, "*batch kv_heads key d_value"],
        mask: Any,
    ) -> Float[Tensor, "*batch heads query d_value"]:
        if self.window is None:
            return super().attend(q, k, v, mask)
        *batch, _, query, _ = q.shape
        key = k.shape[-2]
        # The last query is the last key, so query i is key i + key - query.
        near = torch.ones(query, key, dtype=torch.bool, device=q.device)
        near = near.triu(key - query - self.window + 1)
        near = near.expand(*batch, query, key) if mask is None else near & mask
        return super().attend(q, k, v, near)


def widen(model: Transformer, every: int, rope: nn.Module | None = None) -> None:
    """Let every n-th layer attend to all tokens, and rotate with `rope` if one is passed."""
    layers: Any = model.layers
    for block in layers[every - 1 :: every]:
        block.attn.window = None
        if rope is not None:
            block.attn.rope = rope


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 64)
    changed = x.clone()
    changed[0] = -changed[0]
    for num_layers in (1, 2, 4):
        model = Transformer(
            num_layers, 64, 4, max_seq_len=len(x), attention=WindowAttention, window=4
        )
        notices = (model(x) != model(changed)).any(-1)
        last = notices.nonzero().max().item()
        layers = "layer" if num_layers == 1 else "layers"
        print(f"{num_layers} {layers}: token 0 reaches tokens 0 to {last}")


if __name__ == "__main__":
    main()
