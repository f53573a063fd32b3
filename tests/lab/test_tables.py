"""Numbers and tables as text."""

from lab.tables import Table, number, share, show, si, spread_cells, time_unit
from lab.timing import Spread

TABLE = Table(
    "Times", ["part", "ms", "share"], [["ln1", "1.00", "5%"], ["q|k", "10.0", "95%"]]
)
TEXT = """Times

| part |   ms | share |
| ---- | ---: | ----: |
| ln1  | 1.00 |    5% |
| q\\|k | 10.0 |   95% |"""


def test_number_has_three_digits_and_no_exponent():
    values = [0.0, 0.1234, 1.234, 12.34, 123.4, 12345.6, None]
    assert [number(value) for value in values] == [
        "0.00",
        "0.12",
        "1.23",
        "12.3",
        "123",
        "12346",
        "n/a",
    ]


def test_number_keeps_significant_digits_of_small_numbers():
    values = [0.05, 0.012, 0.0004, -0.0004, 0.0]
    expected = ["0.050", "0.012", "0.00040", "-0.00040", "0.00"]
    assert [number(value) for value in values] == expected
    assert [share(value) for value in (0.0004, 0.00004)] == ["0.04%", "0.004%"]


def test_number_that_rounds_up_keeps_its_digits():
    values = [99.96, 9.996, 999.6, 0.09996, 0.9996, -0.0]
    expected = ["100", "10.0", "1000", "0.10", "1.00", "0.00"]
    assert [number(value) for value in values] == expected


def test_number_that_is_not_finite_is_named():
    values = [float("inf"), float("-inf"), float("nan")]
    assert [number(value) for value in values] == ["inf", "-inf", "nan"]


def test_si_takes_the_prefix_that_leaves_three_digits():
    values = [0, 999, 1000, 999_999, 3_110_000, 2e15]
    assert [si(value, "B") for value in values] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "1.00 MB",
        "3.11 MB",
        "2.00 PB",
    ]
    assert si(None, "B") == "n/a"


def test_times_and_shares_have_a_unit_that_fits():
    assert [share(value) for value in (None, 0.004, 0.456, 1.3)] == [
        "n/a",
        "0.4%",
        "45.6%",
        "130%",
    ]
    assert [time_unit(seconds) for seconds in (9e-4, 1e-3)] == [
        ("us", 1e6),
        ("ms", 1e3),
    ]
    assert spread_cells(Spread(0.002, -0.001, 0.0305, 7), 1e3) == [
        "2.00",
        "-1.00 to 30.5",
    ]


def test_show_aligns_columns_escapes_bars_and_separates_sections(capsys):
    show(["A paragraph.", TABLE, Table("Empty", ["a", "b"])])
    assert (
        capsys.readouterr().out
        == f"A paragraph.\n\n{TEXT}\n\nEmpty\n\n| a   |   b |\n| --- | --: |\n"
    )
