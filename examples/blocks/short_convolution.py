"""Gated short convolutions: a token mixes with the `width` - 1 tokens before it.

    gate_in, gate_out, value = W_in x
    out = W_out (gate_out * conv(gate_in * value))

    python examples/blocks/short_convolution.py

This command changes the first token, and prints which tokens notice.

The convolution has one filter per component. Such layers replace most attention layers of
a model, and cost the same for each token of a text.
Source: `Lfm2ShortConv` and `Lfm3ShortConv` of LFM2 and LFM3 in transformers; LFM2
Technical Report (arXiv 2511.23404).
To copy this file, import Linear from your copy of attention.py.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tinyblock.attention import Linear


class ShortConvolution(nn.Module):
    """A layer that is built and called like CausalMultiHeadSelfAttention.

    num_heads, eps, a `rope` and positions are ignored. x has at most one batch axis.

    Raises:
        ValueError: a mask is passed.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int = 1,
        *,
        width: int = 3,
        rope: Any = None,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.d_model = d_model
        self.in_proj = Linear(d_model, 3 * d_model, bias=False, **factory)
        self.conv = nn.Conv1d(
            in_channels=d_model,
            out_channels=d_model,
            kernel_size=width,
            padding=width - 1,
            groups=d_model,
            bias=False,
            **factory,
        )
        self.output_proj = Linear(d_model, d_model, bias=False, **factory)

    def forward(
        self,
        x: Float[Tensor, "*batch seq {self.d_model}"],
        token_positions: Any = None,
        mask: Any = None,
    ) -> Float[Tensor, "*batch seq {self.d_model}"]:
        if mask is not None:
            raise ValueError(f"mask must be None in {type(self).__name__}, got {mask}")
        seq = x.shape[-2]
        gate_in, gate_out, value = self.in_proj(x).chunk(3, dim=-1)
        # The convolution pads both ends. Without the last outputs, it is causal.
        mixed = self.conv((gate_in * value).mT)[..., :seq].mT
        return self.output_proj(gate_out * mixed)


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    layer = ShortConvolution(64)
    x = torch.randn(10, 64)
    changed = x.clone()
    changed[0] += 1
    notices = (layer(x) - layer(changed)).abs().amax(-1) > 1e-6
    print("tokens that notice:", *notices.nonzero().flatten().tolist())


if __name__ == "__main__":
    main()
