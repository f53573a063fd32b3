"""Numbers and tables as text."""

import io

import pytest
from profiling.report import Table, describe_all, number, plain, share, show, si

TABLE = Table(
    "Times", ["part", "ms", "share"], [["ln1", "1.00", "5%"], ["[red]", "10.0", "95%"]], [["whole", "11.0", ""]]
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.00"),
        (0.1234, "0.12"),
        (1.234, "1.23"),
        (12.34, "12.3"),
        (123.4, "123"),
        (12345.6, "12346"),
        (None, "n/a"),
    ],
)
def test_number_has_three_digits_and_no_exponent(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (999_999, "1.00 MB"),
        (3_110_000, "3.11 MB"),
        (2e15, "2.00 PB"),
        (None, "n/a"),
    ],
)
def test_si_takes_the_prefix_that_leaves_three_digits(value, text):
    assert si(value, "B") == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "n/a"), (0.004, "0.4%"), (0.456, "45.6%"), (1.0, "100%"), (1.3, "130%")]
)
def test_share_is_in_percent(value, text):
    assert share(value) == text


def test_plain_aligns_columns_and_sets_totals_apart():
    assert plain(TABLE).split("\n") == [
        "Times",
        "part     ms  share",
        "------------------",
        "ln1    1.00     5%",
        "[red]  10.0    95%",
        "------------------",
        "whole  11.0",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_show_is_plain_in_a_pipe():
    stream = io.StringIO()
    show(["A paragraph.", TABLE], stream)
    assert stream.getvalue() == "A paragraph.\n\n" + plain(TABLE) + "\n"


def test_show_is_plain_on_a_terminal_without_rich(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "rich.console", None)
    stream = Terminal()
    show([TABLE], stream)
    assert stream.getvalue() == plain(TABLE) + "\n"


def test_show_draws_tables_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    show(["A paragraph.", TABLE], stream)
    text = stream.getvalue()
    assert "\u2500" in text  # a drawn line
    assert all(cell in text for cell in ("A paragraph.", "ln1", "95%", "whole", "[red]"))


def test_describe_all_shows_what_varies():
    heads = {"num_heads": 4, "num_kv_heads": 4, "d_head": 16, "qk_norm": False}
    size = {"batch_size": 2, "seq_len": 8, "d_model": 64, "d_ff": 192, "num_layers": None, **heads}
    assert describe_all([size]) == "Block: batch 2, 8 tokens, d_model 64, 4 heads of 16, d_ff 192"
    longer = size | {"seq_len": 32, "num_kv_heads": 2}
    assert "8 to 32 tokens" in describe_all([size, longer])
    assert "2 for keys and values" in describe_all([longer])
