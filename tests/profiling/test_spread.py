"""The profiler on two processes: all of it in one launch."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from lab.sizes import Size
from processes import run_as_torchrun
from profiling import cli
from profiling.collectives import Mesh, collectives_of
from profiling.compare import compare

SCRIPTS = Path(__file__).parents[2] / "scripts"
TINY = ["--device=cpu", "--seq-len=8", "--d-model=16", "--num-heads=4", "--d-ff=24", "--num-layers=2", "--rounds=2"]

# What each of two processes does: profile; once all is written, the second fails.
PROGRAM = """
import sys, time
from pathlib import Path
sys.argv[0] = "scripts/profile_block.py"
from profiling import cli, spread
from lab.machine import Ceilings
from lab.processes import is_first
from lab.timing import Spread

def measure_spread(*args):
    point = spread.measure_spread(*args)
    while not is_first():
        if Path("plot.svg").exists():
            raise ZeroDivisionError("by\\nzero")
        time.sleep(0.1)
    return point

cli.measure_spread = measure_spread
cli.measure_ceilings = lambda *args: Ceilings(Spread(1e11, 1e11, 1e11, 7), Spread(1e10, 1e10, 1e10, 7), 1024, 2**27)
spread._LINK_BYTES["cpu"] = 2**16
sys.exit(cli.main([*{tiny}, "--tp=2", "--mode=step", "--json=profile.json", "--plot=plot.svg"]))
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Return how two processes ended, and their folder."""
    folder = tmp_path_factory.mktemp("processes")
    return run_as_torchrun(PROGRAM.format(tiny=TINY), 2, folder), folder


def test_only_the_first_process_speaks_and_of_the_slowest(outcome):
    (first, second), folder = outcome
    document = json.loads((folder / "profile.json").read_text())
    assert first.out.count("speed-up") == first.out.count("\n| forward ") == 1
    assert second.out == ""
    assert document["environment"]["command"].startswith("torchrun --nproc-per-node 2 scripts/profile_block.py")
    assert document["settings"]["mesh"] == {"dp_replicate": 1, "dp": 1, "tp": 2}
    (point,) = document["points"]
    assert list(point["whole"]) == ["forward", "train", "step"]
    for record in point["whole"].values():
        assert len(record["of_ranks"]) == 2
        assert record["seconds"]["median"] >= max(record["of_ranks"]) > 0
        assert record["efficiency"] == record["speed_up"]["median"] / 2
    assert point["overlap"] is None
    assert "Hidden behind computing: nothing" in first.out


def test_collectives_and_memory_are_those_of_the_sizes(outcome):
    (point,) = json.loads((outcome[1] / "profile.json").read_text())["points"]
    size = Size(**point["size"])
    assert all(record["seconds"] > 0 for record in point["collectives"])
    for key, figure in (("count", lambda call: 1), ("bytes", lambda call: 4 * call.elements)):
        counted = {(record["pass"], record["axis"], record["kind"]): record[key] for record in point["collectives"]}
        expected = Counter()
        for pass_, calls in collectives_of(size, Mesh(tp=2)).items():
            for call, count in calls.items():
                expected[pass_, call.axis, call.kind] += count * figure(call)
        assert counted == expected
    gains = 5 * 16
    of_process = 4 * (gains + (size.parameters - gains) // 2)
    assert point["memory"]["parameters_bytes"] == point["memory"]["gradients_bytes"] == of_process
    assert point["memory"]["optimizer_state_bytes"] == 2 * of_process + 4 * 19  # and as many step counts


def test_process_that_fails_reports_its_exception(outcome):
    processes, _ = outcome
    assert processes[1].code == 1
    assert ["ZeroDivisionError" in each.err for each in processes] == [False, True]


def test_schema_compare_and_plot_know_processes(outcome):
    document = json.loads((outcome[1] / "profile.json").read_text())
    assert set(keys(document)) <= documented()
    table = compare(document, document)[1]
    assert [row[:2] for row in table.rows] == [["whole", "forward"], ["whole", "train"], ["whole", "step"]]
    assert "<svg" in (outcome[1] / "plot.svg").read_text()


def test_prediction_is_written_shown_and_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    paper, plot = tmp_path / "paper.json", tmp_path / "paper.png"
    options = [
        "--predict",
        "tp=2,dp=2",
        "dp=8",
        "--link=450e9,50e9",
        "--ceilings=NVIDIA H200",
        "--sweep=batch-size=4,8",
    ]
    assert cli.main([*TINY, *options, "--json", str(paper), "--plot", str(plot)]) == 0
    document, out = json.loads(paper.read_text()), capsys.readouterr().out
    assert set(keys(document)) <= documented()
    assert [prediction["processes"] for prediction in document["predictions"]] == [4, 4, 8]  # 4 do not split over 8
    assert re.search(r"^\| dp=2,tp=2 \| +4 \| +16 .*NVIDIA H200 datasheet \|$", out, re.MULTILINE)
    assert plot.read_bytes().startswith(b"\x89PNG")


def documented():
    page = (SCRIPTS.parent / "docs" / "profile_schema.md").read_text()
    return set(re.findall(r"[`\"]([a-z0-9_]+)[`\"]", page))


def keys(value):
    if isinstance(value, dict):
        yield from value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from keys(item)
