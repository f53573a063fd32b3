"""Context parallelism: one sequence is split over processes, a slice for each.

    torchrun --nproc-per-node 2 examples/context_parallel.py

This command computes loss and gradients of one sequence of 128 tokens. Each process
prints the loss of its tokens, the mean over the processes, and the loss on one process,
which is equal. It also prints how far gradients are from those of one process, about
1e-8.

Every layer except attention treats each token separately, so it needs no change.
Attention gathers the keys and values of all processes, and hides later positions.
Shared key heads make these tensors small. Llama 3 was trained in this way (arXiv
2407.21783, section 3.3.2), because gathered keys allow any mask, such as that of packed
documents. torch has `torch.distributed.tensor.experimental.context_parallel`, which
replaces SDPA inside a context. In torch 2.13 it is a prototype that accepts no mask in
SDPA and does not run on a CPU, so this file does not use it.

- `parallelize` distributes the weights over "dp". Each process passes its slice of the
  tokens, and their positions. The axis is called "dp" because gradients are averaged
  over it, as in data parallelism.
- Take targets before slicing: the target of the last token of a slice is the first
  token of the next slice.
- With slices of the same size, the mean gradient of the mean loss of each slice is the
  gradient of the mean loss of the sequence.
- On n processes, the mask of each has seq / n rows and seq columns, and each holds all
  seq keys and values of a layer, repeated for every query head.
  `parallelize(..., recompute=True)` stores those of one layer at a time.
- SDPA computes masked scores, too, so all processes have the same work. A kernel that
  skips them requires balanced slices, so Llama 3 gives each process two chunks, one
  from the start and one from the end of the sequence.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from attention_variants import attend_where, require_mask
from language_model import LanguageModel
from parallel import NextTokenLoss, distribute, mesh_along
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from tinyblock import CausalMultiHeadSelfAttention


class ContextParallelAttention(CausalMultiHeadSelfAttention):
    """Attend from the tokens of this process to earlier ones, on any process.

    `mesh` has one axis, whose processes hold slices of the same length, in order. A
    `mask` has a row for each token of this process, and a column for each token of the
    sequence; it is combined with the causal mask.
    """

    def __init__(
        self, d_model: int, num_heads: int, *, mesh: DeviceMesh, **options: Any
    ) -> None:
        super().__init__(d_model, num_heads, **options)
        self.mesh = mesh

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        require_mask(mask, q.shape[-2], q.shape[-2] * self.mesh.size())
        k = gather_tokens(k, self.mesh)
        v = gather_tokens(v, self.mesh)
        position = torch.arange(k.shape[-2], device=q.device)
        own_position = own_slice(position, self.mesh)
        causal = own_position[:, None] >= position
        return attend_where(q, k, v, causal if mask is None else causal & mask)


def gather_tokens(own: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the tokens of all processes, in order.

    `own` has shape (..., tokens, size). `DTensor.full_tensor` has gradients, and
    `torch.distributed.all_gather` has none. `torch.distributed.tensor`, where DTensor
    is, requires torch 2.5.
    """
    tokens = DTensor.from_local(own, mesh, [Shard(-2)])
    # Each process computes the part of the gradient that its own queries cause.
    # Partial adds the parts up.
    return tokens.full_tensor(grad_placements=[Partial()])


def own_slice(sequence: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the slice of this process of a sequence of shape (..., seq).

    Raises:
        ValueError: the processes do not divide the sequence.
    """
    seq = sequence.shape[-1]
    count = mesh.size()
    if seq % count:
        raise ValueError(
            f"seq must be a multiple of {count} processes, got {seq}: pad it"
        )
    return sequence.chunk(count, dim=-1)[mesh.get_local_rank()]


def mean_loss(training_model: NextTokenLoss, text: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the mean loss over the tokens of this process."""
    tokens, targets = text[:, :-1], text[:, 1:]
    positions = torch.arange(tokens.shape[-1], device=text.device)
    return training_model(
        own_slice(tokens, mesh), own_slice(targets, mesh), own_slice(positions, mesh)
    )


def main() -> None:
    mesh = mesh_along("dp")
    device = mesh.device_type
    build = partial(
        LanguageModel,
        vocabulary=50,
        num_layers=2,
        d_model=64,
        num_heads=4,
        num_kv_heads=2,
        max_seq_len=128,
        device=device,
    )
    torch.manual_seed(0)  # the same weights on each process
    attention = partial(ContextParallelAttention, mesh=mesh)
    training_model = NextTokenLoss(build(attention=attention))
    distribute(training_model, mesh)
    text = torch.randint(50, (1, 129), device=device)
    own = mean_loss(training_model, text, mesh)
    own.backward()
    total = own.detach().clone()
    dist.all_reduce(total)

    torch.manual_seed(0)
    one_process = NextTokenLoss(build())
    expected = one_process(text[:, :-1], text[:, 1:])
    expected.backward()
    difference = 0.0
    pairs = zip(training_model.parameters(), one_process.parameters(), strict=True)
    for parameter, reference in pairs:
        gradient: Any = parameter.grad
        error = (gradient.full_tensor() - reference.grad).abs().max()
        difference = max(difference, float(error))
    print(
        f"rank {dist.get_rank()}: loss of its tokens {own:.4f}, "
        f"of all {total / mesh.size():.4f}, on one process {expected:.4f}; "
        f"gradients differ by {difference:.0e}"
    )


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
