"""compare_peers.py on a device: the Block agrees with every peer, saves no more bytes, and meets the targets."""

import pytest

pytestmark = pytest.mark.cuda
MODELS = ("llama-3.1-8b", "llama-3.2-1b")
SIZES = [f"{model}-{size}" for model in MODELS for size in ("4x2048", "1x8192")]


def cases(how):
    """Return the names of the cases of two models' blocks; those with targets come first."""
    names = [
        f"{work}{how}-bf16-{size}" for size in SIZES for work in ("train", "forward")
    ]
    return [*names, *(f"one-token{how}-bf16-{model}" for model in MODELS)]


CASES = {
    "eager": [*cases(""), "train-bf16-768"],
    "compiled": cases("-compiled"),
    "graphs": cases("-graphs"),
}
ABSENT = ("skipped", "missing")  # not installed, or no time was left
QUICK = {
    mode: [names[0], names[8]] for mode, names in CASES.items()
}  # a training step and one token


@pytest.fixture(scope="module")
def outcome(request, run, device, quick):
    """Measure the cases of one mode in one process."""
    mode, options = request.param, ["--rounds", "7"]
    if quick:
        if mode != "eager" and device.type == "cpu":
            pytest.skip("left out by --quick on a CPU: it compiles for minutes")
        options = ["--rounds", "2", "--quick", "--peers", "limit,operations,unchecked"]
    options += [
        "--presets",
        ",".join(MODELS),
        "--case",
        ",".join((QUICK if quick else CASES)[mode]),
    ]
    return run(
        "compare_peers.py", f"peers-{mode}", *options, "--write", f"peers-{mode}.md"
    )


@pytest.mark.parametrize(
    ("outcome", "name"),
    [(mode, name) for mode, names in CASES.items() for name in names],
    indirect=["outcome"],
    scope="module",
)
def test_block_meets_its_targets(outcome, name, quick):
    if quick and all(name not in names for names in QUICK.values()):
        pytest.skip("left out by --quick")
    document, errors = outcome
    measured = {case["case"]: case for case in document["cases"]} if document else {}
    if name not in measured:
        pytest.skip("missing: no time was left") if errors is None else pytest.fail(
            errors, pytrace=False
        )
    case = measured[name]
    assert "failure" not in case, case["failure"]
    rows = [row for row in case["rows"] if row["status"] not in ABSENT]
    if not rows:
        pytest.skip(f"missing: {case['rows'][0]['reason']}")
    assert [
        f"{row['peer']} {row['status']}: {row['reason']}"
        for row in rows
        if row["status"] != "measured"
    ] == []
    if not document["settings"]["shape_checks"]:
        rows = [row for row in rows if row["peer"] != "unchecked"]
    missed = [
        f"{row['ratio']['median']:.3f} of {row['peer']}"
        for row in rows
        if row["met"] is False
    ]
    assert missed == [], {row["peer"]: row["target"] for row in rows if row["target"]}
    assert [
        f"saves more than {row['peer']}" for row in rows if row["saved_met"] is False
    ] == []
    if all(row["met"] is None for row in rows):
        pytest.skip("not judged: tiny sizes" if quick else "not judged: no target")
