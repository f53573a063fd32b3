"""The Block, copies of it, and its operations without modules.

Each function takes a Block, and returns a Peer with its own weights. Timing layers that
share weights would be unfair, because the second finds them in the cache.
"""

import copy
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jaxtyping
import torch
import torch.nn.functional as F
from lab.sizes import Size
from torch import Tensor

import tinyblock

Layer = Callable[[Tensor], Any]  # returns a tensor, or a tuple that begins with it


@dataclass(frozen=True)
class Peer:
    """The layers of a project, as functions of x only. "Block" calls the other layers."""

    parameters: list[Tensor]
    layers: dict[str, Layer]


def make_block(
    size: Size,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    eps: float = 1e-5,
) -> tuple[Any, Tensor]:
    """Return a Block whose gains are not all 1, and an input for it."""
    torch.manual_seed(seed)
    block: Any = size.build(device, torch.float32)
    for norm in (block.ln1, block.ln2):
        norm.eps = eps
        norm.weight.data += 0.1 * torch.randn(size.d_model, device=device)
    x = torch.randn(size.batch_size, size.seq_len, size.d_model, device=device)
    return block.to(dtype), x.to(dtype)


def weights_of(block: Any) -> dict[str, Tensor]:
    """Return copies of the weights of a Block, by short names."""
    layers = {
        "q": block.attn.q_proj,
        "k": block.attn.k_proj,
        "v": block.attn.v_proj,
        "o": block.attn.output_proj,
        "w1": block.ffn.w1,
        "w2": block.ffn.w2,
        "w3": block.ffn.w3,
        "ln1": block.ln1,
        "ln2": block.ln2,
    }
    copies = {}
    for name, layer in layers.items():
        copies[name] = layer.weight.detach().clone().requires_grad_()
    return copies


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the root mean square error as a share of the expected root mean square."""
    expected = expected.detach().double()
    return float((actual.detach().double() - expected).norm() / expected.norm())


def ours(block: Any) -> Peer:
    layers = {
        "RMSNorm": block.ln1,
        "SwiGLU": block.ffn,
        "attention": block.attn,
        "Block": block,
    }
    return Peer(list(block.parameters()), layers)


def control(block: Any) -> Peer:
    """Copy the Block. The times of the two differ only by noise."""
    return ours(copy.deepcopy(block))


def unchecked(block: Any) -> Peer:
    """Import tinyblock a second time, without its shape checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    package = import_as("tinyblock_unchecked", Path(str(tinyblock.__file__)))
    jaxtyping.config.update("jaxtyping_disable", False)
    return of_package(package, block)


def of_package(package: Any, block: Any) -> Peer:
    """Build the Block of another tinyblock."""
    rope = block.attn.rope
    other = package.Block(
        block.d_model,
        block.attn.num_heads,
        block.ffn.d_ff,
        rope=package.RotaryPositionalEmbedding(rope.theta, rope.d_k, rope.max_seq_len),
        num_kv_heads=block.attn.num_kv_heads,
        d_head=block.attn.d_head,
        eps=block.ln1.eps,
    ).to(block.ln1.weight)
    other.load_state_dict(block.state_dict())
    return ours(other)


def import_as(name: str, source: Path) -> ModuleType:
    """Import a file, or a package by its __init__.py, under another name."""
    if name not in sys.modules:
        spec: Any = importlib.util.spec_from_file_location(name, source)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def operations(block: Any) -> Peer:
    """Call the torch functions that an eager Block calls, without modules or checks."""
    weights = weights_of(block)
    rotation = torch.view_as_complex(block.attn.rope.cos_sin)

    def normalize(x: Tensor, gain: str) -> Tensor:
        return F.rms_norm(x, (block.d_model,), weights[gain], block.ln1.eps)

    def heads(x: Tensor, name: str) -> Tensor:
        projected = F.linear(x, weights[name]).unflatten(-1, (-1, block.attn.d_head))
        return projected.transpose(1, 2)

    def rotate(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * rotation).flatten(-2).to(x)

    def attend(x: Tensor) -> Tensor:
        attended = F.scaled_dot_product_attention(
            rotate(heads(x, "q")),
            rotate(heads(x, "k")),
            heads(x, "v"),
            is_causal=x.shape[1] > 1,
            enable_gqa=block.attn.num_kv_heads < block.attn.num_heads,
        )
        return F.linear(attended.transpose(1, 2).flatten(-2), weights["o"])

    def run(x: Tensor) -> Tensor:
        x = x + attend(normalize(x, "ln1"))
        h = normalize(x, "ln2")
        hidden = F.silu(F.linear(h, weights["w1"])) * F.linear(h, weights["w3"])
        return x + F.linear(hidden, weights["w2"])

    return Peer(list(weights.values()), {"Block": run})


OWN: dict[str, Callable[[Any], Peer]] = {
    "control": control,
    "unchecked": unchecked,
    "operations": operations,
}
