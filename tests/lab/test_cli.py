"""The command line that the programs share."""

import argparse
import os
import sys
from pathlib import Path

import pytest
import torch
from lab.cli import Parser, check_outputs, device_of, run
from processes import run_as_torchrun

PARSER = Parser("program.py", "What it does.", "examples:")


def test_parser_reports_in_one_line_and_exits_with_2(capsys):
    with pytest.raises(SystemExit) as raised, PARSER.reporting():
        raise ValueError("--n must be\n  even, got 3")
    assert raised.value.code == 2
    assert capsys.readouterr().err == "program.py: error: --n must be even, got 3\n"
    with pytest.raises(SystemExit):
        PARSER.parse_args(["--frobnicate"])
    assert (
        capsys.readouterr().err
        == "program.py: error: unrecognized arguments: --frobnicate\n"
    )


@pytest.fixture
def current(monkeypatch):
    """Return the indices of the GPUs, of two, that have been made the current one."""
    current = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch._C, "_cuda_setDevice", current.append, raising=False
    )  # what set_device calls in the end
    return current


def test_device_has_an_index_is_current_and_exists(current, monkeypatch):
    for name, index in ((None, 0), ("cuda", 0), ("cuda:1", 1)):
        assert device_of(name) == torch.device("cuda", index)
        assert current.pop() == index
    assert device_of("cpu") == torch.device("cpu")
    there = "needs 3 GPUs, and torch finds 2: cuda:0, cuda:1$"
    for name, message in (
        ("meta", "must be cpu, cuda or cuda:N, got 'meta'"),
        ("cuda:2", there),
    ):
        with pytest.raises(ValueError, match=message):
            device_of(name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert device_of(None) == torch.device("cpu")
    for built, reason in ((True, "finds none"), (False, "is built without CUDA")):
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda built=built: built)
        with pytest.raises(
            ValueError,
            match=f"--device cuda needs 1 GPU, and torch {reason}: use --device cpu",
        ):
            device_of("cuda")


def test_device_of_each_process_is_its_own(current, monkeypatch):
    processes = {
        "TORCHELASTIC_RUN_ID": "x",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
    }
    for name, value in processes.items():
        monkeypatch.setenv(name, value)
    assert device_of("cuda") == torch.device("cuda", 1)
    assert current == [1]
    with pytest.raises(ValueError, match="each process has a GPU of its own"):
        device_of("cuda:0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="needs 3 GPUs, and torch finds 2"):
        device_of("cuda")


def test_check_outputs_rejects_what_cannot_be_written(tmp_path, monkeypatch):
    def check(**paths):
        options = {"json": None, "plot": None, "trace": None} | paths
        check_outputs(argparse.Namespace(**options), *options)

    same = tmp_path / "x.png"
    (tmp_path / "x.json").write_text("old")
    check(json=tmp_path / "x.json", plot=tmp_path / "x.svg")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [
        ("x.json", "old")
    ]
    for paths, message in (
        (
            {"json": tmp_path / "missing" / "x"},
            "--json: cannot write .*: No such file or directory",
        ),
        (
            {"json": Path(os.devnull)},
            "cannot write /dev/null: it is not a regular file",
        ),
        ({"plot": tmp_path / "x.gif"}, "--plot must end in .png, .svg, .pdf"),
        (
            {"json": tmp_path / "x", "plot": same, "trace": same},
            f"^two outputs have the same path: {same}$",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            check(**paths)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        check(plot=tmp_path / "x.png")


def test_run_ends_in_one_line_or_passes_the_error_on(capsys, monkeypatch):
    def fail(error):
        raise error

    assert run(PARSER, lambda: 7) == 7
    assert run(PARSER, lambda: fail(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "program.py: interrupted\n"
    assert (
        run(PARSER, lambda: fail(torch.OutOfMemoryError("CUDA out of\nmemory."))) == 1
    )
    assert (
        capsys.readouterr().err
        == "program.py: error: out of memory: CUDA out of memory.\n"
    )
    with pytest.raises(RuntimeError, match="something else"):
        run(PARSER, lambda: fail(RuntimeError("something else")))
    reader, writer = os.pipe()
    os.close(reader)  # which has seen enough
    with os.fdopen(writer, "w") as closed_pipe:
        monkeypatch.setattr(sys, "stdout", closed_pipe)
        assert run(PARSER, lambda: print("report", flush=True) or 1) == 0
        monkeypatch.undo()


# The first of two processes prints and waits for the second, which fails.
FAILING = """
import os, sys
os.environ["TORCHELASTIC_ERROR_FILE"] = f"{os.environ['RANK']}.json"
import torch.distributed as dist
from lab.cli import Parser, run
def main():
    print("from", dist.get_rank())
    if dist.get_rank() == 1:
        raise ZeroDivisionError("by zero")
    dist.barrier()
sys.exit(run(Parser("program.py", "", ""), main))
"""


def test_process_that_fails_first_is_recorded_and_only_the_first_prints(tmp_path):
    first, second = run_as_torchrun(FAILING, 2, tmp_path)
    assert second.code == 1
    assert "ZeroDivisionError: by zero" in second.err
    assert (
        "ZeroDivisionError: by zero" in (tmp_path / "1.json").read_text()
    )  # torchrun reports it
    assert "from 1" not in first.out + second.out
