"""A Llama with plain layers, and a port of it: fused weights, consecutive pairs, and mistakes."""

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, HEADS, KV_HEADS, HIDDEN, SEQ = 50, 32, 4, 2, 48, 16
D_HEAD = WIDTH // HEADS
TOKENS = torch.randint(VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(0))


class Norm(nn.Module):
    def __init__(self, wrong: Collection[str] = ()) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        eps = 1e-4 if "eps" in self.wrong else 1e-6
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        if "norm detached" in self.wrong:
            scale = scale.detach()
        return (wide * scale).type_as(x) * self.weight


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, KV_HEADS * D_HEAD, bias=False)
        self.v = nn.Linear(WIDTH, KV_HEADS * D_HEAD, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        cos, sin = angles.cos(), angles.sin()

        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, D_HEAD)).transpose(1, 2)

        def turned(y: Tensor) -> Tensor:
            a, b = y.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        q, k, v = turned(heads(self.q(x))), turned(heads(self.k(x))), heads(self.v(x))
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, 1) for y in (k, v))
        scores = q @ k.mT / D_HEAD**0.5
        future = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(), Norm()
        self.attention, self.ffn = Attention(), FeedForward()

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), angles)
        return x + self.ffn(self.norm2(x))


def angles_of(theta: float) -> Tensor:
    frequencies = theta ** (-torch.arange(0, D_HEAD, 2).float() / D_HEAD)
    return torch.outer(torch.arange(SEQ).float(), frequencies)


class Plain(nn.Module):
    """The model that the port must equal."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = Norm()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("angles", angles_of(10000.0), persistent=False)
        generator = torch.Generator().manual_seed(1)
        for name, weight in self.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
            weight.data = 1 + drawn / 5 if "norm" in name else drawn / 4

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.angles)
        return self.head(self.norm(x))


class WrongSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * x.sigmoid()


class WrongLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.mT

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        rows = gradients[0].flatten(0, -2)
        return gradients[0] @ weight, (rows.mT @ x.flatten(0, -2)).flip(-1)


class FusedAttention(nn.Module):
    def __init__(self, wrong: Collection[str]) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * D_HEAD, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wrong = wrong

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        wrong = self.wrong
        sizes = [WIDTH, KV_HEADS * D_HEAD, KV_HEADS * D_HEAD]
        q, k, v = (y.unflatten(-1, (-1, D_HEAD)) for y in self.qkv(x).split(sizes, -1))
        if "conjugate" in wrong:
            turns = turns.conj()
        q, k = turned(q, turns), turned(k, turns)
        if "k detached" in wrong:
            k = k.detach()
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        group = HEADS // KV_HEADS
        if "heads repeated" in wrong:
            k, v = (y.repeat(1, group, 1, 1) for y in (k, v))
        else:
            k, v = (y.repeat_interleave(group, 1) for y in (k, v))
        mask = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
        if "no mask" in wrong:
            mask = torch.ones_like(mask)
        scale = WIDTH**-0.5 if "scale" in wrong else None
        if "q scaled" in wrong:  # which is right
            q, scale = q * D_HEAD**-0.5, 1.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        y = y if "heads not transposed" in wrong else y.transpose(1, 2)
        return self.o(y.reshape(x.shape))


def turned(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns[:, None]).flatten(-2).type_as(x)


class FusedFeedForward(nn.Module):
    def __init__(self, wrong: Collection[str]) -> None:
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        if "gradient of a weight" in self.wrong:
            both: Any = WrongLinear.apply(x, self.gate_up.weight)
        else:
            both = self.gate_up(x)
        gate, up = both.chunk(2, -1)
        if "weights split" in self.wrong:  # which is right
            gate, up = (F.linear(x, w) for w in self.gate_up.weight.chunk(2))
        if "gate and up exchanged" in self.wrong:
            gate, up = up, gate
        if "gelu" in self.wrong:
            return self.down(F.gelu(gate) * up)
        if "gradient of silu" in self.wrong:
            return self.down(WrongSilu.apply(gate) * up)
        if "silu written out" in self.wrong:  # which is right
            return self.down(gate / (1 + torch.exp(-gate)) * up)
        return self.down(F.silu(gate) * up)


class FusedLayer(nn.Module):
    def __init__(self, wrong: Collection[str]) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(wrong), Norm()
        self.attention = FusedAttention(wrong)
        self.ffn = FusedFeedForward(wrong)
        self.wrong = wrong

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        y = self.attention(self.norm1(x), turns)
        if "parallel" in self.wrong:
            return x + y + self.ffn(self.norm2(x))
        if "residual skipped" in self.wrong:
            return x + self.ffn(self.norm2(x + y))
        if "residual detached" in self.wrong:
            return (x + y).detach() + self.ffn(self.norm2(x + y))
        if "sum reordered" in self.wrong:  # which is right
            return self.ffn(self.norm2(y + x)) + y + x
        return x + y + self.ffn(self.norm2(x + y))


class Fused(nn.Module):
    """The port. Its second layer makes the mistakes of layers."""

    def __init__(self, wrong: Collection[str] = (), tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([FusedLayer(()), FusedLayer(wrong)])
        self.last = Norm()
        self.output = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.output.weight = self.tokens.weight
        theta = 500000.0 if "theta" in wrong else 10000.0
        angles = angles_of(theta)
        turns = torch.polar(torch.ones_like(angles), angles)
        self.register_buffer("turns", turns, persistent=False)
        self.wrong = wrong

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if "embedding scaled" in self.wrong:
            x = x * WIDTH**0.5
        for block in self.blocks:
            x = block(x, self.turns)
        return self.output(x if "no last norm" in self.wrong else self.last(x))

    @torch.no_grad()
    def load(self, plain: Plain) -> "Fused":
        self.tokens.weight.copy_(plain.embed.weight)
        self.output.weight.copy_(plain.head.weight)
        self.last.weight.copy_(plain.norm.weight)
        own: Any
        other: Any
        for own, other in zip(self.blocks, plain.layers, strict=True):
            q, k = (
                w if "rows in halves" in self.wrong else in_pairs(w)
                for w in (other.attention.q.weight, other.attention.k.weight)
            )
            own.attention.qkv.weight.copy_(torch.cat([q, k, other.attention.v.weight]))
            own.attention.o.weight.copy_(other.attention.o.weight)
            both = other.ffn.gate.weight, other.ffn.up.weight
            own.ffn.gate_up.weight.copy_(torch.cat(both))
            own.ffn.down.weight.copy_(other.ffn.down.weight)
            own.norm1.weight.copy_(other.norm1.weight)
            own.norm2.weight.copy_(other.norm2.weight)
        block: Any = self.blocks[1]
        if "o transposed" in self.wrong:
            block.attention.o.weight.copy_(block.attention.o.weight.mT.clone())
        if "o not loaded" in self.wrong:
            nn.init.normal_(block.attention.o.weight)
        if "norm not loaded" in self.wrong:
            block.norm2.weight.fill_(1)
        if "embedding not loaded" in self.wrong:
            nn.init.normal_(self.tokens.weight)
        return self


def in_pairs(weight: Tensor) -> Tensor:
    """Return rows of heads whose consecutive features are turned together."""
    return weight.view(-1, 2, D_HEAD // 2, WIDTH).transpose(1, 2).reshape(weight.shape)
