"""Joint q/k norm: normalize queries and keys over all heads together.

    q = norm(W_q x),  k = norm(W_k x),  each over its whole width

    python examples/blocks/joint_qk_norm.py

This command makes the weights of queries and keys 100 times larger, and prints the
largest weight of attention before and after, without this norm and with it.

The norm bounds the scores, so attention cannot become one-hot as weights grow. With
qk_norm=True, tinyblock normalizes each head by itself, as Qwen3 and Gemma 3 do.
Sources: Dehghani et al., "Scaling Vision Transformers to 22 Billion Parameters" (arXiv
2302.05442), for q/k norms; Team OLMo, "2 OLMo 2 Furious" (arXiv 2501.00656). OLMo 3 and
MiniMax-M2 have it, too.
To copy this file, import CausalMultiHeadSelfAttention and RMSNorm from your copies of
attention.py and rmsnorm.py.
"""

from typing import Any

import torch
from torch import nn

from tinyblock import CausalMultiHeadSelfAttention, RMSNorm


class JointNormAttention(CausalMultiHeadSelfAttention):
    """Attention whose q_proj and k_proj are a projection, then a norm."""

    q_proj: Any
    k_proj: Any

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(d_model, num_heads, eps=eps, **factory, **options)
        q_norm = RMSNorm(self.num_heads * self.d_head, eps, **factory)
        k_norm = RMSNorm(self.num_kv_heads * self.d_head, eps, **factory)
        self.q_proj = nn.Sequential(self.q_proj, q_norm)
        self.k_proj = nn.Sequential(self.k_proj, k_norm)


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 64)
    for kind in (CausalMultiHeadSelfAttention, JointNormAttention):
        attention = kind(64, 4)
        for growth in (1, 100):
            for name, weight in attention.named_parameters():
                if weight.ndim == 2 and name.startswith(("q_", "k_")):
                    weight.mul_(growth)
            q, k, _ = attention.project(x, None)
            weights = (q @ k.mT / 4).softmax(-1)
            print(f"{kind.__name__}, weights x {growth}: {weights.max():.2f}")


if __name__ == "__main__":
    main()
