"""Put sequences of different lengths into one batch: pad them, or pack them.

    python examples/packing.py

This command prints the largest difference from running each sequence alone. Both
functions return `token_positions` and `mask`, with which you call a model. Padding on
the right needs neither, because causal attention never looks ahead. Outputs at padding
have no meaning, so leave them out of the loss, for example with the target -100.
"""

import torch
from torch import Tensor

from tinyblock import Transformer


def padded_left(lengths: Tensor, seq: int) -> tuple[Tensor, Tensor]:
    """Return positions and mask of rows that end with `lengths` tokens."""
    padding = seq - lengths[:, None]
    position = torch.arange(seq, device=lengths.device) - padding  # negative: padding
    return position.clamp(min=0), (position >= 0)[:, None, :]


def packed(document: Tensor) -> tuple[Tensor, Tensor]:
    """Return positions and mask of rows of documents, such as 0 0 0 1 1 2."""
    same_document = document[:, :, None] == document[:, None, :]
    positions = same_document.tril().sum(-1) - 1  # earlier tokens of the document
    return positions, same_document


@torch.no_grad()
def main() -> None:
    model = Transformer(2, d_model=64, num_heads=4, max_seq_len=128)
    short, long, padding = torch.randn(14, 64).split((3, 7, 4))
    alone = torch.cat((model(short), model(long)))

    x = torch.stack((torch.cat((padding, short)), long))
    out = model(x, *padded_left(torch.tensor([3, 7]), seq=7))
    out = torch.cat((out[0, 4:], out[1]))
    print(f"padded on the left: {(out - alone).abs().max():.0e}")

    x = torch.cat((short, long))[None]
    out = model(x, *packed(torch.tensor([[0] * 3 + [1] * 7])))
    print(f"packed: {(out[0] - alone).abs().max():.0e}")


if __name__ == "__main__":
    main()
