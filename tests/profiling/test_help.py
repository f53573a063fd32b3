"""The examples of --help: each can be pasted into a shell."""

import shlex
from pathlib import Path

import pytest
from profiling import cli, compare_cli, predict_cli

ROOT = Path(__file__).parents[2]


@pytest.fixture
def examples(capsys):
    """Return a function that returns the words of each command in the examples of a program."""

    def find(main):
        with pytest.raises(SystemExit):
            main(["--help"])
        _, _, text = capsys.readouterr().out.partition("\nexamples:\n")
        text, _, _ = text.partition("\n\n")
        commands = []
        for line in text.replace("\\\n", "").splitlines():
            if line.startswith("    "):
                commands.append(shlex.split(line))
            else:
                assert line.endswith(":")
        return commands

    return find


@pytest.mark.parametrize("main", [cli.main, compare_cli.main, predict_cli.main])
def test_examples_are_whole_commands(main, examples):
    commands = examples(main)
    assert commands
    for program, *words in commands:
        assert program in ("python", "torchrun")
        (script,) = [word for word in words if word.endswith(".py")]
        assert (ROOT / script).is_file()


def test_examples_of_the_prediction_run(examples, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    for _, _, *options in examples(predict_cli.main):
        assert predict_cli.main(options) == 0


def test_examples_of_the_profiler_have_options_that_it_accepts(
    examples, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    profiled = []

    def profile(sizes, *arguments):
        profiled.extend(sizes)
        return 0

    monkeypatch.setattr(cli, "profile", profile)
    commands = examples(cli.main)
    for program, *words in commands:
        processes = 1
        if program == "torchrun":
            processes = int(words[words.index("--nproc-per-node") + 1])
        monkeypatch.setattr(cli, "launched", lambda count=processes: count)
        script = words.index("scripts/profile_block.py")
        assert cli.main(words[script + 1 :]) == 0
    assert len(profiled) > len(commands)
