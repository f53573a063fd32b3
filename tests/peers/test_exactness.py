"""The errors that docs/exactness.md reports: those of known roundings, their units, and the tables."""

import math

import exactness
import pytest
import torch
from peers import errors, errors_report, pages
from peers.errors import FORWARD, OURS, ROUNDED, WEIGHTS, Error, Key

# The peers warn, which this project cannot mend.
pytestmark = pytest.mark.filterwarnings("ignore")
BFLOAT16 = torch.bfloat16
EPS = torch.finfo(BFLOAT16).eps
EXACT = torch.tensor([1.0, 2.0, -4.0], dtype=torch.float64)


def test_error_is_in_units_of_eps():
    found = errors.error(EXACT * (1 + EPS), EXACT, BFLOAT16)
    assert (found.rms, found.largest) == pytest.approx((1, 1))


def test_largest_error_is_relative_to_the_largest_value():
    wrong = EXACT + EPS * torch.tensor([0.0, 0.0, 2.0])
    assert errors.error(wrong, EXACT, BFLOAT16).largest == pytest.approx(0.5)


def test_error_of_nan_is_infinite():
    wrong = EXACT * torch.tensor([1, 1, torch.nan])
    assert errors.error(wrong, EXACT, BFLOAT16) == Error(math.inf, math.inf)


@pytest.fixture(scope="module")
def measured():
    return errors.measure(torch.device("cpu"), quick=True)


def rms(measured, *key):
    return errors_report.rms(measured[Key(*key)])


def test_all_layers_but_rope_are_exact_to_a_few_roundings(measured):
    found = {
        key: errors_report.rms(values)
        for key, values in measured.items()
        if not key.layer.startswith("RoPE")
    }
    assert {key.layer for key in found} >= {"RMSNorm", "SwiGLU", "Block", "8 Blocks"}
    assert all(0 < error < 12 for error in found.values()), found


@pytest.mark.parametrize("direction", errors.DIRECTIONS)
def test_norm_in_half_precision_rounds_once(measured, direction):
    ours = rms(measured, "bfloat16", direction, "RMSNorm", OURS)
    assert ours < 1.01 * rms(measured, "bfloat16", direction, "RMSNorm", ROUNDED)


def test_norm_of_hugging_face_rounds_twice(measured):
    norm = ("bfloat16", FORWARD, "RMSNorm")
    if Key(*norm, "Hugging Face") not in measured:
        pytest.skip("needs transformers")
    ratio = rms(measured, *norm, "Hugging Face") / rms(measured, *norm, ROUNDED)
    assert 1.2 < ratio < 1.6


def test_rope_is_as_exact_as_its_dtype_and_float32_angles_are_not(measured):
    rope = ("float32", FORWARD, "RoPE from position 8,192")
    assert rms(measured, *rope, OURS) < 0.5
    # The angles are off by up to half an eps of each position.
    assert 200 < rms(measured, *rope, "Meta") < 2000


def made_up():
    """Return errors of three seeds of one layer in float32."""
    of_projects = {
        ROUNDED: [Error(0.5, 1.0)] * 3,
        OURS: [Error(1.0, 2.0), Error(1.5, 1.0), Error(1.25, 3.0)],
        "litgpt": [Error(0.8, 2.0), Error(1.0, 1.0), Error(1.0, 1.0)],
        "torchtune": [Error(1.0, 2.0)] * 3,
        "Hugging Face": [Error(math.inf, math.inf)] * 3,
    }
    return {
        Key("float32", FORWARD, "RMSNorm", project): found
        for project, found in of_projects.items()
    }


def test_table_has_medians_and_largest_errors_and_marks_who_is_closer():
    table = errors_report.table(made_up(), "float32", FORWARD)
    header, _, row = [line.split("|")[1:-1] for line in table.splitlines()]
    cells = dict(zip(map(str.strip, header), map(str.strip, row), strict=True))
    assert cells == {
        "layer": "RMSNorm",
        ROUNDED: "0.50, 1.00",
        OURS: "1.25, 3.00",
        "Hugging Face": "not finite",
        "litgpt": "**1.00, 2.00**",
        "torchtune": "1.00, 2.00",  # not closer with every seed
    }


def test_seeds_are_compared_with_the_medians_of_a_table():
    assert errors_report.variation(made_up(), "float32", FORWARD) == (
        "Seeds differ from these medians by at most 10.0% in half of the cells, "
        "and by at most 20% in all."
    )


def test_ratios_are_those_of_all_dtypes_and_directions():
    found = made_up()
    for project, error in {OURS: Error(1.0, 1.0), "litgpt": Error(2000.0, 1.0)}.items():
        found[Key("float16", WEIGHTS, "RMSNorm", project)] = [error]
    assert errors_report.ratios(found, "RMSNorm", "litgpt") == "0.00050 to 1.25"
    assert errors_report.ratios(found, "RMSNorm", "torch.nn") == ""


def test_page_has_a_table_for_each_dtype_and_direction(measured):
    text = errors_report.tables(measured)
    headings = [line for line in text.splitlines() if line.startswith("### ")]
    assert len(headings) == len(set(headings)) == 9
    assert text.count("| layer ") == 9
    # RoPE has no weights, so it is in the table of ratios and in six others.
    assert text.count("\n| RoPE from position 8,192 ") == 7


def test_write_requires_a_page_with_the_marks_of_the_device(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(pages.begin("scripts/exactness.py --device cuda") + pages.END)
    before = page.read_text()
    with pytest.raises(SystemExit, match="2"):
        exactness.main(["--write", str(page)])
    expected = "must be a page with the lines <!-- scripts/exactness.py --device cpu"
    assert expected in capsys.readouterr().err
    assert page.read_text() == before


def test_quick_run_cannot_be_written(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        exactness.main(["--quick", "--write", str(tmp_path / "page.md")])
    assert "--quick measures one seed, too few for --write" in capsys.readouterr().err


def test_quick_run_prints_all_tables(capsys, monkeypatch, measured):
    monkeypatch.setattr(exactness, "measure", lambda device, quick, begin: measured)
    assert exactness.main(["--quick"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Measured on ")
    assert "### float16, gradient of the weights" in printed
