"""The JSON of a run: what is read equals what was written, and damaged files are rejected in one line."""

import json

import pytest
import torch
from lab.environment import environment
from peers import records
from peers.records import (
    CaseResult,
    Measurement,
    Needs,
    Row,
    Run,
)


def measured_row():
    measurement = Measurement(
        errors={"outputs": 1e-7},
        needs=Needs(saved_bytes=5, peak_bytes=7, kernels=11),
        block_seconds=(1.0, 2.0),
        peer_seconds=(2.0, 2.0),
    )
    return Row(
        peer="control",
        title="a copy",
        version=None,
        project=False,
        target=1.03,
        status="measured",
        measurement=measurement,
    )


def skipped_row():
    return Row(
        peer="liger",
        title="Liger",
        version="0.6",
        project=True,
        target=None,
        status="skipped",
        reason="needs CUDA",
    )


def a_run():
    case = CaseResult(
        name="train",
        summary="training",
        description="Training",
        work="train",
        dtype=torch.float32,
        causal_flops=10,
        dense_flops=20,
        needs=Needs(saved_bytes=3),
        rows=(measured_row(), skipped_row()),
    )
    return Run(
        environment=environment(torch.device("cpu"), seed=0),
        rounds=2,
        quick=False,
        shape_checks=True,
        cases=(case,),
    )


def test_run_that_is_read_equals_the_one_written(tmp_path):
    path = tmp_path / "run.json"
    run = a_run()
    records.write(path, run)
    assert records.read(path) == run


def changed(change, tmp_path):
    """Write a run as JSON, edit it, and read it."""
    path = tmp_path / "run.json"
    records.write(path, a_run())
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    return records.read(path)


def older_schema(document):
    document["schema"] = "tinyblock.compare_peers/3"


def without_rounds(document):
    del document["rounds"]


def text_for_a_number(document):
    document["cases"][0]["needs"]["saved_bytes"] = "many"


def text_for_a_list(document):
    document["cases"] = "all"


def negative_time(document):
    document["cases"][0]["rows"][0]["measurement"]["peer_seconds"][1] = -2.0


def time_of_no_machine(document):
    document["cases"][0]["rows"][0]["measurement"]["peer_seconds"][1] = 1e-300


def no_errors(document):
    document["cases"][0]["rows"][0]["measurement"]["errors"] = {}


def nan_time(document):
    document["cases"][0]["rows"][0]["measurement"]["peer_seconds"][1] = float("nan")


def missing_time(document):
    document["cases"][0]["rows"][0]["measurement"]["block_seconds"].pop()


def unknown_status(document):
    document["cases"][0]["rows"][1]["status"] = "fine"


def status_without_a_measurement(document):
    document["cases"][0]["rows"][1]["status"] = "measured"


def without_needs(document):
    document["cases"][0]["needs"] = None


def unknown_dtype(document):
    document["cases"][0]["dtype"] = "int9"


def without_a_device(document):
    del document["environment"]["device"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (older_schema, 'must have the "schema" tinyblock.compare_peers/4, got tiny'),
        (without_rounds, "is damaged: rounds is missing; measure again with --json"),
        (
            text_for_a_number,
            "cases[0].needs.saved_bytes must be an integer, got 'many'",
        ),
        (text_for_a_list, "cases must be a list, got 'all'"),
        (negative_time, "times must be from 1e-9 to 1e9 s, got -2.0"),
        (time_of_no_machine, "times must be from 1e-9 to 1e9 s, got 1e-300"),
        (no_errors, 'errors must have the key "outputs", or be null'),
        (nan_time, "peer_seconds[1] must be a finite number, got nan"),
        (missing_time, "must have one time for each round, got 1 and 2"),
        (unknown_status, "rows[1].status must be one of measured, "),
        (status_without_a_measurement, "liger must have a measurement"),
        (without_needs, "train must have the needs of the Block"),
        (unknown_dtype, "cases[0].dtype must be a dtype of torch, got 'int9'"),
        (without_a_device, "environment.device is missing"),
    ],
)
def test_damaged_file_is_rejected_in_one_line(change, message, tmp_path):
    with pytest.raises(ValueError, match=r"^--report: ") as error:
        changed(change, tmp_path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
