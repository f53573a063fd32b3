"""The comparison of decoding: all candidates compute the same, and the report has a row for each."""

import compare_decoding
import pytest
import torch


def test_tables_have_each_candidate_over_reading_the_weights(capsys):
    pytest.importorskip("transformers")
    sizes = "--num-layers 1 --tokens 3 --rounds 2 --threads 1"
    assert compare_decoding.main(f"--dtype float32 --eager {sizes}".split()) == 0
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.startswith("| ")]
    names = [line.split("|")[1].strip() for line in rows[2:]]
    assert names == [
        "growing cache",
        "static cache",
        "transformers, DynamicCache",
        "transformers, StaticCache",
        "only the matrix products",
        "reading the weights once",
    ]
    assert "1 thread; torch" in printed
    assert "float32, 1 layer, 3 tokens, relative error between logits" in printed
    ratios = [float(line.split("|")[5]) for line in rows[2:]]
    assert ratios[-1] == 1


def test_candidates_that_differ_are_not_timed():
    ones = torch.ones(1, 5)
    found = {"a": lambda: ones, "b": lambda: ones + 1e-7, "c": lambda: ones + 1e-3}
    wrong = compare_decoding.Disagreement
    with pytest.raises(wrong, match=r"got a relative error of 0.001: a, b, c$"):
        compare_decoding.check_agreement(found, torch.float32)
    found["c"] = lambda: ones * torch.nan
    with pytest.raises(wrong, match="got a relative error of nan"):
        compare_decoding.check_agreement(found, torch.float32)
    del found["c"]
    assert compare_decoding.check_agreement(found, torch.float32) == "1e-07"
    # Rounding changes bfloat16 by about 0.01, and a missing layer by more.
    found["c"] = lambda: 1.01 * ones
    assert compare_decoding.check_agreement(found, torch.bfloat16) == "0.01"
    found["c"] = lambda: 1.2 * ones
    with pytest.raises(
        wrong, match=r"must agree to 0\.1, got a relative error of 0\.2"
    ):
        compare_decoding.check_agreement(found, torch.bfloat16)


def test_candidates_that_differ_end_the_program_with_1(capsys, monkeypatch):
    pytest.importorskip("transformers")
    ones = torch.ones(1, 5)
    found = {"a": lambda: ones, "b": lambda: 2 * ones}
    monkeypatch.setattr(compare_decoding, "candidates", lambda *arguments: found)
    sizes = "--num-layers 1 --tokens 3 --rounds 2 --threads 1"
    assert compare_decoding.main(f"--dtype float32 --eager {sizes}".split()) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("compare_decoding.py: error: logits must agree to ")
    assert line.endswith(", got a relative error of 1: a, b")


def test_sizes_below_one_are_rejected(capsys):
    with pytest.raises(SystemExit) as error:
        compare_decoding.main(["--rounds", "0"])
    assert error.value.code == 2
    expected = "argument --rounds: must be an integer of at least 1, got '0'"
    assert expected in capsys.readouterr().err


def test_more_tokens_than_the_model_takes_are_rejected(capsys):
    with pytest.raises(SystemExit) as error:
        compare_decoding.main(["--tokens", "8193"])
    assert error.value.code == 2
    expected = "--tokens must be at most 8192, the longest text of the model, got 8193"
    assert expected in capsys.readouterr().err


def test_missing_transformers_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as error:
        compare_decoding.main([])
    assert error.value.code == 2
    assert "error: transformers must be installed: pip" in capsys.readouterr().err
