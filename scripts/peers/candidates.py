"""What a Block is measured against: what a candidate is, and those that are made of the Block's own parts.

A builder takes a Block and its size, and returns a Candidate that computes the same function of `x` on the same
weights. What a model computes once for all of its layers, the tables of cosines and sines, a builder computes, outside
of any timing.
"""

import copy
import functools
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import jaxtyping
import torch
import torch.nn.functional as F
from lab.sizes import Size
from torch import Tensor, nn

import tinyblock
from tinyblock import Block


@dataclass(frozen=True)
class Candidate:
    """What is timed: `call(x, **keywords)`, with the parameters that a training step differentiates."""

    call: Callable[..., Any]
    parameters: list[Tensor]
    keywords: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module, **keywords: Any) -> "Candidate":
        return cls(module, list(module.parameters()), keywords)

    def constants(self) -> list[Tensor]:
        """Return what exists before a call: parameters, buffers and tables."""
        buffers = list(self.call.buffers()) if isinstance(self.call, nn.Module) else []
        given = [each for value in self.keywords.values() for each in (value if isinstance(value, tuple) else (value,))]
        return [*self.parameters, *buffers, *(each for each in given if isinstance(each, Tensor))]


@dataclass(frozen=True)
class Peer:
    """Where a candidate comes from. `agrees` is False where the outputs are of another kind, and not to be compared.

    One that takes positions is given those of the Block; the others rotate by the same, from tables made beforehand.
    """

    builder: Callable[[Block, Size], Candidate]
    title: str
    package: str | None = None
    cuda_only: bool = False
    agrees: bool = True
    takes_positions: bool = False

    def version(self) -> str | None:
        try:
            return importlib.metadata.version(self.package) if self.package else None
        except importlib.metadata.PackageNotFoundError:
            return None


def build(peer: Peer, block: Block, size: Size) -> Candidate:
    """Return a peer with the weights, dtype and device of `block`; ImportError where it is not to be had."""
    if peer.cuda_only and not weights_of(block)["q"].is_cuda:
        raise ImportError(f"{peer.package} needs CUDA")
    if peer.package and peer.version() is None:
        raise ImportError(f"not installed: pip install {peer.package}")
    return peer.builder(block, size)


def weights_of(block: Block) -> dict[str, Any]:
    attn: Any = block.attn
    ffn: Any = block.ffn
    layers = {"q": attn.q_proj, "k": attn.k_proj, "v": attn.v_proj, "o": attn.output_proj}
    layers |= {"w1": ffn.w1, "w2": ffn.w2, "w3": ffn.w3, "ln1": block.ln1, "ln2": block.ln2}
    return {name: layer.weight for name, layer in layers.items()}


@functools.cache
def import_as(name: str, source: Path) -> ModuleType:
    """Import a file under another name; an `__init__.py` brings the modules of its package along."""
    spec = importlib.util.spec_from_file_location(name, source)
    if spec is None or spec.loader is None:
        raise ImportError(f"no loader for {source}")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_limit(block: Block, size: Size) -> Candidate:
    """Chain the matrix products and the attention kernel that no such block can do without, and nothing else.

    Under autograd this counts the sums of the gradients too where q, k and v, and w1 and w3, meet.
    """
    weights = weights_of(block)
    q_weight, k_weight, v_weight, o_weight = (weights[name] for name in "qkvo")
    gate_weight, down_weight, up_weight = weights["w1"], weights["w2"], weights["w3"]
    heads, kv_heads, d_head = size.num_heads, size.num_kv_heads, size.d_head

    def limit(x: Tensor) -> tuple[Tensor, Tensor]:
        q = F.linear(x, q_weight).unflatten(-1, (heads, d_head)).transpose(1, 2)
        k = F.linear(x, k_weight).unflatten(-1, (kv_heads, d_head)).transpose(1, 2)
        v = F.linear(x, v_weight).unflatten(-1, (kv_heads, d_head)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=size.seq_len > 1, enable_gqa=kv_heads < heads)
        x = F.linear(attended.transpose(1, 2).flatten(-2), o_weight)
        return F.linear(F.linear(x, gate_weight), down_weight), F.linear(x, up_weight)

    return Candidate(limit, [q_weight, k_weight, v_weight, o_weight, gate_weight, down_weight, up_weight])


def build_copy(block: Block, size: Size) -> Candidate:
    """Copy half as many bytes as the weights have: read and written, as many are moved. One token takes no less."""
    if size.tokens > 1:
        raise ImportError("it bounds one token, whose weights are most of what is moved")
    weights = torch.cat([weight.detach().flatten() for weight in block.parameters()])
    half = weights[: weights.numel() // 2]
    return Candidate(lambda x: half.clone(), [half])


def build_operations(block: Block, size: Size) -> Candidate:
    """Chain the operations of a plain eager Block, without modules, checks, options or positions: what Python costs.

    In the order of the Block: heads are split and transposed before they are rotated.
    """
    weights, width = weights_of(block), (size.d_model,)
    rope: Any = block.attn.rope
    norm_1, norm_2, gate_weight, down_weight, up_weight = (weights[name] for name in ("ln1", "ln2", "w1", "w2", "w3"))
    rotation = torch.view_as_complex(rope.cos_sin[: size.seq_len])

    def rotate(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)

    def operations(x: Tensor) -> Tensor:
        h = F.rms_norm(x, width, norm_1, size.eps)
        q, k, v = (F.linear(h, weights[name]).unflatten(-1, (-1, size.d_head)).transpose(1, 2) for name in "qkv")
        gqa = size.num_kv_heads < size.num_heads
        h = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=size.seq_len > 1, enable_gqa=gqa)
        x = x + F.linear(h.transpose(1, 2).flatten(-2), weights["o"])
        h = F.rms_norm(x, width, norm_2, size.eps)
        return x + F.linear(F.silu(F.linear(h, gate_weight)) * F.linear(h, up_weight), down_weight)

    return Candidate(operations, [*block.parameters()])


def build_control(block: Block, size: Size) -> Candidate:
    return Candidate.of(copy.deepcopy(block))


def block_of(checkout: Path) -> Peer:
    """Return the Block of another version of tinyblock as a peer."""

    def build_against(block: Block, size: Size) -> Candidate:
        return _build_block_of(import_as("tinyblock_against", checkout / "tinyblock" / "__init__.py"), block, size)

    return Peer(build_against, f"the Block of {checkout}", takes_positions=True)


def build_unchecked(block: Block, size: Size) -> Candidate:
    """Import tinyblock a second time, without its shape checks."""
    checks_were_off = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    package = import_as("tinyblock_unchecked", Path(tinyblock.__file__))
    jaxtyping.config.update("jaxtyping_disable", checks_were_off)
    return _build_block_of(package, block, size)


def _build_block_of(package: ModuleType, block: Block, size: Size) -> Candidate:
    """Make it of the very weights of the Block, not of a copy: one that lies elsewhere may be faster to read."""
    rope = package.RotaryPositionalEmbedding(size.theta, size.d_head, size.seq_len)
    layer = package.Block(
        size.d_model,
        size.num_heads,
        size.d_ff,
        rope=rope.to(weights_of(block)["q"].device),
        num_kv_heads=size.num_kv_heads,
        d_head=size.d_head,
        eps=size.eps,
    )
    layer.load_state_dict(block.state_dict(), assign=True)
    return Candidate.of(layer)
