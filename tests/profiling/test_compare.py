"""Two profiles beside each other."""

from typing import Any

from profiling.compare import compare

SIZE: dict[str, Any] = {
    "batch_size": 2,
    "seq_len": 8,
    "d_model": 64,
    "num_heads": 4,
    "num_kv_heads": 4,
}
SIZE |= {"d_head": 16, "d_ff": 192, "qk_norm": False, "num_layers": None}


def document(microseconds, flops=1e9, **settings):
    """Return a profile of one time, whose samples vary by 5%."""
    seconds = {
        "median": 1e-6 * microseconds,
        "p20": 0.95e-6 * microseconds,
        "p80": 1.05e-6 * microseconds,
    }
    environment = {
        "date": "2026-01-01",
        "commit": "abc",
        "device": "a CPU",
        "cudnn": None,
    }
    point = {
        "size": SIZE,
        "whole": {"forward": {"seconds": seconds}},
        "attention_kernel": "flash",
    }
    return {
        "environment": environment,
        "settings": {"dtype": "float32", "sweep": None} | settings,
        "ceilings": {
            "flops_per_second": {"median": flops},
            "bytes_per_second": {"median": 1e9},
        },
        "points": [point | {"trust": {"doubts": []}}],
    }


def row(new, old):
    return next(
        section.rows for section in compare(new, old) if hasattr(section, "rows")
    )


def test_compare_shows_ratios_with_the_interval_in_which_they_may_lie():
    assert row(document(6), document(2)) == [
        ["whole", "forward", "2.00", "6.00", "3.00", "2.71-3.32", "may be slower"]
    ]
    assert row(document(2), document(6))[0][-3:] == [
        "0.33",
        "0.30-0.37",
        "may be faster",
    ]
    assert row(document(2), document(2))[0][-3:] == ["1.00", "0.90-1.11", "same"]
    # A machine that was slower, or faster, by a third makes the interval wider.
    assert row(document(2.5), document(2))[0][-2:] == ["1.13-1.38", "may be slower"]
    for rate in (0.75e9, 1 / 0.75e9 * 1e18):
        new = document(2.5, flops=rate)
        assert row(new, document(2))[0][-2:] == ["0.85-1.84", "same"]
        assert "differ by 33.3%" in str(compare(new, document(2))[-1])


def test_compare_lists_what_else_differs_and_repeats_the_doubts_of_the_old_profile():
    old, new = document(2), document(2, dtype="bfloat16")
    new["points"][0]["attention_kernel"], new["environment"]["cudnn"] = "cudnn", 91002
    old["points"][0]["trust"] = {
        "doubts": ["other programs kept 50% of all cores busy"]
    }
    differences, doubts, *_, advice = map(str, compare(new, old))
    assert "dtype: float32 then, bfloat16 now" in differences
    assert "attention kernel: flash then, cudnn now" in differences
    assert "cudnn: None then, 91002 now" in differences
    assert "Do not trust" in doubts
    assert "50% of all cores" in doubts
    assert "compare_peers.py --against" in advice
    old["points"][0]["size"] = SIZE | {"seq_len": 16}
    assert any(
        "nothing to compare with" in str(section) for section in compare(new, old)
    )
