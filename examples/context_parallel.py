"""Split one sequence over processes, a slice for each: context parallelism.

    torchrun --nproc-per-node 2 examples/context_parallel.py

This command prints the loss of each slice, their mean, the loss on one process, and how
far the gradients are from those on one process.

Every layer except attention treats each token separately. Attention gathers the keys
and values of all processes, as in Llama 3 (arXiv 2407.21783, section 3.3.2), and counts
positions from the start of the complete sequence. Later slices attend to more tokens,
so they have more work. Llama 3 gives each process two slices to balance the work.
"""

import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from language_model import LanguageModel
from parallel import distribute
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

from tinyblock import CausalMultiHeadSelfAttention


class ContextParallelAttention(CausalMultiHeadSelfAttention):
    """Attend to the tokens of all processes of `mesh`, which hold slices in order.

    All slices have the same length. A mask has a row for each token of this process,
    and a column for every token.
    """

    def __init__(self, *sizes: Any, mesh: DeviceMesh, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.mesh = mesh

    def project(
        self, x: Tensor, token_positions: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if token_positions is None and self.rope is not None:
            length = x.shape[-2]
            start = self.mesh.get_local_rank() * length
            token_positions = torch.arange(start, start + length, device=x.device)
        return super().project(x, token_positions)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        # The base class expects the queries of the last keys, so drop the keys of later
        # processes.
        end = (self.mesh.get_local_rank() + 1) * q.shape[-2]
        keys = self.gather(k)[..., :end, :]
        values = self.gather(v)[..., :end, :]
        if mask is not None:
            mask = mask[..., :end]
        return super().attend(q, keys, values, mask)

    def gather(self, own: Tensor) -> Tensor:
        """Return the tokens of all processes. Partial adds up their gradients."""
        tokens = DTensor.from_local(own, self.mesh, [Shard(-2)])
        return tokens.full_tensor(grad_placements=[Partial()])


def own_slice(sequence: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the slice of this process, of (..., seq); all have the same length."""
    return sequence.unflatten(-1, (mesh.size(), -1))[..., mesh.get_local_rank(), :]


def loss_of(model: LanguageModel, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = (int(os.environ["WORLD_SIZE"]),)
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("dp",))
    torch.manual_seed(0)  # the same weights and text on each process
    build = partial(LanguageModel, 50, 2, 64, 4, max_seq_len=128, device=device)
    whole = build()
    model = build(attention=partial(ContextParallelAttention, mesh=mesh))
    model.load_state_dict(whole.state_dict())
    distribute(model, mesh)  # averages all gradients over the slices

    text = torch.randint(50, (1, 129), device=device)
    # The target of a slice's last token is the first token of the next slice.
    tokens, targets = text[:, :-1], text[:, 1:]
    one = loss_of(whole, tokens, targets)
    own = loss_of(model, own_slice(tokens, mesh), own_slice(targets, mesh))
    one.backward()
    own.backward()

    mean = own.detach() / mesh.size()
    dist.all_reduce(mean)
    difference = 0.0
    weight: Any
    expected: Any
    for weight, expected in zip(model.parameters(), whole.parameters(), strict=True):
        error = (weight.grad.full_tensor() - expected.grad).norm()
        difference = max(difference, float(error / expected.grad.norm()))
    print(
        f"rank {dist.get_rank()}: {own:.4f}, mean {mean:.4f}, one process {one:.4f}, "
        f"gradients differ by {difference:.0e}"
    )


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
