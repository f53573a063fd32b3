"""What is made of a profiler's answers."""

import json
import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from profiling.parts import Call, TimedPart
from profiling.tracing import compile_report, write_trace


@pytest.mark.parametrize(
    ("arguments", "torn_down"),
    [([], None), (["--trace=x.json"], None), (["--sweep", "seq-len=1,2"], "1")],
)
def test_cupti_is_torn_down_only_where_timings_follow_a_profile(
    arguments, torn_down, monkeypatch
):
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["profile_block.py", *arguments])
    runpy.run_path(str(SCRIPT))
    assert os.environ.get("TEARDOWN_CUPTI") == torn_down


SCRIPT = Path(__file__).parents[2] / "scripts" / "profile_block.py"


def test_trace_labels_every_pass_and_runs_backward_on_its_thread(tmp_path):
    x = torch.ones(2, requires_grad=True)
    multithreading = []
    x.register_hook(
        lambda gradient: multithreading.append(
            torch.autograd.is_multithreading_enabled()
        )
    )
    call = Call(lambda x: (x * x,), (x,))
    square = TimedPart("a", (call,), gradients=(torch.ones(2),))
    forward_only = replace(square, name="b", gradients=())
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    write_trace([square, forward_only], optimizer, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    labels = [e["name"] for e in events if e.get("cat") == "user_annotation"]
    ours = [name for name in labels if not name.startswith("Optimizer.")]
    assert ours == ["a forward", "a backward", "b forward", "AdamW"]
    assert weight == 0  # updated
    assert multithreading == [False]
    assert torch.autograd.is_multithreading_enabled()


def test_compile_report_counts_graphs_and_breaks():
    def broken(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    compiled = torch.compile(broken, backend="eager")
    report = compile_report(lambda: compiled(torch.ones(3)))
    assert report.graphs == 2
    assert report.graph_breaks == 1
    assert len(report.break_reasons) == 1
    assert not report.from_cache
    assert report.seconds > 0
