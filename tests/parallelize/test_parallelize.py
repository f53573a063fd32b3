"""parallelize: four processes against one, and what it refuses."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from parallelize import cases
from processes import run_as_torchrun
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tinyblock import Transformer, parallelize

TP_4 = ((4,), ("tp",))
DP_2_TP_2 = ((2, 2), ("dp", "tp"))


class Outcome(NamedTuple):
    """Which cases passed, what was said of the rest, and the folder that they wrote to."""

    passed: list[str]
    errors: list[str]
    folder: Path


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Run all cases in one launch of four processes."""
    folder = tmp_path_factory.mktemp("processes")
    ended = run_as_torchrun("from parallelize import cases; cases.run_cases()", cases.PROCESSES, folder)
    names = folder / "passed"
    return Outcome(names.read_text().splitlines() if names.exists() else [], [each.err for each in ended], folder)


@pytest.mark.parametrize("name", cases.CASES)
def test_processes_agree_that(name: str, outcome: Outcome) -> None:
    assert name in outcome.passed, outcome.errors


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_checkpoint_resumes_without_a_process_group(outcome: Outcome) -> None:
    folder = outcome.folder / "checkpoint"
    losses = cases.resume(None, folder)
    torch.testing.assert_close(losses, torch.load(folder / "losses.pt"), rtol=1e-7, atol=0)


@pytest.fixture
def fake_processes() -> Iterator[None]:
    """Be the first of four processes that do nothing."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    torch.distributed.destroy_process_group()


def own_ffn(d_model: int, d_ff: int | None, **kwargs: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(d_model, d_model, **kwargs))


@pytest.mark.parametrize(
    ("mesh", "model", "options", "expected"),
    [
        (((4,), ("data",)), {}, {}, r"must have one of the axes .*'dp_replicate', 'dp', 'tp'\), got \('data',\)"),
        (((2, 2), ("tp", "dp")), {}, {}, "got \\('tp', 'dp'\\)"),
        (((4,), None), {}, {}, "got \\(\\)"),
        (TP_4, {"num_heads": 2}, {}, "num_heads=2 is not a multiple of the 4 processes"),
        (TP_4, {"num_kv_heads": 2}, {}, "num_kv_heads=2 is not"),
        (TP_4, {"d_ff": 6}, {}, "ffn.w1=6 is not"),
        (TP_4, {"ffn": own_ffn}, {}, "no rule that splits the parameter layers.0.ffn.0.weight"),
        (TP_4, {}, {"mp_policy": None}, "mp_policy: an option of fully_shard, but the mesh has no axis 'dp'"),
        (DP_2_TP_2, {}, {"mp_polcy": None}, "fully_shard has no option mp_polcy"),
    ],
)
@pytest.mark.usefixtures("fake_processes")
def test_parallelize_refuses_in_one_line_and_changes_nothing(
    mesh: tuple[Any, Any], model: dict[str, Any], options: dict[str, Any], expected: str
) -> None:
    transformer = Transformer(**{"num_layers": 2, "d_model": 16, "num_heads": 8, "max_seq_len": 8, **model})
    assert_refused(transformer, init_device_mesh("cpu", mesh[0], mesh_dim_names=mesh[1]), expected, **options)


@pytest.mark.usefixtures("fake_processes")
def test_parallelize_refuses_a_model_that_is_spread_already_and_another_module() -> None:
    for shape, axes in (TP_4, DP_2_TP_2):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
        spread = parallelize(Transformer(1, 16, 8, max_seq_len=8), mesh)
        assert_refused(spread, mesh, "spread over processes already")
        assert_refused(nn.Linear(3, 4), mesh, "Linear is no Block")


def assert_refused(model: nn.Module, mesh: DeviceMesh, expected: str, **options: Any) -> None:
    def state() -> list[Any]:
        of_modules = [(type(module), dict(vars(module)), hooks(module)) for module in model.modules()]
        return [*of_modules, *map(id, model.parameters())]

    def hooks(module: nn.Module) -> list[Any]:
        return [*module._forward_hooks, *module._forward_pre_hooks]

    before = state()
    with pytest.raises(ValueError, match=expected) as caught:
        parallelize(model, mesh, recompute=True, **options)
    assert "\n" not in str(caught.value)
    assert state() == before
