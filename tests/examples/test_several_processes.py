"""parallel.py, parallel_lora.py, pipeline.py and context_parallel.py: four processes against one."""

import copy
import re

import parallel
import pytest
import torch
from context_parallel import own_slice
from pipeline import remove_other_stages, state_of_stage
from processes import run_as_torchrun
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from examples import cases
from tinyblock import Transformer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Run all cases in one launch of four processes, and return the folder that they wrote to."""
    folder = tmp_path_factory.mktemp("processes")
    (folder / "passed").touch()
    run_as_torchrun(
        "from examples import cases; cases.run_cases()", cases.PROCESSES, folder
    )
    return folder


@pytest.mark.parametrize("name", cases.CASES)
def test_processes_agree_that(name, folder):
    if name in cases.NEED_PEFT and not cases.peft_is_installed:
        pytest.skip("needs peft")
    passed = (folder / "passed").read_text().splitlines()
    assert name in passed, [path.read_text() for path in folder.glob("*.err")]


def test_mains_print_what_each_process_found(folder):
    outputs = [(folder / f"{rank}.out").read_text() for rank in range(4)]
    training = [
        re.search(r"rank \d: loss (\S+), after 20 steps (\S+)", out) for out in outputs
    ]
    losses = [(float(match[1]), float(match[2])) for match in training]
    assert losses[0] == losses[1] != losses[2] == losses[3]  # two pairs
    assert all(last < first / 10 for first, last in losses)

    context = r"of its tokens (\S+), of all (\S+), on one process (\S+); .* by (\S+)"
    found = [re.search(context, out).groups() for out in outputs]
    own, total, one, difference = zip(*found, strict=True)
    assert len(set(own)) == 4
    assert len(set(total + one)) == 1
    assert max(map(float, difference)) < 1e-6

    if cases.peft_is_installed:
        assert "rank 0: loaded adapters are equal: True" in outputs[0]
        assert all("trained 28 matrices of adapters" in out for out in outputs)

    assert ["step" in out.replace("20 steps", "") for out in outputs] == [
        *[False] * 3,
        True,
    ]


@pytest.mark.parametrize("stages", [3, 5])
def test_a_pipeline_rejects_stages_that_do_not_divide_the_layers(stages):
    model = Transformer(4, d_model=64, num_heads=4, max_seq_len=8)
    with pytest.raises(ValueError, match=f"multiple of the {stages} stages, got 4"):
        remove_other_stages(model, rank=0, stages=stages)
    assert len(model.layers) == 4


def test_stages_of_a_pipeline_are_the_whole_model():
    model = Transformer(6, d_model=64, num_heads=4, max_seq_len=8)
    x = torch.randn(2, 7, 64)
    expected = model(x)
    state = model.state_dict()
    saved = {}
    for rank in range(3):
        stage = copy.deepcopy(model)
        remove_other_stages(stage, rank, stages=3)
        assert len(stage.layers) == 2
        x = stage(x)
        saved.update(state_of_stage(stage, rank))
    assert torch.equal(x, expected)
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[name], state[name]) for name in state)


def test_context_parallelism_rejects_a_sequence_that_processes_do_not_divide():
    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=1, world_size=4
    )
    try:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        assert own_slice(torch.arange(8), mesh).tolist() == [2, 3]
        with pytest.raises(ValueError, match="multiple of 4 processes, got 10"):
            own_slice(torch.arange(10), mesh)
    finally:
        torch.distributed.destroy_process_group()


def test_parallel_main_says_how_to_start_it(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit, match="torchrun --nproc-per-node 4"):
        parallel.main()
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit, match="must be even, got 3"):
        parallel.main()


def test_matrices_come_before_gains():
    groups = parallel.matrices_then_gains(
        nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 3), nn.PReLU(), nn.Conv1d(3, 2, 1))
    )
    dimensions = [parameter.ndim for group in groups for parameter in group["params"]]
    assert dimensions == [2, 3, 1, 1, 1, 1, 1]
