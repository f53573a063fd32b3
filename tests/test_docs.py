"""The pages: their Python runs, and their links lead to files and headings."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")]
each_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix()
)


def without_blocks(page):
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(page), re.MULTILINE)
    letters = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return [text.strip().replace(" ", "-") for text in letters]


@each_page
def test_python_of_a_page_runs(page):
    mktestdocs = pytest.importorskip("mktestdocs", reason="requires the extra dev")
    mktestdocs.check_md_file(page, memory=True)


@each_page
def test_links_lead_to_files_and_headings(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", without_blocks(page)):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
