"""What is made of a profiler's answers."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from profiling.parts import Part
from profiling.tracing import (
    compile_report,
    nsys_command,
    run_labelled,
    summarize_overlap,
)


def event(name, start, end, device="CUDA", annotation=False):
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start, end=end),
        device_type=SimpleNamespace(name=device),
        is_user_annotation=annotation,
    )


def test_overlap_is_the_time_of_collectives_in_which_another_kernel_runs():
    events = [
        event("ncclDevKernel_AllGather_RING_LL", 0, 30),
        event("gemm", 10, 25),
        event("add", 20, 40),  # beside both of the others
        event("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", 50, 60),
        event("nccl:all_gather", 0, 90, annotation=True),
        event("aten::mm", 0, 100, device="CPU"),
    ]
    summary = summarize_overlap(events)
    assert summary["collective_seconds"] == pytest.approx(40e-6)
    assert summary["hidden_seconds"] == pytest.approx(20e-6)
    assert summarize_overlap(events[1:3]) is None


def test_nsys_command_repeats_the_run_quoted(monkeypatch):
    monkeypatch.setattr("sys.argv", ["scripts/profile_block.py"])
    command = nsys_command(["--json", "my file.json", "--nvtx"])
    assert command.startswith("nsys profile ")
    assert "--capture-range=cudaProfilerApi" in command
    assert "--force-overwrite=true" in command
    assert command.endswith("scripts/profile_block.py --json 'my file.json' --nvtx")


def test_run_labelled_names_every_pass_and_runs_backward_on_its_thread():
    names, multithreading = [], []

    def label(name):
        names.append(name)
        return torch.profiler.record_function(name)

    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: multithreading.append(torch.autograd.is_multithreading_enabled()))
    trained = Part("a", lambda x: (x * x,), (x,), (), (torch.ones(2),))
    run_labelled([trained, Part("b", lambda x: (x + 1,), (x,))], lambda: names.append("called"), label)
    assert names == ["a forward", "a backward", "b forward", "AdamW", "called"]
    assert multithreading == [False]
    assert torch.autograd.is_multithreading_enabled()


def test_compile_report_counts_graphs_and_breaks():
    def broken(x):
        x = x + 1
        torch._dynamo.graph_break()
        return (x * 2,)

    part = Part("whole", broken, (torch.ones(3),))
    report = compile_report(part, replace(part, run=torch.compile(broken, backend="eager")), train=False)
    assert (report["graphs"], report["graph_breaks"]) == (2, 1)
    assert len(report["break_reasons"]) == 1
    assert report["seconds"] > 0
    assert isinstance(report["from_cache"], bool)
