"""Two profiles beside each other, and the program that shows them."""

import json
from dataclasses import replace

import pytest
from lab.sizes import Size
from lab.tables import Table
from lab.timing import Spread
from profiles import machine, point_of, profile_of, samples_of
from profiling.compare import compare, verdict
from profiling.compare_cli import main
from profiling.records import OutOfMemory, Trust
from profiling.report import describe
from profiling.storage import write_profile

SIZE = Size(
    batch_size=2,
    seq_len=8,
    d_model=64,
    num_heads=4,
    num_kv_heads=4,
    d_head=16,
    d_ff=192,
)


def profile_in(microseconds, flops=1e12, size=SIZE, rounds=5):
    """Return a profile whose whole takes this long, except for 4.5% less in its first and more in its last rounds."""
    samples = samples_of(size, "forward", 1e-3, whole=1.0, smallest=1e-7, rounds=rounds)
    seconds = 1e-6 * microseconds
    factors = [0.955, 0.955, 1.0, 1.045, 1.045]
    samples["whole", "forward"] = [seconds * factor for factor in factors[:rounds]]
    ceilings = machine(flops, 1e12)
    return profile_of(point_of(size, samples), ceilings=ceilings)


def row_of_whole(old, new):
    for section in compare(old, new):
        if isinstance(section, Table):
            return section.rows[-1]
    raise AssertionError("no table")


def test_compare_shows_ratios_with_the_interval_in_which_they_may_lie():
    old, new = profile_in(2), profile_in(6)
    # p20 and p80 are 4.5% below and above the median.
    old_seconds = old.points[0].whole.passes["forward"].seconds
    assert old_seconds.p20 == pytest.approx(2e-6 * 0.955)
    low, high = 3 * 0.955 / 1.045, 3 * 1.045 / 0.955
    expected = ["2.00", "6.00", "3.00", f"{low:.2f} to {high:.2f}", "may be slower"]
    assert row_of_whole(old, new) == ["Block", "forward", *expected]
    assert row_of_whole(new, old)[-1] == "may be faster"
    assert row_of_whole(old, old)[-1] == "same"


def test_interval_is_wider_by_what_the_ceilings_differ_by():
    old = profile_in(2)
    assert row_of_whole(old, profile_in(2.5))[-2:] == ["1.14 to 1.37", "may be slower"]
    for flops in (0.75e12, 1e12 / 0.75):
        new = profile_in(2.5, flops)
        assert row_of_whole(old, new)[-2:] == ["0.86 to 1.82", "unclear"]
        assert "differ by a factor of 1.33, so every" in str(compare(old, new)[-1])


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.01, 47.0, "may be slower"),
        (0.01, 0.99, "may be faster"),
        (0.81, 1.24, "same"),
        (0.79, 1.01, "unclear"),
        (0.99, 1.26, "unclear"),
        (0.00, 47.6, "unclear"),
    ],
)
def test_interval_that_contains_1_and_is_wide_is_unclear(low, high, expected):
    assert verdict(low, high) == expected


def test_ratio_of_fewer_than_5_samples_is_unclear():
    old, new = profile_in(2), profile_in(6)
    for rounds in (1, 4):
        few = profile_in(6, rounds=rounds)
        assert row_of_whole(old, few)[-1] == "unclear"
        assert row_of_whole(few, old)[-1] == "unclear"
    assert row_of_whole(old, new)[-1] == "may be slower"


def test_time_that_is_lost_in_the_noise_has_no_ratio():
    old = profile_in(2)
    (point,) = old.points
    forward = point.whole.passes["forward"]
    noisy = replace(forward, seconds=Spread(1e-6, -1e-6, 3e-6, 3))
    whole = replace(point.whole, passes={"backward": noisy})
    old = replace(old, points=(replace(point, whole=whole),))
    assert row_of_whole(old, old)[-3:] == ["n/a", "n/a", "unclear"]


def test_compare_explains_each_verdict():
    legend = str(compare(profile_in(2), profile_in(2))[-1])
    for text in (
        '"May be slower" means that it lies above 1',
        '"may be faster" that it lies below 1',
        '"Same" means that it contains 1 and lies within 0.8 to 1.25',
        '"Unclear" means that it contains 1 and is wider',
    ):
        assert text in legend


def test_compare_lists_what_else_differs():
    old, new = profile_in(2), profile_in(2)
    environment = replace(new.environment, cudnn=91002)
    point = replace(new.points[0], attention_kernel="cudnn")
    settings = replace(new.settings, compile=True)
    new = replace(new, environment=environment, points=(point,), settings=settings)
    differences = str(compare(old, new)[0])
    assert "attention kernel: flash then, cudnn now" in differences
    assert "cudnn: None then, 91002 now" in differences
    assert "compile: False then, True now" in differences
    assert "torch" not in differences


def test_compare_repeats_the_doubts_of_both_profiles():
    steady = profile_in(2)
    (point,) = steady.points
    busy = replace(point, trust=Trust(0.0, 0.5, 0.0, 0.0))
    doubtful = replace(steady, points=(busy,))
    expected = "profile: Do not trust these figures:\n- other programs kept 50%"
    assert str(compare(doubtful, steady)[1]).startswith(f"Old {expected}")
    assert str(compare(steady, doubtful)[1]).startswith(f"New {expected}")


def test_compare_names_the_profile_that_was_interrupted():
    whole = profile_in(2)
    part = replace(whole, finished=False)
    expected = "profile: Interrupted after 1 size: the others were not measured."
    assert compare(part, whole)[1] == f"Old {expected}"
    assert compare(whole, part)[1] == f"New {expected}"
    assert "Interrupted" not in " ".join(map(str, compare(whole, whole)))


def written(folder, name, profile):
    path = folder / name
    write_profile(path, profile)
    return str(path)


def test_program_shows_the_ratios(tmp_path, capsys):
    old = written(tmp_path, "old.json", profile_in(2))
    new = written(tmp_path, "new.json", profile_in(6))
    assert main([old, new]) == 0
    assert "may be slower" in capsys.readouterr().out


def rejection(capsys, *arguments):
    """Return the one line in which the program rejects its arguments."""
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    captured = capsys.readouterr()
    assert (raised.value.code, captured.out) == (2, "")
    assert captured.err.startswith("compare_profiles.py: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_program_rejects_what_it_cannot_compare(tmp_path, capsys):
    old = written(tmp_path, "old.json", profile_in(2))
    longer = profile_in(2, size=replace(SIZE, seq_len=16))
    other = written(tmp_path, "other.json", longer)
    message = rejection(capsys, old, other)
    assert "must have a size of OLD.json" in message
    assert "profile the same size" in message
    rotated = profile_in(2, size=replace(SIZE, theta=500000.0, eps=1e-6))
    other = written(tmp_path, "other.json", rotated)
    expected = f"got {describe(SIZE)}, theta 500000.0, eps 1e-06: "
    assert expected in rejection(capsys, old, other)
    assert "NEW.json: cannot read missing.json" in rejection(
        capsys, old, "missing.json"
    )
    too_large = profile_of(OutOfMemory(SIZE, "no memory"))
    empty = written(tmp_path, "empty.json", too_large)
    message = "must have a size that was measured, got none, because memory ran out"
    assert f"NEW.json: {empty} {message}" in rejection(capsys, old, empty)
    assert f"OLD.json: {empty} {message}" in rejection(capsys, empty, old)
    foreign = tmp_path / "foreign.json"
    foreign.write_text("{}")
    message = rejection(capsys, str(foreign), old)
    assert message.endswith(", got None: write it with profile_block.py --json\n")
    broken = tmp_path / "broken.json"
    document = json.loads((tmp_path / "old.json").read_text())
    del document["settings"]["rounds"]
    broken.write_text(json.dumps(document))
    assert "settings.rounds is missing" in rejection(capsys, str(broken), old)
