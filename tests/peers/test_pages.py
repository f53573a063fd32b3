"""A script writes a part of a page, and changes nothing else there."""

import pytest
from peers import pages


def test_replaced_changes_only_what_is_between_the_marks_of_the_command(tmp_path):
    page = tmp_path / "page.md"
    first, second = pages.begin("one"), pages.begin("two")
    before = f"before\n{first}one\n{pages.END}between\n{second}"
    after = f"{pages.END}after\n"
    page.write_text(f"{before}old\n{after}")
    found = pages.replaced(page, "two", "new")
    assert found == f"{before}\nnew\n{after}"
    page.write_text(found)
    assert pages.replaced(page, "two", "new") == found


@pytest.mark.parametrize("text", ["no marks\n", pages.begin("one"), pages.END])
def test_page_without_both_marks_is_rejected(text, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match="--write must be a page with the lines <!--"):
        pages.replaced(page, "one", "new")


def test_missing_page_is_rejected(tmp_path):
    with pytest.raises(ValueError, match="--write must be a page with the lines"):
        pages.replaced(tmp_path / "none.md", "one", "new")
