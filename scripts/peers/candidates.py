"""The candidates that a Block is measured against, and those made of the Block's own parts.

A builder takes a Block and its size, and returns a Candidate that computes the same function of `x` with the same
weights. The builder also makes the tables of cosines and sines, because a model computes them once for all layers: they
are not timed.
"""

import copy
import functools
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import jaxtyping
import torch
import torch.nn.functional as F
from lab.environment import versions
from lab.sizes import Size
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import tinyblock
from tinyblock import Block

Layer = Callable[[Tensor], Any]


class Unavailable(Exception):
    """A peer has no such layer, or cannot run on this device; the message says why."""


@dataclass(frozen=True)
class Candidate:
    """A function to time, `call(x, **keywords)`, and the parameters that a training step differentiates.

    A candidate with the keyword `token_positions` gets the positions of the case; the others rotate by tables of the
    same positions. `parts` are its layers and the complete block, under the names of docs/exactness.md: functions of
    x only.
    """

    call: Callable[..., Any]
    parameters: list[Tensor]
    keywords: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, Layer] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        module: nn.Module,
        norm: Any,
        ffn: Any,
        attention: Callable[..., Any],
        **keywords: Any,
    ) -> "Candidate":
        """Return a module. The keywords, such as its tables, go to the module and to its attention."""
        parts = {
            "RMSNorm": norm,
            "SwiGLU": ffn,
            "attention": functools.partial(attention, **keywords),
            "Block": functools.partial(module, **keywords),
        }
        return cls(module, list(module.parameters()), keywords, parts)

    def constants(self) -> list[Tensor]:
        """Return the tensors that exist before a call: parameters, buffers and tables."""
        tensors = list(self.parameters)
        if isinstance(self.call, nn.Module):
            tensors += self.call.buffers()
        for value in tree_leaves(self.keywords):
            if isinstance(value, Tensor):
                tensors.append(value)
        return tensors


@dataclass(frozen=True)
class Peer:
    """The source of a candidate.

    `package` is the project that it comes from, None for a part of tinyblock. `must_agree` is False if its outputs
    differ by design, so that they are not compared.
    """

    builder: Callable[[Block, Size], Candidate]
    title: str
    package: str | None = None
    cuda_only: bool = False
    eager_only: bool = False
    must_agree: bool = True

    def version(self) -> str | None:
        if self.package is None:
            return None
        return versions(self.package).get(self.package)

    def build(self, block: Block, size: Size) -> Candidate:
        """Return a candidate with the weights of `block`; raise Unavailable if it cannot run here."""
        if self.cuda_only and not next(block.parameters()).is_cuda:
            raise Unavailable(f"{self.package} requires CUDA")
        if self.package is not None and self.version() is None:
            raise Unavailable(f"not installed: pip install {self.package}")
        return self.builder(block, size)


def weights_of(block: Block) -> dict[str, Tensor]:
    """Return the weights of a Block by short names; those of the q/k norm only if it has one."""
    attn = cast(Any, block.attn)
    ffn = cast(Any, block.ffn)
    layers: dict[str, Any] = {
        "q": attn.q_proj,
        "k": attn.k_proj,
        "v": attn.v_proj,
        "o": attn.output_proj,
        "w1": ffn.w1,
        "w2": ffn.w2,
        "w3": ffn.w3,
        "ln1": block.ln1,
        "ln2": block.ln2,
    }
    if attn.q_norm is not None:
        layers["q_norm"] = attn.q_norm
        layers["k_norm"] = attn.k_norm
    return {name: layer.weight for name, layer in layers.items()}


@functools.cache
def import_as(name: str, source: Path) -> ModuleType:
    """Import a file under another name; an `__init__.py` also imports the modules of its package."""
    spec: Any = importlib.util.spec_from_file_location(name, source)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _attention(
    weights: dict[str, Tensor],
    size: Size,
    prepare: Callable[[Tensor, str], Tensor] = lambda heads, norm: heads,
) -> Layer:
    """Return the operations of the attention layer, in the Block's order.

    `prepare` gets queries or keys, split into heads, and the name of their norm.
    """
    causal = size.seq_len > 1
    shared = size.num_kv_heads < size.num_heads

    def project(x: Tensor, name: str) -> Tensor:
        heads = F.linear(x, weights[name]).unflatten(-1, (-1, size.d_head))
        return heads.transpose(1, 2)

    def attention(x: Tensor) -> Tensor:
        q = prepare(project(x, "q"), "q_norm")
        k = prepare(project(x, "k"), "k_norm")
        v = project(x, "v")
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=shared
        )
        return F.linear(attended.transpose(1, 2).flatten(-2), weights["o"])

    return attention


def build_limit(block: Block, size: Size) -> Candidate:
    """Chain the matrix products and the attention kernel that every such block requires, and nothing else.

    Under autograd this includes the sums of the gradients of q, k and v, and of w1 and w3.
    """
    weights = weights_of(block)
    attention = _attention(weights, size)

    def limit(x: Tensor) -> tuple[Tensor, Tensor]:
        attended = attention(x)
        hidden = F.linear(attended, weights["w1"])
        gated = F.linear(attended, weights["w3"])
        return F.linear(hidden, weights["w2"]), gated

    matrices = [weight for weight in weights.values() if weight.ndim == 2]
    return Candidate(limit, matrices)


def build_copy(block: Block, size: Size) -> Candidate:
    """Copy half of the weights: reads and writes together are as many bytes as the weights have."""
    if size.tokens > 1:
        raise Unavailable(
            "applies only to one-token cases, where weights dominate the traffic"
        )
    weights = torch.cat([weight.detach().flatten() for weight in block.parameters()])
    half = weights[: weights.numel() // 2]
    return Candidate(lambda x: half.clone(), [half])


def build_operations(block: Block, size: Size) -> Candidate:
    """Chain the operations of an eager Block, without modules, checks, options or positions."""
    weights = weights_of(block)
    rope = cast(Any, block.attn).rope
    rotation = torch.view_as_complex(rope.cos_sin[: size.seq_len])

    def normalize(x: Tensor, norm: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weights[norm], size.eps)

    def rotate(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)

    def prepare(heads: Tensor, norm: str) -> Tensor:
        if size.qk_norm:
            heads = normalize(heads, norm)
        return rotate(heads)

    attention = _attention(weights, size, prepare)

    def operations(x: Tensor) -> Tensor:
        x = x + attention(normalize(x, "ln1"))
        h = normalize(x, "ln2")
        gate = F.silu(F.linear(h, weights["w1"]))
        value = F.linear(h, weights["w3"])
        return x + F.linear(gate * value, weights["w2"])

    return Candidate(operations, [*block.parameters()])


def build_block(block: Any, size: Size) -> Candidate:
    """Take a Block as it is."""
    device = block.ln1.weight.device
    at_0 = torch.zeros(size.seq_len, dtype=torch.long, device=device)
    candidate = Candidate.of(
        block, block.ln1, block.ffn, block.attn, token_positions=None
    )
    # At position 0, RoPE rotates nothing.
    candidate.parts["attention without RoPE"] = functools.partial(
        block.attn, token_positions=at_0
    )
    return candidate


def block_of(checkout: Path) -> Peer:
    """Return the Block of another version of tinyblock as a peer; raise a ValueError if `checkout` has none."""
    source = checkout / "tinyblock" / "__init__.py"
    if not source.is_file():
        raise ValueError(f"--against must be a checkout of tinyblock, got {checkout}")

    def build(block: Block, size: Size) -> Candidate:
        return _build_block_of(import_as("tinyblock_against", source), block, size)

    return Peer(build, f"the Block of {checkout}")


def build_unchecked(block: Block, size: Size) -> Candidate:
    """Import tinyblock a second time, without its shape checks."""
    checks_were_off = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    package = import_as("tinyblock_unchecked", Path(tinyblock.__file__))
    jaxtyping.config.update("jaxtyping_disable", checks_were_off)
    return _build_block_of(package, block, size)


def _build_block_of(package: ModuleType, block: Block, size: Size) -> Candidate:
    """Build it on the weights of the Block themselves, because a copy elsewhere in memory may be faster to read."""
    weight = next(block.parameters())
    layer = size.build(weight.device, weight.dtype, package)
    layer.load_state_dict(block.state_dict(), assign=True)
    return build_block(layer, size)


OWN = {
    "limit": Peer(build_limit, "limit: the matrix products and SDPA", must_agree=False),
    "copy": Peer(
        build_copy, "copy: reads and writes half of the weights", must_agree=False
    ),
    # Inductor generates no code for its complex product.
    "operations": Peer(
        build_operations,
        "operations: the Block without modules or checks",
        eager_only=True,
    ),
    "control": Peer(
        lambda block, size: build_block(copy.deepcopy(block), size),
        "control: a second copy of the Block",
    ),
    "unchecked": Peer(build_unchecked, "unchecked: the Block without checks"),
}
