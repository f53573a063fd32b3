"""A mixture of experts as the feed-forward layer: a router chooses experts per token.

    out = sum of p_i expert_i(x) / sum of p_i
    over the top_k largest p_i of p = softmax(router x)

    python examples/mixture_of_experts.py

This command prints how many of 1000 tokens each expert of an untrained layer gets.

`Transformer(..., ffn=MixtureOfExperts)` builds a model with this layer, and
`ffn=partial(MixtureOfExperts, top_k=1)` sets an option. `parallelize` supports it over
"dp". Over "tp" it raises a ValueError, because it has no rule for the router and the
experts.

The loop over experts is written for readability, not for speed. In each turn the CPU
waits for the GPU, to learn how many tokens an expert gets. A grouped matrix product is
faster. Training at scale adds a loss that balances the experts (arXiv 2101.03961,
equation 4), which this file leaves out.
Source: Jiang et al., "Mixtral of Experts" (arXiv 2401.04088), section 2.1.
"""

import torch
from torch import Tensor, nn

from tinyblock import SwiGLU, Transformer


class MixtureOfExperts(nn.Module):
    """Send each token through top_k of num_experts SwiGLU layers.

    Returns the dtype of the input.

    Raises:
        ValueError: top_k is not between 1 and num_experts.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        device: str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_experts: int = 8,
        top_k: int = 2,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k must be 1 ... {num_experts=}, got {top_k}")
        self.top_k = top_k
        self.router = nn.Linear(
            d_model, num_experts, bias=False, device=device, dtype=dtype
        )
        self.experts = nn.ModuleList(
            SwiGLU(d_model, d_ff, device=device, dtype=dtype)
            for _ in range(num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(tokens)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            # Run experts without tokens, too: FSDP requires all gradients.
            token, choice = (chosen == number).nonzero(as_tuple=True)
            expert_out = weights[token, choice, None] * expert(tokens[token])
            # The weights are float32 or wider, and autocast changes the expert's dtype.
            out = out.index_add(0, token, expert_out.to(out.dtype))
        return out.view(x.shape)

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the numbers of the experts of each token.

        Both have shape (tokens, top_k). The weights are in float32 or wider.
        """
        logits = self.router(tokens)
        wide = torch.promote_types(logits.dtype, torch.float32)
        probabilities = logits.softmax(dim=-1, dtype=wide)
        weights, chosen = probabilities.topk(self.top_k)
        return weights / weights.sum(dim=-1, keepdim=True), chosen


def main() -> None:
    model = Transformer(
        2, d_model=64, num_heads=4, max_seq_len=128, ffn=MixtureOfExperts
    )
    model(torch.randn(2, 7, 64)).sum().backward()
    layer = MixtureOfExperts(d_model=64)
    _, chosen = layer.route(torch.randn(1000, 64))
    counts = chosen.flatten().bincount(minlength=8).tolist()
    print(f"tokens of each expert: {counts}, {sum(counts)} in total")


if __name__ == "__main__":
    main()
