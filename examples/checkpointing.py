"""Activation checkpointing: keep the input of each block, and recompute the rest.

    python examples/checkpointing.py

This command prints how many bytes a forward pass keeps for backward, without and with
checkpointing. The gradients are the same. The backward pass recomputes the forward pass
of each block. On several devices, use `parallelize(model, mesh, recompute=True)`.
Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174).
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tinyblock import Transformer


def recompute(model: Transformer) -> None:
    """Change each block in place, so that it keeps only its input.

    This replaces the `forward` of each block, because a wrapper around the block would
    change the keys of the state dict. A second call changes nothing.
    """
    for block in model.layers:
        if isinstance(block.forward, partial):  # recomputed already
            continue
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Return how many bytes the forward pass keeps for backward.

    The weights are not counted.
    """
    weights = {weight.data_ptr() for weight in model.parameters()}
    sizes = {}

    def save(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        out = model(x)
    total = sum(sizes.values())
    # Keep `out` alive until here: freed memory could be reused at the same address.
    del out
    return total


def main() -> None:
    model = Transformer(4, d_model=64, num_heads=4, max_seq_len=128)
    x = torch.randn(2, 128, 64)
    before = saved_bytes(model, x)
    recompute(model)
    after = saved_bytes(model, x)
    print(f"kept for backward: {before} bytes, with checkpointing {after}")


if __name__ == "__main__":
    main()
