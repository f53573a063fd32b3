"""The profiler on two processes: all of it in one launch."""

import json
from collections import Counter

import pytest
from lab.sizes import Size
from processes import run_as_torchrun
from profiles import event, undocumented
from profiling.collectives import Mesh, collectives_of
from profiling.compare import compare
from profiling.distributed import summarize_overlap

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


def test_profile_of_two_processes(tmp_path):
    first, second = run_as_torchrun(PROGRAM.replace("MODE", "step"), 2, tmp_path)
    document = json.loads((tmp_path / "profile.json").read_text())
    assert undocumented(document) == set()
    # Only the first process prints, and the slowest counts.
    assert (first.code, second.code) == (0, 0)
    assert first.out.count("speed-up") == first.out.count("\n| forward ") == 1
    assert second.out == ""
    assert document["environment"]["command"].startswith(
        "torchrun --nproc-per-node 2 scripts/profile_block.py"
    )
    assert document["settings"]["mesh"] == {"dp_replicate": 1, "dp": 1, "tp": 2}
    (point,) = document["points"]
    assert list(point["whole"]) == ["forward", "train", "step"]
    for record in point["whole"].values():
        assert record["seconds"]["median"] >= max(record["of_ranks"]) > 0
        assert record["efficiency"] == record["speed_up"]["median"] / 2
    assert (point["overlap"], point["trust"]["others_share"]) == (None, None)
    # While it is timed, the first process alone has all 7 matrices of each block, unsharded.
    assert [(tmp_path / f"alive.{rank}").read_text() for rank in range(2)] == [
        "14",
        "0",
    ]
    # Collectives and memory are those of the size.
    size = Size(**point["size"])
    assert all(record["seconds"] > 0 for record in point["collectives"])
    for key, figure in (
        ("count", lambda call: 1),
        ("bytes", lambda call: 4 * call.elements),
    ):
        counted = {
            (record["pass"], record["axis"], record["kind"]): record[key]
            for record in point["collectives"]
        }
        expected = Counter()
        for pass_, calls in collectives_of(size, Mesh(tp=2)).items():
            for call, count in calls.items():
                expected[pass_, call.axis, call.kind] += count * figure(call)
        assert counted == expected
    gains = 5 * 16
    of_process = 4 * (gains + (size.parameters - gains) // 2)
    assert (
        point["memory"]["parameters_bytes"]
        == point["memory"]["gradients_bytes"]
        == of_process
    )
    assert (
        point["memory"]["optimizer_state_bytes"] == 2 * of_process + 4 * 19
    )  # and as many step counts
    table = next(
        section for section in compare(document, document) if hasattr(section, "rows")
    )
    assert [row[:2] for row in table.rows] == [
        ["whole", "forward"],
        ["whole", "train"],
        ["whole", "step"],
    ]


def test_forward_of_two_processes_has_its_own_collectives_alone(tmp_path):
    run_as_torchrun(PROGRAM.replace("MODE", "forward"), 2, tmp_path)
    [point] = json.loads((tmp_path / "profile.json").read_text())["points"]
    assert (
        {record["pass"] for record in point["collectives"]}
        == set(point["whole"])
        == {"forward"}
    )


def test_overlap_is_the_time_of_collectives_in_which_another_kernel_runs():
    gather, scatter = (
        event("ncclDevKernel_AllGather_RING_LL", 0, 30),
        event("ncclDevKernel_ReduceScatter_LL", 50, 60),
    )
    others = [event("gemm", 10, 25), event("add", 20, 40)]  # the second beside both
    expected = {"collective_seconds": 40e-6, "hidden_seconds": 20e-6}
    assert summarize_overlap([gather, *others, scatter]) == pytest.approx(expected)
    assert summarize_overlap(others) is None
