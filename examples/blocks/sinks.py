"""Attention sinks: a learned score per head for attending to no token.

    weight of key j = exp(score_j) / (exp(sink) + sum of exp(score) over all keys)

    python examples/blocks/sinks.py

This command prints how much the weights of attention sum to, for several sinks.

The weights sum to less than 1, so a head can add little, without attending to the first
token for this.
Sources: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (arXiv
2309.17453); OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card" (arXiv 2508.10925). MiMo-V2-
Flash, Flint and Granite SWA have it, too.
To combine it with windows.py, derive from (WindowAttention, SinkAttention), in this order.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from tinyblock import CausalMultiHeadSelfAttention


class SinkAttention(CausalMultiHeadSelfAttention):
    """Attention with one more key, whose value is 0, and whose scores are `sinks`.

    Raises:
        TypeError: a subclass has another base after this one.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        next_class = cls.__mro__[cls.__mro__.index(SinkAttention) + 1]
        # For example, a window would hide the sink.
        if next_class is not CausalMultiHeadSelfAttention:
            raise TypeError(
                f"SinkAttention must be the last base of {cls.__name__}, "
                f"got {next_class.__name__} after it"
            )

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(d_model, num_heads, device=device, dtype=dtype, **options)
        self.sinks = nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.sinks)

    def attend(
        self,
        q: Float[Tensor, "*batch heads query d_head"],
        k: Float[Tensor, "*batch kv_heads key d_head"],
        v: Float[Tensor, "*batch kv_heads key d_value"],
        mask: Any,
    ) -> Float[Tensor, "*batch heads query d_value"]:
        d_head = q.shape[-1]
        # Heads get one more component, so torch divides the scores by sqrt(d_head + 1).
        q = q * ((d_head + 1) / d_head) ** 0.5
        # The component is 0 in all keys. In the sink, which is all zeros otherwise, it is
        # 1, so that the score of the sink is the component of the query.
        scores = self.sinks * (d_head + 1) ** 0.5
        scores = scores.to(q.dtype)[:, None, None].expand(*q.shape[:-1], 1)
        q = torch.cat((q, scores), dim=-1)
        # One more component at the end of each key, and one more key at the start.
        k = F.pad(k, (0, 1, 1, 0))
        k[..., 0, -1] = 1
        v = F.pad(v, (0, 0, 1, 0))
        if mask is not None:
            mask = F.pad(mask, (1, 0), value=True)
        return super().attend(q, k, v, mask)


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    attention = SinkAttention(64, 4)
    q, k, _ = attention.project(torch.randn(20, 64), None)
    ones = torch.ones(4, 20, 1)
    for sink in (-5.0, 0.0, 5.0):
        attention.sinks.fill_(sink)
        total = attention.attend(q, k, ones, None).mean()
        print(f"sink {sink:4}: the weights of a query sum to {total:.3f}")


if __name__ == "__main__":
    main()
