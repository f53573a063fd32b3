"""Activation checkpointing: save the input of each block, and compute the rest again in the backward pass.

    python examples/checkpointing.py

prints how many bytes a forward pass saves for the backward pass, without and with checkpointing. The gradients are the
same, and the forward pass is computed twice. On several devices, use `parallelize(model, mesh, recompute=True)`.
Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174).
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tinyblock import Transformer


def recompute(model: Transformer) -> None:
    """Let each block save only its input, in place. The keys of the state dict stay the same."""
    for block in model.layers:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Return how many bytes the forward pass saves for the backward pass, apart from the weights."""
    weights = {weight.data_ptr() for weight in model.parameters()}
    sizes = {}

    def save(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        out = model(x)
    total = sum(sizes.values())
    del out  # not earlier: it keeps the saved tensors, and other tensors would take their addresses
    return total


def main() -> None:
    model = Transformer(4, d_model=64, num_heads=4, max_seq_len=128)
    x = torch.randn(2, 128, 64)
    before = saved_bytes(model, x)
    recompute(model)
    after = saved_bytes(model, x)
    print(f"saved for the backward pass: {before} bytes, with checkpointing {after}")


if __name__ == "__main__":
    main()
