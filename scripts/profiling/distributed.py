"""Measure a model that several processes share.

torchrun --nproc-per-node 2 scripts/profile_block.py --tp 2
"""

import os

import torch
import torch.distributed as dist
from lab.machine import environment
from lab.sizes import Size
from lab.timing import Spread, clock
from torch.distributed.device_mesh import init_device_mesh

from tinyblock import parallelize

from .kernels import record_run
from .measure import Settings
from .report import kernel_table, time_line


def profile(size: Size, settings: Settings, *, dp: int, tp: int) -> None:
    """Measure on all processes, and print the report on the first one."""
    device, dtype = settings.device, settings.dtype
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    axes = {name: count for name, count in (("dp", dp), ("tp", tp)) if count > 1}
    shape = tuple(axes.values())
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=tuple(axes))
    torch.manual_seed(0)
    model = parallelize(size.build(device, dtype), mesh, compile=settings.compile)
    x = torch.randn(size.batch_size // dp, size.seq_len, size.d_model)
    x = x.to(device, dtype).requires_grad_(settings.train)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)

    def run() -> None:
        out = model(x)
        # FSDP reduces the gradients of .backward(), and not of autograd.grad.
        if settings.train:
            out.backward(torch.ones_like(out))
        if settings.mode == "step":
            optimizer.step()
        optimizer.zero_grad()
        x.grad = None

    def sample() -> float:
        dist.barrier()  # all processes start together
        start = clock()
        run()
        return clock() - start

    for _ in range(3):
        run()  # allocates, and compiles what is to be compiled
    took = Spread.of([sample() for _ in range(settings.rounds)])
    recording = record_run(run)
    if dist.get_rank() == 0:
        print(environment(device))
        processes = f"{dist.get_world_size()} processes"
        print(f"{size.title}; {settings.describe()}; {processes}\n")
        print(time_line(settings.mode, took, size.tokens))
        calls = [f"{count} {name}" for name, count in recording.collectives.items()]
        print(f"Collectives of this process: {', '.join(calls)}")
        print(kernel_table(recording))
    dist.destroy_process_group()
