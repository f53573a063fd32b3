"""The profiler on two processes: all of it in one launch."""

from collections import Counter
from types import SimpleNamespace

import pytest
from processes import run_as_torchrun
from profiles import event
from profiling.collectives import Mesh, collectives_of
from profiling.compare import compare
from profiling.distributed import summarize_overlap
from profiling.storage import read_profile

PROGRAM = """
import os, sys, weakref
sys.argv[0] = "scripts/profile_block.py"
from lab.sizes import Size
from profiling.cli import main
from profiles import ticking
build, tick, matrices, alive = Size.build, ticking(), [], []
def watched(*arguments):
    model = build(*arguments)
    matrices.extend(weakref.ref(weight) for weight in model.parameters() if weight.ndim == 2)
    return model
def clock():
    alive.append(sum(matrix() is not None for matrix in matrices))
    return tick()
Size.build = watched
options = ["--device=cpu", "--seq-len=8", "--d-model=16", "--num-heads=4", "--d-ff=24", "--num-layers=2", "--rounds=2"]
code = main([*options, "--tp=2", "--mode=MODE", "--json=profile.json"], clock)
open(f"alive.{os.environ['RANK']}", "w").write(str(max(alive)))
sys.exit(code)
"""


def run(mode, folder):
    """Run the profiler on two processes, and return both processes and the profile."""
    processes = run_as_torchrun(PROGRAM.replace("MODE", mode), 2, folder)
    return processes, read_profile(folder / "profile.json", "profile")


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    folder = tmp_path_factory.mktemp("step")
    processes, profile = run("step", folder)
    (point,) = profile.points
    return SimpleNamespace(
        processes=processes, profile=profile, point=point, folder=folder
    )


def test_only_the_first_process_prints(step):
    first, second = step.processes
    assert (first.code, second.code) == (0, 0)
    assert first.out.count("speed-up") == first.out.count("\n| forward ") == 1
    assert "Communication overlapped with computation: not measured" in first.out
    assert second.out == ""


def test_profile_has_the_mesh_and_the_command(step):
    command = step.profile.environment.command
    start = "torchrun --nproc-per-node 2 scripts/profile_block.py"
    assert command.startswith(start)
    assert step.profile.settings.mesh == Mesh(tp=2)


def test_slowest_process_counts(step):
    assert list(step.point.whole) == ["forward", "train", "step"]
    for each in step.point.whole.values():
        assert each.seconds.median >= max(each.of_ranks) > 0
        assert each.speed_up.median > 0
    assert step.point.overlap is None
    assert step.point.trust.others_share is None


def test_only_the_first_process_has_a_model_of_full_size_while_it_is_timed(step):
    # All 7 matrices of each block, unsharded.
    alive = [(step.folder / f"alive.{rank}").read_text() for rank in range(2)]
    assert alive == ["14", "0"]


def test_collectives_are_those_of_the_size(step):
    counts, sizes = Counter(), Counter()
    for name, calls in collectives_of(step.point.size, Mesh(tp=2)).items():
        for call, count in calls.items():
            counts[name, call.axis, call.kind] += count
            sizes[name, call.axis, call.kind] += count * 4 * call.elements
    records = step.point.collectives
    found = {(each.pass_name, each.axis, each.kind): each for each in records}
    assert {key: each.count for key, each in found.items()} == counts
    assert {key: each.bytes for key, each in found.items()} == sizes
    assert all(each.seconds > 0 for each in records)


def test_memory_is_that_of_one_process(step):
    size, memory = step.point.size, step.point.memory
    gains = 5 * 16
    of_process = 4 * (gains + (size.parameters - gains) // 2)
    assert memory.parameters_bytes == memory.gradients_bytes == of_process
    # Two moments, and a step count for each of the 19 parameters.
    assert memory.optimizer_state_bytes == 2 * of_process + 4 * 19


def test_profiles_of_two_processes_are_compared(step):
    table = compare(step.profile, step.profile)[-2]
    passes = [row[:2] for row in table.rows]
    names = ("forward", "train", "step")
    assert passes == [["Transformer", name] for name in names]


def test_forward_of_two_processes_has_only_its_own_collectives(tmp_path):
    _, profile = run("forward", tmp_path)
    (point,) = profile.points
    assert {each.pass_name for each in point.collectives} == {"forward"}
    assert list(point.whole) == ["forward"]


def test_overlap_is_the_time_of_collectives_in_which_another_kernel_runs():
    gather, scatter = (
        event("ncclDevKernel_AllGather_RING_LL", 0, 30),
        event("ncclDevKernel_ReduceScatter_LL", 50, 60),
    )
    others = [event("gemm", 10, 25), event("add", 20, 40)]  # the second beside both
    overlap = summarize_overlap([gather, *others, scatter])
    assert overlap.collective_seconds == pytest.approx(40e-6)
    assert overlap.hidden_seconds == pytest.approx(20e-6)
    assert summarize_overlap(others) is None
