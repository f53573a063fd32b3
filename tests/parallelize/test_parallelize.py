"""parallelize: four processes against one, and what it rejects."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parallelize import cases
from processes import run_as_torchrun
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tinyblock import Block, Transformer, parallelize

TP_4 = ((4,), ("tp",))
DP_2_TP_2 = ((2, 2), ("dp", "tp"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all cases in one launch of four processes, and return the folder that they wrote to."""
    folder = tmp_path_factory.mktemp("processes")
    (folder / "passed").touch()
    run_as_torchrun("from parallelize import cases; cases.run_cases()", cases.PROCESSES, folder)
    return folder


@pytest.mark.parametrize("name", cases.CASES)
def test_processes_agree_that(name: str, folder: Path) -> None:
    passed = (folder / "passed").read_text().splitlines()
    assert name in passed, [path.read_text() for path in folder.glob("*.err")]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_checkpoint_resumes_without_a_process_group(folder: Path) -> None:
    losses = cases.resume(None, folder / "checkpoint")
    torch.testing.assert_close(losses, torch.load(folder / "checkpoint" / "losses.pt"), rtol=1e-7, atol=0)


@pytest.fixture
def fake_processes() -> Iterator[None]:
    """Be the first of four processes that do nothing."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    torch.distributed.destroy_process_group()


class FusedGate(nn.Module):
    def __init__(self, d_model: int, d_ff: int | None, **options: Any) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(d_model, 16, **options), nn.Linear(8, d_model, **options)


class Convolution(nn.Conv1d):
    """A mixer of tokens that is no attention."""

    def __init__(self, d_model: int, num_heads: int, **options: Any) -> None:
        super().__init__(d_model, d_model, kernel_size=3)


@pytest.mark.parametrize(
    ("mesh", "model", "options", "expected"),
    [
        (((4,), ("data",)), {}, {}, r"must contain this rank and have the axes .*'dp', 'tp'\), got .*data=4"),
        (((2, 2), ("tp", "dp")), {}, {}, r"got .*\(tp=2, dp=2\)"),
        (TP_4, {"num_heads": 2}, {}, "num_heads=2 must be a multiple of the 4 processes"),
        (TP_4, {"num_kv_heads": 2}, {}, "num_kv_heads=2 must"),
        (TP_4, {"d_ff": 6}, {}, "ffn.w1=6 must be a multiple"),
        (TP_4, {"ffn": FusedGate}, {}, "ffn.w1 must have the 8 outputs that ffn.w2 takes, got 16"),
        (TP_4, {"ffn": cases.MIXTURE}, {}, "no rule splits layers.0.ffn.router.weight over the axis 'tp'"),
        (TP_4, {"attention": Convolution}, {}, "Convolution must have num_heads, .*output_proj; use 'dp'"),
        (TP_4, {}, {"mp_policy": None}, "fully_shard has no option mp_policy over the axes \\('tp',\\)"),
        (DP_2_TP_2, {}, {"mp_polcy": None}, "fully_shard has no option mp_polcy"),
        (DP_2_TP_2, {}, {"mp_policy": torch.bfloat16}, "mp_policy must be a MixedPrecisionPolicy, got torch.bfloat16"),
        (DP_2_TP_2, {}, {"ignored_params": set()}, "no option ignored_params over the axes \\('dp', 'tp'\\)"),
        (DP_2_TP_2, {}, {"reshard_after_forward": "no"}, "reshard_after_forward should be a bool or an int"),
    ],
)
@pytest.mark.usefixtures("fake_processes")
def test_parallelize_rejects_in_one_line_and_changes_nothing(
    mesh: tuple[Any, Any], model: dict[str, Any], options: dict[str, Any], expected: str
) -> None:
    transformer = Transformer(**{"num_layers": 2, "d_model": 16, "num_heads": 8, "max_seq_len": 8, **model})
    assert_rejected(transformer, init_device_mesh("cpu", mesh[0], mesh_dim_names=mesh[1]), expected, **options)


@pytest.mark.parametrize("mesh", [TP_4, ((4,), ("dp",))])
@pytest.mark.usefixtures("fake_processes")
def test_parallelize_rejects_shared_parameters(mesh: tuple[Any, Any]) -> None:
    def rejects(share: Callable[[Transformer], object], expected: str) -> None:
        transformer = Transformer(2, 16, 8, max_seq_len=8)
        share(transformer)
        assert_rejected(transformer, init_device_mesh("cpu", mesh[0], mesh_dim_names=mesh[1]), expected)

    def tie(model: Transformer) -> None:
        model.layers[1].ffn.w1.weight = model.layers[0].ffn.w1.weight

    rejects(tie, "layers.0.ffn.w1.weight and layers.1.ffn.w1.weight are the same parameter")
    rejects(lambda model: setattr(model.layers[1], "ln2", model.layers[0].ln2), "layers.0.ln2.weight and layers.1.ln2")
    rejects(lambda model: setattr(model, "ln_final", model.layers[0].ln1), "layers.0.ln1.weight and ln_final.weight")
    rejects(lambda model: model.layers.append(model.layers[0]), "layers.0.ln1.weight and layers.2.ln1.weight")


@pytest.mark.usefixtures("fake_processes")
def test_parallelize_rejects_a_distributed_model_and_another_module_and_mesh() -> None:
    for shape, axes in (TP_4, DP_2_TP_2):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
        transformer = Transformer(1, 16, 8, max_seq_len=8)
        assert_rejected(nn.Sequential(transformer), mesh, "Sequential must have ln1, .*; pass the Transformer")
        assert_rejected(transformer, None, "mesh must .*, got None")
        assert_rejected(transformer, DeviceMesh("cpu", [1, 2], mesh_dim_names=("tp",)), "mesh must contain this rank")
        assert_rejected(parallelize(transformer, mesh), mesh, "already distributed")


@pytest.mark.parametrize(("x", "got"), [(torch.ones(16), "[16]"), (torch.ones(0, 7, 16), "[0, 7, 16]"), (None, "None")])
@pytest.mark.usefixtures("fake_processes")
def test_parallel_model_rejects_an_x_without_tokens(x: Any, got: str) -> None:
    block = parallelize(Block(16, 8), init_device_mesh("cpu", TP_4[0], mesh_dim_names=TP_4[1]))
    with pytest.raises(ValueError, match=f"x must be a tensor .*, not empty, got .*{re.escape(got)}"):
        block(x)


def assert_rejected(model: nn.Module, mesh: Any, expected: str, **options: Any) -> None:
    def state() -> list[Any]:
        found: list[Any] = [*map(id, model.parameters())]
        for module in model.modules():
            found += [type(module), dict(vars(module)), *module._forward_hooks, *module._forward_pre_hooks]
        return found

    before = state()
    with pytest.raises(ValueError, match=expected) as caught:
        parallelize(model, mesh, recompute=True, **options)
    assert "\n" not in str(caught.value)
    assert state() == before
