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
from weakref import WeakKeyDictionary

import einops
import torch
from language_model import Cache, LanguageModel
from torch import Tensor, nn


class StaticCache(Cache):
    """A cache with room for `size` tokens. The dtype is that of the first keys."""

    def __init__(self, size: int, padding: Tensor | None = None) -> None:
        super().__init__(padding)
        self.size = size
        # The views of each layer's buffers that end with the tokens of this call.
        self.newest: list[tuple[Tensor, Tensor]] = []

    def require_room(self, length: int) -> None:
        if length > self.size:
            raise ValueError(
                f"a StaticCache must have room for all tokens but the last new one, "
                f"{length}, got StaticCache({self.size})"
            )

    def advance(self, tokens: Tensor, model: nn.Module) -> Tensor:
        positions = super().advance(tokens, model)
        self.newest = [self.view_newest(*buffers) for buffers in self.layers]
        position = torch.arange(-self.size, 0, device=tokens.device) + self.length
        if self.padding is None:
            position = position.view(*[1] * tokens.ndim, self.size)  # for any batch
        else:
            position = (position - self.padding[:, None])[:, None, :]
        self.mask = position >= 0  # negative: empty or padding
        return positions

    def view_newest(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return (
            keys.narrow(-2, self.length, self.size),
            values.narrow(-2, self.length, self.size),
        )

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.next == len(self.layers):
            buffers = self.allocate(k), self.allocate(v)
            self.layers.append(buffers)
            self.newest.append(self.view_newest(*buffers))
        keys, values = self.newest[self.next]
        self.next += 1
        keys[..., -k.shape[-2] :, :] = k
        values[..., -v.shape[-2] :, :] = v
        # A later call may run under another autocast than the first.
        return keys.to(k.dtype), values.to(v.dtype)

    def allocate(self, like: Tensor) -> Tensor:
        *batch, _, d_head = like.shape
        shape = (*batch, 2 * self.size, d_head)
        # Otherwise, after a prompt in inference mode, all steps would have to be in it.
        with torch.inference_mode(mode=False):
            return torch.zeros(shape, dtype=like.dtype, device=like.device)


def compile_step(model: LanguageModel, **options: Any) -> None:
    """Compile calls with one token and a StaticCache that has tokens, in place.

    Prompts stay eager, because their lengths vary. The `options` go to torch.compile.
    """
    # Otherwise torch traces einops' parser, and guards it, in every layer.
    torch.compiler.allow_in_graph(einops.rearrange)
    # Without isolation, torch compiles the code of a class for 8 models at most.
    options = {"fullgraph": True, "isolate_recompiles": True, **options}
    # A copy of the model has this forward, too, but weights and a graph of its own.
    compiled: Any = WeakKeyDictionary()

    def forward(
        self: Any, x: Tensor, token_positions: Any = None, cache: Any = None
    ) -> Tensor:
        is_step = x.shape[-2] == 1 and isinstance(cache, StaticCache) and cache.layers
        if not is_step:
            return type(self).forward(self, x, token_positions, cache)
        if self not in compiled:
            compiled[self] = torch.compile(type(self).forward, **options)
        return compiled[self](self, x, token_positions, cache)

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
