"""LoRA over several processes: adapters are trained on batches of each process, and gathered at the end.

    torchrun --nproc-per-node 2 examples/parallel_lora.py

Add the adapters before `parallelize`, and use the axis "dp" only: no rule splits adapters over "tp". Each process ends
with the full state dict of the adapters, which is small. It prints how many matrices of adapters were trained.
"""

from typing import Any

import torch
import torch.distributed as dist
from lora import add_adapters, train_step, trained_parameters
from parallel import mesh_along
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh

from tinyblock import Transformer, parallelize


def train(mesh: DeviceMesh) -> dict[str, Any]:
    """Train adapters, and return all of them on each process."""
    torch.manual_seed(0)  # the same weights on each process
    model = add_adapters(
        Transformer(
            2, d_model=64, num_heads=4, max_seq_len=128, device=mesh.device_type
        )
    )
    parallelize(model, mesh)

    optimizer = torch.optim.AdamW(trained_parameters(model))
    torch.manual_seed(mesh.get_local_rank())  # another batch on each process
    for _ in range(2):
        train_step(model, optimizer, torch.randn(4, 16, 64, device=mesh.device_type))

    options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    return get_model_state_dict(model, options=options)


def main() -> None:
    adapters = train(mesh_along("dp"))
    print(f"rank {dist.get_rank()}: trained {len(adapters)} matrices of adapters")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
