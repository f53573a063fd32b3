"""Compile the blocks of a model, and export it: one graph each, for any length.

    python examples/compile_and_export.py

This command prints how far the outputs of the graphs are from the eager model's.
`torch.export.save` writes an exported graph. static_cache.py compiles a whole model.
"""

from copy import deepcopy

import torch

from tinyblock import Transformer


@torch.no_grad()
def main() -> None:
    model = Transformer(2, d_model=64, num_heads=4, max_seq_len=128)
    weight = next(model.parameters())
    x = torch.randn(2, 16, 64).to(weight)  # an export holds for one dtype and device
    seq = torch.export.Dim("seq", min=1, max=128)
    exported = torch.export.export(model, (x,), dynamic_shapes={"x": {1: seq}}).module()

    # One graph serves all blocks, so that a deep model compiles fast.
    compiled = deepcopy(model)
    for block in compiled.layers:
        block.compile(fullgraph=True, dynamic=True)

    for length in (7, 32):
        x = torch.randn(2, length, 64).to(weight)
        expected = model(x)
        for name, graph in (("compiled", compiled), ("exported", exported)):
            difference = (graph(x) - expected).abs().max()
            print(f"{length} tokens, {name}: {difference:.0e}")


if __name__ == "__main__":
    main()
