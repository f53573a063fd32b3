"""Train a model on several processes: "dp" splits batches, and "tp" splits layers.

    torchrun --nproc-per-node 4 examples/parallel.py

Four processes train as two pairs. Each pair has its own batches, and each process of a
pair holds half of every layer. All processes build the same weights from the same seed.
This command prints the losses of each process, which are equal within a pair. Ignore
torch's warning that two sequential all_reduce operations are suboptimal.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from language_model import LanguageModel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)

from tinyblock import parallelize


def distribute(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Distribute the Transformer, embedding and head over the mesh, in place.

    The vocabulary is split over "tp", so that all weights are on one mesh, which
    `clip_grad_norm_` and a fused AdamW require.
    """
    axes = mesh.mesh_dim_names or ()
    parallelize(model.transformer, mesh)
    if "tp" in axes:
        parts = {
            "token_embeddings": RowwiseParallel(input_layouts=Replicate()),
            # A DTensor, as the weights of a tied head are.
            "transformer": PrepareModuleOutput(
                output_layouts=Replicate(),
                desired_output_layouts=Replicate(),
                use_local_output=False,
            ),
        }
        if model.lm_head is not None:
            parts["lm_head"] = ColwiseParallel(use_local_output=False)
        parallelize_module(model, mesh["tp"], parts)
    data_axes = tuple(axis for axis in axes if axis != "tp")
    if data_axes:
        fully_shard(model, mesh=mesh[data_axes])
    if "tp" in axes:  # after FSDP's hooks, which would warn of a view
        model.register_forward_hook(gather)


def gather(_model: nn.Module, _args: object, logits: DTensor) -> Tensor:
    return logits.full_tensor()


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = (int(os.environ["WORLD_SIZE"]) // 2, 2)
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = LanguageModel(50, 2, 64, 4, max_seq_len=128, tied=True, device=device)
    distribute(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)

    torch.manual_seed(mesh["dp"].get_local_rank())  # the same batches in a pair
    for step in range(3):
        starts = torch.randint(50, (8, 1), device=device)
        tokens = (starts + torch.arange(17, device=device)) % 50
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {dist.get_rank()}, step {step}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
