"""Sequences of different lengths in one batch: padded left or right, or packed.

    python examples/packing.py

This command prints, for each layout, the largest difference from running each sequence
alone, about 1e-6.

Each function returns the `token_positions` and the `mask` to call a model with. Each
token then gets the output that it gets when its sequence stands alone. A mask is True
where a query may attend to a key. A padding mask `keep` of shape (batch, seq) becomes
`keep[:, None, :]`. Outputs of padding have no meaning: leave them out of the loss, for
example with target -100, which `F.cross_entropy` ignores.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tinyblock import Transformer


def padded_right(lengths: Tensor, seq: int) -> tuple[Tensor, Tensor]:
    """Return positions and mask of rows that begin with `lengths` tokens.

    Causal attention needs neither, because the padding comes last.
    BidirectionalAttention needs the mask.
    """
    token = torch.arange(seq, device=lengths.device)
    positions = token.expand(len(lengths), seq)
    keep = token < lengths[:, None]
    return positions, keep[:, None, :]


def padded_left(lengths: Tensor, seq: int) -> tuple[Tensor, Tensor]:
    """Return positions and mask of rows that end with `lengths` tokens.

    Prompts are padded in this way, so that the new tokens of all rows are aligned.
    """
    token = torch.arange(seq, device=lengths.device)
    distance = token - (seq - lengths)[:, None]  # negative for padding
    positions = distance.clamp(min=0)
    keep = distance >= 0
    return positions, keep[:, None, :]


def packed(document: Tensor) -> tuple[Tensor, Tensor]:
    """Return positions and mask of rows that consist of several documents.

    `document` has the number of each token's document: 0 0 0 1 1 2. A document ends
    where the number changes. Positions restart in each document: RoPE depends on
    differences of positions only, and restarting keeps them below max_seq_len.
    """
    changes = document.diff(dim=-1) != 0
    number = F.pad(changes.cumsum(dim=-1), (1, 0))  # counts from 0 in each row
    # The index of the first token with the same number.
    first = torch.searchsorted(number, number)
    positions = torch.arange(document.shape[-1], device=document.device) - first
    same_document = number[:, :, None] == number[:, None, :]
    return positions, same_document


@torch.no_grad()
def main() -> None:
    model = Transformer(2, d_model=64, num_heads=4, max_seq_len=128)
    short = torch.randn(3, 64)
    long = torch.randn(7, 64)
    padding = torch.randn(4, 64)
    lengths = torch.tensor([3, 7])

    x = torch.stack((torch.cat((short, padding)), long))
    out = model(x, *padded_right(lengths, seq=7))
    print_difference("padded on the right", model, [short, long], [out[0, :3], out[1]])

    x = torch.stack((torch.cat((padding, short)), long))
    out = model(x, *padded_left(lengths, seq=7))
    print_difference("padded on the left", model, [short, long], [out[0, 4:], out[1]])

    x = torch.cat((short, long))[None]
    document = torch.tensor([[0] * 3 + [1] * 7])
    out = model(x, *packed(document))
    print_difference("packed", model, [short, long], [out[0, :3], out[0, 3:]])


def print_difference(
    name: str, model: Transformer, sequences: list[Tensor], outputs: list[Tensor]
) -> None:
    """Print how far these outputs are from those of each sequence alone."""
    alone = torch.cat([model(sequence) for sequence in sequences])
    difference = (torch.cat(outputs) - alone).abs().max()
    print(f"{name}: {difference:.0e} from each sequence alone")


if __name__ == "__main__":
    main()
