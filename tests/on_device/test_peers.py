"""compare_peers.py on a device: the Block agrees with every peer, keeps no more bytes, and meets the targets."""

import pytest
from peers import records
from peers.pooling import pool

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
def outcome(request, run, out, device, quick):
    """Measure the cases of one mode in one process, and return the record of the run, or None, and the errors."""
    mode = request.param
    options = ["--rounds", "7"]
    if quick:
        if mode != "eager" and device.type == "cpu":
            pytest.skip("left out by --quick on a CPU: it compiles for minutes")
        options = ["--rounds", "2", "--quick", "--peers", "limit,operations,unchecked"]
    names = (QUICK if quick else CASES)[mode]
    options += ["--presets", ",".join(MODELS), "--case", ",".join(names)]
    name = f"peers-{mode}"
    document, errors = run("compare_peers.py", name, *options, "--write", f"{name}.md")
    measured = None if document is None else records.read(out / f"{name}.json")
    return measured, errors


@pytest.mark.parametrize(
    ("outcome", "name"),
    [(mode, name) for mode, names in CASES.items() for name in names],
    indirect=["outcome"],
    scope="module",
)
def test_block_meets_its_targets(outcome, name, quick):
    if quick and all(name not in names for names in QUICK.values()):
        pytest.skip("left out by --quick")
    measured, errors = outcome
    cases = {} if measured is None else {case.name: case for case in measured.cases}
    if name not in cases:
        if errors is None:
            pytest.skip("missing: no time was left")
        pytest.fail(errors, pytrace=False)
    case = cases[name]
    assert case.failure is None, case.failure
    rows = [row for row in case.rows if row.status not in ABSENT]
    if not rows:
        pytest.skip(f"missing: {case.rows[0].reason}")
    failed = [row for row in rows if row.status != "measured"]
    assert not failed, [f"{row.peer} {row.status}: {row.reason}" for row in failed]
    if case.needs.kernels_error is not None:
        pytest.fail(f"kernels not counted: {case.needs.kernels_error}", pytrace=False)
    check_verdicts(measured, name, quick)


def check_verdicts(measured, name, quick):
    """Fail if a target is missed. Without shape checks, the Block and `unchecked` are the same."""
    (case,) = (case for case in pool([measured]) if case.result.name == name)
    rows = [row for row in case.rows if row.timing is not None]
    if not measured.shape_checks:
        rows = [row for row in rows if row.row.peer != "unchecked"]
    too_slow = {
        row.row.peer: (row.timing.ratio.median, row.row.target)
        for row in rows
        if row.meets_target is False
    }
    assert not too_slow, f"ratio and target: {too_slow}"
    keeps_less = [row.row.peer for row in rows if row.keeps_no_more is False]
    assert not keeps_less, "these keep less for backward"
    if all(row.meets_target is None for row in rows):
        pytest.skip("not judged: tiny sizes" if quick else "not judged: no target")
