"""The pages: their Python runs, their links lead somewhere, and their commands exist."""

import contextlib
import functools
import io
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
# What gets the options in ARGS.
TARGETS = {
    "test": "pytest",
    "compare": "scripts/compare.py",
    "mutants": "scripts/mutants.py",
    "profile": "scripts/profile_block.py",
    "story": "",
    "install": "",
    "lint": "",
}


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


def commands(page):
    """Yield the program and the arguments of each command, in blocks and in the text."""
    lines = re.findall(r"`([^`\n]+)`", text_of(page))
    for kind, block in re.findall(
        r"^```(sh|console)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
    ):
        lines += [
            line.removeprefix("$ ")
            for line in block.splitlines()
            if kind == "sh" or line.startswith("$ ")
        ]
    program = re.compile(
        r"(?:[A-Z_]+=\S* )*(?:\S+/)?(python3?|make|tinyblock|pytest) +(?!tinyblock$)"
    )
    for line in lines:
        if found := program.match(line):
            yield found[1], shlex.split(line[found.end() :], comments=True)


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
            copies.main([program[1], "--help"])
        passed_on = help_of("pytest") if program[1] == "verify" else ""
        return printed.getvalue() + passed_on
    failed, printed = processes.run(
        ROOT / program[0], *program[1:], "--help", processes=1
    )
    assert not failed, f"{' '.join(program)}: {printed}"
    return printed


def options_of(*program):
    """Return the options that the help of a program names."""
    return re.findall(r"(?<![\w-])--?\w[\w-]*", help_of(*program))


def require_options(program, arguments):
    """Require that a program has the options among the arguments."""
    options = {word.partition("=")[0] for word in arguments if word.startswith("-")}
    if options:
        unknown = options - set(options_of(*program))
        assert not unknown, f"{' '.join(program)} has no option {unknown}"


@each_page
def test_each_command_takes_what_the_page_passes(page):
    """It is not run: other tests compare what the pages show of its output."""
    for program, arguments in commands(page):
        first, *others = arguments
        if program == "make":
            passed = [word for word in others if word.startswith("ARGS=")]
            words = shlex.split(" ".join(passed).removeprefix("ARGS="))
            require_options([TARGETS[first]], words)
        elif program == "tinyblock" or Path(first).name == "tinyblock":
            words = arguments if program == "tinyblock" else others
            assert words[0] in SUBCOMMANDS
            require_options(["tinyblock", words[0]], words)
        elif program == "pytest" or arguments[:2] == ["-m", "pytest"]:
            require_options(["pytest"], arguments[2 * (program != "pytest") :])
        elif first.startswith(("scripts/", "examples/")) and "NAME" not in first:
            assert (ROOT / first).exists()
            require_options(arguments, others)


@each_page
def test_each_option_in_the_text_exists(page):
    programs = [("tinyblock", name) for name in SUBCOMMANDS]
    programs += [(name,) for name in TARGETS.values() if name]
    known = {option for program in programs for option in options_of(*program)}
    named = set(re.findall(r"`(--[\w-]+)[^`]*`", text_of(page)))
    assert named <= known, named - known


def test_the_files_that_contributing_names_exist():
    page = ROOT / "CONTRIBUTING.md"
    folders = "tinyblock|scripts|examples|tests|docs"
    for path in re.findall(rf"`((?:{folders})/[^` ]*)", text_of(page)):
        assert "NAME" in path or (ROOT / path).exists(), path
