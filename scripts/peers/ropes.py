"""Compute RoPE as each project does: from x, and its positions in tokens.

x has the shape (batch, heads, seq, d_head). All rotate the pairs (x0, x1), (x2, x3), ...
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from tinyblock import RotaryPositionalEmbedding

from .projects import LLAMA

THETA = 10000.0
D_HEAD = 64
MAX_SEQ_LEN = 2**20

Rotation = Callable[[Tensor, Tensor], Tensor]


def formula(dtype: torch.dtype) -> Rotation:
    """Return equation 8, with frequencies, angles and products in one dtype."""
    exponents = torch.arange(0, D_HEAD, 2).to(dtype) / D_HEAD
    frequencies = 1 / THETA**exponents

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        angles = torch.outer(positions.to(dtype), frequencies)
        rotation = torch.polar(torch.ones_like(angles), angles)
        pairs = torch.view_as_complex(x.to(dtype).unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)

    return rotate


def tinyblock() -> Rotation:
    return RotaryPositionalEmbedding(THETA, D_HEAD, MAX_SEQ_LEN)


def transformers() -> Rotation:
    llama = import_module(LLAMA)
    config = llama.LlamaConfig(
        hidden_size=D_HEAD, num_attention_heads=1, head_dim=D_HEAD, rope_theta=THETA
    )
    tables = llama.LlamaRotaryEmbedding(config)

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = tables(x, positions[None])
        rotated, _ = llama.apply_rotary_pos_emb(x, x, cos, sin)
        return rotated

    return _in_pairs(rotate)


def litgpt() -> Rotation:
    model: Any = import_module("litgpt.model")
    tables = model.build_rope_cache(MAX_SEQ_LEN, D_HEAD, base=THETA)

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        # Its models keep the table in their dtype.
        cos, sin = (table[positions][None].to(x) for table in tables)
        return model.apply_rope(x, cos, sin)

    return _in_pairs(rotate)


def x_transformers() -> Rotation:
    module = import_module("x_transformers.x_transformers")
    embedding = module.RotaryEmbedding(D_HEAD, base=THETA)

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        angles, scale = embedding(positions)
        return module.apply_rotary_pos_emb(x, angles, scale)

    return rotate


def _in_pairs(rotation: Rotation) -> Rotation:
    """Rotate (x0, x1), ... by a function that rotates x[k] with x[k + d_head/2]."""
    to_halves = "... (half pair) -> ... (pair half)"
    to_pairs = "... (pair half) -> ... (half pair)"

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        rotated = rotation(rearrange(x, to_halves, pair=2), positions)
        return rearrange(rotated, to_pairs, pair=2)

    return rotate


# Keyed by package.
PROJECT_ROPES: dict[str, Callable[[], Rotation]] = {
    "transformers": transformers,
    "litgpt": litgpt,
    "x-transformers": x_transformers,
}
OWN_ROPES: dict[str, Callable[[], Rotation]] = {
    "exact": partial(formula, torch.float64),
    "tinyblock": tinyblock,
    # Meta's package requires a GPU; its formula computes in float32.
    "Meta's formula": partial(formula, torch.float32),
}
