"""The pages: their Python runs, their links lead somewhere, and their commands exist."""

import contextlib
import functools
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import processes
import pytest
from pages import text_of

from tinyblock import copies

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")]
each_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix()
)
SUBCOMMANDS = ("list", "add", "check", "diff", "update", "verify")
PROGRAMS = (
    "pytest",
    "scripts/accuracy.py",
    "scripts/compare.py",
    "scripts/diverge.py",
    "scripts/mutants.py",
    "scripts/profile_block.py",
)


@each_page
def test_python_of_a_page_runs(page):
    mktestdocs = pytest.importorskip("mktestdocs", reason="requires the extra dev")
    mktestdocs.check_md_file(page, memory=True)


def anchors(page):
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    letters = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return [text.strip().replace(" ", "-") for text in letters]


@each_page
def test_links_lead_to_files_and_headings(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@each_page
def test_lines_but_tables_and_shown_output_have_at_most_120_characters(page):
    text = re.sub(
        r"^```(console|text)\n.*?^```", "", page.read_text(), flags=re.S | re.M
    )
    long = [line for line in text.splitlines() if len(line) > 120]
    assert [line for line in long if not line.startswith("|")] == []


def test_the_picture_of_the_block_is_what_its_program_draws():
    program = ROOT / "docs" / "draw_block.py"
    drawn = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, check=True
    ).stdout
    assert drawn == (ROOT / "docs" / "block.svg").read_text()


def commands(page):
    """Yield the words of each command in the blocks and in the text of a page."""
    lines = re.findall(r"`([^`\n]+)`", text_of(page))
    for kind, block in re.findall(
        r"^```(sh|console)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
    ):
        for line in block.splitlines():
            if kind == "sh" or line.startswith("$ "):
                lines.append(line.removeprefix("$ "))
    program = re.compile(
        r"(?:[A-Z_]+=\S* )*(?:\S+/)?((?:python3?|make|tinyblock|pytest) [^>]*)"
    )
    for line in lines:
        if found := program.match(line):
            yield shlex.split(found[1], comments=True)


def called(command):
    """Return which program of this project, or pytest, a command calls with what."""
    program, *arguments = command
    if program == "make":
        printed = subprocess.run(
            ["make", "--dry-run", *arguments],
            cwd=ROOT,
            env=os.environ | {"MAKEFLAGS": ""},  # of the `make test` that runs this
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        return called(shlex.split(printed.splitlines()[-1]))
    if Path(program).name.startswith("python"):
        program, *arguments = arguments[arguments[0] == "-m" :]
    return program.removeprefix("../tinyblock/"), arguments


@functools.cache
def help_of(*program):
    """Return what a program prints with --help, after its arguments are accepted."""
    if program[0] == "pytest":
        command = [sys.executable, "-m", "pytest", "--help"]
        return subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout
    if program[0] == "tinyblock":
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), pytest.raises(SystemExit):
            copies.main([*program[1:], "--help"])
        passed_on = help_of("pytest") if program[1:] == ("verify",) else ""
        return printed.getvalue() + passed_on
    failed, printed = processes.run(
        ROOT / program[0], *program[1:], "--help", processes=1
    )
    assert not failed, f"{' '.join(program)}: {printed}"
    return printed


def options_of(*program):
    """Return the options that the help of a program names."""
    return re.findall(r"(?<![\w-])--?\w[\w-]*", help_of(*program))


@each_page
def test_each_command_takes_what_the_page_passes(page):
    """It is not run: other tests compare what the pages show of its output."""
    for command in commands(page):
        program, arguments = called(command)
        options = {word.partition("=")[0] for word in arguments if word[0] == "-"}
        if program == "tinyblock":
            assert {*arguments[:1]} <= {*SUBCOMMANDS}, command
            known = options_of(program, *arguments[:1])
        elif program.endswith(".py") and (ROOT / program).parent.is_dir():
            assert "NAME" in program or (ROOT / program).exists(), command
            known = options_of(program, *arguments) if options else ()
        elif program == "pytest":
            known = options_of(program)
        else:  # no program of this project
            continue
        assert options <= set(known), command


@each_page
def test_each_option_in_the_text_exists(page):
    known = set()
    for name in SUBCOMMANDS:
        known |= set(options_of("tinyblock", name))
    for name in PROGRAMS:
        known |= set(options_of(name))
    named = set(re.findall(r"`(--[\w-]+)[^`]*`", text_of(page)))
    assert named <= known, named - known


def test_the_files_that_contributing_names_exist():
    page = ROOT / "CONTRIBUTING.md"
    folders = "tinyblock|scripts|examples|tests|docs"
    for path in re.findall(rf"`((?:{folders})/[^` ]*)", text_of(page)):
        assert "NAME" in path or (ROOT / path).exists(), path
