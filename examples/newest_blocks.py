"""The blocks of today's models, built from tinyblock's parts: each in a few lines.

    python examples/newest_blocks.py

This command builds a small model of each kind, and prints its number of parameters.
The tests compare each part with the code of its model. Copy the part that you need.

Some models pass more than x, token_positions and mask from layer to layer: the values of
the first layer (ResFormer, arXiv 2410.17897), keys that layers share (arXiv 2405.12981),
or an encoder's output. They need an edit of three calls: `layer(x, ...)` in
Transformer.forward, `self.attn(...)` in Block.forward, and `self.project(...)` in
CausalMultiHeadSelfAttention.forward.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from tinyblock import (
    Block,
    FeedForward,
    RMSNorm,
    RotaryPositionalEmbedding,
    SwiGLU,
    Transformer,
)
from tinyblock import CausalMultiHeadSelfAttention as Attention

Projected = tuple[Tensor, Tensor, Tensor]  # queries, keys and values of each head

# --- Blocks: Transformer(..., block=ParallelBlock) ---------------------------------


class SandwichBlock(Block):
    """Gemma 2 (arXiv 2408.00118), GLM-4-0414: norms before and after each branch.

    What a branch adds to the residual stream is bounded, so training is more stable.
    """

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.post_ln1 = deepcopy(self.ln1)
        self.post_ln2 = deepcopy(self.ln2)

    def forward(self, x: Tensor, token_positions: Any = None, mask: Any = None) -> Any:
        x = x + self.post_ln1(self.attn(self.ln1(x), token_positions, mask))
        return x + self.post_ln2(self.ffn(self.ln2(x)))


class ReorderedNormBlock(Block):
    """OLMo 2 (arXiv 2501.00656): normalize the output of each branch, not its input.

    Training has fewer spikes of the loss. OLMo 2 also has JointNormAttention.
    """

    def forward(self, x: Tensor, token_positions: Any = None, mask: Any = None) -> Any:
        x = x + self.ln1(self.attn(x, token_positions, mask))
        return x + self.ln2(self.ffn(x))


class ParallelBlock(Block):
    """PaLM (arXiv 2204.02311), Command R: attention and feed-forward side by side.

    Both read one norm, so that their products can run at the same time.
    """

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        del self.ln2

    def forward(self, x: Tensor, token_positions: Any = None, mask: Any = None) -> Any:
        normalized = self.ln1(x)
        attended = self.attn(normalized, token_positions, mask)
        return x + attended + self.ffn(normalized)


def start_as_identity(model: Any) -> None:
    """Fixup (arXiv 1901.09321), nanochat: branches start at zero.

    The gradient reaches all layers unchanged at first, so that deep stacks train. Call
    this after weights are drawn.
    """
    for block in model.layers:
        nn.init.zeros_(block.attn.output_proj.weight)
        nn.init.zeros_(block.ffn.w2.weight)


# --- Norms and feed-forward layers: Transformer(..., norm=..., ffn=GeGLU) ----------


def norm_without_gain(d_model: int, eps: float, **_: Any) -> nn.Module:
    """nanochat, OLMo (arXiv 2402.00838): the next projection can learn the gains."""
    return nn.RMSNorm(d_model, eps, elementwise_affine=False)


def relu_squared(x: Tensor) -> Tensor:
    """nanochat, Primer (arXiv 2109.08668): a lower loss than GELU's at equal cost.

    Use it as ffn=partial(FeedForward, activation=relu_squared).
    """
    return F.relu(x).square()


class GeGLU(SwiGLU):
    """Gemma (arXiv 2403.08295): the gate is a GELU, in its form with tanh.

    Gates lower the loss at equal parameters (arXiv 2002.05202).
    """

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x), approximate="tanh") * self.w3(x))


class MixtureOfExperts(nn.Module):
    """DeepSeek-V3 (arXiv 2412.19437): top_k of num_experts, and one for all tokens.

    More parameters at equal computation. The bias of the router only selects: instead
    of an extra loss, training lowers it for experts with too many tokens, and raises it
    for others. Without DeepSeek's groups of experts. The loop is readable, not fast.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        *,
        num_experts: int = 8,
        top_k: int = 2,
        scale: float = 1.0,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.scale = scale
        self.router = nn.Linear(d_model, num_experts, **factory)
        nn.init.zeros_(self.router.bias.requires_grad_(False))
        experts = [SwiGLU(d_model, d_ff, **factory) for _ in range(num_experts)]
        self.experts = nn.ModuleList(experts)
        self.shared = SwiGLU(d_model, d_ff, **factory)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        wide = torch.promote_types(x.dtype, torch.float32)
        scores = F.linear(tokens.to(wide), self.router.weight.to(wide)).sigmoid()
        chosen = (scores + self.router.bias).topk(self.top_k).indices
        weights = scores.gather(-1, chosen)
        weights = self.scale * weights / weights.sum(-1, keepdim=True)
        out = self.shared(tokens)
        for number, expert in enumerate(self.experts):
            token, choice = (chosen == number).nonzero(as_tuple=True)
            weighted = weights[token, choice, None] * expert(tokens[token])
            out = out.index_add(0, token, weighted.to(out.dtype))
        return out.view(x.shape)


# --- Positions: Transformer(..., rope=PartialRope(...)) ----------------------------


class PartialRope(nn.Module):
    """Phi-4-mini (arXiv 2503.01743), GLM-4: rotate the first d_k components of a head.

    The others compare contents at any distance.
    """

    def __init__(self, rope: Any) -> None:
        super().__init__()
        self.rope = rope

    def forward(self, x: Tensor, token_positions: Tensor | None = None) -> Tensor:
        d_k = self.rope.d_k
        rotated = self.rope(x[..., :d_k], token_positions)
        return torch.cat((rotated, x[..., d_k:]), dim=-1)


class NoRope(nn.Module):
    def forward(self, x: Tensor, token_positions: Tensor | None = None) -> Tensor:
        return x


def drop_positions(model: Any, every: int = 4) -> None:
    """SmolLM3 (after arXiv 2501.18795): every 4th layer has no positions.

    These layers find contents in long texts; the others know the order.
    """
    for block in model.layers[every - 1 :: every]:
        block.attn.rope = NoRope()


# --- Attention: Transformer(..., attention=WindowAttention) ------------------------


class WindowAttention(Attention):
    """Mistral 7B (arXiv 2310.06825): a token attends to the last `window` tokens.

    Keys outside of the window need not be kept. This mask alone saves no time.
    """

    window: int | None = 512

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        if self.window is not None:
            query, key = q.shape[-2], k.shape[-2]
            near = torch.ones(query, key, dtype=torch.bool, device=q.device)
            near = near.triu(key - query - self.window + 1)
            mask = near.expand(*q.shape[:-3], -1, -1) if mask is None else near & mask
        return super().attend(q, k, v, mask)


def widen(model: Any, rope: nn.Module, every: int = 6) -> None:
    """Gemma 3 (arXiv 2503.19786): every 6th layer of WindowAttention sees all tokens.

    Its rope has theta 1,000,000 for far tokens. The others, 10,000, need few keys.
    """
    for block in model.layers[every - 1 :: every]:
        block.attn.window = None
        block.attn.rope = rope


class JointNormAttention(Attention):
    """OLMo 2: normalize queries and keys over all heads together, against large scores."""

    q_proj: Any
    k_proj: Any

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        eps = options.get("eps", 1e-5)
        q_norm = RMSNorm(self.q_proj.out_features, eps).to(self.q_proj.weight)
        k_norm = RMSNorm(self.k_proj.out_features, eps).to(self.k_proj.weight)
        self.q_proj = nn.Sequential(self.q_proj, q_norm)
        self.k_proj = nn.Sequential(self.k_proj, k_norm)


class GatedAttention(Attention):
    """Qwen3-Next (arXiv 2505.06708): a sigmoid gate for each component of the heads.

    A head can add nothing, and need not attend to the first token for that.
    """

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        width = self.output_proj.in_features
        self.gate = nn.Linear(self.d_model, width, bias=False).to(self.q_proj.weight)

    def forward(self, x: Tensor, token_positions: Any = None, mask: Any = None) -> Any:
        out = self.attend(*self.project(x, token_positions), mask)
        merged = rearrange(out, "... heads seq d_head -> ... seq (heads d_head)")
        return self.output_proj(merged * self.gate(x).sigmoid())


class SinkAttention(Attention):
    """gpt-oss (arXiv 2508.10925): a learned score per head that attends to nothing.

    A head can add little, as with a gate. With a window, also gpt-oss's: a subclass of
    (WindowAttention, SinkAttention), in this order, so that the window keeps the sink.
    """

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.sinks = nn.Parameter(self.q_proj.weight.new_zeros(self.num_heads))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "sinks"):  # the constructor of the base class resets, too
            nn.init.zeros_(self.sinks)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        # The sink is a key with value 0 before the others. An additional component of
        # the head is 1 in this key only, so its product with the query is the score.
        d_head = q.shape[-1]
        scores = self.sinks[:, None, None] * d_head**0.5
        q = torch.cat((q, scores.to(q.dtype).expand(*q.shape[:-1], 1)), dim=-1)
        k = F.pad(k, (0, 1, 1, 0))
        k[..., 0, -1] = 1
        v = F.pad(v, (0, 1, 1, 0))
        if mask is not None:
            mask = F.pad(mask, (1, 0), value=True)
        q = q * (1 + 1 / d_head) ** 0.5  # torch divides by the root of d_head + 1
        return super().attend(q, k, v, mask)[..., :-1]


class FlexAttention(Attention):
    """FlexAttention (arXiv 2412.05496): any mask from one function, such as `visible`.

    Build mask=create_block_mask(visible(...), batch, None, seq, seq, device) once for
    all layers. In a compiled model on a GPU, the kernel skips hidden blocks. On a CPU
    there is no gradient.
    """

    score_mod: Callable[..., Tensor] | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        if not isinstance(mask, BlockMask):
            raise ValueError(
                f"mask must be a BlockMask, got {mask}: build it by create_block_mask"
            )
        return flex_attention(q, k, v, self.score_mod, mask, enable_gqa=True)


def visible(documents: Tensor, window: int) -> Callable[..., Tensor]:
    """Return where a query may attend: near, before it, and in the same document.

    `documents` has a number for each token, (batch, seq).
    """

    def rule(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = documents[batch, query] == documents[batch, key]
        return same & (key <= query) & (query - key < window)

    return rule


class SoftCappedAttention(FlexAttention):
    """Gemma 2 (arXiv 2408.00118): scores are bounded, so training is more stable."""

    cap = 50.0

    def score_mod(self, score: Tensor, *where: Tensor) -> Tensor:
        return self.cap * torch.tanh(score / self.cap)


class LatentAttention(Attention):
    """DeepSeek-V2 (arXiv 2405.04434), Kimi K2: keys and values from one small vector.

    A cache can hold this vector and one rotated key, instead of those of all heads
    (a cache in `attend` holds all heads). `rope` has the d_k of the rotated part.
    """

    q_proj: Any
    rope: RotaryPositionalEmbedding

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        rope: RotaryPositionalEmbedding,
        d_head: int = 128,
        q_rank: int = 1536,
        kv_rank: int = 512,
        eps: float = 1e-6,
        **factory: Any,
    ) -> None:
        width = d_head + rope.d_k
        super().__init__(d_model, num_heads, d_head=width, eps=eps, device="meta")
        del self.k_proj, self.v_proj
        self.rope = rope
        linear: Any = partial(nn.Linear, bias=False, **factory)
        q_norm = RMSNorm(q_rank, eps, **factory)
        q_up = linear(q_rank, num_heads * width)
        self.q_proj = nn.Sequential(linear(d_model, q_rank), q_norm, q_up)
        self.kv_down = linear(d_model, kv_rank + rope.d_k)
        kv_norm = RMSNorm(kv_rank, eps, **factory)
        self.kv_up = nn.Sequential(kv_norm, linear(kv_rank, num_heads * 2 * d_head))
        self.output_proj = linear(num_heads * d_head, d_model)
        self.reset_parameters()

    def project(self, x: Tensor, token_positions: Tensor | None) -> Projected:
        d_k = self.rope.d_k
        latent, shared_k = self.kv_down(x).tensor_split([-d_k], dim=-1)
        split = partial(rearrange, pattern="... seq (heads d) -> ... heads seq d")
        q = split(self.q_proj(x), heads=self.num_heads)
        kv = split(self.kv_up(latent), heads=self.num_heads)
        q, rotated_q = q.tensor_split([-d_k], dim=-1)
        k, v = kv.chunk(2, dim=-1)
        if token_positions is not None:
            token_positions = token_positions.unsqueeze(-2)
        rotated_q = self.rope(rotated_q, token_positions)
        rotated_k = self.rope(shared_k.unsqueeze(-3), token_positions)
        q = torch.cat((q, rotated_q), dim=-1)
        k = torch.cat((k, rotated_k.expand_as(rotated_q)), dim=-1)
        return q, k, v


def main() -> None:
    build = partial(Transformer, 2, d_model=64, num_heads=4, max_seq_len=128)
    half = RotaryPositionalEmbedding(10000.0, 8, 128)
    squared = partial(FeedForward, activation=relu_squared)
    latent = partial(LatentAttention, d_head=16, q_rank=32, kv_rank=24)
    models = {
        "Gemma 3": build(block=SandwichBlock, ffn=GeGLU, attention=WindowAttention),
        "OLMo 2": build(block=ReorderedNormBlock, attention=JointNormAttention),
        "Command R": build(block=ParallelBlock),
        "nanochat": build(norm=norm_without_gain, ffn=squared),
        "Phi-4-mini": build(rope=PartialRope(half)),
        "Qwen3-Next": build(rope=PartialRope(half), attention=GatedAttention),
        "gpt-oss": build(attention=SinkAttention),
        "DeepSeek-V3": build(rope=half, attention=latent, ffn=MixtureOfExperts),
    }
    for name, model in models.items():
        model(torch.randn(2, 24, 64))
        count = sum(weight.numel() for weight in model.parameters())
        print(f"{name:12}{count:>10,} parameters")


if __name__ == "__main__":
    main()
