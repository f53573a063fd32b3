"""Numbers of tensors: how far they are from others, in whatever order."""

from collections.abc import Iterable
from typing import Any

import torch
from profiling.parts import results_in
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

TOLERANCE = 2.0**-20  # a model may hold constants in float32, which has 24 bits


class Refused(ValueError):
    """Something that this program does not take."""


def dense(tensor: Tensor) -> Tensor:
    """Return a plain tensor of a class of its own, such as a quantized weight."""
    is_plain = type(tensor) in (Tensor, nn.Parameter)
    return tensor if is_plain else tensor.dequantize()


def numbers(tensor: Tensor) -> Tensor:
    """Return finite numbers in float64: masks have infinities, and masked rows NaN."""
    tensor = dense(tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.detach().double().flatten().nan_to_num(0.0).clamp_(-1e100, 1e100)


def error(found: Tensor, exact: Tensor, least_norm: float = 1e-300) -> float:
    """Return the norm of the difference, divided by the norm of the exact numbers."""
    if found.numel() != exact.numel():
        return float("inf")
    off, norm = 0.0, 0.0
    parts = (each.flatten().split(2**20) for each in (found, exact))  # to bound memory
    for some, exact_ones in zip(*parts, strict=True):
        true = numbers(exact_ones)
        off += (numbers(some) - true).square().sum().item()
        norm += true.square().sum().item()
    return off**0.5 / max(norm**0.5, least_norm)


def difference(found: Tensor, exact: Tensor, least_norm: float = 1e-300) -> float:
    """Return the error in whatever order: rows may be permuted, and axes exchanged."""
    in_order = error(found, exact, least_norm)
    if in_order <= TOLERANCE or in_order == float("inf"):
        return in_order
    found, exact = numbers(found).sort().values, numbers(exact).sort().values
    return min(in_order, error(found, exact, least_norm))


def nearest(found: list[Tensor], exact: list[Tensor]) -> float:
    """Return the difference between our first tensor and the nearest of theirs."""
    if not found:
        return 0.0
    return min((difference(found[0], each) for each in exact), default=float("inf"))


def hash_of(weight: Tensor) -> int:
    """Return a sum over the numbers: the same if they are permuted, joined or split."""
    total = 0
    parts = dense(weight).detach().flatten().split(2**20)  # to bound memory
    for some in parts:
        bits = (numbers(some) + 0.0).view(torch.int64)  # -0.0 becomes 0.0
        bits = (bits ^ (bits >> 29)) * 0x1CE4E5B9BF58476D
        total += int(((bits ^ (bits >> 32)) * 0x14D049BB133111EB).sum().item())
    return total


def joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0), *(each.flatten() for each in tensors)])


def tensors_in(tree: Any) -> list[Tensor]:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return tensors or list(results_in(tree, set()))


def floats(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [each for each in tensors if each.is_floating_point()]
