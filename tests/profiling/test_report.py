"""Numbers and tables as text."""

import io
import sys

from profiling.report import Table, describe_all, number, plain, share, show, si

TABLE = Table(
    "Times", ["part", "ms", "share"], [["ln1", "1.00", "5%"], ["[red]", "10.0", "95%"]], [["whole", "11.0", ""]]
)


def test_number_has_three_digits_and_no_exponent():
    values = [0.0, 0.1234, 1.234, 12.34, 123.4, 12345.6, None]
    assert [number(value) for value in values] == ["0.00", "0.12", "1.23", "12.3", "123", "12346", "n/a"]


def test_si_takes_the_prefix_that_leaves_three_digits():
    values = [0, 999, 1000, 999_999, 3_110_000, 2e15]
    assert [si(value, "B") for value in values] == ["0 B", "999 B", "1.00 kB", "1.00 MB", "3.11 MB", "2.00 PB"]
    assert si(None, "B") == "n/a"


def test_share_is_in_percent():
    assert [share(value) for value in (None, 0.004, 0.456, 1.0, 1.3)] == ["n/a", "0.4%", "45.6%", "100%", "130%"]


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


def test_show_is_plain_in_a_pipe_and_without_rich(monkeypatch):
    expected = "A paragraph.\n\n" + plain(TABLE) + "\n"
    show(["A paragraph.", TABLE], stream := io.StringIO())
    assert stream.getvalue() == expected
    monkeypatch.setitem(sys.modules, "rich.console", None)
    show(["A paragraph.", TABLE], terminal := Terminal())
    assert terminal.getvalue() == expected


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
