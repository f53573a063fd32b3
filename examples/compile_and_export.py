"""Compile and export a model, each as one graph that accepts any length.

    python examples/compile_and_export.py

This command prints how far the outputs of both graphs are from those of the model.
Shape checks do not run in the graphs. `torch.export.save` writes an exported graph.
"""

import torch

from tinyblock import Transformer


@torch.no_grad()
def main() -> None:
    model = Transformer(2, d_model=64, num_heads=4, max_seq_len=128)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)

    weight = next(model.parameters())
    x = torch.randn(2, 16, 64).to(weight)  # an export holds for one dtype and device
    seq = torch.export.Dim("seq", min=1, max=128)
    exported = torch.export.export(model, (x,), dynamic_shapes={"x": {1: seq}}).module()

    for length in (7, 32):
        x = torch.randn(2, length, 64).to(weight)
        expected = model(x)
        for name, graph in (("compiled", compiled), ("exported", exported)):
            difference = (graph(x) - expected).abs().max()
            print(f"{length} tokens, {name}: {difference:.0e}")


if __name__ == "__main__":
    main()
