"""The errors that docs/exactness.md reports: those of known roundings, their units, and the tables."""

import exactness
import pytest
import torch
from peers import errors

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # of the peers, which this project cannot fix


def test_error_is_in_units_of_eps():
    exact = torch.tensor([1.0, 2.0, -4.0], dtype=torch.float64)
    eps = torch.finfo(torch.bfloat16).eps
    assert errors.error(exact * (1 + eps), exact, torch.bfloat16) == pytest.approx(
        (1, 1)
    )
    assert errors.error(
        exact + eps * torch.tensor([0.0, 0.0, 2.0]), exact, torch.bfloat16
    )[1] == pytest.approx(0.5)
    assert errors.error(
        exact * torch.tensor([1, 1, torch.nan]), exact, torch.bfloat16
    ) == (torch.inf, torch.inf)


def test_measured_errors_are_those_of_known_roundings():
    measured = errors.measure(torch.device("cpu"), quick=True)
    rms = {
        (*key, project): exactness.rms(pairs)
        for key, of in measured.items()
        for project, pairs in of.items()
    }
    assert all(
        0 < error < 12
        for (section, *_), error in rms.items()
        if section not in errors.ROPES
    ), rms
    for what in (
        errors.FORWARD,
        errors.GRADIENT,
        errors.WEIGHTS,
    ):  # rounded once, at the end
        norm = "RMSNorm", "bfloat16", what
        assert rms[*norm, errors.OURS] < 1.01 * rms[*norm, errors.ROUNDED]
    norm = "RMSNorm", "bfloat16", errors.FORWARD
    if (*norm, "Hugging Face") in rms:  # rounded twice
        assert 1.2 < rms[*norm, "Hugging Face"] / rms[*norm, errors.ROUNDED] < 1.6
    rope = "RoPE at 8,192", "float32", errors.FORWARD
    assert rms[*rope, errors.OURS] < 0.5
    assert (
        200 < rms[*rope, "Meta"] < 2000
    )  # angles in float32 are off by up to half an eps of each position


def test_page_shows_ranges_ratios_and_who_is_closer():
    ours, once, closer = (
        [(1.0, 2.0), (1.5, 1.0), (1.25, 3.0)],
        3 * [(1.0, 2.0)],
        [(0.8, 2.0), (1.0, 1.0), (1.0, 1.0)],
    )
    measured = {
        ("RMSNorm", dtype, errors.FORWARD): {errors.OURS: ours}
        for dtype in errors.DTYPES
    }
    measured["RMSNorm", "float32", errors.FORWARD] |= {
        errors.ROUNDED: once,
        "litgpt": closer,
        "torchtune": once,
    }
    measured["RMSNorm", "bfloat16", errors.FORWARD] |= {"litgpt": 3 * [(2.5, 2.0)]}
    measured["RMSNorm", "float16", errors.FORWARD] |= {
        "litgpt": 3 * [(torch.inf, torch.inf)]
    }
    page = exactness.page(measured, {"device": "a device", "commit": "abc"})
    lines = [" ".join(line.replace("|", " ").split()) for line in page.splitlines()]
    assert lines[0].startswith("Measured on a device, with torch ")
    assert "RMSNorm 0.00-1.25 1.25-1.25" in lines
    assert {
        "tinyblock 1.25 (1.00-1.50), 3.00",
        "the exact result, rounded 1.00, 2.00",
    } <= set(lines)
    assert {
        "litgpt **1.00 (0.80-1.00), 2.00**",
        "litgpt 2.50, 2.00",
        "litgpt not finite",
    } <= set(lines)
    assert "torchtune 1.00, 2.00" in lines  # not closer with every seed


def test_write_requires_a_page_with_the_mark(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("my notes")
    with pytest.raises(SystemExit, match="2"):
        exactness.main(["--write", str(page)])
    assert (
        "--write must be a page with the line <!-- scripts/exactness.py"
        in capsys.readouterr().err
    )
    with pytest.raises(SystemExit, match="2"):
        exactness.main(["--quick", "--write", str(page)])
    assert "--quick measures one seed, too few for --write" in capsys.readouterr().err
    assert page.read_text() == "my notes"
