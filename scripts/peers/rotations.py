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
    frequencies = 1 / theta ** (torch.arange(0, d_head, 2).to(real) / d_head)

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        angles = torch.outer(positions.to(real), frequencies)
        pairs = torch.view_as_complex(x.to(real).unflatten(-1, (-1, 2)))
        return (
            torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles))
            .flatten(-2)
            .to(x.dtype)
        )

    return rotate


# Meta's Llama computes in float32. Meta publishes the formula, and no package.
meta: Builder = partial(formula, real=torch.float32)


def hugging_face(theta: float, d_head: int, length: int) -> Rotation:
    llama = import_module("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(
        hidden_size=d_head, num_attention_heads=1, head_dim=d_head, rope_theta=theta
    )
    tables = llama.LlamaRotaryEmbedding(config)
    return _in_halves(
        lambda x, positions: llama.apply_rotary_pos_emb(
            x, x, *tables(x, positions[None])
        )[0]
    )


def litgpt(theta: float, d_head: int, length: int) -> Rotation:
    model: Any = import_module("litgpt.model")
    tables = model.build_rope_cache(length, d_head, base=theta)
    return _in_halves(
        lambda x, positions: model.apply_rope(
            x, *(table[positions][None].to(x) for table in tables)
        )
    )


def torchtune(theta: float, d_head: int, length: int) -> Rotation:
    rope = import_module("torchtune.modules").RotaryPositionalEmbeddings(
        d_head, length, theta
    )
    return lambda x, positions: rope(
        x.transpose(1, 2), input_pos=positions[None]
    ).transpose(1, 2)


def x_transformers(theta: float, d_head: int, length: int) -> Rotation:
    module = import_module("x_transformers.x_transformers")
    angles = module.RotaryEmbedding(d_head, base=theta)
    return lambda x, positions: module.apply_rotary_pos_emb(x, *angles(positions))


def rotary_embedding_torch(theta: float, d_head: int, length: int) -> Rotation:
    """Rotate consecutive positions: this project takes the first."""
    rope = import_module("rotary_embedding_torch").RotaryEmbedding(d_head, theta=theta)
    return lambda x, positions: rope.rotate_queries_or_keys(x, offset=int(positions[0]))


def _in_halves(rotation: Rotation) -> Rotation:
    """Return a rotation of consecutive pairs by one that pairs x[k] with x[k + d_head/2]."""
    to_halves, to_pairs = (
        "... (half pair) -> ... (pair half)",
        "... (pair half) -> ... (half pair)",
    )
    return lambda x, positions: rearrange(
        rotation(rearrange(x, to_halves, pair=2), positions), to_pairs, pair=2
    )
