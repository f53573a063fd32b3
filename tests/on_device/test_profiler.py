"""The figures of profile_block.py on a device: they are complete, they add up, and the ceilings are true."""

import functools
import importlib.util
import json
import time

import pytest
import torch
from lab.kernels import kernel_report
from torch.utils.benchmark import Timer

pytestmark = pytest.mark.cuda
TINY = ("--seq-len", "16", "--d-model", "64", "--num-heads", "4", "--rounds", "2")
STEP = (
    "--batch-size",
    "4",
    "--seq-len",
    "2048",
    "--rounds",
    "7",
    "--mode",
    "step",
    "--dtype",
    "bfloat16",
)
TOKEN = (
    "--batch-size",
    "1",
    "--seq-len",
    "1",
    "--rounds",
    "7",
    "--mode",
    "forward",
    "--dtype",
    "bfloat16",
)
RUNS = {
    "defaults": (),
    "8b-step": ("--preset", "llama-3.1-8b", *STEP),
    "8b-step-compiled": ("--preset", "llama-3.1-8b", *STEP, "--compile"),
    "8b-token": ("--preset", "llama-3.1-8b", *TOKEN),
    "8b-token-compiled": ("--preset", "llama-3.1-8b", *TOKEN, "--compile"),
    "1b-step": ("--preset", "llama-3.2-1b", *STEP),
    "1b-step-compiled": ("--preset", "llama-3.2-1b", *STEP, "--compile"),
}
QUICK = {"cpu": ("8b-step",), "cuda": ("8b-step", "8b-step-compiled")}


@pytest.fixture(scope="module", params=RUNS)
def report(request, run, device, quick, out):
    """Return a profile; that of 8b-step has a trace, and a plot and a memory snapshot where they can be made."""
    options = RUNS[request.param] + (TINY if quick else ())
    if quick and request.param not in QUICK[device.type]:
        pytest.skip("left out by --quick")
    if request.param == "8b-step":
        options += ("--trace", "trace.json")
        options += (
            ("--plot", "profile.png") if importlib.util.find_spec("matplotlib") else ()
        )
        options += (
            ("--memory-snapshot", "memory.pickle") if device.type == "cuda" else ()
        )
    document, errors = run("profile_block.py", request.param, *options)
    if document is None or not document["points"]:
        pytest.skip("missing: no time was left") if errors is None else pytest.fail(
            errors, pytrace=False
        )
    files = [
        option for option in options if option.endswith((".json", ".png", ".pickle"))
    ]
    assert [name for name in files if not (out / name).is_file()] == []
    return document


def test_profile_is_complete(report, device, out):
    [point], command = report["points"], report["environment"]["command"]
    assert point["kind"] == "one process", point["error"]
    compilation = point["compilation"]
    if compilation is not None:
        assert compilation["graph_breaks"] == 0, compilation["break_reasons"]
    if device.type == "cuda":
        assert point["kernels"], "the profiler saw no kernel"
    if "--trace" in command:
        events = json.loads((out / "trace.json").read_text())["traceEvents"]
        labels = {
            f"{part['name']} {way}"
            for part in point["parts"]
            for way in ("forward", "backward")
        }
        assert labels <= {event["name"] for event in events}
        assert device.type == "cpu" or any(
            event.get("cat") == "kernel" for event in events
        )


def test_kernel_counts_do_not_fall_with_the_number_of_profiles(device):
    if device.type == "cpu":
        pytest.skip("left out without CUDA: torch.profiler sees no kernels of a CPU")
    x = torch.ones(8, device=device)
    found = [kernel_report(lambda: x + 1 + 1 + 1, device, 1.0) for _ in range(6)]
    assert [kernels.count for kernels in found] == [3] * 6


def test_parts_add_up_to_the_whole(report, quick):
    [point], mode = report["points"], report["settings"]["mode"]
    of_whole = point["sum_of_parts"]["train" if mode == "step" else mode]["of_whole"][
        "median"
    ]
    assert of_whole > 0
    busy = (point["kernels"] or {"busy_fraction": 0})["busy_fraction"]
    if quick or point["compilation"] is not None:
        pytest.skip(
            "not judged: tiny sizes"
            if quick
            else "not judged: the compiler fuses the Block across its parts"
        )
    if busy < 0.9:  # a part takes the longer of host and GPU; in the whole they overlap
        pytest.skip(
            f"not judged: the GPU is busy {busy:.0%} of the time; parts / whole = {of_whole:.2f}"
        )
    assert 0.9 <= of_whole <= 1.1


@functools.cache
def rates(device, dtype, quick):
    """Measure the rates of a product and of a copy with torch's own benchmark: for half a second, and for 10 ms."""
    side, size = (256, 2**20) if quick else (8192, 2**29)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    source = torch.randn(size // dtype.itemsize, device=device).to(dtype)
    product = ("torch.mm(a, b)", 2 * side**3)
    copy = ("source.clone()", 2 * source.nbytes)
    found = {}
    for name, (statement, amount) in {
        "flops_per_second": product,
        "bytes_per_second": copy,
    }.items():
        timer = Timer(
            statement, globals={"torch": torch, "a": a, "b": b, "source": source}
        )
        sustained = timer.blocked_autorange(min_run_time=0.5).median
        bursts = []
        for _ in range(7):
            time.sleep(0.1)  # under a power limit, the clocks recover
            bursts.append(timer.timeit(max(1, round(0.01 / sustained))).median)
        found[name] = amount / sustained, amount / min(bursts)
    return found


def test_ceilings_are_those_of_torch_benchmark(report, device, quick):
    dtype = getattr(torch, report["settings"]["dtype"])
    datasheet = report["datasheet"] or {}
    for name, (sustained, burst) in rates(device, dtype, quick).items():
        ceiling = report["ceilings"][name]["median"]
        peak = datasheet.get(name)
        assert ceiling > 0
        if not quick:
            assert 0.95 * sustained <= ceiling <= 1.05 * burst
            assert peak is None or ceiling <= peak
    if quick:
        pytest.skip("not judged: tiny sizes")
