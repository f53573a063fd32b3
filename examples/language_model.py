"""A language model that generates text: embedding, Transformer and head, with a cache.

    python examples/language_model.py

This command trains a small model to count, and continues three prompts of different
lengths in one batch.

`model(tokens)` returns the logits after each token. `model(tokens, cache)` appends the
tokens to the cache, and returns the logits after the last one. The layers hold no
state, because the model passes the cache to attention in place of the mask.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyblock import CausalMultiHeadSelfAttention, Transformer


class Cache:
    """Keys and values of the tokens so far, for each layer of attention.

    A model may call each of its layers only once per token.

    `padding` is the number of padding tokens at the start of each row of the batch. No
    token attends to them. After a call that has failed, begin a new cache.
    """

    def __init__(self, padding: Tensor | None = None) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.padding = padding
        self.length = 0
        self.mask: Tensor | None = None

    def advance(self, tokens: Tensor) -> Tensor:
        """Count new tokens, (..., seq), and return their positions, in this shape."""
        start = self.length
        self.length += tokens.shape[-1]
        token = torch.arange(self.length, device=tokens.device)
        if self.padding is None:
            return token[start:]
        position = token - self.padding[:, None]  # negative for padding
        self.mask = (position >= 0)[:, None, :]
        return position[:, start:].clamp(min=0)

    def append(self, layer: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens, and return all of them."""
        if id(layer) in self.layers:
            old_k, old_v = self.layers[id(layer)]
            k = torch.cat((old_k, k), dim=-2)
            v = torch.cat((old_v, v), dim=-2)
        self.layers[id(layer)] = k, v
        return k, v


class CachedAttention(CausalMultiHeadSelfAttention):
    """Causal attention whose mask may be a Cache."""

    def project(
        self, x: Tensor, token_positions: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.rope is None:  # the cache passes positions to every layer
            token_positions = None
        return super().project(x, token_positions)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        if not isinstance(mask, Cache):
            return super().attend(q, k, v, mask)
        cache = mask
        keys, values = cache.append(self, k, v)
        return super().attend(q, keys, values, cache.mask)


class LanguageModel(nn.Module):
    """Embed tokens, apply a Transformer, and return a logit for each next token.

    If `tied`, head and embedding are one parameter. Call `tie` after everything that
    replaces parameters, such as `to_empty` and `load_state_dict(assign=True)`. The
    `options` go to Transformer.
    """

    def __init__(
        self,
        vocabulary: int,
        num_layers: int,
        d_model: int,
        num_heads: int,
        d_ff: int | None = None,
        *,
        tied: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.tied = tied
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        options.setdefault("attention", CachedAttention)
        self.token_embeddings = nn.Embedding(vocabulary, d_model, **factory)
        self.transformer = Transformer(
            num_layers, d_model, num_heads, d_ff, **options, **factory
        )
        self.lm_head = nn.Linear(d_model, vocabulary, bias=False, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw a head with variance 2 / (d_in + d_out), and embeddings with variance 1."""
        self.transformer.reset_parameters()
        std = math.sqrt(2 / sum(self.lm_head.weight.shape))
        nn.init.trunc_normal_(self.lm_head.weight, std=std, a=-3 * std, b=3 * std)
        nn.init.trunc_normal_(self.token_embeddings.weight, a=-3, b=3)
        self.tie()

    def tie(self) -> None:
        if self.tied:
            self.token_embeddings.weight = self.lm_head.weight

    def forward(
        self, tokens: Int[Tensor, "*batch seq"], cache: Cache | None = None
    ) -> Float[Tensor, "*batch last vocabulary"]:
        """Return the logits after each token or, with a cache, after the last one."""
        x = self.token_embeddings(tokens)
        if cache is None:
            return self.lm_head(self.transformer(x))
        x = self.transformer(x, cache.advance(tokens), cache)
        return self.lm_head(x[..., -1:, :])

    def generate(
        self, tokens: Int[Tensor, "batch seq"], count: int, **options: Any
    ) -> Int[Tensor, "batch total"]:
        """Return the prompts with up to `count` new tokens. `options` are `stream`'s."""
        new = list(self.stream(tokens, count, **options))
        return torch.cat((tokens, torch.stack(new, dim=-1)), dim=-1)

    @torch.no_grad()
    def stream(
        self,
        tokens: Int[Tensor, "batch seq"],
        count: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        stop: int | None = None,
        cache: Cache | None = None,
    ) -> Iterator[Tensor]:
        """Yield the next token of each prompt, (batch), up to `count` times.

        With temperature=0, it is the most likely token; otherwise it is drawn from the
        top_k most likely ones, or from all. After `stop`, a row yields only `stop`. For
        prompts with different lengths, pass `tokens, padding = pad_left(prompts)` and
        `cache=Cache(padding)`.
        """
        cache = Cache() if cache is None else cache
        stopped = torch.zeros_like(tokens[:, 0], dtype=torch.bool)
        for _ in range(count):
            token = choose(self(tokens, cache)[:, -1], temperature, top_k)
            if stop is not None:
                token = token.masked_fill(stopped, stop)
                stopped |= token == stop
            yield token
            if stop is not None and stopped.all():
                return
            tokens = token[:, None]


def choose(logits: Tensor, temperature: float, top_k: int | None) -> Tensor:
    """Return a token for each row of logits."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.double() / temperature  # float32 would overflow at 1e-38
    if top_k is not None:
        lowest = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < lowest, -math.inf)
    return torch.multinomial(logits.softmax(-1), 1).squeeze(-1)


def pad_left(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return prompts as one batch, and how many tokens of each row are padding."""
    longest = max(len(prompt) for prompt in prompts)
    padding = [longest - len(prompt) for prompt in prompts]
    rows = [[0] * pads + [*row] for pads, row in zip(padding, prompts, strict=True)]
    return torch.tensor(rows), torch.tensor(padding)


def main() -> None:
    torch.manual_seed(0)
    model = LanguageModel(50, 2, 64, 4, max_seq_len=512)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        starts = torch.randint(50, (16, 1))
        tokens = (starts + torch.arange(17)) % 50  # 0 follows 49
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss after 60 steps: {loss.item():.4f}")

    tokens, padding = pad_left([[7, 8, 9], [20], [45, 46]])
    texts = model.generate(tokens, 10, cache=Cache(padding))
    for text, pads in zip(texts.tolist(), padding.tolist(), strict=True):
        print("counted:", *text[pads:])


if __name__ == "__main__":
    main()
