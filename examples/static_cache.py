"""Generate with preallocated keys and values, and a step that compiles once.

    python examples/static_cache.py

This command generates the same text with the growing cache of language_model.py, with
the static cache, and with the static cache and a compiled step. For each, it prints
tokens per second, and whether the text equals the first one.

A growing cache copies all keys and values for each token, and has another shape each
time, so a compiled step would need dynamic shapes. A `StaticCache` has room for `size`
tokens from the start. A token overwrites one slot of it, and a mask hides the slots
that are not written yet. All shapes stay the same, so the step compiles once. In
return, each token reads all slots: choose `size` as small as your texts allow.

This file was run on a CPU only.
"""

import time
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Int
from language_model import Cache, LanguageModel
from torch import Tensor, nn

__all__ = ["StaticCache", "StaticLanguageModel"]


class StaticCache(Cache):
    """A cache with room for `size` tokens: the shapes of its tensors never change."""

    def __init__(
        self,
        model: LanguageModel,
        batch: int,
        size: int,
        padding: Int[Tensor, " batch"] | None = None,
    ) -> None:
        super().__init__(padding)
        self.size = size
        layers: Any = model.transformer.layers
        for index, block in enumerate(layers):
            attention = block.attn
            shape = (batch, attention.num_kv_heads, size, attention.d_head)
            self.keys[index] = attention.k_proj.weight.new_zeros(shape)
            self.values[index] = attention.v_proj.weight.new_zeros(shape)

    def advance(self, seq: int, device: torch.device) -> Int[Tensor, "*batch seq"]:
        """Count `seq` more tokens, select their slots, and return their positions."""
        positions = super().advance(seq, device)
        self.new_slots = torch.arange(self.length - seq, self.length, device=device)
        if seq == 1:
            self.mask = self._written(device)
        return positions

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the keys and values of new tokens, and return all slots."""
        keys = self.keys[layer].index_copy_(-2, self.new_slots, k)
        values = self.values[layer].index_copy_(-2, self.new_slots, v)
        return keys, values

    def _written(self, device: torch.device) -> Tensor:
        """Return a mask of the slots that contain a token: not empty, not padding."""
        slots = torch.arange(self.size, device=device)
        written = rearrange(slots < self.length, "key -> 1 1 key")
        if self.padding is None:
            return written
        return written & (slots >= rearrange(self.padding, "batch -> batch 1 1"))


class StaticLanguageModel(LanguageModel):
    """The layers of `model`, which generate with a static cache of `size` tokens.

    If `compile`, the step of one token is compiled: by the first token of the first
    text, and once more for a batch of another size. The prompt is not compiled, because
    each has another length. `size` defaults to max_seq_len of the model.

    Raises:
        ValueError: size is not between 1 and max_seq_len.
    """

    def __init__(
        self, model: LanguageModel, size: int | None = None, compile: bool = True
    ) -> None:
        # Not super().__init__, which builds new layers: these are those of `model`.
        nn.Module.__init__(self)
        self.tied = model.tied
        self.transformer = model.transformer
        self.token_embeddings = model.token_embeddings
        self.lm_head = model.lm_head
        self.stay_tied_after_loading()
        max_seq_len = model.transformer.max_seq_len
        self.size = max_seq_len if size is None else size
        if not 1 <= self.size <= max_seq_len:
            raise ValueError(
                f"size must be 1 ... {max_seq_len} (max_seq_len of the model), "
                f"got {size}"
            )
        self.run_token = self.step_one_token
        if compile:
            self.run_token = torch.compile(self.step_one_token, fullgraph=True)

    def new_cache(
        self, tokens: Tensor, count: int, padding: Tensor | None = None
    ) -> Cache:
        """Return an empty cache.

        Raises:
            ValueError: prompt and new tokens do not fit.
        """
        seq = tokens.shape[-1]
        if seq + count > self.size:
            raise ValueError(
                f"prompt and new tokens must fit into the cache of size={self.size}, "
                f"got {seq} + {count}: pass size={seq + count}, "
                "or generate fewer tokens"
            )
        return StaticCache(self, len(tokens), self.size, padding)

    def step(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Return the logits after the last token, by the compiled step if it fits."""
        if tokens.shape[-1] > 1:
            return super().step(tokens, positions, cache)
        return self.run_token(tokens, positions, cache)

    def step_one_token(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Return the logits after one token: all shapes are the same in each call."""
        return super().step(tokens, positions, cache)


def main() -> None:
    torch.manual_seed(0)
    growing = LanguageModel(
        vocabulary=1000,
        num_layers=2,
        d_model=256,
        num_heads=8,
        max_seq_len=1024,
        num_kv_heads=2,
    )
    models = {
        "growing cache": growing,
        "static cache": StaticLanguageModel(growing, size=256, compile=False),
        "static cache, compiled": StaticLanguageModel(growing, size=256),
    }
    prompt = torch.randint(1000, (1, 16))
    expected = growing.generate(prompt, 200)
    for name, model in models.items():
        model.generate(prompt, 2)  # compiles
        start = time.perf_counter()
        text = model.generate(prompt, 200)
        speed = 200 / (time.perf_counter() - start)
        equal = torch.equal(text, expected)
        print(f"{name:24} {speed:6.0f} tokens/s, equal to the growing cache: {equal}")


if __name__ == "__main__":
    main()
