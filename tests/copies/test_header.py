"""The header of a copy: what it says, and what linters and formatters make of the copy."""

import email.message
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from copies.releases import PACKAGE, ROOT, make_release

from tinyblock.copies import installed_release, main


def ruff(*arguments):
    """Run ruff without the settings of this repository, and return what it prints."""
    command = [sys.executable, "-m", "ruff", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr  # 1: it reports something
    return done.stdout


def reported_codes(folder, *options):
    """Return the codes that ruff reports for each file."""
    command = ["--isolated", "--no-cache", "--output-format", "json", *options]
    codes = {path: set() for path in folder.rglob("*.py")}
    for finding in json.loads(ruff("check", *command, folder)):
        codes[Path(finding["filename"])].add(finding["code"])
    return codes


def disabled_codes(text):
    """Return the codes that the header of a copy disables."""
    [pragma] = re.findall(r"^# flake8: noqa: (.*)$", text, re.MULTILINE) or [""]
    return set(pragma.split(", ")) - {""}


@pytest.fixture
def layers(tmp_path):
    """All layers of this tinyblock and their tests, as copies in a folder."""
    names = installed_release().names
    folder = tmp_path / "layers"
    assert main(["add", *names, "--with-tests", "--to", str(folder)]) == 0
    return folder


def test_header_has_name_version_license_and_repository(tmp_path):
    url = "https://example.org/layers"
    release = make_release(tmp_path / "release", "1.2.3", repository=url)
    assert release.original("norm.py").text.startswith(
        "# Copied from tinyblock 1.2.3: norm.py (license: LICENSE.tinyblock)\n"
        "# Copyright (c) 2026 Someone\n"
        "# SPDX-License-Identifier: MIT\n"
        "# https://example.org/layers\n"
        '# fmt: off\n"""Norm: '
    )


def test_repository_is_that_of_the_metadata(monkeypatch):
    metadata = email.message.Message()
    metadata["Project-URL"] = "Documentation, https://example.org/pages"
    metadata["Project-URL"] = "Repository, https://example.org/layers"
    monkeypatch.setattr("importlib.metadata.metadata", lambda name: metadata)
    assert installed_release().repository == "https://example.org/layers"
    del metadata["Project-URL"]
    assert installed_release().repository == ""


def test_header_has_the_copyright_holder_of_this_project():
    text = installed_release().original("rmsnorm.py").text
    holder = re.search(r"^Copyright .*", (ROOT / "LICENSE").read_text(), re.MULTILINE)
    assert f"\n# {holder[0]}\n" in text
    assert (PACKAGE / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_header_disables_only_codes_that_ruff_reports(layers):
    disabled = {}
    for path in layers.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        disabled[path] = disabled_codes(text)
        without = re.sub(r"^# flake8: noqa.*\n", "", text, flags=re.MULTILINE)
        path.write_text(without, encoding="utf-8")
    reported = reported_codes(layers, "--select", "ALL")
    unneeded = {path.name: codes - reported[path] for path, codes in disabled.items()}
    assert not any(unneeded.values()), unneeded
    assert any(disabled.values())


def test_ruff_reports_nothing_under_usual_settings(layers):
    reported = reported_codes(layers, "--select", "E,W,F,I,N,UP,B,CPY,RUF100")
    assert not any(reported.values()), reported


@pytest.mark.parametrize("width", [40, 120])
def test_formatter_leaves_copies_as_they_are(width, layers):
    options = ["--isolated", "--no-cache", "--line-length", width, "--diff"]
    assert ruff("format", *options, layers) == ""
