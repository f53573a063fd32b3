"""A mixture of experts: each token uses top_k of num_experts feed-forward layers.

    score = sigmoid(W x)  or  softmax(W x)
    chosen = the top_k largest  score + bias
    weight = score / sum of the chosen scores
    y = scale * sum over the chosen of  weight * expert(x)  +  shared expert(x)

    python examples/blocks/experts.py

This command prints how many tokens each expert gets, before and after the bias is
adjusted, and that the weights are right where all scores are almost 0.

The layer has more parameters at equal computation. The bias only selects experts: lower
it yourself for experts that get too many tokens, and raise it for the others.
Sources: Shazeer et al., "Outrageously Large Neural Networks" (arXiv 1701.06538); DeepSeek-
V3 (arXiv 2412.19437), equations 12 to 16, without its groups of experts. Qwen3 and
Mixtral have softmax scores, and neither a bias nor a shared expert.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyblock import SwiGLU


class Router(nn.Module):
    """Choose experts for each token. Returns their weights and numbers, (token, top_k).

    All is computed with logarithms of scores. Scores themselves underflow: in float32,
    sigmoid(-104) is 0, and so would be the sum that they are divided by.
    With is_normalized=False, a weight is the score itself. `bias` stays in float32.
    """

    bias: Tensor

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int,
        *,
        is_softmax: bool = False,
        is_normalized: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k must be 1 ... {num_experts}, got {top_k}")
        self.d_model = d_model
        self.top_k = top_k
        self.is_softmax = is_softmax
        self.is_normalized = is_normalized
        weight = torch.empty(num_experts, d_model, device=device, dtype=dtype)
        self.weight = nn.Parameter(weight)
        bias = torch.empty(num_experts, device=device, dtype=torch.float32)
        self.register_buffer("bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)

    def forward(
        self, x: Float[Tensor, "token {self.d_model}"]
    ) -> tuple[Float[Tensor, "token {self.top_k}"], Int[Tensor, "token {self.top_k}"]]:
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(wide), self.weight.to(wide))
        log_scores = (
            F.log_softmax(logits, -1) if self.is_softmax else F.logsigmoid(logits)
        )
        # In float64, scores down to exp(-745) still differ.
        scores = log_scores.detach().double().exp()
        chosen = (scores + self.bias).topk(self.top_k, dim=-1).indices
        log_weights = log_scores.gather(-1, chosen)
        if self.is_normalized:
            return log_weights.softmax(-1), chosen  # exp(log score) / their sum
        return log_weights.exp(), chosen

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Move the bias with the layer, but do not cast it."""
        # All of .to(), .half(), .cuda() and so on call this method. In bfloat16, the
        # small steps of the bias would be lost, and other experts would be chosen.
        bias = self.bias
        super()._apply(fn, recurse)
        moved = self.bias
        # On meta, there are no values to keep.
        self.bias = moved.float() if bias.is_meta else bias.to(moved.device)
        return self


class MixtureOfExperts(nn.Module):
    """Add up the experts that a Router chooses, and a shared expert for all tokens.

    The loop over experts is readable, not fast. Other options go to Router.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        *,
        num_experts: int = 8,
        top_k: int = 2,
        scale: float = 1.0,
        has_shared_expert: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **router_options: Any,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.d_model = d_model
        self.scale = scale
        self.router = Router(d_model, num_experts, top_k, **router_options, **factory)
        self.experts = nn.ModuleList(
            SwiGLU(d_model, d_ff, **factory) for _ in range(num_experts)
        )
        self.shared = SwiGLU(d_model, d_ff, **factory) if has_shared_expert else None

    def forward(
        self, x: Float[Tensor, "*batch {self.d_model}"]
    ) -> Float[Tensor, "*batch {self.d_model}"]:
        tokens = x.reshape(-1, self.d_model)
        weights, chosen = self.router(tokens)
        weights = self.scale * weights
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, choice = (chosen == number).nonzero(as_tuple=True)
            weighted = weights[token, choice, None] * expert(tokens[token])
            out = out.index_add(0, token, weighted.to(out.dtype))
        if self.shared is not None:
            out = out + self.shared(tokens)
        return out.view(x.shape)


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    router = Router(64, num_experts=4, top_k=1)
    x = torch.randn(1000, 64) + 0.5
    for step in range(101):
        load = router(x)[1].flatten().bincount(minlength=4)
        if step in (0, 100):
            print(f"tokens per expert after {step} steps:", *load.tolist())
        router.bias += 0.002 * (load.float().mean() - load).sign()

    router = Router(1, num_experts=3, top_k=2)
    router.weight.copy_(torch.tensor([[-95.0], [-96.0], [-97.0]]))
    weights, _ = router(torch.ones(1, 1))
    print("weights for logits of -95, -96, -97:", *(f"{w:.4f}" for w in weights[0]))


if __name__ == "__main__":
    main()
