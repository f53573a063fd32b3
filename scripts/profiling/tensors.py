"""Which tensors a value has, and in which storages they lie."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

_SPARSE_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_SPARSE_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def result_in(output: Any) -> Tensor:
    """Return the tensor at which backward starts: the first that has a gradient.

    Without gradients, return the first tensor. The output of a model may be any object
    with tensors in its attributes.

    Raises:
        ValueError: there is no tensor.
    """
    tensors = list(_tensors_of(output, set()))
    if not tensors:
        kind = type(output).__name__
        raise ValueError(f"the model must return a tensor, or several, got {kind}")
    return next((each for each in tensors if each.requires_grad), tensors[0])


def _tensors_of(value: Any, seen: set[int]) -> Iterator[Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, nn.Module) or id(leaf) in seen:
            continue
        elif is_dataclass(leaf):
            seen.add(id(leaf))
            values = [getattr(leaf, field.name) for field in fields(leaf)]
            yield from _tensors_of(values, seen)
        elif hasattr(leaf, "__dict__"):
            seen.add(id(leaf))
            yield from _tensors_of(list(vars(leaf).values()), seen)


def stored_in(value: Any) -> list[Tensor]:
    """Return the tensors that have a storage, also inside of those that have none.

    A sparse tensor and a wrapper (torchao's int8 weights, DTensor) consist of others.
    """
    found = []
    for each in tensors_in(value):
        if is_traceable_wrapper_subclass(each):
            names, _ = each.__tensor_flatten__()
            found += stored_in([getattr(each, name) for name in names])
        elif each.layout == torch.sparse_coo:
            found += [each._indices(), each._values()]
        elif each.layout in _SPARSE_ROWS:
            found += [each.crow_indices(), each.col_indices(), each.values()]
        elif each.layout in _SPARSE_COLUMNS:
            found += [each.ccol_indices(), each.row_indices(), each.values()]
        elif each.layout == torch.strided and not each.is_nested:
            found.append(each)
    return found


def storage_of(tensor: Tensor) -> int:
    """Return what is equal for tensors that share their storage."""
    return tensor.untyped_storage()._cdata


def stored_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def distinct_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor in memory. An expanded axis repeats the same ones."""
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    sizes = [size for size, stride in axes if stride]
    return min(tensor.element_size() * prod(sizes), stored_bytes(tensor))


def nbytes(value: Any) -> int:
    return sum(tensor.nbytes for tensor in stored_in(value))
