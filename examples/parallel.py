"""Train a language model over processes: "dp" splits batches, and "tp" splits layers.

    torchrun --nproc-per-node 4 examples/parallel.py

This command trains on four processes, as two pairs. Each pair has batches of its own,
and each process of a pair holds half of every layer. Each process prints its loss at
the first and last step: the two processes of a pair print the same loss. With two
processes there is one pair. torch logs that a `_NormPartial` takes two collective
operations: these are the two axes of the norm of the gradients.

Three rules:
- All processes build the same weights: use the same seed. Processes of a pair pass the
  same batch.
- "tp" splits embedding and head by vocabulary, and "dp" shards them like the other
  weights. All parameters are then on one mesh, which `clip_grad_norm_` and a fused
  AdamW require.
- The distributed model returns the loss. If it returned logits, which are a view here,
  FSDP would warn.

With float16, also see `matrices_then_gains`.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from language_model import LanguageModel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tinyblock import parallelize


def processes() -> int:
    """Return how many processes torchrun has started."""
    if "WORLD_SIZE" not in os.environ:
        raise SystemExit(
            f"start this file with: torchrun --nproc-per-node 4 {sys.argv[0]}"
        )
    return int(os.environ["WORLD_SIZE"])


def mesh_along(axis: str) -> DeviceMesh:
    """Return a mesh of all processes along one axis, on GPUs if there are any."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(device, (processes(),), mesh_dim_names=(axis,))


class NextTokenLoss(nn.Module):
    """Return the mean cross-entropy of a language model."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, targets: Tensor, token_positions: Tensor | None = None
    ) -> Tensor:
        logits = self.model(tokens, token_positions)
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def distribute(training_model: NextTokenLoss, mesh: DeviceMesh) -> None:
    """Distribute a language model over the axes of the mesh, in place.

    `parallelize` distributes the Transformer, and this function embedding and head.
    """
    model = training_model.model
    axes = mesh.mesh_dim_names or ()
    parallelize(model.transformer, mesh)
    if "tp" in axes:
        by_vocabulary = {
            "token_embeddings": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tp"], by_vocabulary)
    if model.tied:
        # parallelize_module made two parameters of one. Tie them again before
        # fully_shard, which keeps ties.
        model.lm_head.weight = model.token_embeddings.weight
    data_axes = tuple(axis for axis in axes if axis != "tp")
    if data_axes:
        fully_shard(training_model, mesh=mesh[data_axes])


def matrices_then_gains(model: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
    """Return the parameters as groups for an optimizer: matrices, then gains of norms.

    GradScaler, which float16 requires, looks only at the first gradient to see whether
    gradients are sharded. "tp" shards matrices, and not gains: with gains first,
    processes would skip different steps.
    """
    matrices: list[nn.Parameter] = []
    gains: list[nn.Parameter] = []
    for parameter in model.parameters():
        group = gains if parameter.ndim < 2 else matrices
        group.append(parameter)
    return [{"params": matrices}, {"params": gains}]


def train_step(
    training_model: NextTokenLoss, optimizer: torch.optim.Optimizer, tokens: Tensor
) -> Tensor:
    """Train on a batch, and return the loss of this process before the step."""
    loss = training_model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    nn.utils.clip_grad_norm_(training_model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def main() -> None:
    if processes() % 2:
        raise SystemExit(f"the number of processes must be even, got {processes()}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = (processes() // 2, 2)
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("dp", "tp"))

    torch.manual_seed(0)  # the same weights on each process
    model = LanguageModel(
        vocabulary=50,
        num_layers=2,
        d_model=64,
        num_heads=4,
        max_seq_len=128,
        tied=True,
        device=device,
    )
    training_model = NextTokenLoss(model)
    distribute(training_model, mesh)
    groups = matrices_then_gains(training_model)
    optimizer = torch.optim.AdamW(groups, lr=3e-3, fused=True)

    torch.manual_seed(mesh["dp"].get_local_rank())  # the same batches in a pair
    losses = []
    for _ in range(20):
        starts = torch.randint(50, (8, 1), device=device)
        # Consecutive numbers; 0 follows 49.
        tokens = (starts + torch.arange(17, device=device)) % 50
        losses.append(train_step(training_model, optimizer, tokens))
    print(
        f"rank {dist.get_rank()}: loss {losses[0]:.3f}, "
        f"after {len(losses)} steps {losses[-1]:.3f}"
    )


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
