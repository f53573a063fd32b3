"""Merge the projections of a trained model that read the same x: a token takes less time.

    python examples/merged.py

This command prints the time of a token with merged weights, divided by the time before,
and how far the logits are apart.

A small product costs as much for its start as for its numbers. So q, k and v come from
one product, and so do the gate and the value of SwiGLU. The weights that the layers hold
become views of the merged ones: nothing is held twice, and the state dict stays.
Merge last, for generation alone. A model that is moved, cast or copied afterwards raises
an error until it is merged again.
"""

import copy
import time
from collections import Counter
from collections.abc import Sequence
from statistics import median
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from language_model import CachedAttention, LanguageModel
from torch import Tensor, nn
from torch.compiler import is_compiling

from tinyblock import CausalMultiHeadSelfAttention, RotaryPositionalEmbedding, SwiGLU
from tinyblock.attention import Linear as AttentionLinear
from tinyblock.ffn import Linear

PLAIN = (nn.Linear, Linear, AttentionLinear)


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Merge q, k and v, and w1 and w3, in place.

    Other kinds of layers stay as they are, and attention without RoPE, or with a rope
    that is not tinyblock's.

    Raises:
        ValueError: a projection has an adapter or a hook, is quantized, or shares its
            weight with another layer.
    """
    projects: Any = (CausalMultiHeadSelfAttention.project, CachedAttention.project)
    uses = Counter(
        weight
        for layer in model.modules()
        for weight in layer.parameters(recurse=False)
    )
    for layer in model.modules():
        kind: Any = type(layer)
        changed: Any = layer
        rotate = getattr(type(getattr(layer, "rope", None)), "forward", None)
        has_rope = rotate is RotaryPositionalEmbedding.forward
        if has_rope and getattr(kind, "project", None) in projects:
            join(uses, layer.q_proj, layer.k_proj, layer.v_proj)
            changed.project = MethodType(project, layer)
        elif kind.forward is SwiGLU.forward:
            join(uses, layer.w1, layer.w3)
            changed.forward = MethodType(swiglu, layer)
    model.requires_grad_(False)  # no gradient would reach k_proj, v_proj and w3


def join(uses: Counter[nn.Parameter], *linears: Any) -> None:
    """Let the weights of these projections lie one after another in memory."""
    require_plain(linears)
    for part in ("weight", "bias"):
        held = [getattr(linear, part) for linear in linears]
        if any(each is not None for each in held):
            if any(uses[each] > 1 for each in held):
                raise ValueError(
                    "merged weights must not be shared with another layer, got one "
                    f"that is, of {linears}: clone it first"
                )
            views = torch.cat(held).split([len(each) for each in held])
            for each, view in zip(held, views, strict=True):
                each.data = view


def require_plain(linears: Sequence[Any]) -> None:
    """Raise a ValueError if a projection computes more than its own product."""
    for linear in linears:
        is_plain = type(linear) in PLAIN and type(linear.weight) is nn.Parameter
        if not is_plain or linear._forward_hooks or linear._forward_pre_hooks:
            raise ValueError(
                f"a merged projection must be plain and without hooks, got {linear}: "
                "merge adapters into it first, and do not quantize it"
            )


def product(x: Tensor, *linears: Any) -> Tensor:
    """Apply projections whose weights lie one after another, by one product."""
    require_plain(linears)
    first = linears[0]
    rows = sum(linear.out_features for linear in linears)
    require_together([linear.weight for linear in linears])
    weight = first.weight.as_strided((rows, first.in_features), (first.in_features, 1))
    if first.bias is None:
        return F.linear(x, weight)
    require_together([linear.bias for linear in linears])
    return F.linear(x, weight, first.bias.as_strided((rows,), (1,)))


def require_together(parts: list[Tensor]) -> None:
    """Raise a ValueError unless these tensors lie one after another in memory."""
    if is_compiling():  # the compiler shows no offsets
        return
    end = parts[0].storage_offset()
    for part in parts:
        if part.storage_offset() != end:
            raise ValueError(
                "merged weights must lie one after another: after a model is moved, "
                "cast, copied or given new weights, merge it again"
            )
        end += part.numel()


def project(
    self: Any, x: Tensor, token_positions: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `project` of attention returns."""
    qkv = product(x, self.q_proj, self.k_proj, self.v_proj)
    # Without einops, whose search for the pattern counts in the time of one token.
    heads = qkv.unflatten(-1, (-1, self.d_head)).transpose(-2, -3)
    num_heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
    q, k, v = heads.split(num_heads, dim=-3)
    q_and_k = heads[..., : -self.num_kv_heads, :, :]
    if not isinstance(self.q_norm, nn.Identity):
        q_and_k = torch.cat((self.q_norm(q), self.k_norm(k)), dim=-3)
    if token_positions is not None:  # the heads of a token share its position
        token_positions = rearrange(
            token_positions, "... seq -> ... 1 seq", seq=x.shape[-2]
        )
    # RoPE rotates all heads alike. One call takes less time than two.
    q, k = self.rope(q_and_k, token_positions).split(num_heads[:2], dim=-3)
    return q, k, v


def swiglu(self: Any, x: Tensor) -> Tensor:
    """Return what `forward` of SwiGLU returns."""
    gate, value = product(x, self.w1, self.w3).chunk(2, dim=-1)
    return self.w2(F.silu(gate) * value)


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    model = LanguageModel(1000, 4, 512, 8, max_seq_len=64, num_kv_heads=2)
    merged = copy.deepcopy(model)
    merge(merged)
    token = torch.tensor([[1]])
    expected = model(token)
    difference = (merged(token) - expected).norm() / expected.norm()
    print(f"relative difference of the logits: {difference:.0e}")
    ratios = [seconds(merged, token) / seconds(model, token) for _ in range(9)]
    print(f"time of a token, merged / before: {median(ratios):.2f}")


def seconds(model: nn.Module, token: Tensor) -> float:
    start = time.perf_counter()
    for _ in range(10):
        model(token)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
