"""The records of a profile: they are described, they survive a file, and a damaged file is rejected."""

import dataclasses
import json
import re

import pytest
from lab import kernels
from lab.environment import Environment
from lab.sizes import Size
from profiles import point_of, profile_of, samples_of
from profiling import records
from profiling.records import OutOfMemory
from profiling.storage import read_profile, write_profile

SIZE = Size(
    batch_size=2, seq_len=5, d_model=12, num_heads=6, num_kv_heads=2, d_head=4, d_ff=20
)


@pytest.fixture
def profile():
    samples = samples_of(SIZE, "step", seconds=1.0, whole=10.0, smallest=0.5)
    too_large = OutOfMemory(dataclasses.replace(SIZE, num_layers=3), "no memory")
    return profile_of(point_of(SIZE, samples), too_large, mode="step")


def test_records_describe_every_field():
    described = [each for each in vars(records).values() if isinstance(each, type)]
    described = [each for each in described if each.__module__ == records.__name__]
    described += [kernels.Kernels, Environment]
    assert len(described) > 15
    for record in described:
        names = {field.name for field in dataclasses.fields(record)}
        found = set(re.findall(r"^ +(\w+): ", record.__doc__ or "", re.MULTILINE))
        assert found == names, record


def test_profile_survives_a_file(profile, tmp_path):
    path = tmp_path / "profile.json"
    write_profile(path, profile)
    assert read_profile(path, "OLD.json") == profile
    # What follows from the times is there for other readers.
    point, too_large = json.loads(path.read_text())["points"]
    assert point["analysis"]["tokens_per_second"] == 10 / 40.0
    assert "analysis" not in too_large


def test_profile_with_new_keys_is_read(profile, tmp_path):
    path = tmp_path / "profile.json"
    write_profile(path, profile)
    document = json.loads(path.read_text())
    document["settings"]["new"] = 1
    path.write_text(json.dumps(document))
    assert read_profile(path, "OLD.json") == profile


def damaged(path, profile, damage):
    """Return the message about a file that was changed by `damage`."""
    write_profile(path, profile)
    document = json.loads(path.read_text())
    damage(document)
    path.write_text(json.dumps(document))
    with pytest.raises(
        ValueError, match=r"^OLD\.json: .*profile_block\.py --json"
    ) as raised:
        read_profile(path, "OLD.json")
    message = str(raised.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def spread_of_whole(document):
    return document["points"][0]["whole"]["passes"]["forward"]["seconds"]


def remove_ridge(document):
    del document["ceilings"]["product_size"]


def remove_points(document):
    document["points"] = []


def negate_time(document):
    spread_of_whole(document)["p20"] = -999.0


def stretch_time(document):
    spread_of_whole(document)["p80"] = 1e308


def forget_time(document):
    spread_of_whole(document)["p80"] = float("nan")


def write_time_as_text(document):
    spread_of_whole(document)["median"] = "fast"


def write_count_as_bool(document):
    document["points"][0]["parts"][0]["count"] = True


def change_kind(document):
    document["points"][1]["kind"] = "lost"


def change_dtype(document):
    document["settings"]["dtype"] = "float33"


def change_device(document):
    document["settings"]["device"] = "abacus"


def change_mode(document):
    document["settings"]["mode"] = "backward"


def flatten_points(document):
    document["points"] = {"one": 1}


def stop_machine(document):
    document["ceilings"]["bytes_per_second"]["p20"] = 0


def first_part(document):
    return document["points"][0]["parts"][0]


def swap_percentiles(document):
    spread = spread_of_whole(document)
    spread["p20"], spread["p80"] = 3.0, 2.0


def forget_samples(document):
    spread_of_whole(document)["samples"] = 0


def negate_count(document):
    first_part(document)["count"] = -3


def negate_work(document):
    first_part(document)["passes"]["forward"]["cost"]["bytes"] = -1


def negate_memory(document):
    document["points"][0]["memory"]["held"]["gradients_bytes"] = -1


def negate_size(document):
    document["points"][0]["size"]["batch_size"] = -2


def stop_gpu(document):
    spread = {"median": 0.0, "p20": 0.0, "p80": 0.0, "samples": 5}
    first_part(document)["passes"]["forward"]["gpu_seconds"] = spread


def remove_processes(document):
    document["settings"]["mesh"]["dp"] = 0


def change_sweep(document):
    document["settings"]["sweep"] = "vocab"


def write_huge_integer(document):
    first_part(document)["count"] = 10**400


def write_huge_time(document):
    spread_of_whole(document)["p80"] = 10**400


def write_kind_as_list(document):
    document["points"][0]["kind"] = []


def nest_environment(document):
    nested = []
    for _ in range(400):
        nested = [nested]
    document["environment"] = nested


def color_date(document):
    document["environment"]["date"] = "\x1b[31m2026"


def color_part(document):
    first_part(document)["name"] = "\x1b[31mln1"


def forget_passes(document):
    document["points"] = [document["points"][0]]
    point = document["points"][0]
    point["optimizer"] = None
    for part in (*point["parts"], point["whole"]):
        part["passes"] = {}


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (remove_ridge, "ceilings.product_size is missing"),
        (remove_points, "points must have at least one size"),
        (negate_time, "whole: the time of forward must be at least 1e-12, got -999.0"),
        (forget_time, "forward.seconds.p80 must be a finite number, got nan"),
        (write_time_as_text, "seconds.median must be a finite number, got 'fast'"),
        (write_count_as_bool, "parts[0].count must be an integer, got True"),
        (change_kind, "points[1].kind must be one of one process, "),
        (change_dtype, "settings.dtype must be a dtype of torch, got 'float33'"),
        (change_device, "settings.device must be a device of torch, got 'abacus'"),
        (change_mode, "settings.mode must be one of forward, train, step, got"),
        (flatten_points, "points must be a list, got {'one': 1}"),
        (stretch_time, "the time of forward must be at most 1e+09 s, got 1e+308"),
        (stop_machine, "ceilings: bytes_per_second must be at least 1, got 0.0"),
        (swap_percentiles, "seconds: p20, median and p80 must be in this order, got"),
        (forget_samples, "forward.seconds: samples must be at least 1, got 0"),
        (negate_count, "points[0].parts[0]: count must be at least 1, got -3"),
        (negate_work, "passes.forward.cost: bytes must be at least 0, got -1"),
        (negate_memory, "memory.held: gradients_bytes must be at least 0, got -1"),
        (negate_size, "points[0].size: batch_size must be at least 1, got -2"),
        (stop_gpu, "the GPU's time of forward must be at least 1e-12, got 0.0"),
        (remove_processes, "settings.mesh: dp must be at least 1, got 0"),
        (change_sweep, "settings.sweep must be one of seq-len, batch-size, d-model,"),
        (write_huge_integer, "count must be an integer below 2**64, got 1000"),
        (write_huge_time, "seconds.p80 must be a finite number, got 1000"),
        (write_kind_as_list, "points[0].kind must be one of one process, "),
        (nest_environment, "environment must be an object, got [[[[[[["),
        (color_date, "environment.date must be printable, got '\\x1b[31m2026'"),
        (color_part, "a name in points[0] must be printable, got '\\x1b[31mln1"),
        (forget_passes, "points[0] must have a time, got none"),
    ],
)
def test_damaged_profile_is_rejected_in_one_line(damage, expected, profile, tmp_path):
    assert expected in damaged(tmp_path / "profile.json", profile, damage)


def test_profile_of_an_older_schema_is_rejected(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"schema": "tinyblock.profile/1", "points": []}))
    with pytest.raises(
        ValueError, match=r"profile/2, got tinyblock\.profile/1"
    ) as raised:
        read_profile(path, "OLD.json")
    assert "--json" in str(raised.value)


def test_negative_time_of_backward_is_noise_and_no_damage(profile, tmp_path):
    path = tmp_path / "profile.json"
    write_profile(path, profile)
    document = json.loads(path.read_text())
    backward = document["points"][0]["parts"][0]["passes"]["backward"]
    backward["seconds"]["p20"] = -1.0
    path.write_text(json.dumps(document))
    part = read_profile(path, "OLD.json").points[0].parts[0]
    assert part.passes["backward"].seconds.p20 == -1.0
