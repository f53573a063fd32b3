"""Errors are those of roundings, and the report has the medians of the seeds."""

import os

import accuracy
import pytest
import torch

CPU = torch.device("cpu")

# transformers warns when it is imported, and in its layers.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _transformers():
    pytest.importorskip("transformers", reason="requires the extra examples")


def test_errors_are_those_of_roundings_except_in_the_table_of_transformers():
    """Rounding to float32 is off by up to 2^-24, and its table at 131,072 by thousandths."""
    errors = accuracy.errors_in(torch.float32, CPU, seeds=[0, 1])
    layers = ["RMSNorm", "SwiGLU", "attention", "Block"]
    ropes = [f"RoPE at {start}" for start in ("0", "8,192", "131,072", "1,048,448")]
    names = [*layers, *ropes]
    assert set(errors) == {*names, *(f"{name}, gradient" for name in names)}
    for name, row in errors.items():
        assert len(set(row["tinyblock"])) == 2, "each seed has its weights and inputs"
        assert max(row["rounded"]) < 2**-24, name
        assert 2**-26 < max(row["tinyblock"]) < 16 * 2**-24, name
    for name in ("RoPE at 131,072", "RoPE at 131,072, gradient"):
        assert max(errors[name]["tinyblock"]) < 2**-24
        assert min(errors[name]["transformers"]) > 1e-4


def test_report(capsys):
    """A cell has the median, here of 3, 1 and 2, or of 30, 10 and 50."""
    measured = []

    def errors_in(dtype, device):
        measured.append((dtype, device.type, torch.get_num_threads()))
        return {
            "RMSNorm": {"rounded": [3.0, 1.0, 2.0], "transformers": [30.0, 10.0, 50.0]},
            "Block": {"rounded": [4.0, 9.0, 0.0], "transformers": [5e-8, 6e-8, 1e-9]},
        }

    torch.set_num_threads(2)
    accuracy.main(["--device", "meta"], errors_in)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    assert measured == [(dtype, "meta", 1) for dtype in dtypes]
    first, _, *tables = capsys.readouterr().out.split("\n\n")
    assert f", 1 of {os.cpu_count()} threads, " in first
    for name, table in zip(("float32", "bfloat16", "float16"), tables, strict=True):
        rows = [line.split("|")[1:-1] for line in table.strip().splitlines()]
        assert [[cell.strip(" -:") for cell in row] for row in rows] == [
            [name, "rounded", "transformers"],
            ["", "", ""],
            ["RMSNorm", "2.00e+00", "3.00e+01"],
            ["Block", "4.00e+00", "5.00e-08"],
        ]
