"""Pipeline parallelism: each process holds a stage, which is some consecutive layers.

    torchrun --nproc-per-node 2 examples/pipeline.py

This command trains the layers to return their input. The last process prints the loss
of each step.

Each stage passes its outputs to the next. Each batch is cut into four microbatches, so
that the stages work at the same time on different ones. Every process builds all
layers, and keeps those of its stage. In a language model, the first stage also embeds
the tokens, and the last stage also has the head.

The keys in the state dict begin at `layers.0` on each process; `state_of_stage` gives
them the names that they have in the whole model, for saving.
Source: Huang et al., "GPipe" (arXiv 1811.06965), whose schedule this is.
"""

import torch
import torch.distributed as dist
from parallel import mesh_along
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from tinyblock import Transformer

MICROBATCHES = 4


def remove_other_stages(model: Transformer, rank: int, stages: int) -> None:
    """Remove all layers except those of stage `rank`.

    The last stage also keeps the final norm.

    Raises:
        ValueError: the number of stages does not divide the number of layers.
    """
    if len(model.layers) % stages:
        raise ValueError(
            f"the number of layers must be a multiple of the {stages} stages, "
            f"got {len(model.layers)}: start another number of processes"
        )
    size = len(model.layers) // stages
    model.layers = model.layers[rank * size : (rank + 1) * size]
    if rank < stages - 1:
        model.ln_final = nn.Identity()


def state_of_stage(stage: Transformer, rank: int) -> dict[str, Tensor]:
    """Return the weights of stage `rank` under their names in the whole model."""
    size = len(stage.layers)
    state = {}
    for name, weight in stage.state_dict().items():
        if name.startswith("layers."):
            _, number, rest = name.split(".", maxsplit=2)
            name = f"layers.{rank * size + int(number)}.{rest}"
        state[name] = weight
    return state


def train(mesh: DeviceMesh) -> list[Tensor]:
    """Train the layers to return their input.

    The last stage returns the loss of each step, and the others return an empty list.
    """
    rank = mesh.get_local_rank()
    stages = mesh.size()
    device = torch.device(mesh.device_type)
    torch.manual_seed(0)  # the same weights and batches on each process
    model = Transformer(4, d_model=64, num_heads=4, max_seq_len=128, device=device)
    remove_other_stages(model, rank, stages)
    stage = PipelineStage(model, rank, stages, device, group=mesh.get_group())
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(model.parameters())

    torch.manual_seed(1)
    losses = []
    for _ in range(2):
        x = torch.randn(8, 16, 64, device=device)
        inputs = (x,) if rank == 0 else ()  # the others get theirs from a stage
        of_microbatches: list[Tensor] = []  # filled on the last stage
        schedule.step(*inputs, target=x, losses=of_microbatches)
        if of_microbatches:
            losses.append(torch.stack(of_microbatches).mean())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main() -> None:
    losses = train(mesh_along("pp"))
    for step, loss in enumerate(losses):
        print(f"step {step}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
