"""LoRA over several processes: each process trains on its own batches.

    torchrun --nproc-per-node 2 examples/parallel_lora.py

Each process prints how many matrices of adapters were trained. The first process saves
them in peft's format, loads them into a new model, and prints whether they are equal.

Add the adapters before `parallelize`, and use the axis "dp" only: no rule splits
adapters over "tp". After training, each process gathers the full state dict of the
adapters, which is small.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lora import add_adapters, train_step, trained_parameters
from parallel import mesh_along
from peft import PeftModel, get_peft_model_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh

from tinyblock import Transformer, parallelize


def build(device: str) -> Transformer:
    torch.manual_seed(0)  # the same weights on each process
    return Transformer(2, d_model=64, num_heads=4, max_seq_len=128, device=device)


def train(mesh: DeviceMesh) -> tuple[PeftModel, dict[str, Any]]:
    """Train adapters, and return the model and the full adapters on each process."""
    model = add_adapters(build(mesh.device_type))
    parallelize(model, mesh)

    optimizer = torch.optim.AdamW(trained_parameters(model))
    torch.manual_seed(mesh.get_local_rank())  # another batch on each process
    for _ in range(2):
        train_step(model, optimizer, torch.randn(4, 16, 64, device=mesh.device_type))

    options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    return model, get_model_state_dict(model, options=options)


def save(model: PeftModel, adapters: dict[str, Any], folder: str | Path) -> None:
    """Write adapters as `PeftModel.from_pretrained` reads them, from one process."""
    model.save_pretrained(folder, state_dict=adapters)


def is_restored(adapters: dict[str, Any], folder: str | Path, device: str) -> bool:
    """Return whether a new model loads equal adapters from the folder."""
    loaded = PeftModel.from_pretrained(build(device), folder)
    saved = get_peft_model_state_dict(loaded)
    expected = get_peft_model_state_dict(loaded, state_dict=adapters)
    return saved.keys() == expected.keys() and all(
        torch.equal(saved[name], expected[name]) for name in saved
    )


def main() -> None:
    mesh = mesh_along("dp")
    model, adapters = train(mesh)
    rank = dist.get_rank()
    print(f"rank {rank}: trained {len(adapters)} matrices of adapters")
    if rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            save(model, adapters, folder)
            equal = is_restored(adapters, folder, mesh.device_type)
            print(f"rank 0: loaded adapters are equal: {equal}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
