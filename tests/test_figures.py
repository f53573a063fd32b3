"""The figures of the pages are those of the reports, and what they claim holds there."""

import itertools
import re
from pathlib import Path

import pytest
from compare import SIZES
from pages import name_of, tables, text_of

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
MEASURED = ROOT / "docs" / "compare.md"
CPU, H100 = "cpu-amd-epyc-avx512.md", "speed-h100.md"
AVX2 = "cpu-amd-epyc-avx2.md"
# The report and the case of each row in the README.
README = {
    "training, one core of a CPU": (CPU, "train-bf16-768-eager"),
    "training, H100": (H100, "train-bf16-llama-8b-eager"),
    "training, H100, compiled": (H100, "train-bf16-llama-8b-compiled"),
    "one token, one core of a CPU": (CPU, "forward-bf16-token-eager"),
    "one token, float32, [merged projections](examples/merged.py)": (
        AVX2,
        "forward-f32-token-merged-eager",
    ),
    "one token, H100, CUDA graphs": (H100, "forward-bf16-llama-8b-token-graphs"),
}


def rows_of(report, name):
    """Return the rows of this name in a report."""
    found = tables((RESULTS / report).read_text())
    return [row for table in found for row in table if name_of(row) == name]


def test_each_row_of_the_page_is_in_the_report_before_it():
    parts = re.split(r"\(results/([^)]*)\)", text_of(MEASURED))
    compared = 0
    for report, text in zip(parts[1::2], parts[2::2], strict=True):
        for row in itertools.chain(*tables(text)):
            name, *cells = row
            shown = {(column, row[column]) for column in cells if row[column]}
            found = rows_of(report, row[name])
            assert any(shown <= other.items() for other in found), (report, row[name])
            compared += 1
    assert compared > 20


def test_the_page_names_the_torch_of_each_report_of_speed():
    speed = text_of(MEASURED).partition("## Speed")[2].partition("## Accuracy")[0]
    named = re.findall(
        r"torch ([\d.]+\d).*?\[report\]\(results/(.*?)\)", speed, re.DOTALL
    )
    assert [report for _, report in named] == [CPU, AVX2, H100]
    for version, report in named:
        assert (
            f"; torch {version}+" in (RESULTS / report).read_text().partition("\n")[0]
        )


def test_the_sizes_of_the_page_are_those_that_are_compared():
    rows = itertools.chain(*tables(text_of(MEASURED)))
    sizes = {row["size"]: row for row in rows if "size" in row}
    for name, row in sizes.items():
        size = SIZES[name]
        assert row == {
            "size": name,
            "tokens": f"{size.batch_size} x {size.seq_len}",
            "d_model": str(size.d_model),
            "heads": str(size.num_heads),
        }
    used = re.findall(r"^\| \w+-b?f\d\d-(\S+)-\w+ \|", text_of(MEASURED), re.MULTILINE)
    assert set(used) == set(sizes)


def test_the_readme_has_the_medians_of_the_reports():
    found = tables(text_of(ROOT / "README.md"))
    [table] = [rows for rows in found if "transformers" in rows[0]]
    assert [name_of(row) for row in table] == list(README)
    for name, row in zip(README, table, strict=True):
        [found] = rows_of(*README[name])
        for project in ("transformers", "litgpt"):
            assert row[project] == found[project].partition(" ")[0], name


def test_the_readme_has_the_length_of_attention():
    length = len((ROOT / "tinyblock" / "attention.py").read_text().splitlines())
    assert f"| {length} lines |" in text_of(ROOT / "README.md")


def test_the_readme_names_the_versions_that_ci_tests():
    [sentence] = re.findall(r"CI tests it.*?\n.*", (ROOT / "README.md").read_text())
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    pinned = (ROOT / "pyproject.toml").read_text()
    pythons = re.findall(r'"(3\.\d+)"', workflow)
    torches = re.findall(r"torch==(\d\.\d+)", workflow + pinned)
    assert set(re.findall(r"\d\.\d+", sentence)) == {*pythons, *torches}


@pytest.mark.parametrize(
    ("better", "worse", "rows"),
    [
        ("SwiGLU", "SiLU", r".*seed \d"),
        ("pre-norm", "post-norm", r".*seed \d"),
        ("RoPE", "no positions", r".*seed \d"),
        ("no positions", "RoPE", ".*to byte (448|512)"),
    ],
)
def test_a_claim_on_small_models_holds_in_each_row(better, worse, rows):
    report = (RESULTS / "ablations-amd-epyc-avx512.md").read_text()
    compared = [
        float(row[better]) < float(row[worse])
        for table in tables(report)
        for row in table
        if better in row and re.fullmatch(rows, name_of(row))
    ]
    assert compared
    assert all(compared)
