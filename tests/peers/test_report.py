"""The report of made-up runs: pooled ratios, the table of projects, verdicts, and the figures of a case."""

import dataclasses
from pathlib import Path

import pytest
import torch
from lab.environment import environment
from markdown_tables import table_rows
from peers import report
from peers.pooling import pool
from peers.records import (
    CaseResult,
    Measurement,
    Needs,
    Row,
    Run,
)

MIB = 2**20
H100 = "NVIDIA H100 80GB HBM3"  # 67 TFLOP/s in float32, by its datasheet


def row(peer, ratio, target, *, kept=1, project=True):
    """Return the row of a peer: two rounds of one second, and of `ratio` seconds for the Block."""
    measurement = Measurement(
        errors={"outputs": 1e-3},
        needs=Needs(saved_bytes=kept * MIB),
        block_seconds=(ratio, ratio),
        peer_seconds=(1.0, 1.0),
    )
    return Row(
        peer=peer,
        title=f"layer of {peer}",
        version="1.2",
        project=project,
        target=target,
        status="measured",
        measurement=measurement,
    )


def skipped(peer):
    return Row(
        peer=peer,
        title=f"layer of {peer}",
        version=None,
        project=True,
        target=1.0,
        status="skipped",
        reason="needs CUDA",
    )


def case_of(*rows):
    return CaseResult(
        name="train-f32",
        summary="training, float32",
        description="Forward and backward",
        work="train",
        dtype=torch.float32,
        causal_flops=int(67e11),
        dense_flops=int(134e11),
        needs=Needs(saved_bytes=2 * MIB),
        rows=rows,
    )


def run_of(*rows, **facts):
    here = environment(torch.device("cpu"), seed=0)
    known = {"device": H100, "commit": "abc", "command": "python x", **facts}
    return Run(
        environment=dataclasses.replace(here, **known),
        rounds=2,
        quick=False,
        shape_checks=True,
        interrupted=False,
        cases=(case_of(*rows),),
    )


def table_in(text):
    """Return the rows of the first table as lists of cells, by the first cell of each row."""
    return {first: cells for first, *cells in table_rows(text)}


def test_ratios_of_several_runs_are_pooled():
    runs = [run_of(row("litgpt", 1.0, 1.5)), run_of(row("litgpt", 2.0, 1.5))]
    (case,) = pool(runs)
    rows = case.rows
    assert rows[0].timing.ratio.median == 1.5
    assert rows[0].timing.run_ratios == [1.0, 2.0]
    cells = table_in(report.text_of(case))
    assert cells["layer of litgpt 1.2"][:3] == [
        "1.500",
        "1.000-2.000",
        "2: 1.000-2.000",
    ]


@pytest.mark.parametrize("reverse", [False, True])
def test_peer_that_one_run_has_not_measured_is_not_judged(reverse):
    runs = [run_of(row("liger", 9.0, 1.0)), run_of(skipped("liger"))]
    if reverse:
        runs.reverse()
    (case,) = pool(runs)
    assert (case.rows[0].timing, case.rows[0].meets_target) == (None, None)
    assert "- liger skipped: needs CUDA" in report.verdicts([case])
    assert "9.000" not in report.text_of(case)


def test_verdicts_name_what_is_missed_and_what_is_not_judged():
    rows = [
        row("litgpt", 1.0, 1.0),
        row("torchtune", 1.1, 1.03),
        row("limit", 1.5, 2.5, project=False),
        row("control", 1.1, None, kept=9, project=False),
        skipped("liger"),
    ]
    text = report.verdicts(pool([run_of(*rows)]))
    assert text.splitlines() == [
        "**2 of 5 targets are met.**",
        "",
        "Missed:",
        "",
        "- train-f32: takes 1.100 times (1.100-1.100) as long as torchtune; target: at most 1.03",
        "- train-f32: keeps 2.0 MiB for backward; target: at most 1.0, as litgpt does",
        "- train-f32: keeps 2.0 MiB for backward; target: at most 1.0, as torchtune does",
        "",
        "Not judged:",
        "",
        "- liger skipped: needs CUDA",
    ]


def test_overview_has_a_column_for_each_measured_project_and_the_control():
    rows = [
        row("litgpt", 1.234, None),
        row("limit", 9.0, None, project=False),
        row("control", 0.99, None, project=False),
        skipped("liger"),
    ]
    cells = table_in(report.overview(pool([run_of(*rows)])))
    assert cells["Block / project"] == ["litgpt 1.2", "noise: Block / Block"]
    assert cells["`train-f32`: training, float32"] == [
        "1.23 (1.23-1.23)",
        "0.99 (0.99-0.99)",
    ]


def test_figures_of_a_case_have_mfu_and_bytes_but_no_empty_columns():
    (case,) = pool([run_of(row("litgpt", 2.0, 1.0), skipped("liger"))])
    cells = table_in(report.text_of(case))
    headings = cells["peer"]
    litgpt = dict(zip(headings, cells["layer of litgpt 1.2"], strict=True))
    assert litgpt["verdict"] == "**missed**"
    assert litgpt["target"] == "<= 1.00"
    assert litgpt["Block ms"] == "2000"
    assert litgpt["outputs differ by"] == "1.0e-03"
    assert (litgpt["Block keeps MiB"], litgpt["peer keeps MiB"]) == ("2.0", "1.0")
    assert litgpt["kept: verdict"] == "**missed**"
    assert litgpt["Block MFU causal"] == "5.0%"
    assert litgpt["peer MFU dense"] == "20.0%"
    assert "peer kernels" not in headings
    liger = dict(zip(headings, cells["layer of liger"], strict=True))
    assert (liger["ratio"], liger["Block ms"]) == ("skipped", "")


def test_kernels_and_why_they_were_not_counted_are_shown():
    run = run_of(row("litgpt", 1.0, None))
    run.cases[0].needs.kernels = 12
    run.cases[0].rows[0].measurement.needs.kernels_error = "OutOfMemoryError"
    (case,) = pool([run])
    text = report.text_of(case)
    cells = table_in(text)
    litgpt = dict(zip(cells["peer"], cells["layer of litgpt 1.2"], strict=True))
    assert litgpt["Block kernels"] == "12"
    assert "- kernels of litgpt not counted: OutOfMemoryError" in text


def test_failure_of_the_block_is_shown_and_not_judged():
    run = run_of()
    run.cases[0].needs = None
    run.cases[0].failure = "RuntimeError: no memory"
    (case,) = pool([run])
    assert "- failed: RuntimeError: no memory" in report.text_of(case)
    assert "- train-f32: RuntimeError: no memory" in report.verdicts([case])
    (pooled,) = pool([run, run_of(row("litgpt", 1.0, None))])
    assert pooled.failures == ["RuntimeError: no memory"]
    assert pooled.rows[0].timing.ratio.median == 1.0


def test_page_has_conclusions_first_and_a_heading_for_each_machine():
    here = run_of(row("litgpt", 1.0, 1.0))
    elsewhere = run_of(row("litgpt", 2.0, 1.0), commit="def")
    page = report.page([here, elsewhere, dataclasses.replace(here, rounds=7)])
    headings = [line for line in page.splitlines() if line.startswith("#")]
    assert headings == [
        "# Benchmarks",
        f"## {H100}, commit abc",
        f"## {H100}, commit def",
        "## How the times were measured",
        f"## All figures: {H100}, commit abc",
        "### train-f32",
        f"## All figures: {H100}, commit def",
        "### train-f32",
    ]
    assert page.index("| Block / project") < page.index("targets are met")
    assert page.count("`python x`") == 3
    assert "Interrupted" not in page
    here.interrupted = True
    assert "Interrupted" in report.page([here])


def test_published_page_has_the_texts_that_the_script_writes():
    page = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
    assert page.startswith(report.INTRODUCTION)
    assert f"\n\n{report.METHOD}\n\n" in page
