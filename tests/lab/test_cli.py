"""The command line that the programs share."""

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from lab.cli import Parser, check_outputs, device_of, positive_int, run
from processes import run_as_torchrun


@pytest.fixture
def parser():
    """Return a parser with the options --seq-len and --seed, which once had --keep."""
    parser = Parser(
        "program.py", "What it does.", "examples:", {"--keep": "delete by hand"}
    )
    parser.add_argument("--seq-len", type=positive_int)
    parser.add_argument("--seed", type=int)
    return parser


def error_of(parser, capsys, *arguments):
    """Return the line in which the parser rejects the arguments, without the name of the program."""
    with pytest.raises(SystemExit) as raised:
        parser.parse_args(arguments)
    assert raised.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line.strip().removeprefix("program.py: error: ")


def test_parser_reports_in_one_line_and_exits_with_2(parser, capsys):
    with pytest.raises(SystemExit) as raised, parser.reporting():
        raise ValueError("--n must be\n  even, got 3")
    assert raised.value.code == 2
    assert capsys.readouterr().err == "program.py: error: --n must be even, got 3\n"


def test_parser_suggests_the_option_that_is_nearest(parser, capsys):
    expected = "unknown option --seqlen: did you mean --seq-len?"
    assert error_of(parser, capsys, "--seqlen", "8") == expected
    assert error_of(parser, capsys, "--seqlen=8") == expected


def test_parser_points_to_the_help_if_no_option_is_near(parser, capsys):
    expected = "unknown option --frobnicate: see --help"
    assert error_of(parser, capsys, "--frobnicate") == expected
    assert error_of(parser, capsys, "word") == "unknown argument 'word': see --help"


def test_parser_names_what_replaces_a_removed_option(parser, capsys):
    expected = "--keep was removed: delete by hand"
    assert error_of(parser, capsys, "--keep=3") == expected


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "x", ""])
def test_positive_int_rejects_other_texts(text, parser, capsys):
    message = error_of(parser, capsys, f"--seq-len={text}")
    assert message.endswith(f"must be an integer of at least 1, got {text!r}")


@pytest.fixture
def current(monkeypatch):
    """Return the indices of the GPUs, of two, that have been made the current one."""
    current = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    # What set_device calls in the end.
    monkeypatch.setattr(torch._C, "_cuda_setDevice", current.append, raising=False)
    return current


@pytest.mark.parametrize(
    ("name", "index"), [(None, 0), ("cuda", 0), ("cuda:1", 1)], ids=str
)
def test_device_of_a_gpu_has_an_index_and_is_current(name, index, current):
    assert device_of(name) == torch.device("cuda", index)
    assert current == [index]


def test_device_of_the_cpu_leaves_the_gpus_alone(current):
    assert device_of("cpu") == torch.device("cpu")
    assert current == []


def test_device_of_another_kind_is_rejected():
    with pytest.raises(ValueError, match="must be cpu, cuda or cuda:N, got 'meta'"):
        device_of("meta")


@pytest.mark.usefixtures("current")
def test_device_of_a_missing_gpu_names_those_that_exist():
    with pytest.raises(
        ValueError, match=r"requires 3 GPUs, but torch finds 2: cuda:0, cuda:1$"
    ):
        device_of("cuda:2")


@pytest.mark.parametrize(
    ("built", "reason"), [(True, "finds none"), (False, "is built without CUDA")]
)
def test_device_of_a_machine_without_gpu_is_the_cpu(built, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    assert device_of(None) == torch.device("cpu")
    message = f"--device cuda requires 1 GPU, but torch {reason}: use --device cpu"
    with pytest.raises(ValueError, match=message):
        device_of("cuda")


@pytest.fixture
def second_of_two(monkeypatch):
    """Let this process be the second of two that torchrun has started."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")


@pytest.mark.usefixtures("second_of_two")
def test_device_of_each_process_is_its_own(current):
    assert device_of("cuda") == torch.device("cuda", 1)
    assert current == [1]
    with pytest.raises(ValueError, match="each process has a GPU of its own"):
        device_of("cuda:0")


@pytest.mark.usefixtures("second_of_two", "current")
def test_device_of_more_processes_than_gpus_names_the_number_to_start(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    message = "requires 3 GPUs, but torch finds 2: .*; lower --nproc-per-node to 2"
    with pytest.raises(ValueError, match=message):
        device_of("cuda")


def check(**paths):
    """Check outputs of a program that has the options --json, --plot and --trace."""
    options = {"json": None, "plot": None, "trace": None, **paths}
    check_outputs(argparse.Namespace(**options), *options)


def test_check_outputs_leaves_existing_files_as_they_are(tmp_path):
    old = tmp_path / "x.json"
    old.write_text("old")
    check(json=old, plot=tmp_path / "x.svg")
    assert list(tmp_path.iterdir()) == [old]
    assert old.read_text() == "old"


@dataclass
class Wrong:
    """Outputs that cannot be written, and what the error says."""

    paths: dict[str, Path]
    message: str


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(
            Wrong(
                {"json": Path("missing/x.json")},
                "--json: cannot write missing/x.json: No such file or directory",
            ),
            id="in a missing folder",
        ),
        pytest.param(
            Wrong(
                {"json": Path(os.devnull)},
                "--json: cannot write /dev/null: it is not a regular file",
            ),
            id="a device",
        ),
        pytest.param(
            Wrong({"plot": Path("x.gif")}, "--plot must end in .png, .svg, .pdf"),
            id="an unknown format",
        ),
        pytest.param(
            Wrong(
                {"json": Path("x"), "plot": Path("x.png"), "trace": Path("x.png")},
                "two outputs have the same path: x.png",
            ),
            id="the same file twice",
        ),
    ],
)
def test_check_outputs_rejects_what_cannot_be_written(wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"^{wrong.message}"):
        check(**wrong.paths)
    assert list(tmp_path.iterdir()) == []


def test_check_outputs_requires_matplotlib_for_a_plot(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match="--plot requires matplotlib: pip install matplotlib"
    ):
        check(plot=tmp_path / "x.png")


def failing(error):
    """Return a program that raises this error."""

    def main():
        raise error

    return main


def test_run_returns_the_exit_code(parser):
    assert run(parser, lambda: 7) == 7


def test_run_reports_an_interruption_in_one_line(parser, capsys):
    assert run(parser, failing(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "program.py: interrupted\n"


def test_run_reports_a_lack_of_memory_in_one_line(parser, capsys):
    error = torch.OutOfMemoryError("CUDA out of\nmemory.")
    assert run(parser, failing(error)) == 1
    expected = "program.py: error: out of memory: CUDA out of memory.\n"
    assert capsys.readouterr().err == expected


def test_run_reports_a_file_that_cannot_be_written_in_one_line(parser, capsys):
    def main():
        return Path("missing/x.json").write_text("")

    assert run(parser, main) == 1
    expected = "[Errno 2] No such file or directory: 'missing/x.json'"
    assert capsys.readouterr().err == f"program.py: error: {expected}\n"


def test_run_passes_other_errors_on(parser):
    with pytest.raises(RuntimeError, match="something else"):
        run(parser, failing(RuntimeError("something else")))


def test_run_ends_with_0_if_the_reader_closes_the_pipe(parser, monkeypatch):
    def main():
        print("report", flush=True)
        return 1

    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed_pipe:
        monkeypatch.setattr(sys, "stdout", closed_pipe)
        assert run(parser, main) == 0
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
    # torchrun reports it.
    assert "ZeroDivisionError: by zero" in (tmp_path / "1.json").read_text()
    assert "from 1" not in first.out + second.out
