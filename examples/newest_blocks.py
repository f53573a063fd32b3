"""Build the blocks of today's models from tinyblock's parts, in 3 to 70 lines each.


    python examples/newest_blocks.py

This command builds a small model of each kind, and prints its number of parameters.
The tests compare each part with the code of its model. Copy the part that you need.

docs/models.md lists what today's models change in the block, and the part for it.
"""

import math
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from einops import einsum, rearrange, repeat
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

    Both read one norm, so that their matmuls can run at the same time.
    """

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        del self.ln2

    def forward(self, x: Tensor, token_positions: Any = None, mask: Any = None) -> Any:
        normalized = self.ln1(x)
        attended = self.attn(normalized, token_positions, mask)
        return x + attended + self.ffn(normalized)


class StreamWeights(nn.Module):
    """Weights for each token, from all of its residual streams.

    Returns a tensor in float32 for each of `counts`, (..., seq, count).
    """

    def __init__(
        self, d_model: int, counts: tuple[int, ...], streams: int, device: Any = None
    ) -> None:
        super().__init__()
        width = streams * d_model
        self.counts = counts
        self.norm = nn.RMSNorm(width, 1e-6, elementwise_affine=False)
        self.proj = nn.Linear(width, sum(counts), device=device)
        self.scales = nn.Parameter(torch.empty(len(counts), device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.proj.weight, std=0.02)
        nn.init.zeros_(self.proj.bias)
        nn.init.ones_(self.scales)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        flat = rearrange(x.float(), "stream ... d_model -> ... (stream d_model)")
        raw = F.linear(self.norm(flat), self.proj.weight.float()).split(self.counts, -1)
        biases = self.proj.bias.split(self.counts)
        scaled = zip(self.scales, raw, biases, strict=True)
        return tuple(scale * weight + bias for scale, weight, bias in scaled)


def read_streams(x: Tensor, weights: Tensor) -> Tensor:
    """Return one input from all streams. The weights are before the sigmoid."""
    weights = (weights.sigmoid() + 1e-6).to(x.dtype)
    return einsum(weights, x, "... stream, stream ... d_model -> ... d_model")


def doubly_stochastic(weights: Tensor, steps: int = 20) -> Tensor:
    """Return positive matrices whose rows and columns sum to 1 (Sinkhorn, Knopp)."""
    weights = weights.softmax(-1) + 1e-6
    for step in range(2 * steps - 1):
        axis = -1 if step % 2 else -2
        weights = weights / (weights.sum(axis, keepdim=True) + 1e-6)
    return weights


class HyperBlock(Block):
    """DeepSeek-V4 (mHC, arXiv 2512.24880): several residual streams in place of one.

    Each branch reads a mix of the streams, and adds to all of them. A doubly stochastic
    matrix mixes the streams, so that a deep stack keeps their scale. Streams are the
    first axis of x, so that any Transformer can pass them. After construction, call
    `open_and_close`. The weights of streams stay in float32.
    """

    def __init__(
        self, d_model: int, *sizes: Any, streams: int = 4, **options: Any
    ) -> None:
        super().__init__(d_model, *sizes, **options)
        self.streams = streams
        self.opens = False
        self.close: StreamWeights | None = None
        counts = (streams, streams, streams**2)
        build = partial(StreamWeights, d_model, counts, streams, options.get("device"))
        self.attn_streams, self.ffn_streams = build(), build()

    def forward(self, x: Tensor, token_positions: Any = None, mask: Any = None) -> Any:
        if self.opens:
            x = repeat(x, "... -> stream ...", stream=self.streams)
        read, write, mix = self.attn_streams(x)
        normalized = self.ln1(read_streams(x, read))
        x = self.combine(x, self.attn(normalized, token_positions, mask), write, mix)
        read, write, mix = self.ffn_streams(x)
        x = self.combine(x, self.ffn(self.ln2(read_streams(x, read))), write, mix)
        return x if self.close is None else read_streams(x, *self.close(x))

    def combine(self, x: Tensor, branch: Tensor, write: Tensor, mix: Tensor) -> Tensor:
        matrix = rearrange(mix, "... (old new) -> ... old new", old=self.streams)
        matrix = doubly_stochastic(matrix).to(x.dtype)
        kept = einsum(matrix, x, "... old new, old ... d_model -> new ... d_model")
        write = 2 * write.sigmoid().to(x.dtype)
        return kept + einsum(write, branch, "... new, ... d_model -> new ... d_model")


def open_and_close(model: Any) -> None:
    """Let the first HyperBlock open the streams, and the last one close them."""
    first, last = model.layers[0], model.layers[-1]
    first.opens = True
    device = last.attn_streams.scales.device
    last.close = StreamWeights(last.d_model, (last.streams,), last.streams, device)


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

    The layer has more parameters at equal computation. The router's bias only selects
    experts. Instead of an extra loss, lower it yourself for experts with too many
    tokens, and raise it for others. DeepSeek's groups of experts are left out. The loop
    is readable, not fast. Qwen3 and Mixtral use softmax=True and shared=False.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        *,
        num_experts: int = 8,
        top_k: int = 2,
        scale: float = 1.0,
        softmax: bool = False,
        shared: bool = True,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.scale = scale
        self.softmax = softmax
        self.router = nn.Linear(d_model, num_experts, **factory)
        nn.init.zeros_(self.router.bias.requires_grad_(False))
        experts = [SwiGLU(d_model, d_ff, **factory) for _ in range(num_experts)]
        self.experts = nn.ModuleList(experts)
        self.shared = SwiGLU(d_model, d_ff, **factory) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(tokens.to(wide), self.router.weight.to(wide))
        scores = logits.softmax(-1) if self.softmax else logits.sigmoid()
        chosen = (scores + self.router.bias).topk(self.top_k).indices
        weights = scores.gather(-1, chosen)
        weights = self.scale * weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens) if self.shared is None else self.shared(tokens)
        for number, expert in enumerate(self.experts):
            token, choice = (chosen == number).nonzero(as_tuple=True)
            weighted = weights[token, choice, None] * expert(tokens[token])
            out = out.index_add(0, token, weighted.to(out.dtype))
        return out.view(x.shape)


# --- Positions: Transformer(..., rope=PartialRope(...)) ----------------------------


class PartialRope(nn.Module):
    """Phi-4-mini (arXiv 2503.01743), GLM-4: rotate the first d_k components of a head.

    The other components compare contents at any distance.
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

    These layers find contents in long texts, and the other layers know the order.
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

    Its rope has theta 1,000,000 for far tokens. The others keep 10,000, for near ones.
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

    The gate lets a head add nothing, without attending to the first token. LFM3 and
    Step 3.7 have one gate per head.
    """

    def __init__(
        self, *sizes: Any, gate_per_head: bool = False, **options: Any
    ) -> None:
        super().__init__(*sizes, **options)
        width = self.num_heads if gate_per_head else self.output_proj.in_features
        self.gate = nn.Linear(self.d_model, width, bias=False).to(self.q_proj.weight)

    def forward(self, x: Tensor, token_positions: Any = None, mask: Any = None) -> Any:
        out = self.attend(*self.project(x, token_positions), mask)
        gate = self.gate(x).sigmoid()
        split = "... seq (heads each) -> ... heads seq each"
        out = out * rearrange(gate, split, heads=self.num_heads)
        merged = rearrange(out, "... heads seq d_head -> ... seq (heads d_head)")
        return self.output_proj(merged)


class SinkAttention(Attention):
    """gpt-oss (arXiv 2508.10925): a learned score per head that attends to nothing.

    The sink lets a head add little, as a gate does. gpt-oss also has windows. For both,
    derive from (WindowAttention, SinkAttention), in this order, to keep the sink.
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
    all layers. In a compiled model on a GPU, the kernel skips hidden blocks. It has no
    gradient on a CPU.
    """

    score_mod: Callable[..., Tensor] | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        if not isinstance(mask, BlockMask):
            raise ValueError(
                f"mask must be a BlockMask, got {mask}: build it with create_block_mask"
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

    A cache can hold this vector and one rotated key, instead of the keys of all heads
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


class SparseAttention(LatentAttention):
    """DeepSeek-V3.2 (DSA, arXiv 2512.02556), GLM-5: attend to the `top_k` best keys.

    A small scorer, the indexer, chooses the keys of each query. It gets no gradient from
    here, because its own loss trains it towards the weights of attention. This is the
    equation. A fast kernel would read only the chosen keys.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        top_k: int = 2048,
        index_heads: int = 64,
        index_d_head: int = 128,
        q_rank: int = 1536,
        **options: Any,
    ) -> None:
        super().__init__(d_model, num_heads, q_rank=q_rank, **options)
        self.top_k = top_k
        self.index_heads = index_heads
        linear: Any = partial(nn.Linear, bias=False)
        index = {
            "q": linear(q_rank, index_heads * index_d_head),
            "k": linear(d_model, index_d_head),
            "norm": nn.LayerNorm(index_d_head, eps=1e-6),
            "weights": linear(d_model, index_heads),
        }
        self.index = nn.ModuleDict(index).to(self.output_proj.weight)
        self.index_rope = PartialRope(self.rope)

    def forward(self, x: Tensor, token_positions: Any = None, mask: Any = None) -> Any:
        seq = x.shape[-2]
        causal = torch.ones(seq, seq, dtype=torch.bool, device=x.device).tril()
        shown = causal.expand(*x.shape[:-2], -1, -1)
        if mask is not None:
            shown = shown & mask
        scores = self.score(x, token_positions).masked_fill(~shown, -torch.inf)
        best = scores.topk(min(self.top_k, seq), dim=-1).indices
        chosen = torch.zeros_like(shown).scatter(-1, best, value=True)
        return super().forward(x, token_positions, shown & chosen)

    @torch.no_grad()
    def score(self, x: Tensor, token_positions: Tensor | None) -> Tensor:
        """Return how well each key fits each query, (..., seq, seq), in float32."""
        q = self.index["q"](self.q_proj[:2](x))
        q = rearrange(q, "... seq (heads d) -> ... heads seq d", heads=self.index_heads)
        k = self.index["norm"](self.index["k"](x)).unsqueeze(-3)
        if token_positions is not None:
            token_positions = token_positions.unsqueeze(-2)
        q = self.index_rope(q, token_positions).float()
        k = self.index_rope(k, token_positions).float()
        products = F.relu(q @ k.mT) / q.shape[-1] ** 0.5
        weights = self.index["weights"](x).float() / self.index_heads**0.5
        return einsum(weights, products, "... q heads, ... heads q k -> ... q k")


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
    """Gated DeltaNet (arXiv 2412.06464): read q from a memory of the tokens so far.

    For each token: memory = decay * memory, then memory += rate * k (v - memory^T k),
    which moves what the memory holds at k towards v. The result is memory^T q. All are
    (..., seq, d); decay and rate may have d = 1. One step per token is readable, not
    fast: `chunk_kda` and `chunk_gated_delta_rule` of flash-linear-attention are.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    memory = torch.zeros(*k.shape[:-2], k.shape[-1], v.shape[-1], dtype=wide).to(
        q.device
    )
    out = []
    tokens = (tensor.to(wide).unbind(-2) for tensor in (q, k, v, decay, rate))
    for q_t, k_t, v_t, decay_t, rate_t in zip(*tokens, strict=True):
        memory = memory * decay_t.unsqueeze(-1)
        error = v_t - einsum(k_t, memory, "... k, ... k v -> ... v")
        memory = memory + einsum(rate_t * k_t, error, "... k, ... v -> ... k v")
        out.append(einsum(q_t, memory, "... k, ... k v -> ... v"))
    return torch.stack(out, dim=-2).to(q.dtype)


class DeltaAttention(nn.Module):
    """Kimi Linear (arXiv 2510.26692): a memory of fixed size in place of all keys.

    Each component of a key decays at its own speed. Kimi Linear has this in 3 of 4
    layers. In `model.layers[3::4]`, replace `block.attn` with attention. The layer knows
    the order of tokens without a rope. It takes no mask, and x has at most one batch
    axis.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        d_head: int = 128,
        width: int = 4,
        eps: float = 1e-5,
        rope: Any = None,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        inner = num_heads * d_head
        linear: Any = partial(nn.Linear, bias=False, **factory)
        self.qkv_proj = linear(d_model, 3 * inner)
        self.conv = nn.Conv1d(
            3 * inner,
            3 * inner,
            width,
            padding=width - 1,
            groups=3 * inner,
            bias=False,
            **factory,
        )
        speed = nn.Linear(d_head, inner, **factory)
        self.speed_proj = nn.Sequential(linear(d_model, d_head), speed)
        self.log_decay = nn.Parameter(torch.empty(num_heads, 1, 1, **factory))
        self.rate_proj = linear(d_model, num_heads)
        self.gate_proj = nn.Sequential(linear(d_model, d_head), linear(d_head, inner))
        self.norm = RMSNorm(d_head, eps, **factory)
        self.output_proj = linear(inner, d_model)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights, so that a step forgets 0.1 to 80% of a component at first."""
        for layer in self.modules():
            if isinstance(layer, nn.Linear | nn.Conv1d | RMSNorm):
                layer.reset_parameters()
        bias: Any = self.speed_proj[1].bias
        with torch.no_grad():
            speed = torch.empty_like(bias).uniform_(math.log(1e-3), math.log(0.1)).exp()
            bias.copy_(speed.expm1().log())  # softplus(bias) is speed
            self.log_decay.uniform_(1, 16).log_()

    def forward(self, x: Tensor, token_positions: Any = None, mask: Any = None) -> Any:
        if mask is not None:
            raise ValueError("mask must be None, because DeltaAttention takes none")
        heads = {"heads": self.num_heads}
        split = partial(
            rearrange, pattern="... seq (heads d) -> ... heads seq d", **heads
        )
        mixed = self.conv(self.qkv_proj(x).mT)[..., : x.shape[-2]].mT
        q, k, v = map(split, F.silu(mixed).chunk(3, dim=-1))
        speed = F.softplus(split(self.speed_proj(x)).float())
        decay = torch.exp(-self.log_decay.float().exp() * speed)
        rate = split(self.rate_proj(x).sigmoid())
        q = unit(q) / q.shape[-1] ** 0.5
        out = self.norm(delta_rule(q, unit(k), v, decay, rate))
        out = out * split(self.gate_proj(x)).sigmoid()
        return self.output_proj(rearrange(out, "... heads seq d -> ... seq (heads d)"))


def unit(x: Tensor) -> Tensor:
    """Return vectors of length 1."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def build_models() -> dict[str, Transformer]:
    """Return small models. Each has the block of its namesake, or the named part."""
    build: Any = partial(Transformer, 4, d_model=64, num_heads=4, max_seq_len=128)
    half = RotaryPositionalEmbedding(10000.0, 8, 128)
    squared = partial(FeedForward, activation=relu_squared)
    experts = partial(MixtureOfExperts, softmax=True, shared=False)
    per_head = partial(GatedAttention, gate_per_head=True)
    latent = partial(LatentAttention, d_head=16, q_rank=32, kv_rank=24)
    sparse = partial(SparseAttention, d_head=16, q_rank=32, kv_rank=24, top_k=8)
    gemma = build(
        num_kv_heads=2,
        qk_norm=True,
        block=SandwichBlock,
        ffn=GeGLU,
        attention=WindowAttention,
    )
    widen(gemma, RotaryPositionalEmbedding(1e6, 16, 128), every=2)
    smollm = build(num_kv_heads=2)
    drop_positions(smollm)
    hyper = build(block=HyperBlock)
    open_and_close(hyper)
    norm_without_bias = partial(nn.LayerNorm, bias=False)
    return {
        "Llama 3": build(num_kv_heads=2, theta=500000.0),
        "Qwen3": build(num_kv_heads=2, qk_norm=True, theta=1e6),
        "Qwen3 with experts": build(num_kv_heads=2, qk_norm=True, ffn=experts),
        "Gemma 3": gemma,
        "OLMo 2": build(block=ReorderedNormBlock, attention=JointNormAttention),
        "SmolLM3": smollm,
        "Command R": build(block=ParallelBlock, norm=norm_without_bias),
        "Phi-4-mini": build(num_kv_heads=2, rope=PartialRope(half)),
        "nanochat's norm and squared ReLU": build(norm=norm_without_gain, ffn=squared),
        "gpt-oss's sinks": build(attention=SinkAttention),
        "Qwen3-Next's gate": build(attention=GatedAttention),
        "LFM3's gate per head": build(attention=per_head),
        "DeepSeek-V3's latent attention": build(rope=half, attention=latent),
        "DeepSeek-V3's experts": build(ffn=MixtureOfExperts),
        "DeepSeek-V3.2's sparse attention": build(rope=half, attention=sparse),
        "Kimi Linear's delta rule": build(attention=DeltaAttention, d_head=16),
        "DeepSeek-V4's hyper-connections": hyper,
    }


def main() -> None:
    for name, model in build_models().items():
        model(torch.randn(2, 24, 64))
        count = sum(weight.numel() for weight in model.parameters())
        print(f"{name:33}{count:>10,} parameters")


if __name__ == "__main__":
    main()
