"""A language model that generates text: embedding, Transformer and head, with a cache.

    python examples/language_model.py

This command trains a small model to count, prints its loss, and continues three
sequences of numbers, of different lengths, in one batch. It then prints how long a text
takes with the cache and without, and whether both texts are equal. Other examples
import `LanguageModel` from this file.

`generate` runs the prompt in one call, and then each new token in one call. Every layer
of attention computes keys and values of the new token only. It appends them to a
`Cache`, and attends to all that the cache holds. A second prompt cannot be appended.

The layers hold no state. Block and Transformer pass the argument `mask` on to `attend`
without reading it, and this file passes the cache as that argument. An interrupted text
therefore leaves nothing behind, and two texts can be generated in turns.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tinyblock import CausalMultiHeadSelfAttention, Transformer

__all__ = ["Cache", "CachedAttention", "LanguageModel", "pad_left"]


class Cache:
    """Keys and values of the tokens so far.

    Each layer has two tensors of shape (batch, kv_heads, length, d_head). Row i of the
    batch begins with padding[i] tokens of padding, which no token attends to. Each call
    of the model is an `advance`, and then an `append` in each layer. After a call that
    has failed, begin with a new cache.
    """

    def __init__(self, padding: Int[Tensor, " batch"] | None = None) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.padding = padding
        self.length = 0
        self.mask: Bool[Tensor, "batch 1 key"] | None = None

    def advance(self, seq: int, device: torch.device) -> Int[Tensor, "*batch seq"]:
        """Count the tokens of a prompt, or one more token, and return their positions.

        Raises:
            ValueError: several tokens follow a prompt.
        """
        if seq > 1 and self.length > 0:
            raise ValueError(
                "pass the prompt in one call, then one token per call, "
                f"got {seq} tokens after {self.length}"
            )
        positions = torch.arange(self.length, self.length + seq, device=device)
        self.length += seq
        if self.padding is None:
            return positions
        padding = rearrange(self.padding, "batch -> batch 1")
        is_token = torch.arange(self.length, device=device) >= padding
        self.mask = rearrange(is_token, "batch key -> batch 1 key")
        return (positions - padding).clamp(min=0)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens, and return those of all tokens."""
        if layer in self.keys:
            k = torch.cat((self.keys[layer], k), dim=-2)
            v = torch.cat((self.values[layer], v), dim=-2)
        self.keys[layer], self.values[layer] = k, v
        return k, v


class CachedAttention(CausalMultiHeadSelfAttention):
    """Causal attention that accepts a Cache as its mask.

    The first call with a cache gets the prompt, and each later call gets one token.
    """

    index: int | None = None  # the number of this layer; LanguageModel sets it

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        if not isinstance(mask, Cache):
            return super().attend(q, k, v, mask)
        cache = mask
        if self.index is None:
            raise ValueError(
                "CachedAttention.index must be the number of the layer, got None: "
                "use LanguageModel, or set model.layers[i].attn.index = i"
            )
        keys, values = cache.append(self.index, k, v)
        if q.shape[-2] > 1:
            return super().attend(q, k, v, cache.mask)
        # One query attends to all keys. The query heads that share a key head become
        # its queries, so that no key head has to be repeated. Whether `enable_gqa` is
        # faster depends on the CPU and the dtype.
        queries = rearrange(
            q,
            "batch (kv_heads group) 1 d_head -> batch kv_heads group d_head",
            kv_heads=self.num_kv_heads,
        )
        keep = None
        if cache.mask is not None:
            keep = rearrange(cache.mask, "batch 1 key -> batch 1 1 key")
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=keep)
        return rearrange(
            out, "batch kv_heads group d_head -> batch (kv_heads group) 1 d_head"
        )


class LanguageModel(nn.Module):
    """Embed tokens, apply a Transformer, and return a logit for each next token.

    If `tied`, head and embedding are the same parameter, and a state dict need not
    contain the head. `options` are those of Transformer; max_seq_len is required. Load
    weights into a model on the meta device with `load_state_dict(state, assign=True)`.

    Raises:
        ValueError: the Transformer rejects an argument.
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
        attention: Callable[..., nn.Module] = CachedAttention,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.tied = tied
        self.transformer = Transformer(
            num_layers,
            d_model,
            num_heads,
            d_ff,
            attention=attention,
            device=device,
            dtype=dtype,
            **options,
        )
        layers: Any = self.transformer.layers
        for index, block in enumerate(layers):
            block.attn.index = index
        self.token_embeddings = nn.Embedding(
            vocabulary, d_model, device=device, dtype=dtype
        )
        self.lm_head = nn.Linear(
            d_model, vocabulary, bias=False, device=device, dtype=dtype
        )
        self.stay_tied_after_loading()
        self._reset_ends()

    def stay_tied_after_loading(self) -> None:
        """Keep head and embedding one parameter when a state dict is loaded."""
        self.register_load_state_dict_pre_hook(_share_head)
        self.register_load_state_dict_post_hook(_tie)

    def reset_parameters(self) -> None:
        """Draw new weights."""
        self.transformer.reset_parameters()
        self._reset_ends()

    def _reset_ends(self) -> None:
        """Draw a head of variance 2 / (d_in + d_out), and embeddings of variance 1.

        Tied embeddings are the head.
        """
        head = self.lm_head.weight
        std = math.sqrt(2 / sum(head.shape))
        nn.init.trunc_normal_(head, std=std, a=-3 * std, b=3 * std)
        if self.tied:
            self.token_embeddings.weight = head
        else:
            nn.init.trunc_normal_(self.token_embeddings.weight, std=1, a=-3, b=3)

    def forward(
        self,
        tokens: Int[Tensor, "*batch seq"],
        token_positions: Int[Tensor, "*#batch seq"] | None = None,
        mask: Any = None,
    ) -> Float[Tensor, "*batch seq vocabulary"]:
        """Return the logits of the token after each token, without a cache."""
        x = self.token_embeddings(tokens)
        return self.lm_head(self.transformer(x, token_positions, mask))

    def generate(
        self,
        tokens: Int[Tensor, "batch seq"],
        count: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        stop: int | None = None,
        padding: Int[Tensor, " batch"] | None = None,
    ) -> Int[Tensor, "batch total"]:
        """Return the prompts with up to `count` new tokens.

        The arguments and errors are those of `stream`.
        """
        new = self.stream(tokens, count, temperature, top_k, stop, padding)
        return torch.cat((tokens, torch.stack(list(new), dim=-1)), dim=-1)

    def stream(
        self,
        tokens: Int[Tensor, "batch seq"],
        count: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        stop: int | None = None,
        padding: Int[Tensor, " batch"] | None = None,
    ) -> Iterator[Int[Tensor, " batch"]]:
        """Return an iterator over up to `count` new tokens of each prompt.

        The iterator computes a token when it is asked for. temperature=0 takes the most
        likely token. Otherwise the token is drawn from softmax(logits / temperature),
        of the top_k most likely tokens or of all; torch's global generator draws, so
        `torch.manual_seed` makes texts repeatable. After a row has drawn `stop`, all
        its further tokens are `stop`, and generation ends when all rows have drawn it.
        For prompts of different lengths, `tokens, padding = pad_left(prompts)`.

        Raises:
            ValueError: an argument is out of range, or prompt and new tokens exceed
                max_seq_len.
        """
        self._check_prompt(tokens, count)
        if padding is not None:
            _check_padding(tokens, padding)
        if not 0 <= temperature < math.inf:
            raise ValueError(
                "temperature must be 0 (greedy), or positive and finite, "
                f"got {temperature}"
            )
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k must be at least 1, or None, got {top_k}")
        cache = self.new_cache(tokens, count, padding)
        return self._stream(tokens, cache, count, temperature, top_k, stop)

    def new_cache(
        self, tokens: Tensor, count: int, padding: Tensor | None = None
    ) -> Cache:
        """Return an empty cache for these prompts and `count` new tokens."""
        return Cache(padding)

    def next_logits(
        self, tokens: Int[Tensor, "batch seq"], cache: Cache
    ) -> Float[Tensor, "batch vocabulary"]:
        """Append a prompt or one token to the cache, and return the next logits."""
        positions = cache.advance(tokens.shape[-1], tokens.device)
        return self.step(tokens, positions, cache)

    def step(
        self, tokens: Tensor, positions: Tensor, cache: Cache
    ) -> Float[Tensor, "batch vocabulary"]:
        """Return the logits after the last token.

        The positions are those that `cache.advance` has returned. The head, a large
        matrix, gets only the last token.
        """
        has_rope = self.transformer.rope is not None
        x = self.token_embeddings(tokens)
        x = self.transformer(x, positions if has_rope else None, cache)
        return self.lm_head(x[:, -1])

    def _check_prompt(self, tokens: Tensor, count: int) -> None:
        attention = self.transformer.layers[0].attn
        if not isinstance(attention, CachedAttention):
            raise ValueError(
                "attention must be CachedAttention or a subclass to generate, "
                f"got {type(attention).__name__}"
            )
        if tokens.dim() != 2 or tokens.numel() == 0:
            raise ValueError(
                "tokens must have shape (batch, seq), both at least 1, "
                f"got {tuple(tokens.shape)}: pass tokens[None] for one prompt, and "
                "pad_left(prompts) for prompts of different lengths"
            )
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        seq, limit = tokens.shape[-1], self.transformer.max_seq_len
        if seq + count > limit:
            raise ValueError(
                f"prompt and new tokens must fit into max_seq_len={limit}, "
                f"got {seq} + {count}: shorten the prompt, or generate at most "
                f"{max(limit - seq, 0)} tokens"
            )
        vocabulary = self.token_embeddings.num_embeddings
        if tokens.min() < 0 or tokens.max() >= vocabulary:
            raise ValueError(
                f"tokens must be 0 ... {vocabulary - 1}, "
                f"got {tokens.min()} ... {tokens.max()}: "
                "use the tokenizer of this model"
            )

    @torch.no_grad()
    def _stream(
        self,
        tokens: Tensor,
        cache: Cache,
        count: int,
        temperature: float,
        top_k: int | None,
        stop: int | None,
    ) -> Iterator[Tensor]:
        stopped = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        for _ in range(count):
            token = _choose(self.next_logits(tokens, cache), temperature, top_k)
            if stop is not None:
                token = token.masked_fill(stopped, stop)
                stopped |= token == stop
            yield token
            if stop is not None and stopped.all():
                return
            tokens = rearrange(token, "batch -> batch 1")


def pad_left(prompts: Sequence[Sequence[int] | Tensor]) -> tuple[Tensor, Tensor]:
    """Put prompts of different lengths into one tensor of shape (batch, seq).

    Zeros fill the rows of shorter prompts from the left. Returns the tokens, and how
    many tokens of each row are padding: the arguments `tokens` and `padding` of
    `generate`.

    Raises:
        ValueError: there is no prompt, or one is empty.
    """
    rows = [torch.as_tensor(prompt, dtype=torch.long) for prompt in prompts]
    lengths = [len(row) for row in rows]
    if min(lengths, default=0) < 1:
        raise ValueError(f"each prompt must have at least one token, got {lengths}")
    padding = [max(lengths) - length for length in lengths]
    padded = [F.pad(row, (pads, 0)) for row, pads in zip(rows, padding, strict=True)]
    return torch.stack(padded), torch.tensor(padding, device=rows[0].device)


def _check_padding(tokens: Tensor, padding: Tensor) -> None:
    rows, seq = tokens.shape
    if padding.shape != (rows,):
        raise ValueError(
            f"padding must have shape ({rows},), one number for each row, "
            f"got {tuple(padding.shape)}"
        )
    if padding.min() < 0 or padding.max() >= seq:
        raise ValueError(
            f"padding must be 0 ... {seq - 1}, less than the {seq} tokens of a row, "
            f"got {padding.tolist()}"
        )


def _choose(
    logits: Float[Tensor, "batch vocabulary"], temperature: float, top_k: int | None
) -> Int[Tensor, " batch"]:
    """Take the most likely token if temperature is 0, or draw one."""
    if temperature == 0:
        return logits.argmax(-1)
    most_likely = min(top_k or logits.shape[-1], logits.shape[-1])
    logits, candidates = logits.topk(most_likely)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # The largest becomes 0, and no divisor is rounded to 0: no temperature yields NaN.
    logits = logits - logits[:, :1]
    temperature = max(temperature, torch.finfo(logits.dtype).tiny)
    drawn = torch.multinomial((logits / temperature).softmax(-1), 1)
    return candidates.gather(-1, drawn).squeeze(-1)


def _share_head(
    model: LanguageModel, state: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Before a tied model loads a state dict without a head, add the embedding."""
    embedding = state.get(f"{prefix}token_embeddings.weight")
    if not model.tied or embedding is None:
        return
    head = state.setdefault(f"{prefix}lm_head.weight", embedding)
    if head is not embedding and not torch.equal(head, embedding):
        raise ValueError(
            "lm_head.weight must equal token_embeddings.weight in a tied model, "
            "got another one: pass tied=False"
        )


def _tie(model: LanguageModel, _: object) -> None:
    """After a tied model has loaded a state dict, share the parameter again.

    assign=True leaves two parameters.
    """
    if model.tied:
        model.lm_head.weight = model.token_embeddings.weight


def counting_model(steps: int = 60) -> LanguageModel:
    """Train a small model to count to 49 and to begin again at 0."""
    model = LanguageModel(
        vocabulary=50,
        num_layers=2,
        d_model=64,
        num_heads=4,
        max_seq_len=512,
        num_kv_heads=2,
        qk_norm=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        starts = torch.randint(50, (16, 1))
        tokens = (starts + torch.arange(17)) % 50
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss after {steps} steps of training: {loss.item():.4f}")
    return model


def main() -> None:
    torch.manual_seed(0)
    model = counting_model()

    prompts = [[7, 8, 9], [20], [45, 46]]
    tokens, padding = pad_left(prompts)
    texts = model.generate(tokens, 10, padding=padding)
    for text, pads in zip(texts.tolist(), padding.tolist(), strict=True):
        print("counted:", *text[pads:])

    prompt = torch.randint(50, (1, 8))
    start = time.perf_counter()
    cached = model.generate(prompt, 200)
    cached_seconds = time.perf_counter() - start

    start = time.perf_counter()
    tokens = prompt
    with torch.no_grad():
        for _ in range(200):
            token = model(tokens)[:, -1:].argmax(-1)
            tokens = torch.cat((tokens, token), dim=-1)
    full_seconds = time.perf_counter() - start
    print(
        f"200 tokens with the cache: {cached_seconds:.2f} s, "
        f"without: {full_seconds:.2f} s"
    )
    print("equal texts:", torch.equal(cached, tokens))


if __name__ == "__main__":
    main()
