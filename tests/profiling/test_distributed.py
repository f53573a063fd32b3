"""The profiler on two processes."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from lab.sizes import Size
from lab.tables import show
from processes import Ended, run_as_torchrun
from profiles import event, machine
from profiling.collectives import Mesh, collectives_of
from profiling.distributed import summarize_overlap
from profiling.records import DistributedPoint, Profile
from profiling.report_distributed import distributed_report
from profiling.storage import read_profile

# Each process counts the most weight matrices of full size that it has while something is timed.
PROGRAM = """
import os, sys, weakref
sys.argv[0] = "scripts/profile_block.py"
from lab.sizes import Size
from profiling.cli import main
from profiles import ticking

build, tick = Size.build, ticking()
matrices, alive = [], []

def watched(*arguments):
    model = build(*arguments)
    matrices.extend(weakref.ref(weight) for weight in model.parameters() if weight.ndim == 2)
    return model

def clock():
    alive.append(sum(matrix() is not None for matrix in matrices))
    return tick()

Size.build = watched
size = ["--seq-len=8", "--d-model=16", "--num-heads=4", "--d-ff=24", "--num-layers=2"]
code = main(["--device=cpu", *size, "--rounds=2", "--tp=2", "--mode=MODE", "--json=profile.json"], clock)
with open(f"alive.{os.environ['RANK']}", "w") as file:
    file.write(str(max(alive)))
sys.exit(code)
"""
SIZE = Size(
    batch_size=1,
    seq_len=8,
    d_model=16,
    num_heads=4,
    num_kv_heads=4,
    d_head=4,
    d_ff=24,
    num_layers=2,
)


class Run:
    """A profile of two processes, and what each of them printed."""

    def __init__(self, mode: str, folder: Path) -> None:
        self.folder = folder
        ended = run_as_torchrun(PROGRAM.replace("MODE", mode), 2, folder)
        self.first: Ended = ended[0]
        self.second: Ended = ended[1]
        self.profile: Profile = read_profile(folder / "profile.json", "profile.json")

    @property
    def point(self) -> DistributedPoint:
        (point,) = self.profile.points
        assert isinstance(point, DistributedPoint)
        return point


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    return Run("step", tmp_path_factory.mktemp("step"))


def test_only_the_first_process_prints(step):
    assert (step.first.code, step.second.code) == (0, 0)
    assert step.first.out.count("| speedup |") == 1
    assert step.first.out.count("\n| forward ") == 1
    assert step.second.out == ""


def test_profile_records_the_command_and_the_mesh(step):
    command = step.profile.environment.command
    assert command.startswith("torchrun --nproc-per-node 2 scripts/profile_block.py")
    assert step.profile.settings.mesh == Mesh(tp=2)
    assert step.point.size == SIZE


def test_time_of_a_pass_is_that_of_the_slowest_process(step):
    assert list(step.point.whole) == ["forward", "train", "step"]
    for found in step.point.whole.values():
        assert len(found.of_ranks) == 2
        assert found.seconds.median >= max(found.of_ranks) > 0


def test_no_share_of_a_ceiling_that_is_too_low_is_shown(step, capsys):
    show(distributed_report(step.profile))
    assert "%, counting only the causal attention scores" in capsys.readouterr().out
    too_low = replace(step.profile, ceilings=machine(flops_per_second=1.0))
    show(distributed_report(too_low))
    assert "n/a: the measured ceilings are too low" in capsys.readouterr().out


def test_only_the_first_process_keeps_a_model_of_full_size(step):
    # It has 7 matrices in each of 2 blocks.
    alive = [(step.folder / f"alive.{rank}").read_text() for rank in range(2)]
    assert alive == ["14", "0"]


def test_overlap_and_other_programs_are_not_measured_on_a_cpu(step):
    assert step.point.overlap is None
    assert step.point.trust.others_share is None
    line = "Communication overlapped with computation: not measured on a CPU"
    assert line in step.first.out


def test_collectives_are_those_of_the_size(step):
    counts, bytes_of = Counter(), Counter()
    for name, calls in collectives_of(SIZE, Mesh(tp=2)).items():
        for call, count in calls.items():
            key = (name, call.axis, call.kind)
            counts[key] += count
            bytes_of[key] += 4 * count * call.elements
    found = {
        (each.pass_name, each.axis, each.kind): each for each in step.point.collectives
    }
    assert {key: each.count for key, each in found.items()} == counts
    assert {key: each.bytes for key, each in found.items()} == bytes_of
    assert all(each.seconds > 0 for each in found.values())


def test_memory_is_that_of_one_process(step):
    gains = 5 * 16
    matrices = 2 * (4 * 16 * 16 + 3 * 16 * 24)
    of_process = 4 * (gains + matrices // 2)
    memory = step.point.memory
    assert memory.parameters_bytes == of_process
    assert memory.gradients_bytes == of_process
    # Two moments, and a step count for each of 19 weights.
    assert memory.optimizer_state_bytes == 2 * of_process + 4 * 19


def test_forward_has_only_its_own_collectives(tmp_path):
    point = Run("forward", tmp_path).point
    assert list(point.whole) == ["forward"]
    assert {each.pass_name for each in point.collectives} == {"forward"}


def test_overlap_is_the_time_of_collectives_in_which_another_kernel_runs():
    gather = event("ncclDevKernel_AllGather_RING_LL", 0, 30)
    scatter = event("ncclDevKernel_ReduceScatter_LL", 50, 60)
    # The second one runs beside both the gather and the first one.
    others = [event("gemm", 10, 25), event("add", 20, 40)]
    found = summarize_overlap([gather, *others, scatter])
    assert found is not None
    assert found.collective_seconds == pytest.approx(40e-6)
    assert found.hidden_seconds == pytest.approx(20e-6)


def test_overlap_without_collectives_is_not_known():
    assert summarize_overlap([event("gemm", 10, 25)]) is None
