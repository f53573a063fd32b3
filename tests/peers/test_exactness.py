"""The errors that docs/exactness.md reports: what they are measured against, in which units, and who is closer."""

import cmath

import exactness
import pytest
import torch

CPU = torch.device("cpu")


def test_errors_are_in_units_of_eps():
    exact = torch.tensor([1.0, 2.0, -4.0], dtype=torch.float64)
    eps = torch.finfo(torch.bfloat16).eps
    assert exactness.error(exact * (1 + eps), exact, torch.bfloat16) == pytest.approx((1, 1))
    assert exactness.error(exact + eps * torch.tensor([0.0, 0.0, 2.0]), exact, torch.bfloat16)[1] == pytest.approx(0.5)
    exact = torch.randn(10_000, dtype=torch.float64)
    rms, largest = exactness.error(exact.bfloat16(), exact, torch.bfloat16)
    assert 0.1 < rms < 0.3
    assert 0.1 < largest <= 0.5


def test_exact_rotation_is_that_of_complex_numbers():
    x, position = torch.randn(1, 1, 1, exactness.D_HEAD, dtype=torch.float64), 1_000_003
    actual = exactness.rotate(x, torch.tensor([position]), torch.float64).flatten().tolist()
    for pair in range(exactness.D_HEAD // 2):
        angle = position * exactness.THETA ** (-2 * pair / exactness.D_HEAD)
        rotated = complex(*x.flatten()[2 * pair : 2 * pair + 2].tolist()) * cmath.exp(1j * angle)
        assert actual[2 * pair : 2 * pair + 2] == pytest.approx([rotated.real, rotated.imag], abs=1e-8)


def test_layers_of_all_peers_compute_the_same_and_half_precision_rounds_once():
    results: exactness.Results = {}
    for dtype in exactness.DTYPES:
        exactness.measure_layers(results, dtype, 0, CPU, compiled=False)
    assert set(results) == {section for section in exactness.SECTIONS if "RoPE," not in section}
    for columns in results.values():
        for column, errors in columns.items():
            for peer, ((rms, largest),) in errors.items():
                assert 0 < rms < 10, (column, peer)
                assert 0 < largest < 30, (column, peer)
    for dtype in ("bfloat16", "float16"):
        errors = results["RMSNorm"][f"{dtype} forward"]
        assert exactness.rms(errors, "tinyblock") < 1.01 * exactness.rms(errors, exactness.ROUNDED)
    assert exactness.rms(results["attention without RoPE"]["float32 forward"], "torch.nn") < 10


def test_rotation_is_exact_at_any_position_where_float32_angles_are_not():
    results: exactness.Results = {}
    exactness.measure_rotations(results, CPU, [0, 4096], compiled=False)
    errors = results["RoPE, float32"]["forward at 4,096"]
    assert exactness.rms(errors, "tinyblock") < 0.5
    assert 50 < exactness.rms(errors, "Meta") < 500
    assert [len(of_peer) for of_peer in errors.values()] == [exactness.SEEDS] * len(errors)


def test_page_names_the_peers_that_are_closer():
    columns = {
        "float32 forward": {
            "tinyblock": [(1.0, 2.0)],
            "a": [(0.9, 2.0)],
            "b": [(0.995, 1.0)],
            exactness.ROUNDED: [(0.2, 0.5)],
        },
        "float32 gradient": {"tinyblock": [(1.0, 2.0), (1.0, 2.0)], "a": [(0.5, 2.0), (0.7, 2.0)]},
    }
    assert (
        exactness.closer(columns)
        == "Closer than tinyblock, with ratios of errors: a (float32 forward 0.90, float32 gradient 0.60)."
    )
    assert exactness.closer({"c": {"tinyblock": [(1.0, 2.0)]}}) == "No peer is closer than tinyblock."
    assert exactness.cell([(1.0, 2.0), (1.5, 1.0), (1.25, 3.0)]) == "1.25 (1.00-1.50), 3.00"
    assert exactness.cell([(1.0, 2.0), (float("nan"), float("nan"))]) == "not finite"
