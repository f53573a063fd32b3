"""Train a language model over several processes: "dp" splits the batches, and "tp" splits each layer.

    torchrun --nproc-per-node 4 examples/parallel.py

trains on four processes, as two pairs. Each pair has batches of its own, and each process of a pair holds half of every
layer. It prints the loss of each process at the first and last step: the two processes of a pair print the same loss.
With two processes there is one pair.

Four rules:
- All processes build the same weights: use the same seed. Processes of a pair pass the same batch.
- "tp" splits embedding and head by vocabulary, and "dp" shards them like the other weights. All parameters are then on
  one mesh, which `clip_grad_norm_` and a fused AdamW require.
- The optimizer lists matrices before gains (the weights of norms). Over "tp", float16's `GradScaler` checks the first
  gradient only for sharding: with gains first, processes skip different steps.
- The distributed model returns the loss. If it returned logits, which are a view here, FSDP would warn.
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


def distribute(loss: NextTokenLoss, mesh: DeviceMesh) -> None:
    """Distribute the model, its embedding and its head over the axes of the mesh, in place, as `parallelize` does."""
    model = loss.model
    axes = mesh.mesh_dim_names or ()
    parallelize(model.transformer, mesh)
    if "tp" in axes:
        by_vocabulary = {
            "token_embeddings": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tp"], by_vocabulary)
    if model.tied:  # parallelize_module has separated them, and fully_shard keeps them
        model.lm_head.weight = model.token_embeddings.weight
    data_axes = tuple(axis for axis in axes if axis != "tp")
    if data_axes:
        fully_shard(loss, mesh=mesh[data_axes])


def matrices_then_gains(model: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
    """Return the parameters as groups for an optimizer, in the order that GradScaler requires over "tp"."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    gains = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    return [{"params": matrices}, {"params": gains}]


def train_step(
    loss: NextTokenLoss, optimizer: torch.optim.Optimizer, tokens: Tensor
) -> Tensor:
    """Train on a batch, and return the loss of this process before the step."""
    value = loss(tokens[:, :-1], tokens[:, 1:])
    value.backward()
    nn.utils.clip_grad_norm_(loss.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return value.detach()


def main() -> None:
    if processes() % 2:
        raise SystemExit(f"the number of processes must be even, got {processes()}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = (processes() // 2, 2)
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("dp", "tp"))

    torch.manual_seed(0)  # the same weights on each process
    model = LanguageModel(50, 2, 64, 4, max_seq_len=128, tied=True, device=device)
    loss = NextTokenLoss(model)
    distribute(loss, mesh)
    optimizer = torch.optim.AdamW(matrices_then_gains(loss), lr=3e-3, fused=True)

    torch.manual_seed(mesh["dp"].get_local_rank())  # the same batches in a pair
    losses = []
    for _ in range(20):
        starts = torch.randint(50, (8, 1), device=device)
        tokens = (starts + torch.arange(17, device=device)) % 50  # to count
        losses.append(train_step(loss, optimizer, tokens))
    print(
        f"rank {dist.get_rank()}: loss {losses[0]:.3f}, "
        f"after {len(losses)} steps {losses[-1]:.3f}"
    )


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
