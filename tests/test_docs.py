"""The pages: their links lead somewhere, and what README.md shows is what happens."""

import contextlib
import io
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tinyblock

ROOT = Path(__file__).parents[1]
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "examples").glob("*.md"),
]
NOT_LISTED = {"README.md"}
README = (ROOT / "README.md").read_text(encoding="utf-8")


def without_code(text):
    """Return a page without its code blocks and without inline code."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(text):
    """Return the anchors that GitHub gives to the headings of a page."""
    found = set()
    blocks = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for heading in re.findall(r"^#+ (.*)$", blocks, re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")
        number = 1
        unique = slug
        while unique in found:
            unique = f"{slug}-{number}"
            number += 1
        found.add(unique)
    return found


def code_blocks(kind):
    return re.findall(rf"^```{kind}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def section(title):
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_links_lead_to_files_and_headings(page):
    missing = []
    text = without_code(page.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        is_there = target.exists()
        if is_there and anchor:
            is_there = anchor in anchors(target.read_text(encoding="utf-8"))
        if not is_there:
            missing.append(link)
    assert missing == []


def test_every_page_is_on_the_map_of_the_readme():
    listed = section("Documentation, help, license")
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        assert name in NOT_LISTED or f"({name})" in listed, name


def test_readme_has_no_code_block_that_is_not_tested():
    kinds = re.findall(r"^```(.+)$", README, re.MULTILINE)
    assert set(kinds) == {"sh", "python", "console"}
    assert (len(code_blocks("python")), len(code_blocks("console"))) == (2, 1)


def test_readme_trains_a_transformer():
    [training] = [block for block in code_blocks("python") if "optimizer" in block]
    assert len([line for line in training.splitlines() if line]) == 16
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(training, {})
    loss = float(shown.getvalue().split()[0])
    guess_by_frequency = 3.2  # of the bytes of Python's source, in nats
    assert loss < guess_by_frequency < math.log(256)


def test_readme_example_prints_what_it_says(capsys):
    [example] = [block for block in code_blocks("python") if "Block(" in block]
    exec(example, {})
    expected = example.splitlines()[-1].partition("# ")[2]
    assert capsys.readouterr().out.strip() == expected


def test_readme_error_is_the_one_that_is_raised():
    [quoted] = re.findall(
        r"```\njaxtyping.TypeCheckError: (.*?)\n\.\.\.\n```", README, re.DOTALL
    )
    with pytest.raises(TypeError) as caught:
        tinyblock.Block(512, 8)(torch.zeros(4, 128, 500))
    assert str(caught.value).startswith(quoted)


def test_readme_session_prints_what_it_shows(tmp_path):
    [session] = code_blocks("console")
    function = f'tinyblock() {{ "{sys.executable}" -m tinyblock "$@"; }}\n'
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def output_of(command):
        done = subprocess.run(
            ["sh", "-c", function + command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.stderr == ""
        return done.stdout

    [first_copy] = re.findall(r"^tinyblock add .*$", section("Installation"), re.M)
    output_of(first_copy)
    shown = ""
    for command in re.findall(r"^\$ (.*)$", session, re.MULTILINE):
        shown += f"$ {command}\n{output_of(command)}"
    assert shown == session


def test_readme_names_targets_that_make_has():
    targets = set(re.findall(r"^make (\w+)|`make (\w+)", README, re.MULTILINE))
    names = {name for pair in targets for name in pair if name}
    assert {"profile", "story", "test"} <= names
    for name in names:
        command = ["make", "--dry-run", name]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "Nothing to be done" not in done.stdout, name


def test_make_tests_is_make_test():
    shown = []
    for target in ("test", "tests"):
        command = ["make", "--dry-run", target]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        shown.append(done.stdout)
    assert "pytest" in shown[0]
    assert shown[0] == shown[1]


def test_readme_names_options_that_scripts_have():
    commands = re.findall(r"python scripts/([\w.]+)([^`\n]*)", README)
    assert {"profile_block.py", "train_lm.py"} <= {script for script, _ in commands}
    for script, arguments in commands:
        helped = subprocess.run(
            [sys.executable, ROOT / "scripts" / script, "--help"],
            capture_output=True,
            text=True,
        )
        for option in re.findall(r"--[\w-]+", arguments):
            assert re.search(rf"^ +{option}\b", helped.stdout, re.MULTILINE), option


def test_readme_has_the_speeds_of_the_benchmarks():
    benchmarks = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    speeds = re.findall(r"\| (\d\.\d{3}) \((\d\.\d{3})-(\d\.\d{3})\)", README)
    assert len(speeds) > 9
    for figures in speeds:
        for figure in figures:
            assert figure in benchmarks


def test_api_page_has_the_signatures_and_docstrings_of_the_code():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    script = runpy.run_path(str(ROOT / "scripts" / "write_api.py"))
    assert page == script["page"](), (
        "run python scripts/write_api.py --write docs/api.md"
    )
    headings = set(re.findall(r"^### (\w+)$", page, re.MULTILINE))
    assert headings == set(tinyblock.__all__)
