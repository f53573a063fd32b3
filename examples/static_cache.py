"""Generate with preallocated keys and values, and a step that compiles once.

    python examples/static_cache.py

This command prints the tokens per second of the growing cache, of the static cache, and
of the static cache with a compiled step, and whether their texts are equal.

A growing cache changes its shape with each token. A `StaticCache` always has `size`
keys. The newest are last, and a mask hides the empty keys before the first. So the step
of one token compiles once, and a window still counts back from the last key. The keys
are a view that moves along a buffer of 2 * size, so no key has to be moved. The price
is that each token reads all keys, so choose `size` as small as your texts allow.
"""

import time
from types import MethodType
from typing import Any

import einops
import torch
from language_model import Cache, LanguageModel
from torch import Tensor, nn


class StaticCache(Cache):
    """A cache with room for `size` tokens."""

    def __init__(self, size: int, padding: Tensor | None = None) -> None:
        super().__init__(padding)
        self.size = size
        # The views of this call. Each layer takes its own, once.
        self.newest: dict[int, tuple[Tensor, Tensor]] = {}

    def require_room(self, length: int) -> None:
        if length > self.size:
            raise ValueError(
                f"a StaticCache must have room for all tokens but the last new one, "
                f"{length}, got StaticCache({self.size})"
            )

    def advance(self, tokens: Tensor) -> Tensor:
        positions = super().advance(tokens)
        for layer in self.layers:
            self.newest[layer] = self.view_newest(layer)
        position = torch.arange(-self.size, 0, device=tokens.device) + self.length
        if self.padding is not None:
            position = position - self.padding[:, None]
        self.mask = (position >= 0).view(-1, 1, self.size)  # negative: empty or padding
        return positions

    def view_newest(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the views of a layer's buffers that end with the newest tokens."""
        keys, values = self.layers[layer]
        return (
            keys.narrow(-2, self.length, self.size),
            values.narrow(-2, self.length, self.size),
        )

    def append(self, layer: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if id(layer) not in self.layers:  # the first keys have the right dtype
            self.require_a_key_per_token(k)
            self.layers[id(layer)] = self.allocate(k), self.allocate(v)
            self.newest[id(layer)] = self.view_newest(id(layer))
        if id(layer) not in self.newest:
            raise ValueError(
                "a model must call each of its layers once per token to use a StaticCache"
            )
        keys, values = self.newest.pop(id(layer))
        keys[..., -k.shape[-2] :, :] = k
        values[..., -v.shape[-2] :, :] = v
        return keys, values

    def allocate(self, like: Tensor) -> Tensor:
        *batch, _, d_head = like.shape
        return like.new_zeros(*batch, 2 * self.size, d_head)


def compile_step(model: LanguageModel) -> None:
    """Compile calls with one token and a StaticCache that has tokens, in place.

    Prompts stay eager, because their lengths vary.
    """
    # Otherwise torch traces einops' parser, and guards it, in every layer.
    torch.compiler.allow_in_graph(einops.rearrange)
    # Of the class: a compiled bound method would run this model's weights in a copy, too.
    compiled = torch.compile(type(model.transformer).forward, fullgraph=True)

    def forward(
        self: Any, x: Tensor, token_positions: Any = None, cache: Any = None
    ) -> Tensor:
        is_step = x.shape[-2] == 1 and isinstance(cache, StaticCache) and cache.layers
        run = compiled if is_step else type(self).forward
        return run(self, x, token_positions, cache)

    transformer: Any = model.transformer
    transformer.forward = MethodType(forward, transformer)


def main() -> None:
    torch.manual_seed(0)
    model = LanguageModel(1000, 2, 256, 8, max_seq_len=1024, num_kv_heads=2)
    prompt = torch.randint(1000, (1, 16))
    expected = model.generate(prompt, 100)
    for name in ("growing", "static", "compiled"):
        if name == "compiled":
            compile_step(model)
            model.generate(prompt, 2, cache=StaticCache(128))  # compiles
        cache = Cache() if name == "growing" else StaticCache(128)
        start = time.perf_counter()
        text = model.generate(prompt, 100, cache=cache)
        speed = 100 / (time.perf_counter() - start)
        print(f"{name:9} {speed:6.0f} tokens/s, equal: {torch.equal(text, expected)}")


if __name__ == "__main__":
    main()
