"""Compile and export a model, so that one graph accepts any length.

    python examples/compile_and_export.py

This command prints how far the outputs of the graphs are from the eager model's.
`torch.export.save` writes an exported graph.
"""

from copy import deepcopy
from typing import Any

import einops
import torch

from tinyblock import Transformer


@torch.no_grad()
def main() -> None:
    model = Transformer(2, d_model=64, num_heads=4, max_seq_len=128)
    weight = next(model.parameters())
    x = torch.randn(2, 16, 64).to(weight)  # an export holds for one dtype and device
    seq = torch.export.Dim("seq", min=1, max=128)
    exported = torch.export.export(model, (x,), dynamic_shapes={"x": {1: seq}}).module()

    # For training, one graph serves all blocks, so that a deep model compiles fast.
    by_blocks = deepcopy(model)
    for block in by_blocks.layers:
        block.compile(fullgraph=True, dynamic=True)

    # For decoding, each token calls one graph. Without this line, torch traces einops'
    # parser, and guards it, in every layer.
    torch.compiler.allow_in_graph(einops.rearrange)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)

    graphs: dict[str, Any] = {
        "blocks": by_blocks,
        "model": compiled,
        "exported": exported,
    }
    for length in (7, 32):
        x = torch.randn(2, length, 64).to(weight)
        expected = model(x)
        for name, graph in graphs.items():
            difference = (graph(x) - expected).abs().max()
            print(f"{length} tokens, {name}: {difference:.0e}")


if __name__ == "__main__":
    main()
