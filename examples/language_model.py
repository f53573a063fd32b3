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
from tinyblock.attention import Linear


class Cache:
    """The tokens so far, with their keys and values in each layer of attention.

    `padding` is the number of padding tokens at the start of each row of the batch. No
    token attends to them. After a call that has failed, or after a change of the weights,
    also by an adapter that is switched off, begin a new cache.
    """

    def __init__(self, padding: Tensor | None = None) -> None:
        self.model: nn.Module | None = None
        self.tokens: Tensor | None = None
        # In the order in which the layers of the model append to them.
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.next = 0
        self.padding = padding
        self.mask: Tensor | None = None

    @property
    def length(self) -> int:
        return 0 if self.tokens is None else self.tokens.shape[-1]

    def unseen(self, text: Tensor) -> Tensor:
        """Return the tokens of a text, (..., seq), that follow those of the cache."""
        if self.tokens is None:
            return text
        start = text[..., : self.length]
        if not torch.equal(start, self.tokens) or text.shape[-1] == self.length:
            raise ValueError(
                f"tokens must be the whole text: the {self.length} tokens of the cache, "
                f"and at least one more, got {tuple(text.shape)}"
            )
        return text[..., self.length :]

    def require_room(self, length: int) -> None:
        """Raise a ValueError if the cache cannot grow to this many tokens."""

    def advance(self, tokens: Tensor, model: nn.Module) -> Tensor:
        """Append new tokens, (..., seq), and return their positions, in this shape.

        Then each layer of the model appends its keys and values, always in one order.
        """
        if self.model not in (None, model) or self.next != len(self.layers):
            raise ValueError(
                "a cache must belong to one model, whose last call has not failed: begin "
                "a new one"
            )
        start = self.length
        self.require_room(start + tokens.shape[-1])
        self.model = model
        self.next = 0
        self.tokens = (
            tokens.clone()  # because the caller may change them
            if self.tokens is None
            else torch.cat((self.tokens, tokens), dim=-1)
        )
        token = torch.arange(self.length, device=tokens.device)
        if self.padding is None:
            return token[start:]
        position = token - self.padding[:, None]  # negative for padding
        self.mask = (position >= 0)[:, None, :]
        return position[:, start:].clamp(min=0)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens, and return all of this layer."""
        if self.next < len(self.layers):
            old_k, old_v = self.layers[self.next]
            k = torch.cat((old_k, k), dim=-2)
            v = torch.cat((old_v, v), dim=-2)
            self.layers[self.next] = k, v
        else:
            self.layers.append((k, v))
        self.next += 1
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
        return super().attend(q, *cache.append(k, v), cache.mask)


class Embedding(nn.Embedding):
    """A vector for each token, with components of variance 1."""

    def reset_parameters(self) -> None:
        draw(self.weight, std=1)


class TiedEmbedding(nn.Embedding):
    """A vector for each token, and the weights of the head, drawn as Linear draws them."""

    def reset_parameters(self) -> None:
        draw(self.weight, std=math.sqrt(2 / sum(self.weight.shape)))


def draw(weight: Tensor, std: float) -> None:
    """Draw from a normal that is cut at 3 sigma, in place."""
    nn.init.trunc_normal_(weight, std=std, a=-3 * std, b=3 * std)


class LanguageModel(nn.Module):
    """Embed tokens, apply a Transformer, and return a logit for each next token.

    If `tied`, the embedding is also the head, and there is no `lm_head`. The `options` go
    to Transformer.
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
        embedding = TiedEmbedding if tied else Embedding
        self.token_embeddings = embedding(vocabulary, d_model, **factory)
        self.transformer = Transformer(
            num_layers, d_model, num_heads, d_ff, **options, **factory
        )
        self.lm_head = None
        if not tied:
            self.lm_head = Linear(d_model, vocabulary, bias=False, **factory)

    def forward(
        self, tokens: Int[Tensor, "*batch seq"], cache: Cache | None = None
    ) -> Float[Tensor, "*batch last vocabulary"]:
        """Return the logits after each token or, with a cache, after the last one."""
        x = self.token_embeddings(tokens)
        if cache is None:
            return self.logits(self.transformer(x))
        x = self.transformer(x, cache.advance(tokens, self), cache)
        return self.logits(x[..., -1:, :])

    def logits(
        self, x: Float[Tensor, "*batch seq d_model"]
    ) -> Float[Tensor, "*batch seq vocabulary"]:
        """Apply the head to what the Transformer returns."""
        if self.lm_head is not None:
            return self.lm_head(x)
        if not isinstance(self.token_embeddings, nn.Embedding):
            raise ValueError(
                "token_embeddings must be an nn.Embedding, whose weights the head uses, "
                f"got {type(self.token_embeddings)}: do not adapt it in a tied model"
            )
        return F.linear(x, self.token_embeddings.weight)

    def generate(
        self, tokens: Int[Tensor, "batch seq"], count: int, **options: Any
    ) -> Int[Tensor, "batch total"]:
        """Return the prompts with up to `count` new tokens. `options` are `stream`'s."""
        new = list(self.stream(tokens, count, **options))
        return torch.cat((tokens, torch.stack(new, dim=-1)), dim=-1)

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
        top_k most likely ones, or from all. After `stop`, a row yields only `stop`.

        To continue a text, pass all of its tokens, and the cache of the earlier calls.
        For prompts with different lengths, pass `tokens, padding = pad_left(prompts)`
        and `cache=Cache(padding)`.

        Raises:
            ValueError: an argument is out of range; prompts and `count` exceed the
                positions of the model, or the room of the cache; the text does not
                begin with the tokens of the cache.
        """
        cache = Cache() if cache is None else cache
        require_choice(temperature, top_k)
        self.require_length(tokens, count, cache)
        return self._stream(tokens, count, temperature, top_k, stop, cache)

    def require_length(self, tokens: Tensor, count: int, cache: Cache) -> None:
        """Raise a ValueError unless the model can add `count` tokens to the prompts."""
        if count < 1:
            raise ValueError(
                f"the number of new tokens must be at least 1, got {count}"
            )
        if not tokens.numel():
            raise ValueError(
                f"each prompt must have a token, got tokens of shape {tuple(tokens.shape)}"
            )
        read = tokens.shape[-1] + count - 1  # the last token is not read
        padding = 0 if cache.padding is None else int(cache.padding.min())
        positions = self.transformer.max_seq_len
        if read - padding > positions:
            raise ValueError(
                f"the model has {positions} positions, of which the last new token needs "
                f"none, got a prompt of {tokens.shape[-1] - padding} tokens and {count} new"
            )
        cache.require_room(read)

    @torch.no_grad()
    def _stream(
        self,
        tokens: Tensor,
        count: int,
        temperature: float,
        top_k: int | None,
        stop: int | None,
        cache: Cache,
    ) -> Iterator[Tensor]:
        tokens = cache.unseen(tokens)
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


def require_choice(temperature: float, top_k: int | None) -> None:
    if not 0 <= temperature < math.inf:
        raise ValueError(
            f"temperature must be at least 0 and finite, got {temperature}"
        )
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    if top_k is not None and temperature == 0:
        raise ValueError(
            f"top_k must come with a temperature above 0, which draws tokens, got {top_k}"
        )


def choose(logits: Tensor, temperature: float, top_k: int | None) -> Tensor:
    """Return a token for each row of logits."""
    if temperature == 0:
        return logits.argmax(-1)
    # The largest becomes 0, so that division by a small temperature gives no NaN.
    wide = logits.double()
    scaled = (wide - wide.amax(-1, keepdim=True)) / temperature
    if top_k is None:
        return torch.multinomial(scaled.softmax(-1), 1).squeeze(-1)
    likeliest = scaled.topk(min(top_k, scaled.shape[-1]))
    drawn = torch.multinomial(likeliest.values.softmax(-1), 1)
    return likeliest.indices.gather(-1, drawn).squeeze(-1)


def pad_left(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return prompts as one batch, and how many tokens of each row are padding."""
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or 0 in lengths:
        raise ValueError(f"each prompt must have a token, got prompts of {lengths}")
    padding = [max(lengths) - length for length in lengths]
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
