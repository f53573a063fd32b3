"""Pack sequences of different lengths into one row, without padding.

    python examples/packing.py

This command prints the largest difference from running each sequence alone. Call a model
as `model(x, documents.positions, documents)`. Padding on the right needs neither, because
causal attention never looks ahead. To generate, language_model.py pads on the left.

A dense mask stores seq x seq entries for each row, and most kernels of a GPU do not take
one. With `attention=PackedAttention`, pass the `Documents` themselves as mask: on a GPU,
in half precision, torch's `varlen_attn` then computes nothing across documents.
To combine it with windows.py or sinks.py, derive from (PackedAttention, WindowAttention),
in this order. Such attention always gets the dense mask.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from tinyblock import CausalMultiHeadSelfAttention, Transformer


class Documents:
    """Documents one after another in each row, (batch, seq), such as 0 0 0 1 1 2.

    - `positions` count from the first token of each document.
    - `starts` are the first tokens of all documents of the batch, and its end, int32.
    - `longest` is the length of the longest document.
    """

    def __init__(self, numbers: Tensor) -> None:
        is_first = F.pad(numbers[:, 1:] != numbers[:, :-1], (1, 0), value=True)
        self.run = is_first.cumsum(-1)
        index = torch.arange(numbers.shape[1], device=numbers.device)
        self.positions = index - (index * is_first).cummax(-1).values
        starts = is_first.flatten().nonzero().flatten()
        self.starts = F.pad(starts, (0, 1), value=numbers.numel()).int()
        self.longest = int(self.positions.max()) + 1

    @property
    def mask(self) -> Tensor:
        """The dense mask, (batch, seq, seq), which any attention takes."""
        return self.run[:, :, None] == self.run[:, None, :]


class PackedAttention(CausalMultiHeadSelfAttention):
    """Causal attention whose mask may be Documents.

    Raises:
        ValueError: the Documents do not have the rows and the length of x.
    """

    is_last = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # The kernel would leave out what another class does in `attend`, such as a window.
        following = super().attend
        cls.is_last = following is CausalMultiHeadSelfAttention.attend

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        if not isinstance(mask, Documents):
            return super().attend(q, k, v, mask)
        require_fit(q, k, mask)
        if self.is_last and self.kernel_takes(q, v):
            return self.attend_by_kernel(q, k, v, mask)
        return super().attend(q, k, v, mask.mask)

    def attend_by_kernel(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Documents
    ) -> Tensor:
        return attend_packed(q, k, v, documents)

    def kernel_takes(self, q: Tensor, v: Tensor) -> bool:
        """Return whether varlen_attn supports the device, the dtype and the head size."""
        d_head = q.shape[-1]
        has_size = d_head == v.shape[-1] and d_head % 8 == 0 and d_head <= 256
        return q.is_cuda and q.dtype.itemsize == 2 and has_size


def require_fit(q: Tensor, k: Tensor, documents: Documents) -> None:
    """Raise a ValueError unless each token of q and k has a document."""
    # Before a kernel is chosen: varlen_attn would leave rows out, or read others.
    *batch, _, seq, _ = q.shape
    given = tuple(documents.run.shape)
    if (*batch, seq) != given or k.shape[-2] != seq:
        raise ValueError(
            f"Documents must have the shape (batch, seq) of x, {(*batch, seq)}, and keys "
            f"as many tokens, got {given} and {k.shape[-2]} keys"
        )


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    kernel: Callable[..., Any] = varlen_attn,
) -> Tensor:
    """Return causal attention within documents, (batch, heads, seq, d_head)."""
    in_one_row = "batch heads seq d_head -> (batch seq) heads d_head"
    out = kernel(
        rearrange(q, in_one_row),
        rearrange(k, in_one_row),
        rearrange(v, in_one_row),
        cu_seq_q=documents.starts,
        cu_seq_k=documents.starts,
        max_q=documents.longest,
        max_k=documents.longest,
        window_size=(-1, 0),  # all earlier tokens, and no later ones
        enable_gqa=k.shape[1] < q.shape[1],
    )
    rows = "(batch seq) heads d_head -> batch heads seq d_head"
    return rearrange(out, rows, batch=len(q))


@torch.no_grad()
def main() -> None:
    model = Transformer(
        2, d_model=64, num_heads=4, max_seq_len=128, attention=PackedAttention
    )
    short, long = torch.randn(10, 64).split((3, 7))
    alone = torch.cat((model(short), model(long)))
    x = torch.cat((short, long))[None]
    documents = Documents(torch.tensor([[0] * 3 + [1] * 7]))
    for name, mask in (("documents", documents), ("a dense mask", documents.mask)):
        out = model(x, documents.positions, mask)
        print(f"with {name}: {(out[0] - alone).abs().max():.0e}")


if __name__ == "__main__":
    main()
