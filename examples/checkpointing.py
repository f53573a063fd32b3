"""Activation checkpointing: keep the input of each block, and recompute the rest.

    python examples/checkpointing.py

This command prints how many bytes a forward pass keeps for backward, without and with
checkpointing. On several devices, use `parallelize(model, mesh, recompute=True)`.
Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174).
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tinyblock import Transformer


def recompute(model: Transformer) -> None:
    """Replace each block's forward. A wrapper would change the keys of the weights.

    A copy of the model recomputes its own blocks, because `block.forward` is a method.
    """
    block: Any
    for block in model.layers:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def kept_bytes(model: nn.Module, x: Tensor) -> int:
    """Return how many bytes the forward pass keeps for backward, weights included."""
    sizes = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()  # which several views may share
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(x)
    total = sum(sizes.values())
    del out  # until here it keeps its tensors, so that no address is used twice
    return total


def main() -> None:
    model = Transformer(4, d_model=64, num_heads=4, max_seq_len=128)
    x = torch.randn(2, 128, 64)
    print("kept for backward, weights included:", kept_bytes(model, x), "bytes")
    recompute(model)
    print("with checkpointing:", kept_bytes(model, x), "bytes")


if __name__ == "__main__":
    main()
