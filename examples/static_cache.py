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
        self.buffers: dict[int, tuple[Tensor, Tensor]] = {}

    def advance(self, tokens: Tensor) -> Tensor:
        positions = super().advance(tokens)
        for layer, (keys, values) in self.buffers.items():
            self.layers[layer] = self.newest(keys), self.newest(values)
        position = torch.arange(-self.size, 0, device=tokens.device) + self.length
        if self.padding is not None:
            position = position - self.padding[:, None]
        self.mask = (position >= 0).view(-1, 1, self.size)  # negative: empty or padding
        return positions

    def newest(self, buffer: Tensor) -> Tensor:
        """Return the view that ends where the newest tokens belong."""
        return buffer.narrow(-2, self.length, self.size)

    def append(self, layer: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if id(layer) not in self.layers:  # the first keys have the right dtype
            keys, values = self.allocate(k), self.allocate(v)
            self.buffers[id(layer)] = keys, values
            self.layers[id(layer)] = self.newest(keys), self.newest(values)
        keys, values = self.layers[id(layer)]
        keys[..., -k.shape[-2] :, :] = k
        values[..., -v.shape[-2] :, :] = v
        return keys, values

    def allocate(self, like: Tensor) -> Tensor:
        *batch, _, d_head = like.shape
        return like.new_zeros(*batch, 2 * self.size, d_head)


def compile_step(model: LanguageModel) -> None:
    """Compile calls with one token. Prompts stay eager, because their lengths vary."""
    # Otherwise torch traces einops' parser, and guards it, in every layer.
    torch.compiler.allow_in_graph(einops.rearrange)
    transformer: Any = model.transformer
    eager = transformer.forward
    compiled = torch.compile(eager, fullgraph=True)

    def forward(
        x: Tensor, token_positions: Any = None, cache: Cache | None = None
    ) -> Tensor:
        is_step = x.shape[-2] == 1 and cache and cache.layers
        run = compiled if is_step else eager
        return run(x, token_positions, cache)

    transformer.forward = forward


def main() -> None:
    torch.manual_seed(0)
    model = LanguageModel(1000, 2, 256, 8, max_seq_len=1024, num_kv_heads=2)
    prompt = torch.randint(1000, (1, 16))
    expected = model.generate(prompt, 200)
    for name in ("growing", "static", "compiled"):
        if name == "compiled":
            compile_step(model)
            model.generate(prompt, 2, cache=StaticCache(256))  # compiles
        cache = Cache() if name == "growing" else StaticCache(256)
        start = time.perf_counter()
        text = model.generate(prompt, 200, cache=cache)
        speed = 200 / (time.perf_counter() - start)
        print(f"{name:9} {speed:6.0f} tokens/s, equal: {torch.equal(text, expected)}")


if __name__ == "__main__":
    main()
