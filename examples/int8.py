"""Quantize weights to int8 with torchao: a quarter of the bytes of float32.

    pip install torchao
    python examples/int8.py

This command prints the relative change of the output, about 0.01. All projections are
`nn.Linear`, so torchao can quantize them. Weights in int8 save memory. They save time
only with a kernel that reads int8. Ignore lines that say "Failed to load", which
are about torchao's GPU kernels.
"""

import copy

import torch
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from tinyblock import Transformer


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    model = Transformer(2, d_model=512, num_heads=8, max_seq_len=128)
    quantized = copy.deepcopy(model)
    quantize_(quantized, Int8WeightOnlyConfig())
    x = torch.randn(2, 16, 512)
    expected = model(x)
    change = (quantized(x) - expected).norm() / expected.norm()
    print(f"relative change of the output: {change:.4f}")


if __name__ == "__main__":
    main()
