"""RoPE as each project computes it: a function of x, of shape (batch, heads, seq, d_head), and its token positions.

Each builder gets theta, the head size and the number of positions. All rotate consecutive pairs, as the Block does.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

Rotation = Callable[[Tensor, Tensor], Tensor]
Builder = Callable[[float, int, int], Rotation]


def formula(
    theta: float, d_head: int, length: int, real: torch.dtype = torch.float64
) -> Rotation:
    """Return equation 8 with frequencies, angles, table and products in one dtype."""
    exponents = torch.arange(0, d_head, 2).to(real) / d_head
    frequencies = 1 / theta**exponents

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        angles = torch.outer(positions.to(real), frequencies)
        rotation = torch.polar(torch.ones_like(angles), angles)
        pairs = torch.view_as_complex(x.to(real).unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)

    return rotate


# Meta's Llama computes in float32. Meta publishes the formula, and no package.
meta: Builder = partial(formula, real=torch.float32)


def hugging_face(theta: float, d_head: int, length: int) -> Rotation:
    llama = import_module("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(
        hidden_size=d_head, num_attention_heads=1, head_dim=d_head, rope_theta=theta
    )
    tables = llama.LlamaRotaryEmbedding(config)

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = tables(x, positions[None])
        rotated, _ = llama.apply_rotary_pos_emb(x, x, cos, sin)
        return rotated

    return _in_halves(rotate)


def litgpt(theta: float, d_head: int, length: int) -> Rotation:
    model: Any = import_module("litgpt.model")
    cos, sin = model.build_rope_cache(length, d_head, base=theta)

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        # litgpt's models keep the table in their dtype.
        return model.apply_rope(
            x, cos[positions][None].to(x), sin[positions][None].to(x)
        )

    return _in_halves(rotate)


def torchtune(theta: float, d_head: int, length: int) -> Rotation:
    modules: Any = import_module("torchtune.modules")
    rope = modules.RotaryPositionalEmbeddings(d_head, length, theta)

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        rotated = rope(x.transpose(1, 2), input_pos=positions[None])
        return rotated.transpose(1, 2)

    return rotate


def x_transformers(theta: float, d_head: int, length: int) -> Rotation:
    module = import_module("x_transformers.x_transformers")
    embedding = module.RotaryEmbedding(d_head, base=theta)

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        angles, scale = embedding(positions)
        return module.apply_rotary_pos_emb(x, angles, scale)

    return rotate


def rotary_embedding_torch(theta: float, d_head: int, length: int) -> Rotation:
    """Return the rotation of consecutive positions: the project takes only the first of them."""
    rope = import_module("rotary_embedding_torch").RotaryEmbedding(d_head, theta=theta)

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        return rope.rotate_queries_or_keys(x, offset=int(positions[0]))

    return rotate


def _in_halves(rotation: Rotation) -> Rotation:
    """Return a rotation of consecutive pairs by one that pairs x[k] with x[k + d_head/2]."""
    to_halves = "... (half pair) -> ... (pair half)"
    to_pairs = "... (pair half) -> ... (half pair)"

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        halves = rearrange(x, to_halves, pair=2)
        return rearrange(rotation(halves, positions), to_pairs, pair=2)

    return rotate
