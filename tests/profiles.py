"""What tests of profiles share: a clock, the events of a profiler, and profiles that were run or made up."""

import io
import itertools
import json
import random
import re
from contextlib import redirect_stdout
from types import SimpleNamespace

import torch
from lab.environment import Environment
from lab.machine import Ceilings
from lab.timing import Spread
from profiling.cli import main
from profiling.records import (
    HeldMemory,
    Memory,
    Point,
    Profile,
    Settings,
    Trust,
)
from profiling.samples import (
    Samples,
    optimizer_record,
    overhead_of,
    part_records,
    sums_of_parts,
    whole_record,
    with_backward,
)
from profiling.storage import read_profile

TINY = [
    "--device=cpu",
    "--batch-size=2",
    "--seq-len=6",
    "--d-model=16",
    "--num-heads=4",
    "--num-kv-heads=2",
]
TINY += ["--d-ff=24", "--rounds=2"]
ENVIRONMENT = Environment(
    date="2026-01-01T00:00:00+00:00",
    command="python scripts/profile_block.py",
    commit="abc",
    seed=0,
    tinyblock="1",
    torch="2",
    python="3",
    os="Linux",
    cpu="a CPU",
    threads=1,
    device="a CPU",
    cuda=None,
    driver=None,
    cudnn=None,
    norm_kernels=None,
    float32_matmul_precision="highest",
)


def ticking():
    """Return a clock by which everything takes 1 to 2 s, however busy the machine is, so that no call is repeated."""
    draw = random.Random(0)
    return itertools.accumulate(draw.uniform(1, 2) for _ in itertools.count()).__next__


def event(name, start, end, device="CUDA", annotation=False):
    """Return an event as torch.profiler gives it, with its times in microseconds."""
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start, end=end),
        device_type=SimpleNamespace(name=device),
        is_user_annotation=annotation,
    )


def profile(folder, *options, code=0):
    """Run the profiler in this process, and return what it wrote: the profile, the picture's texts, and the report."""
    path = folder / "profile.json"
    picture = folder / "plot.svg"
    with redirect_stdout(io.StringIO()) as out:
        assert main([*TINY, *options, f"--json={path}"], ticking()) == code
    texts = []
    if picture.exists():
        # Letters are drawn as curves, and each text stands in a comment before its curves.
        texts = re.findall("<!-- (.*) -->", picture.read_text())
    return SimpleNamespace(
        profile=read_profile(path, "profile"),
        document=json.loads(path.read_text()),
        texts=texts,
        out=out.getvalue(),
        folder=folder,
    )


def steady(seconds):
    """Return a spread of samples that do not vary."""
    return Spread(seconds, seconds, seconds, 5)


def machine(flops_per_second=1e9, bytes_per_second=1e8):
    """Return ceilings that do not vary."""
    return Ceilings(
        flops_per_second=steady(flops_per_second),
        bytes_per_second=steady(bytes_per_second),
        sustained_flops_per_second=flops_per_second,
        product_size=1024,
        copy_bytes=2**20,
    )


def samples_of(size, mode, seconds, whole, smallest, rounds=5):
    """Return samples that do not vary.

    Args:
        size: whose parts they are.
        mode: which passes there are; backward takes twice as long as forward, and AdamW 5 s.
        seconds: of the forward pass of each part, or of the parts by their names.
        whole: of the forward pass of the whole.
        smallest: of the forward pass of the same calls on a tiny input.
        rounds: number of samples.
    """
    forward = {"whole": whole, "smallest": smallest}
    for name in size.part_costs(4):
        forward[name] = seconds[name] if isinstance(seconds, dict) else seconds
    samples = {}
    for name, time in forward.items():
        samples[name, "forward"] = [time] * rounds
        if mode != "forward":
            samples[name, "train"] = [3 * time] * rounds
    if mode == "step":
        samples["whole", "step"] = [3 * whole + 10] * rounds
        samples["smallest", "step"] = [3 * smallest + 1] * rounds
        samples["AdamW", "optimizer"] = [5.0] * rounds
    return samples


def point_of(size, samples, gpu_seconds=None):
    """Return the point that is made of samples, with some memory."""
    found = Samples(with_backward(samples), with_backward(gpu_seconds or {}))
    parts = part_records(found, size, 4)
    held = HeldMemory(400, None, None, 100)
    return Point(
        size=size,
        parts=parts,
        whole=whole_record(found, size, 4),
        optimizer=optimizer_record(found, size, 4),
        sum_of_parts=sums_of_parts(found, parts),
        overhead=overhead_of(found),
        compilation=None,
        attention_kernel="flash",
        memory=Memory(held, 500, None, ()),
        kernels=None,
        trust=Trust(0.0, 0.0, 0.0, 0.0),
    )


def profile_of(*points, mode="forward", ceilings=None, **settings):
    """Return a profile of points that were measured on a CPU."""
    return Profile(
        environment=ENVIRONMENT,
        settings=Settings(torch.device("cpu"), torch.float32, mode, **settings),
        ceilings=ceilings or machine(),
        datasheet=None,
        points=points,
        finished=True,
    )
