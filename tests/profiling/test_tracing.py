"""What is made of a profiler's answers."""

from dataclasses import replace

import torch
from profiling.parts import Step
from profiling.tracing import compile_report, nsys_command, run_labeled


def test_nsys_command_repeats_the_run_quoted(monkeypatch):
    monkeypatch.setattr("sys.argv", ["scripts/profile_block.py"])
    command = nsys_command(["--json", "my file.json", "--nvtx"])
    assert command.startswith("nsys profile ")
    assert "--capture-range=cudaProfilerApi" in command
    assert "--force-overwrite=true" in command
    assert command.endswith("scripts/profile_block.py --json 'my file.json' --nvtx")


def test_run_labeled_names_every_pass_and_runs_backward_on_its_thread():
    names, multithreading = [], []

    def label(name):
        names.append(name)
        return torch.profiler.record_function(name)

    x = torch.ones(2, requires_grad=True)
    x.register_hook(
        lambda gradient: multithreading.append(
            torch.autograd.is_multithreading_enabled()
        )
    )
    trained = Step(
        "a", ("x",), ("y",), lambda x: (x * x,), inputs=(x,), gradients=(torch.ones(2),)
    )
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    run_labeled(
        [trained, replace(trained, name="b", gradients=())],
        torch.optim.SGD([weight], lr=1.0),
        label,
    )
    assert names == ["a forward", "a backward", "b forward", "AdamW"]
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
    assert (report["graphs"], report["graph_breaks"], report["from_cache"]) == (
        2,
        1,
        False,
    )
    assert len(report["break_reasons"]) == 1
    assert report["seconds"] > 0
