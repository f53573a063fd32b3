"""Texts of copies: no byte is lost when they are read, compared and merged."""

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tinyblock.vendoring.texts import CONFLICT_MARKS, decode, encode, merge

LINES = st.lists(st.sampled_from(["a", "b", "c", "", "\tdef f():", "é"]), max_size=8)
LABELS = ("mine", "base", "theirs")


def joined(lines):
    return "".join(f"{line}\n" for line in lines)


@settings(deadline=None, max_examples=15)
@given(base=LINES, mine=LINES, theirs=LINES)
def test_merge_loses_nothing_that_either_side_added(base, mine, theirs):
    assume(mine != theirs)
    mine, theirs = [f"mine {line}" for line in mine], [f"theirs {line}" for line in theirs]
    text, has_conflicts = merge(joined(mine), joined(base), joined(theirs), LABELS)
    lines = text.splitlines()
    assert [line for line in lines if line.startswith("mine ")] == mine
    assert [line for line in lines if line.startswith("theirs ")] == theirs
    assert (
        has_conflicts == ("<<<<<<< mine" in lines) == (">>>>>>> theirs" in lines) == bool(CONFLICT_MARKS.search(text))
    )


@given(st.binary(max_size=20) | st.text("\r\na", max_size=20).map(str.encode))
def test_decode_and_encode_lose_no_byte(content):
    text = decode(content)
    if 2 * content.count(b"\r\n") > content.count(b"\n"):
        assert encode(text, like=content).replace(b"\r\n", b"\n") == content.replace(b"\r\n", b"\n") == encode(text)
    else:
        assert encode(text, like=content) == content
