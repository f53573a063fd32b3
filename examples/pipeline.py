"""Pipeline parallelism: each process holds a stage, which is some consecutive layers.

    torchrun --nproc-per-node 2 examples/pipeline.py

This command trains the layers to return their input. The last process prints the loss.
Each batch is cut into four microbatches, so that the stages work at the same time. In a
language model, the first stage also embeds the tokens, and the last one has the head.
Source: Huang et al., "GPipe" (arXiv 1811.06965), whose schedule this is.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from tinyblock import Transformer


class PassOn(nn.Module):
    def forward(self, x: Tensor, *_: object) -> Tensor:
        return x


def keep_stage(model: Transformer, rank: int, stages: int) -> None:
    """Replace the layers of other stages, so that the keys of the weights stay."""
    for number in range(len(model.layers)):
        if number * stages // len(model.layers) != rank:
            model.layers[number] = PassOn()
    if rank < stages - 1:
        model.ln_final = PassOn()


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    mesh = init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]),))
    rank, stages = mesh.get_rank(), mesh.size()
    torch.manual_seed(0)  # the same weights and batches on each process
    model = Transformer(4, d_model=64, num_heads=4, max_seq_len=128).to(device)
    keep_stage(model, rank, stages)
    stage = PipelineStage(model, rank, stages, device)
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(1)
    for step in range(3):
        x = torch.randn(8, 16, 64).to(device)
        losses: list[Tensor] = []  # filled on the last stage
        inputs = (x,) if rank == 0 else ()
        schedule.step(*inputs, target=x, losses=losses)
        if losses:
            print(f"last stage, step {step}: loss {torch.stack(losses).mean():.4f}")
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
