"""The options of the profiler that are rejected before anything is measured."""

import pytest
import torch
from profiles import TINY
from profiling.cli import main


@pytest.fixture
def rejection(capsys, tmp_path, monkeypatch):
    """Return a function that runs the profiler and returns the one line in which it rejects the options."""
    monkeypatch.chdir(tmp_path)

    def run(*options):
        with pytest.raises(SystemExit) as raised:
            main([*TINY, *options])
        captured = capsys.readouterr()
        assert raised.value.code == 2
        assert captured.out == ""
        assert captured.err.startswith("profile_block.py: error: ")
        assert captured.err.count("\n") == 1
        assert list(tmp_path.iterdir()) == []
        return captured.err

    return run


def test_sizes_that_cannot_be_built_are_rejected(rejection):
    assert "--d-model 17 must be a multiple of --num-heads 4" in rejection(
        "--sweep=d-model=16,17"
    )


def test_sweep_with_a_value_twice_is_rejected(rejection):
    message = rejection("--sweep=seq-len=8,16,8")
    assert "--sweep: must name each value once, got 'seq-len=8,16,8'" in message


def test_counts_must_be_at_least_1(rejection):
    for option in ("--seq-len", "--rounds", "--tp"):
        assert f"argument {option}: must be an integer" in rejection(f"{option}=0")


def test_seed_must_fit_into_64_bits(rejection):
    assert "--seed: must fit into 64 bits" in rejection(f"--seed={2**64}")


def test_step_in_float16_is_rejected(rejection):
    message = rejection("--dtype=float16", "--mode=step")
    assert (
        "--dtype must be float32 or bfloat16 with --mode step, got float16" in message
    )
    assert "use --dtype bfloat16 or --mode train" in message


def test_model_that_does_not_fit_is_rejected(rejection):
    message = rejection("--num-layers", str(10**12))
    assert "GiB of weights does not fit: cpu has " in message


def test_outputs_must_be_writable(rejection):
    assert "--trace: cannot write ." in rejection("--trace=.")


def test_trace_is_of_one_size(rejection):
    message = rejection("--sweep=seq-len=4", "--trace=x")
    assert "--trace records one size: leave --sweep out" in message


def test_memory_snapshot_requires_cuda(rejection):
    message = "--memory-snapshot requires CUDA, got --device cpu: leave"
    assert message in rejection("--memory-snapshot=x")


def test_mesh_requires_as_many_processes(rejection):
    start = "start with torchrun --nproc-per-node 2 "
    assert f"tp=2 requires 2 processes, but 1 is running: {start}" in rejection(
        "--tp=2"
    )


def test_batch_must_split_over_the_mesh(rejection):
    message = "--batch-size must be a multiple of 4 for dp=4, got 2"
    assert message in rejection("--dp=4")


def test_heads_must_split_over_the_mesh(rejection):
    message = "--num-kv-heads must be a multiple of tp=4, got 2: use a smaller tp"
    assert message in rejection("--tp=4")


def test_replicas_require_what_they_replicate(rejection):
    assert "dp_replicate=2 requires dp of at least 2: use dp instead" in rejection(
        "--dp-replicate=2"
    )


@pytest.mark.parametrize("option", ["--plot=x.png", "--trace=x", "--sweep=seq-len=4"])
def test_some_options_are_for_one_process(option, rejection):
    message = "is for one process: leave --tp and --dp out"
    assert message in rejection("--tp=2", option)


@pytest.mark.parametrize(
    ("option", "replacement"),
    [
        ("--predict=dp=8", "scripts/predict_scaling.py"),
        ("--link=1e9", "scripts/predict_scaling.py"),
        ("--vocab=9", "scripts/predict_scaling.py"),
        ("--recompute", "scripts/predict_scaling.py"),
        ("--ceilings=NVIDIA L4", "scripts/predict_scaling.py"),
        ("--from=x.json", "profile the size itself"),
        ("--compare=x.json", "scripts/compare_profiles.py OLD.json NEW.json"),
        ("--nvtx", "docs/cuda.md"),
    ],
)
def test_removed_option_names_its_replacement(option, replacement, rejection):
    message = rejection(option)
    assert f"{option.partition('=')[0]} was removed: " in message
    assert replacement in message


def test_misspelled_option_gets_a_suggestion(rejection):
    assert "--seqlen: did you mean --seq-len?" in rejection("--seqlen=8")


def test_device_must_exist(rejection, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "use --device cpu" in rejection("--device=cuda")
