"""Measure a model that several processes share.

torchrun --nproc-per-node 2 scripts/profile_block.py --tp 2
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from lab.machine import environment
from lab.sizes import Size
from lab.timing import Spread, wall_sampler
from torch.distributed.device_mesh import init_device_mesh

from tinyblock import parallelize

from .kernels import record_run
from .measure import Settings, Subject
from .report import kernel_table, time_line


def profile(size: Size, settings: Settings, *, dp: int, tp: int) -> None:
    """Measure on all processes, and print the report on the first one."""
    kind = settings.device.type
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    axes = {name: count for name, count in (("dp", dp), ("tp", tp)) if count > 1}
    mesh = init_device_mesh(kind, tuple(axes.values()), mesh_dim_names=tuple(axes))

    def build(*place: Any) -> Any:
        return parallelize(size.build(*place), mesh, compile=settings.compile)

    subject = Subject((build, size.shape), settings)
    # One run in each sample, so that all processes have equally many.
    sample = wall_sampler(subject.run_parts, least_seconds=0.0)
    took = Spread.of([sample() for _ in range(settings.rounds)])
    recording = record_run(subject.run_and_clear)
    if dist.get_rank() == 0:
        print(environment(settings.device))
        processes = f"{dist.get_world_size()} processes"
        print(f"{size.title}; {settings.describe()}; {processes}\n")
        print(time_line(took, dp * size.tokens))
        calls = [f"{count} {name}" for name, count in recording.collectives.items()]
        print(f"Collectives of this process: {', '.join(calls)}")
        print(kernel_table(recording))
    dist.destroy_process_group()
