"""The header of a copy: what it says, and what linters and formatters make of the copy."""

import json
import re
import subprocess
import sys

import pytest
from copies.releases import PACKAGE, ROOT, make_release

from tinyblock.copies import installed_release


def ruff(*arguments):
    """Run ruff without the settings of this repository, and return what it prints."""
    command = [sys.executable, "-m", "ruff", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True).stdout


def reported_codes(folder, *options):
    """Return the codes that ruff reports for each file."""
    command = ["--isolated", "--no-cache", "--output-format", "json", *options]
    codes = {path.name: set() for path in folder.iterdir()}
    for finding in json.loads(ruff("check", *command, folder)):
        codes[finding["filename"].rpartition("/")[2]].add(finding["code"])
    return codes


def disabled_codes(text):
    """Return the codes that the header of a copy disables."""
    [pragma] = re.findall(r"^# flake8: noqa: (.*)$", text, re.MULTILINE) or [""]
    return set(pragma.split(", ")) - {""}


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    """All files of this tinyblock that `add` accepts, as copies in a folder."""
    folder = tmp_path_factory.mktemp("layers")
    release = installed_release()
    for name in release.names:
        text = release.original(f"{name}.py").text
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
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


def test_header_has_the_copyright_holder_of_this_project():
    text = installed_release().original("rmsnorm.py").text
    holder = re.search(r"^Copyright .*", (ROOT / "LICENSE").read_text(), re.MULTILINE)
    assert f"\n# {holder[0]}\n" in text
    assert (PACKAGE / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_header_disables_only_codes_that_ruff_reports(layers, tmp_path):
    expected = {}
    for path in layers.iterdir():
        text = path.read_text(encoding="utf-8")
        expected[path.name] = disabled_codes(text)
        without = re.sub(r"^# flake8: noqa.*\n", "", text, flags=re.MULTILINE)
        (tmp_path / path.name).write_text(without, encoding="utf-8")
    reported = reported_codes(tmp_path, "--select", "ALL")
    unneeded = {name: codes - reported[name] for name, codes in expected.items()}
    assert unneeded == {name: set() for name in expected}
    assert any(expected.values())


def test_ruff_reports_nothing_under_usual_settings(layers):
    reported = reported_codes(layers, "--select", "E,W,F,I,N,UP,B,CPY,RUF100")
    assert reported == {name: set() for name in reported}


@pytest.mark.parametrize("width", [40, 120])
def test_formatter_leaves_copies_as_they_are(width, layers):
    options = ["--isolated", "--no-cache", "--line-length", width, "--diff"]
    assert ruff("format", *options, layers) == ""
