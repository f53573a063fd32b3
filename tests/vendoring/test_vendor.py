"""Copies of layers in real folders: taken, edited, outdated, merged, refused."""

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from isolated import WITH_PACKAGE, WITHOUT_PACKAGE

from tinyblock import __version__, contract
from tinyblock.vendoring import copies as vendor
from tinyblock.vendoring.cli import main
from tinyblock.vendoring.staging import Staging
from tinyblock.vendoring.copies import LAYERS, Copies, Refusal, Upstream, merge

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tinyblock"
LOCK = "tinyblock.lock"


def snapshot(folder):
    """Everything below a folder: names, kinds, contents, where links lead."""
    return {
        path.relative_to(folder).as_posix(): os.readlink(path)
        if path.is_symlink()
        else path.is_dir() or path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


def release(folder, version, **changed):
    """A tinyblock of another version: the files of this one, but for those that are given."""
    shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in changed.items():
        (folder / f"{name}.py").write_bytes(text.encode())
    return Upstream(folder, version)


def text_of(name):
    return (PACKAGE / f"{name}.py").read_text(encoding="utf-8")


def old_text(name):
    """The text that a layer file had in an earlier commit, before its last change."""
    if not (ROOT / ".git").exists():
        pytest.skip("there is no history here to take an earlier version from")

    def git(*arguments):
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout

    for commit in git("log", "--format=%H", "--", f"tinyblock/{name}.py").decode().split():
        text = git("show", f"{commit}:tinyblock/{name}.py").decode()
        if text != text_of(name):
            return text
    pytest.skip("the history here holds one version only")


def replace(path, old, new):
    text = path.read_bytes().decode()
    assert text.count(old) == 1
    path.write_bytes(text.replace(old, new).encode())


@pytest.fixture
def old(tmp_path):
    """An earlier release: no scale of 1/sqrt(d_k) in attention's equation, and another first line of rope."""
    attention = text_of("attention").replace(" / math.sqrt(q.shape[-1])\n", "\n")
    rope = text_of("rope").replace("Rotary position embedding (RoPE): turn", "RoPE: turn")
    assert attention != text_of("attention")
    assert rope != text_of("rope")
    return release(tmp_path / "releases" / "old", "0.0.9", attention=attention, rope=rope)


@pytest.fixture
def layers(tmp_path):
    return tmp_path / "host" / "läyers of mine"


def run(capsys, *argv, upstream=None):
    code = main([str(argument) for argument in argv], upstream)
    out, err = capsys.readouterr()
    return code, out, err


def clash(path):
    """Edit the line of attention.py that the earlier release has another way."""
    replace(path, '"... query d_k, ... key d_k -> ... query key")\n', '"... i d, ... j d -> ... i j")\n')


def fail_to_replace(patch, at, error):
    """Let the call of os.replace with this number raise; return the list of the calls."""
    calls, real = [], os.replace

    def failing(source, target):
        calls.append(target)
        if len(calls) == at + 1:
            raise error
        real(source, target)

    patch.setattr(os, "replace", failing)
    return calls


def states(capsys, folder, upstream=None):
    code, out, _ = run(capsys, "check", folder, upstream=upstream)
    return code, {line.split()[0]: line.split()[1] for line in out.splitlines()}


# list


def test_list_has_a_line_for_each_layer_with_needs_and_convention(capsys):
    code, out, _ = run(capsys, "list")
    assert code == 0
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert tuple(lines) == LAYERS
    assert "needs attention.py, ffn.py, rmsnorm.py, jaxtyping, torch" in lines["block"]
    assert "consecutive" in lines["rope"]
    assert "float32 or wider" in lines["rmsnorm"]
    assert "multiple of 64 nearest to 8/3 d_model" in lines["ffn"]
    assert all(len(line.split("  ")[-1]) > 20 for line in out.splitlines())


def test_list_as_json_says_what_the_files_import(capsys):
    _, out, _ = run(capsys, "list", "--json")
    described = {layer["name"]: layer for layer in json.loads(out)["layers"]}
    assert json.loads(out)["tinyblock"] == __version__
    for name, layer in described.items():
        text = text_of(name)
        assert set(layer["siblings"]) == set(re.findall(r"^from \.(\w+) import", text, re.MULTILINE))
        packages = set(re.findall(r"^(?:from|import) ([a-z]\w*)", text, re.MULTILINE)) - sys.stdlib_module_names
        assert set(layer["packages"]) == packages
        assert set(layer["exports"]) == set(sys.modules[f"tinyblock.{name}"].__all__)


# add


@pytest.mark.parametrize("layer", LAYERS)
def test_add_brings_siblings_licence_and_lock(layer, layers, capsys):
    code, out, _ = run(capsys, "add", layer, "--to", layers)
    needed = {layer} | {
        "block": {"attention", "ffn", "rmsnorm"},
        "transformer": {"block", "attention", "ffn", "rmsnorm", "rope"},
    }.get(layer, set())
    assert code == 0
    assert {path.name for path in layers.iterdir()} == {f"{name}.py" for name in needed} | {LOCK, "LICENSE.tinyblock"}
    assert {line.split()[0] for line in out.splitlines()} == {p.name for p in layers.iterdir()} - {LOCK}
    assert (layers / "LICENSE.tinyblock").read_bytes() == (ROOT / "LICENSE").read_bytes()
    for name in needed:
        header, _, body = (layers / f"{name}.py").read_text(encoding="utf-8").partition('"""')
        assert '"""' + body == text_of(name)
        assert header.splitlines() == [
            f"# Copied from tinyblock {__version__}: tinyblock/{name}.py (licence: LICENSE.tinyblock)",
            f"# Pristine SHA-256: {hashlib.sha256((PACKAGE / f'{name}.py').read_bytes()).hexdigest()}",
            "# SPDX-License-Identifier: MIT",
        ]
    assert states(capsys, layers) == (
        0,
        dict.fromkeys(sorted(p.name for p in layers.iterdir() if p.name != LOCK), "pristine"),
    )


def test_licence_of_the_package_is_that_of_the_project():
    assert (PACKAGE / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_add_with_tests_and_typecheck_brings_their_files(layers, capsys):
    assert run(capsys, "add", "rope", "--to", layers, "--with-tests", "--with-typecheck")[0] == 0
    assert {"contract.py", "test_contract.py", "typecheck.py", "rope.py"} <= {path.name for path in layers.iterdir()}
    assert states(capsys, layers)[0] == 0


@pytest.mark.parametrize("layer", LAYERS)
def test_add_with_tests_brings_all_that_they_need(layer, layers, capsys):
    assert run(capsys, "add", layer, "--to", layers, "--with-tests")[0] == 0
    needed = {need for held in contract.PROPERTIES if (layers / f"{held.layer}.py").exists() for need in held.needs}
    assert {name for name in needed if not (layers / f"{name}.py").exists()} == set()


def test_add_dry_run_writes_nothing(tmp_path, layers, capsys):
    code, out, _ = run(capsys, "add", "block", "--to", layers, "--dry-run")
    assert code == 0
    assert "block.py" in out
    assert "dry run" in out
    assert snapshot(tmp_path) == {}


def test_add_again_changes_nothing(layers, capsys):
    run(capsys, "add", "block", "--to", layers)
    before = snapshot(layers)
    assert run(capsys, "add", "block", "--to", layers)[0] == 0
    assert snapshot(layers) == before
    code, out, _ = run(capsys, "add", "block", "rope", "--to", layers)
    assert code == 0
    assert out.count("up to date") == 5
    assert {name: content for name, content in snapshot(layers).items() if name in before and name != LOCK} == {
        name: content for name, content in before.items() if name != LOCK
    }
    assert (layers / "rope.py").is_file()
    assert list(json.loads((layers / LOCK).read_bytes())["files"]) == sorted(
        p.name for p in layers.iterdir() if p.name != LOCK
    )


def test_add_stops_at_an_edited_copy_and_says_what_differs(layers, capsys):
    run(capsys, "add", "rope", "--to", layers)
    replace(layers / "rope.py", "RoPE needs a positive finite theta", "theta must be positive")
    before = snapshot(layers)
    code, out, err = run(capsys, "add", "rope", "ffn", "--to", layers)
    assert code == 1
    assert '-            raise ValueError(f"RoPE needs a positive finite theta' in out
    assert '+            raise ValueError(f"theta must be positive' in out
    assert "nothing was copied" in err
    assert snapshot(layers) == before


def test_add_keeps_an_edited_sibling(layers, capsys):
    run(capsys, "add", "rmsnorm", "--to", layers)
    replace(layers / "rmsnorm.py", "Set every gain to 1.", "Set every gain to one.")
    edited = (layers / "rmsnorm.py").read_bytes()
    code, out, _ = run(capsys, "add", "block", "--to", layers)
    assert code == 0
    assert re.search(r"rmsnorm\.py +kept, with your edits", out)
    assert (layers / "rmsnorm.py").read_bytes() == edited
    assert states(capsys, layers)[1]["rmsnorm.py"] == "edited"


def test_add_restores_a_missing_copy(layers, capsys):
    run(capsys, "add", "block", "--to", layers)
    before = snapshot(layers)
    (layers / "ffn.py").unlink()
    (layers / "LICENSE.tinyblock").unlink()
    assert states(capsys, layers)[0] == 1
    assert states(capsys, layers)[1]["ffn.py"] == "missing"
    assert run(capsys, "add", "ffn", "--to", layers)[0] == 0
    assert snapshot(layers) == before


def test_add_adopts_copies_whose_lock_was_lost(layers, capsys):
    run(capsys, "add", "block", "--to", layers)
    before = snapshot(layers)
    (layers / LOCK).unlink()
    assert run(capsys, "add", "block", "--to", layers)[0] == 0
    assert snapshot(layers) == before


# check and diff


def test_check_knows_every_state(layers, old, capsys):
    run(capsys, "add", "transformer", "--to", layers, upstream=old)
    replace(layers / "rmsnorm.py", "Set every gain to 1.", "Set every gain to one.")
    replace(layers / "rope.py", "Compute the table.", "Fill the table.")
    (layers / "ffn.py").unlink()
    code, found = states(capsys, layers)
    assert code == 1
    assert found == {
        "LICENSE.tinyblock": "pristine",
        "attention.py": "outdated",
        "block.py": "pristine",
        "ffn.py": "missing",
        "rmsnorm.py": "edited",
        "rope.py": "both",
        "transformer.py": "pristine",
    }
    _, out, _ = run(capsys, "check", layers)
    assert re.search(rf"attention\.py +outdated +0\.0\.9 -> {re.escape(__version__)}\n", out)


def test_check_lets_edits_pass_unless_asked(layers, capsys):
    run(capsys, "add", "rope", "--to", layers)
    assert run(capsys, "check", layers, "--fail-on-edits")[0] == 0
    replace(layers / "rope.py", "Compute the table.", "Fill the table.")
    assert run(capsys, "check", layers)[0] == 0
    assert run(capsys, "check", layers, "--fail-on-edits")[0] == 1
    (layers / "rope.py").unlink()
    assert run(capsys, "check", layers)[0] == 1


def test_diff_shows_edits_and_news_apart(layers, old, capsys):
    run(capsys, "add", "attention", "--to", layers, upstream=old)
    replace(layers / "attention.py", "keys whose mask is True.", "keys that the mask lets through.")
    _, mine, _ = run(capsys, "diff", layers, "--mine")
    _, upstream, _ = run(capsys, "diff", layers, "--upstream")
    _, both, _ = run(capsys, "diff", layers)
    assert re.search(r"^\+.*keys that the mask lets through", mine, re.MULTILINE)
    assert "math.sqrt(q.shape" not in mine
    assert re.search(r"^\+    scores = .* / math\.sqrt\(q\.shape\[-1\]\)$", upstream, re.MULTILINE)
    assert "lets through" not in upstream
    assert both == mine + upstream
    assert mine.startswith(f"--- tinyblock 0.0.9/attention.py\n+++ {layers.as_posix()}/attention.py\n@@")


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_diff_can_be_applied(newline, tmp_path, layers, capsysbinary):
    run(capsysbinary, "add", "rope", "--to", layers)
    (layers / "rope.py").write_bytes((layers / "rope.py").read_bytes().replace(b"\n", newline))
    pristine = (layers / "rope.py").read_bytes()
    with (layers / "rope.py").open("ab") as file:
        file.write(b"# caf\xe9, and no newline at the end")
    (layers / "rope.py").write_bytes(
        (layers / "rope.py").read_bytes().replace(b"Compute the table.", b"Fill the table.")
    )
    _, patch, _ = run(capsysbinary, "diff", layers, "--mine")
    shutil.copy(layers / "rope.py", tmp_path / "edited")
    (tmp_path / "edited.py").write_bytes(pristine)
    patch = re.sub(rb"^(---|\+\+\+) .*$", rb"\1 a/edited.py", patch, flags=re.MULTILINE)
    subprocess.run(["git", "apply", "-"], input=patch, cwd=tmp_path, check=True)
    assert (tmp_path / "edited.py").read_bytes() == (tmp_path / "edited").read_bytes()


def test_diff_of_a_missing_copy_removes_it(layers, capsys):
    run(capsys, "add", "rmsnorm", "--to", layers)
    (layers / "rmsnorm.py").unlink()
    _, out, _ = run(capsys, "diff", layers)
    assert "+++ /dev/null" in out
    assert sum(line.startswith("-") for line in out.splitlines()) == len(text_of("rmsnorm").splitlines()) + 3 + 1


def test_diff_without_any_says_so(layers, capsys):
    run(capsys, "add", "rope", "--to", layers)
    code, out, err = run(capsys, "diff", layers)
    assert (code, out) == (0, "")
    assert "no difference" in err


# update


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_round_trip_from_the_previous_commit(name, newline, tmp_path, layers, capsys):
    """Copy the file as an earlier commit had it, edit it, update: this commit's text, with the edit."""
    earlier = release(tmp_path / "earlier", "0.0.9", **{name: old_text(name)})
    run(capsys, "add", name, "--to", layers, upstream=earlier)
    path = layers / f"{name}.py"
    first, last = "# Ours since 2026.\n", "\n\nOURS = True\n"
    path.write_bytes((first + path.read_text(encoding="utf-8") + last).replace("\n", newline).encode())
    assert states(capsys, layers)[1][f"{name}.py"] == "both"
    before = snapshot(layers)
    code, out, _ = run(capsys, "update", layers, "--dry-run")
    assert (code, snapshot(layers)) == (0, before)
    assert re.search(rf"{name}\.py +merged", out)
    code, out, _ = run(capsys, "update", layers)
    assert code == 0
    assert re.search(rf"{name}\.py +merged with your edits\n", out)
    pristine = Upstream.installed().entry(f"{name}.py").text
    assert path.read_bytes() == (first + pristine + last).replace("\n", newline).encode()
    assert states(capsys, layers) == (0, states(capsys, layers)[1] | {f"{name}.py": "edited"})
    assert {path.name for path in layers.iterdir()} == set(before)


def test_update_of_pristine_copies_is_what_add_writes(tmp_path, layers, old, capsys):
    run(capsys, "add", "transformer", "--to", layers, upstream=old)
    run(capsys, "add", "transformer", "--to", tmp_path / "fresh")
    code, out, _ = run(capsys, "update", layers)
    assert code == 0
    assert re.search(r"attention\.py +updated\n", out)
    ours, fresh = snapshot(layers), snapshot(tmp_path / "fresh")
    assert ours.keys() == fresh.keys()
    for name in fresh.keys() - {LOCK}:
        if name in ("attention.py", "rope.py", "LICENSE.tinyblock"):
            assert ours[name] == fresh[name]
        else:  # nothing has changed but the version: the header keeps the one that the file was copied from
            assert ours[name] == fresh[name].replace(__version__.encode(), b"0.0.9", 1)
    assert states(capsys, layers)[0] == 0
    assert run(capsys, "update", layers)[1].count("up to date") == 7


def test_update_marks_a_conflict_and_keeps_the_file_before(layers, old, capsys):
    run(capsys, "add", "attention", "rope", "--to", layers, upstream=old)
    clash(layers / "attention.py")
    edited = (layers / "attention.py").read_bytes()
    assert run(capsys, "update", layers, "--dry-run")[0] == 1
    code, out, err = run(capsys, "update", layers)
    assert code == 1
    assert re.search(r"attention\.py +CONFLICT\n", out)
    assert re.search(r"rope\.py +updated\n", out)
    assert "NAME.orig is the file as it was" in err
    assert (layers / "attention.py.orig").read_bytes() == edited
    text = (layers / "attention.py").read_text(encoding="utf-8")
    mine, theirs = re.search(
        rf"^<<<<<<< .*/attention\.py\n(.*?)^=======\n(.*?)^>>>>>>> tinyblock {re.escape(__version__)}\n",
        text,
        re.M | re.S,
    ).groups()
    assert '"... i d, ... j d -> ... i j")\n' in mine
    assert "math.sqrt(q.shape[-1])" in theirs
    assert states(capsys, layers)[1]["attention.py"] == "conflict"
    assert states(capsys, layers)[0] == 1

    before = snapshot(layers)
    code, out, _ = run(capsys, "update", layers)
    assert code == 1
    assert re.search(r"attention\.py +has conflict marks: resolve them\n", out)
    assert snapshot(layers) == before

    resolved = re.sub(r"^<<<<<<< .*?^=======\n(.*?)^>>>>>>> .*?\n", r"\1", text, flags=re.M | re.S)
    (layers / "attention.py").write_text(resolved, encoding="utf-8")
    assert states(capsys, layers)[1]["attention.py"] == "pristine"
    assert run(capsys, "update", layers)[0] == 0
    entry = json.loads((layers / LOCK).read_bytes())["files"]["attention.py"]
    assert entry.keys() == {"source", "version", "sha256", "pristine"}  # what it was before is not kept any longer


@pytest.fixture
def conflict(layers, old, capsys):
    """A copy whose edit clashes with what has changed since, updated."""
    run(capsys, "add", "attention", "--to", layers, upstream=old)
    clash(layers / "attention.py")
    assert run(capsys, "update", layers)[0] == 1
    return layers / "attention.py"


def test_giving_up_a_conflict_does_not_hide_what_changed(conflict, layers, capsys):
    marked = conflict.read_bytes()
    (layers / "attention.py.orig").replace(conflict)
    assert states(capsys, layers) == (1, {"LICENSE.tinyblock": "pristine", "attention.py": "both"})
    assert "math.sqrt(q.shape[-1])" in run(capsys, "diff", layers, "--upstream")[1]
    assert run(capsys, "update", layers)[0] == 1
    assert conflict.read_bytes() == marked


@pytest.mark.parametrize("left", ["<<<<<<<", ">>>>>>>"])
def test_half_resolved_conflict_is_one(left, conflict, layers, capsys):
    lines = conflict.read_text(encoding="utf-8").splitlines(keepends=True)
    marks = {"<<<<<<<", "=======", ">>>>>>>"} - {left}
    conflict.write_text("".join(line for line in lines if line[:7] not in marks), encoding="utf-8")
    assert states(capsys, layers)[1]["attention.py"] == "conflict"


def test_marks_in_a_docstring_are_no_conflict(layers, capsys):
    run(capsys, "add", "rope", "--to", layers)
    replace(layers / "rope.py", "Compute the table.", "\n<<<<<<< HEAD\na\n=======\nb\n>>>>>>> other\n")
    assert states(capsys, layers) == (0, {"LICENSE.tinyblock": "pristine", "rope.py": "edited"})


def test_conflict_does_not_keep_other_copies_from_an_update(conflict, tmp_path, layers, capsys):
    run(capsys, "add", "rope", "--to", layers)
    newer = release(tmp_path / "newer", "9.0", rope=text_of("rope") + "# newer\n")
    code, out, _ = run(capsys, "update", layers, upstream=newer)
    assert code == 1
    assert re.search(r"rope\.py +updated\n", out)


def test_copy_and_lock_of_different_versions_are_told(tmp_path, layers, old, capsys):
    """As after a merge of branches that took the copy from one side and the lock file from the other."""
    run(capsys, "add", "attention", "--to", layers, upstream=old)
    copied = (layers / "attention.py").read_bytes()
    shutil.rmtree(layers)
    between = release(tmp_path / "between", "0.0.10", attention=text_of("attention") + "# between\n")
    run(capsys, "add", "attention", "--to", layers, upstream=between)
    (layers / "attention.py").write_bytes(copied)
    assert states(capsys, layers) == (1, {"LICENSE.tinyblock": "pristine", "attention.py": "mismatch"})
    before = snapshot(layers)
    code, out, _ = run(capsys, "update", layers)
    assert code == 1
    assert "of another version than the lock file says" in out
    assert snapshot(layers) == before


def test_update_never_overwrites_an_earlier_backup(layers, old, capsys):
    run(capsys, "add", "attention", "--to", layers, upstream=old)
    clash(layers / "attention.py")
    (layers / "attention.py.orig").write_text("mine")
    assert run(capsys, "update", layers)[0] == 1
    assert (layers / "attention.py.orig").read_text() == "mine"
    assert (layers / "attention.py.orig2").is_file()


def test_update_leaves_a_missing_copy_missing(layers, old, capsys):
    run(capsys, "add", "attention", "rope", "--to", layers, upstream=old)
    (layers / "rope.py").unlink()
    code, out, _ = run(capsys, "update", layers)
    assert code == 0
    assert re.search(r"rope\.py +missing", out)
    assert not (layers / "rope.py").exists()
    assert states(capsys, layers)[1]["rope.py"] == "missing"


@pytest.fixture
def without(tmp_path):
    """An earlier release, whose block did not import rmsnorm."""
    block = text_of("block").replace("from .rmsnorm import RMSNorm\n", "")
    return release(tmp_path / "without", "0.0.9", block=block)


def test_update_brings_a_sibling_that_the_new_version_imports(without, layers, capsys):
    run(capsys, "add", "block", "--to", layers, upstream=without)
    assert not (layers / "rmsnorm.py").exists()
    assert run(capsys, "update", layers)[0] == 0
    assert states(capsys, layers) == (0, dict.fromkeys(states(capsys, layers)[1], "pristine"))
    assert (layers / "rmsnorm.py").is_file()


def test_update_refuses_when_such_a_sibling_clashes(without, layers, capsys):
    run(capsys, "add", "block", "--to", layers, upstream=without)
    (layers / "rmsnorm.py").write_text("mine\n")
    before = snapshot(layers)
    code, _, err = run(capsys, "update", layers)
    assert code == 2
    assert "rmsnorm.py is there already" in err
    assert snapshot(layers) == before


def test_update_leaves_alone_what_tinyblock_no_longer_has(tmp_path, layers, capsys):
    run(capsys, "add", "rope", "rmsnorm", "--to", layers)
    newer = release(tmp_path / "newer", "9.0.0")
    (newer.root / "rope.py").unlink()
    before = snapshot(layers)
    code, out, _ = run(capsys, "update", layers, upstream=newer)
    assert code == 0
    assert re.search(r"rope\.py +no longer in tinyblock", out)
    assert snapshot(layers) == before
    assert run(capsys, "check", layers, upstream=newer)[0] == 0


def test_update_without_git_still_replaces_what_was_not_edited(layers, old, monkeypatch, capsys):
    run(capsys, "add", "attention", "rope", "--to", layers, upstream=old)
    replace(layers / "rope.py", "Compute the table.", "Fill the table.")
    monkeypatch.setattr(vendor.shutil, "which", lambda name: None)
    before = snapshot(layers)
    code, _, err = run(capsys, "update", layers)
    assert code == 2
    assert "install git" in err
    assert snapshot(layers) == before
    (layers / "rope.py").unlink()
    assert run(capsys, "update", layers)[0] == 0
    assert states(capsys, layers)[1]["attention.py"] == "pristine"


def test_update_that_was_cut_off_before_the_lock_is_finished_by_the_next(layers, old, capsys):
    run(capsys, "add", "attention", "--to", layers, upstream=old)
    lock = (layers / LOCK).read_bytes()
    run(capsys, "update", layers)
    after = snapshot(layers)
    (layers / LOCK).write_bytes(lock)
    assert states(capsys, layers)[1]["attention.py"] == "pristine"
    assert run(capsys, "update", layers)[0] == 0
    assert snapshot(layers) == after


def test_copies_keep_a_removed_header_removed(layers, old, capsys):
    run(capsys, "add", "attention", "--to", layers, upstream=old)
    path = layers / "attention.py"
    path.write_text(
        path.read_text(encoding="utf-8").partition("\n# SPDX-License-Identifier: MIT\n")[2], encoding="utf-8"
    )
    assert run(capsys, "update", layers)[0] == 0
    assert path.read_text(encoding="utf-8") == text_of("attention")
    assert states(capsys, layers)[1]["attention.py"] == "edited"


def test_part_of_a_header_is_brought_up_to_date(layers, old, capsys):
    run(capsys, "add", "rope", "--to", layers, upstream=old)
    replace(layers / "rope.py", "# SPDX-License-Identifier: MIT\n", "")
    assert run(capsys, "update", layers)[0] == 0
    expected = Upstream.installed().entry("rope.py").text.replace("# SPDX-License-Identifier: MIT\n", "")
    assert (layers / "rope.py").read_text(encoding="utf-8") == expected


def test_odd_line_ends_survive_an_update(layers, old, capsys):
    run(capsys, "add", "attention", "--to", layers, upstream=old)
    odd = b"A = 1\r\nB = 2\n"
    with (layers / "attention.py").open("ab") as file:
        file.write(odd)
    assert states(capsys, layers)[1]["attention.py"] == "both"
    assert run(capsys, "update", layers)[0] == 0
    assert (layers / "attention.py").read_bytes() == Upstream.installed().entry("attention.py").text.encode() + odd


def test_line_ends_are_no_edits(layers, old, capsys):
    run(capsys, "add", "transformer", "--to", layers, upstream=old)
    for path in layers.iterdir():  # as git writes them on Windows, the lock file too
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert set(states(capsys, layers)[1].values()) == {"pristine", "outdated"}
    assert run(capsys, "diff", layers, "--mine")[1] == ""
    replace(layers / "rope.py", "Compute the table.", "Fill the table.")
    assert run(capsys, "update", layers)[0] == 0
    for name in ("attention.py", "rope.py"):
        content = (layers / name).read_bytes()
        assert content.count(b"\r\n") == content.count(b"\n") > 100
    assert states(capsys, layers) == (0, states(capsys, layers)[1] | {"rope.py": "edited"})


def test_bytes_that_are_not_utf_8_survive(layers, old, capsysbinary):
    run(capsysbinary, "add", "attention", "--to", layers, upstream=old)
    with (layers / "attention.py").open("ab") as file:
        file.write(b"# caf\xe9\n")
    assert b"\n+# caf\xe9\n" in run(capsysbinary, "diff", layers)[1]
    assert run(capsysbinary, "update", layers)[0] == 0
    assert (layers / "attention.py").read_bytes().endswith(b"# caf\xe9\n")


def test_file_modes_survive_an_update(layers, old, capsys):
    run(capsys, "add", "attention", "--to", layers, upstream=old)
    (layers / "attention.py").chmod(0o640)
    run(capsys, "update", layers)
    assert (layers / "attention.py").stat().st_mode & 0o777 == 0o640


# merge

LINES = st.lists(st.sampled_from(["a", "b", "c", "", "\tdef f():", "é"]), max_size=8)
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
LABELS = ("mine", "base", "theirs")


def joined(lines):
    return "".join(f"{line}\n" for line in lines)


@needs_git
@settings(deadline=None, max_examples=40)
@given(base=LINES, other=LINES)
def test_merge_with_one_side_unchanged_is_the_other(base, other):
    base, other = joined(base), joined(other)
    assert merge(other, base, base, LABELS) == (other, False)
    assert merge(base, base, other, LABELS) == (other, False)
    assert merge(other, base, other, LABELS) == (other, False)


@needs_git
@settings(deadline=None, max_examples=40)
@given(parts=st.tuples(LINES, LINES, LINES, LINES))
def test_merge_of_changes_apart_has_both(parts):
    first, mine, second, theirs = map(joined, parts)
    between = joined(f"unchanged {number}" for number in range(5))
    merged = merge(mine + between + second, first + between + second, first + between + theirs, LABELS)
    assert merged == (mine + between + theirs, False)


@needs_git
@settings(deadline=None, max_examples=40)
@given(base=LINES, mine=LINES, theirs=LINES)
def test_merge_loses_nothing_that_either_side_added(base, mine, theirs):
    assume(mine != theirs)
    mine, theirs = [f"mine {line}" for line in mine], [f"theirs {line}" for line in theirs]
    text, conflicts = merge(joined(mine), joined(base), joined(theirs), LABELS)
    lines = text.splitlines()
    assert [line for line in lines if line.startswith("mine ")] == mine
    assert [line for line in lines if line.startswith("theirs ")] == theirs
    assert conflicts == any(line.startswith("<<<<<<< mine") for line in lines) == (">>>>>>> theirs" in lines)


@needs_git
@pytest.mark.parametrize("style", ["diff3", "zdiff3", "nonsense"])
def test_merge_does_not_depend_on_the_repository_around(style, tmp_path, monkeypatch):
    texts = ("a\nmine\nz\n", "a\nbase\nz\n", "a\ntheirs\nz\n", LABELS)
    expected = merge(*texts)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    subprocess.run(["git", "config", "merge.conflictStyle", style], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    assert merge(*texts) == expected


@pytest.mark.skipif(os.name != "posix", reason="a stub is a shell script")
@pytest.mark.parametrize(
    "stub", ["exit 0", "exit 1", "exit 126", "exit 127", "cat $8", "echo install me >&2; exit 1", "cat $8; exit 1"]
)
def test_what_only_calls_itself_git_changes_nothing(stub, tmp_path, layers, old, monkeypatch, capsys):
    run(capsys, "add", "attention", "rope", "--to", layers, upstream=old)
    replace(layers / "rope.py", "Compute the table.", "Fill the table.")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "git").write_text(f"#!/bin/sh\n{stub}\n")
    (tmp_path / "bin" / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    assert_refused(capsys, tmp_path, ["update", layers], "git could not merge .*rope.py: ")


@needs_git
def test_merge_refuses_what_git_cannot_merge():
    with pytest.raises(Refusal, match=r"git could not merge mine: .*binary"):
        merge("a\0b\n", "a\n", "c\n", LABELS)


# verify


def test_verify_passes_a_pristine_copy_and_says_where_an_edited_one_fails(layers, monkeypatch, capsys):
    run(capsys, "add", "rmsnorm", "--to", layers)
    monkeypatch.chdir(layers.parent)
    code, out, _ = run(capsys, "verify", layers)
    assert code == 0
    assert out.startswith(f"rmsnorm: {Path(layers.name, 'rmsnorm.py')}\n  ok    equation in float64\n")
    properties = out.count("  ok    ")
    skipped = 0 if torch.cuda.is_available() else 1  # the equation there
    assert out.endswith(f"\n{properties} hold, 0 fail, {skipped} skipped\n")

    replace(layers / "rmsnorm.py", 'raise ValueError(f"RMSNorm needs a positive', 'print(f"RMSNorm needs a positive')
    code, out, _ = run(capsys, "verify", layers / "rmsnorm.py")
    assert code == 1
    assert re.search(r"^  FAIL  RMSNorm: bad hyperparameters refused: .*RMSNorm\(4, 0\.0\)", out, re.MULTILINE)
    assert out.endswith(f"\n{properties - 1} hold, 1 fail, {skipped} skipped\n")
    code, out, _ = run(capsys, "verify", layers, "--skip", "RMSNorm: bad hyperparameters refused")
    assert code == 0
    assert "  skip  RMSNorm: bad hyperparameters refused: as you asked\n" in out


def test_verify_of_a_part_of_a_layer_skips_the_rest(layers, capsys):
    run(capsys, "add", "rmsnorm", "--to", layers)
    text = (layers / "rmsnorm.py").read_text(encoding="utf-8")
    function = re.search(r"^def rms_norm\(.*?(?=^class )", text, re.MULTILINE | re.DOTALL)[0]
    (layers / "rmsnorm.py").write_text(text.replace(function, ""), encoding="utf-8")
    code, out, _ = run(capsys, "verify", layers)
    assert code == 0
    assert re.search(r"^  skip  rms_norm: equation and gradients: rms_norm is not in this copy$", out, re.MULTILINE)


def test_verify_of_attention_alone_borrows_rope(layers, capsys):
    run(capsys, "add", "attention", "--to", layers)
    replace(layers / "attention.py", "rope.rotate(q, cos_sin), rope.rotate(k, cos_sin)", "q, rope.rotate(k, cos_sin)")
    code, out, _ = run(capsys, "verify", layers)
    assert code == 1
    assert out.startswith(f"attention: {layers / 'attention.py'} (with the rope of tinyblock)\n")
    assert re.search(r"^  FAIL  relative positions only \(with RoPE\): ", out, re.MULTILINE)
    assert re.search(r"^  ok    equation in float64$", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("nowhere", "nowhere"),
        ("nowhere.rope", "nowhere"),
        ("empty", "empty"),
        ("broken", r"broken.*rope\.py.*line 1"),
        ("sys", "sys is no .py file: it comes from Python itself"),
        ("data.zip", "data.zip"),
        ("zipped", "zipped is no folder: it comes from .*data.zip"),
        ("zipped.rope", "zipped.rope is no .py file"),
    ],
)
def test_verify_refuses_what_it_cannot_load(target, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "rope.py").write_text("class RotaryPositionalEmbedding(:\n")
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.write(PACKAGE / "rope.py", "zipped/rope.py")
        archive.writestr("zipped/__init__.py", "")
    monkeypatch.syspath_prepend(tmp_path / "data.zip")
    assert_refused(capsys, tmp_path / "empty", ["verify", target], expected)


def test_verify_does_not_pass_over_a_class_of_another_name(layers, capsys):
    run(capsys, "add", "block", "--to", layers)
    replace(layers / "rmsnorm.py", "class RMSNorm(nn.Module)", "class Norm(nn.Module)")
    replace(layers / "rmsnorm.py", '__all__ = ["RMSNorm", ', '__all__ = ["Norm", ')
    for name in ("attention", "block", "ffn"):
        (layers / f"{name}.py").unlink()
    (layers / "block.py").write_text("class DecoderLayer: ...\n")
    code, out, _ = run(capsys, "verify", layers)
    assert code == 1
    assert "  FAIL  RMSNorm is there: rmsnorm.py has Norm only, which is not verified\n" in out
    assert "  FAIL  Block is there: block.py does not define it, and is not verified\n" in out


def test_verify_skips_a_property_of_one_layer_only(layers, capsys):
    run(capsys, "add", "rmsnorm", "ffn", "--to", layers)
    _, out, _ = run(capsys, "verify", layers, "--skip", "rmsnorm: keys of the state dict")
    assert re.findall(r"^  skip  (.*): as you asked$", out, re.MULTILINE) == ["keys of the state dict"]
    code, _, err = run(capsys, "verify", layers, "--skip", "positions off the table")
    assert code == 2
    assert "no property 'positions off the table' to skip here" in err


def test_verify_refuses_to_skip_what_is_no_property(tmp_path, layers, capsys):
    run(capsys, "add", "rmsnorm", "--to", layers)
    assert_refused(
        capsys, tmp_path, ["verify", layers, "--skip", "equation in float"], "did you mean 'equation in float64'"
    )


# What is refused, in one line and without a change on the disk


def corrupt(folder, change):
    lock = json.loads((folder / LOCK).read_bytes())
    change(lock)
    (folder / LOCK).write_text(json.dumps(lock))


def prepend(path, content):
    path.write_bytes(content + path.read_bytes())


def escape(name):
    def change(lock):
        lock["files"][name] = lock["files"].pop("rope.py")

    return change


def set_field(key, value):
    return lambda lock: lock["files"]["rope.py"].__setitem__(key, value)


CORRUPTIONS = {
    "no JSON": (lambda folder: (folder / LOCK).write_bytes(b"{"), "corrupt"),
    "no UTF-8": (lambda folder: (folder / LOCK).write_bytes(b"\xff\xfe{}"), "corrupt"),
    "empty": (lambda folder: (folder / LOCK).write_bytes(b""), "corrupt"),
    "a list": (lambda folder: (folder / LOCK).write_bytes(b"[]"), "corrupt"),
    "nested": (lambda folder: (folder / LOCK).write_bytes(b"[" * 100_000), "corrupt"),
    "no files": (lambda folder: corrupt(folder, lambda lock: lock.pop("files")), "corrupt"),
    "lock version 0": (lambda folder: corrupt(folder, lambda lock: lock.update(lock_version=0)), "corrupt"),
    "lock version 1.5": (lambda folder: corrupt(folder, lambda lock: lock.update(lock_version=1.5)), "corrupt"),
    "infinite": (lambda folder: replace(folder / LOCK, '"lock_version": 1', '"lock_version": 1e999'), "corrupt"),
    "twice": (lambda folder: replace(folder / LOCK, '"lock_version": 1', '"files": {}, "lock_version": 1'), "twice"),
    "long version": (lambda folder: corrupt(folder, set_field("version", "1" * 5000)), "is no version"),
    "other source": (lambda folder: corrupt(folder, set_field("source", "\x1b[2J")), "is no file of tinyblock"),
    "upper case": (lambda folder: corrupt(folder, escape("rOPE.py")), "not the name of a file in its folder"),
    "no lock version": (lambda folder: corrupt(folder, lambda lock: lock.pop("lock_version")), "corrupt"),
    "git's conflict": (lambda folder: prepend(folder / LOCK, b"<<<<<<< HEAD\n"), "corrupt"),
    "other text": (lambda folder: corrupt(folder, set_field("pristine", ["x = 1", ""])), "SHA-256"),
    "no text": (lambda folder: corrupt(folder, set_field("pristine", None)), "corrupt"),
    "number as version": (lambda folder: corrupt(folder, set_field("version", 3)), "corrupt"),
    "no version": (lambda folder: corrupt(folder, set_field("version", "new")), "corrupt"),
    "no source": (lambda folder: corrupt(folder, set_field("source", None)), "corrupt"),
    "newer lock": (lambda folder: corrupt(folder, lambda lock: lock.update(lock_version=2)), "newer tinyblock"),
    "parent folder": (lambda folder: corrupt(folder, escape("../rope.py")), "not the name of a file in its folder"),
    "absolute": (lambda folder: corrupt(folder, escape("/etc/rope.py")), "not the name of a file in its folder"),
    "backslash": (lambda folder: corrupt(folder, escape("..\\rope.py")), "not the name of a file in its folder"),
    "drive": (lambda folder: corrupt(folder, escape("C:rope.py")), "not the name of a file in its folder"),
    "subfolder": (lambda folder: corrupt(folder, escape("a/rope.py")), "not the name of a file in its folder"),
    "newline": (lambda folder: corrupt(folder, escape("rope.py\n")), "not the name of a file in its folder"),
}  # fmt: skip
COMMANDS = {
    "add": lambda folder: ["add", "ffn", "--to", folder],
    "check": lambda folder: ["check", folder],
    "diff": lambda folder: ["diff", folder],
    "update": lambda folder: ["update", folder],
}


def assert_refused(capsys, tmp_path, argv, expected, upstream=None):
    before = snapshot(tmp_path)
    code, out, err = run(capsys, *argv, upstream=upstream)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert re.match("tinyblock: error: ", err)
    assert re.search(expected, err), err
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("how", CORRUPTIONS)
def test_corrupt_lock_is_refused(command, how, tmp_path, layers, capsys):
    damage, expected = CORRUPTIONS[how]
    run(capsys, "add", "rope", "--to", layers)
    damage(layers)
    assert_refused(capsys, tmp_path, COMMANDS[command](layers), expected)


@pytest.mark.parametrize("name", ["rope.py", LOCK])
@pytest.mark.parametrize("command", COMMANDS)
def test_link_out_of_the_folder_is_not_followed(command, name, tmp_path, layers, capsys):
    run(capsys, "add", "rope", "--to", layers)
    outside = tmp_path / "outside"
    shutil.move(layers / name, outside)
    (layers / name).symlink_to(outside)
    argv = COMMANDS[command](layers) if command != "add" else ["add", "rope", "--to", layers]
    assert_refused(capsys, tmp_path, argv, "symbolic link that leads out of the folder")


@pytest.mark.parametrize("command", COMMANDS)
def test_link_to_itself_is_refused(command, tmp_path, layers, capsys):
    run(capsys, "add", "rope", "--to", layers)
    (layers / "rope.py").unlink()
    (layers / "rope.py").symlink_to(layers / "rope.py")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    argv = COMMANDS[command](layers) if command != "add" else ["add", "rope", "--to", layers]
    assert_refused(capsys, tmp_path, argv, "leads back to itself|Too many levels")
    assert_refused(capsys, tmp_path, COMMANDS[command](tmp_path / "loop"), "leads back to itself|Too many levels")


def test_two_copies_that_are_one_file_are_refused(tmp_path, layers, old, capsys):
    run(capsys, "add", "attention", "rope", "--to", layers, upstream=old)
    (layers / "rope.py").unlink()
    (layers / "rope.py").symlink_to("attention.py")
    assert states(capsys, layers)[1]["rope.py"] == "mismatch"
    (layers / "attention.py").write_text("A = 1\n")  # without the headers
    assert states(capsys, layers)[1]["rope.py"] == "both"
    assert_refused(capsys, tmp_path, ["update", layers, "--dry-run"], "two of attention.py, rope.py are the same file")


def test_dangling_link_out_of_the_folder_is_not_written_through(tmp_path, layers, capsys):
    layers.mkdir(parents=True)
    (layers / "rope.py").symlink_to(tmp_path / "outside.py")
    assert_refused(capsys, tmp_path, ["add", "rope", "--to", layers], "symbolic link")


def test_link_inside_the_folder_and_a_folder_that_is_a_link_work(tmp_path, layers, old, capsys):
    run(capsys, "add", "attention", "--to", layers, upstream=old)
    (layers / "sub").mkdir()
    shutil.move(layers / "attention.py", layers / "sub" / "real.py")
    (layers / "attention.py").symlink_to(Path("sub", "real.py"))
    (tmp_path / "link").symlink_to(layers)
    assert run(capsys, "update", tmp_path / "link")[0] == 0
    assert (layers / "attention.py").is_symlink()
    assert (layers / "sub" / "real.py").read_text(encoding="utf-8").endswith(text_of("attention"))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("rop", "no layer 'rop': did you mean rope"),
        ("attn", "no layer 'attn': did you mean attention"),
        ("Rope", "did you mean rope"),
        ("rope.py", "did you mean rope"),
        ("SwiGLU", "did you mean ffn"),
        ("rms_norm", "did you mean rmsnorm"),
        ("contract", "no layer 'contract'"),
        ("../rope", "did you mean rope"),
        ("", "there are rmsnorm, ffn"),
        ("wörld peace", "there are rmsnorm, ffn"),
    ],
)
def test_unknown_layer_is_refused_with_the_nearest_name(asked, expected, tmp_path, layers, capsys):
    for options in ([], ["--with-tests"]):
        assert_refused(capsys, tmp_path, ["add", "rope", asked, "--to", layers, *options], expected)


def test_target_that_is_a_file_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    for target in (tmp_path / "file", tmp_path / "file" / "below"):
        for command in ("add", "check"):
            assert_refused(capsys, tmp_path, COMMANDS[command](target), "file is a file")


@pytest.mark.parametrize("inside", [PACKAGE, PACKAGE / "copies", PACKAGE / "sub" / ".."])
def test_target_inside_the_package_is_refused(inside, tmp_path, capsys):
    assert_refused(capsys, PACKAGE, ["add", "rope", "--to", inside], "inside the tinyblock package")
    (tmp_path / "link").symlink_to(inside.resolve())
    assert_refused(capsys, PACKAGE, ["add", "rope", "--to", tmp_path / "link"], "inside the tinyblock package")


def test_target_that_cannot_be_written_is_refused(tmp_path, layers, capsys, monkeypatch):
    layers.mkdir(parents=True)
    for argv in (["add", "rope", "--to", layers], ["add", "rope", "--to", layers / "new", "--dry-run"]):
        with monkeypatch.context() as patch:  # the user who runs the tests may be one who can write anywhere
            patch.setattr(vendor.os, "access", lambda path, mode: False)
            assert_refused(capsys, tmp_path, argv, "is not writable")
    with monkeypatch.context() as patch:

        def full(*arguments, **options):
            raise OSError(28, "No space left on device", "rope.py")

        patch.setattr(vendor.os, "fsync", full)
        assert_refused(capsys, tmp_path, ["add", "rope", "--to", layers / "new"], r"rope\.py: No space left on device")
    run(capsys, "add", "rope", "--to", layers)
    with monkeypatch.context() as patch:
        patch.setattr(vendor.os, "access", lambda path, mode: not (mode & os.W_OK and Path(path).name == LOCK))
        assert_refused(capsys, tmp_path, ["add", "ffn", "--to", layers], r"tinyblock\.lock is not writable")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a place where even root cannot write")
def test_target_on_a_read_only_file_system_is_refused(tmp_path, capsys):
    assert_refused(capsys, tmp_path, ["add", "rope", "--to", "/proc/layers"], "/proc/?.*: |not writable")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_file_that_tinyblock_did_not_write_is_refused(kind, tmp_path, layers, capsys):
    layers.mkdir(parents=True)
    if kind == "file":
        (layers / "rmsnorm.py").write_text("mine\n")
    else:
        (layers / "rmsnorm.py").mkdir()
    assert_refused(capsys, tmp_path, ["add", "block", "--to", layers], r"rmsnorm\.py is there already")
    assert_refused(capsys, tmp_path, ["add", "block", "--to", layers, "--dry-run"], r"rmsnorm\.py is there already")


def test_outdated_sibling_is_refused(tmp_path, layers, old, capsys):
    run(capsys, "add", "attention", "--to", layers, upstream=old)
    assert_refused(
        capsys, tmp_path, ["add", "block", "--to", layers], r"earlier tinyblock \(0\.0\.9\): run `tinyblock update"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_copies_of_a_newer_tinyblock_are_refused(command, tmp_path, layers, old, capsys):
    run(capsys, "add", "attention", "--to", layers)
    argv = COMMANDS[command](layers)
    assert_refused(capsys, tmp_path, argv, rf"{__version__}, newer than the installed 0\.0\.9: upgrade", upstream=old)


def test_newer_copy_of_what_this_tinyblock_has_not_is_refused(tmp_path, layers, capsys):
    run(capsys, "add", "rope", "--to", layers)

    def rename(lock):
        lock["files"]["kv_cache.py"] = {**lock["files"].pop("rope.py"), "version": "9.0.0"}

    corrupt(layers, rename)
    assert_refused(capsys, tmp_path, ["check", layers], r"tinyblock 9\.0\.0, newer than the installed")


@pytest.mark.parametrize(("taken", "installed"), [("0.10.0", "0.9.0"), ("1.0", "0.9.9"), ("0.9.1", "0.9")])
def test_versions_are_compared_by_their_numbers(taken, installed, tmp_path, layers, capsys):
    newer, older = release(tmp_path / "newer", taken), release(tmp_path / "older", installed, rope="# older\n")
    run(capsys, "add", "rope", "--to", layers, upstream=newer)
    assert_refused(capsys, tmp_path, ["check", layers], f"newer than the installed {installed}", upstream=older)
    shutil.rmtree(layers)
    run(capsys, "add", "rope", "--to", layers, upstream=older)
    assert run(capsys, "check", layers, upstream=newer)[0] == 1


def test_check_of_an_emptied_lock_file_finds_nothing(layers, capsys):
    run(capsys, "add", "rope", "--to", layers)
    corrupt(layers, lambda lock: lock["files"].clear())
    assert run(capsys, "check", layers) == (0, "", "")


def test_empty_target_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["add", "rope", "--to", ""])
    assert stop.value.code == 2


def test_way_through_a_folder_that_is_not_there_makes_none(tmp_path, capsys):
    assert run(capsys, "add", "rope", "--to", tmp_path / "nowhere" / ".." / "layers")[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["layers"]


def test_copy_that_is_a_folder_is_refused(tmp_path, layers, capsys):
    run(capsys, "add", "rope", "--to", layers)
    (layers / "rope.py").unlink()
    (layers / "rope.py").mkdir()
    for argv in (["add", "rope", "--to", layers, "--dry-run"], ["add", "rope", "--to", layers], ["check", layers]):
        assert_refused(capsys, tmp_path, argv, r"rope\.py is there already, and is no file")


def test_lost_lock_file_with_an_edited_copy_is_told(tmp_path, layers, capsys):
    run(capsys, "add", "rope", "--to", layers)
    (layers / LOCK).unlink()
    replace(layers / "rope.py", "Compute the table.", "Fill the table.")
    assert_refused(
        capsys, tmp_path, ["add", "rope", "--to", layers], r"a copy, with edits, that tinyblock\.lock does not know"
    )


@pytest.mark.parametrize("command", ["check", "diff", "update"])
def test_folder_without_copies_is_refused(command, tmp_path, layers, capsys):
    assert_refused(capsys, tmp_path, [command, layers], "there is no folder")
    layers.mkdir(parents=True)
    assert_refused(capsys, tmp_path, [command, layers], "has no tinyblock.lock")


@pytest.mark.parametrize("argv", [[], ["remove", "x"], ["add", "rope"], ["diff", "x", "--mine", "--upstream"]])
def test_wrong_usage_is_refused_in_one_line(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError, SystemExit])
@pytest.mark.parametrize("at", range(6))
def test_interrupted_copy_leaves_nothing(interruption, at, tmp_path, layers, monkeypatch, capsys):
    calls, before = fail_to_replace(monkeypatch, at, interruption("cut off")), snapshot(tmp_path)
    if interruption is SystemExit:
        with pytest.raises(SystemExit):
            main(["add", "block", "--to", str(layers)])
    else:
        code, _, err = run(capsys, "add", "block", "--to", layers)
        assert code == {KeyboardInterrupt: 130, OSError: 2}[interruption]
        assert err.count("\n") == 1
    assert len(calls) == at + 1
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("at", range(3))
def test_interrupted_update_puts_everything_back(at, tmp_path, layers, old, monkeypatch, capsys):
    run(capsys, "add", "attention", "rope", "--to", layers, upstream=old)
    before = snapshot(tmp_path)
    with monkeypatch.context() as patch:
        fail_to_replace(patch, at, KeyboardInterrupt())
        assert run(capsys, "update", layers)[0] == 130
    assert snapshot(tmp_path) == before
    assert run(capsys, "update", layers)[0] == 0


def test_two_runs_at_once_are_kept_apart(tmp_path, layers, old, capsys):
    run(capsys, "add", "attention", "--to", layers, upstream=old)
    with Staging(layers.resolve()):
        assert_refused(
            capsys, tmp_path, ["add", "ffn", "--to", layers], "another run is at work there.*delete .*staging"
        )
        assert_refused(capsys, tmp_path, ["update", layers], "another run is at work there")
        assert run(capsys, "update", layers, "--dry-run")[0] == 0
    assert run(capsys, "update", layers)[0] == 0


def test_edit_that_is_saved_during_an_update_is_not_lost(tmp_path, layers, old, monkeypatch, capsys):
    run(capsys, "add", "attention", "rope", "--to", layers, upstream=old)
    replace(layers / "rope.py", "Compute the table.", "Fill the table.")

    def merge_while_an_editor_saves(*arguments):
        replace(layers / "rope.py", "Fill the table.", "Fill in the table.")
        return merge(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(vendor, "merge", merge_while_an_editor_saves)
        code, _, err = run(capsys, "update", layers)
    assert code == 2
    assert "changed meanwhile" in err
    assert states(capsys, layers)[1] == {"LICENSE.tinyblock": "pristine", "attention.py": "outdated", "rope.py": "both"}
    assert "Fill in the table." in (layers / "rope.py").read_text(encoding="utf-8")


def test_files_that_cannot_be_put_back_are_kept(layers, old, monkeypatch, capsys):
    run(capsys, "add", "attention", "rope", "--to", layers, upstream=old)
    before, real = (layers / "attention.py").read_bytes(), os.replace

    def fails_from_the_second_on(source, target):
        if Path(target).name != "attention.py" or source.suffix == ".old":
            raise OSError(5, "Input/output error", str(target))
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(vendor.os, "replace", fails_from_the_second_on)
        code, _, err = run(capsys, "update", layers)
    assert code == 2
    assert re.search(r"/attention\.py could not be put back: see \S.*\.tinyblock-staging\n$", err)
    assert "rope.py" not in err
    assert before in [path.read_bytes() for path in (layers / Staging.NAME).iterdir()]


def test_main_runs_in_a_thread(layers):
    codes = []
    thread = threading.Thread(target=lambda: codes.append(main(["add", "rope", "--to", str(layers)])))
    thread.start()
    thread.join()
    assert codes == [0]


# As users run it: another process, an archive, a host project

ONLY_WHAT_LAYERS_NEED = """
import sys
ALLOWED = {"torch", "einops", "jaxtyping", "my_project"} | sys.stdlib_module_names
ALLOWED |= {"functorch", "torchgen", "sympy", "mpmath", "filelock", "networkx", "jinja2", "markupsafe", "fsspec"}
ALLOWED |= {"typing_extensions", "wadler_lindig"}  # what torch and jaxtyping themselves import
class Only:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return self.finder.find_spec(name, path, target) if name.partition(".")[0] in ALLOWED else None
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = map(Only, sys.meta_path)
for name in ("tinyblock", "beartype", "numpy"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    sys.exit(f"{name} can be imported")
"""
HOST = """
import torch
from my_project.model import model
out = model(torch.randn(2, 5, 24))
assert out.shape == (2, 5, 24)
out.sum().backward()
import my_project.layers.block
assert my_project.layers.block.__file__.startswith(sys.argv[1])
"""


def command(*argv, cwd, path=ROOT):
    return subprocess.run(
        [sys.executable, "-m", "tinyblock", *argv],
        cwd=cwd, env={**WITH_PACKAGE, "PYTHONPATH": str(path)}, capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip


@pytest.mark.parametrize("has_init", [True, False])
def test_host_package_imports_the_copies_without_tinyblock(has_init, tmp_path, capsys):
    package = tmp_path / "my_project"
    run(capsys, "add", "transformer", "--to", package / "layers")
    for folder in (package, package / "layers") if has_init else ():
        (folder / "__init__.py").touch()
    (package / "model.py").write_text(
        "from .layers.transformer import Transformer\n\nmodel = Transformer(2, 24, 4, max_seq_len=8)\n"
    )
    code = [sys.executable, "-c", ONLY_WHAT_LAYERS_NEED + HOST, str(tmp_path)]
    done = subprocess.run(code, cwd=tmp_path, env=WITHOUT_PACKAGE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_add_works_from_a_zip_archive(tmp_path):
    archive = tmp_path / "with space.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in [*PACKAGE.glob("*.py"), PACKAGE / "LICENSE"]:
            file.write(path, path.relative_to(ROOT))
    done = command("add", "block", "--to", "my läyers", "--with-typecheck", cwd=tmp_path, path=archive)
    assert done.returncode == 0, done.stderr
    done = command("check", "my läyers", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("pristine") == 6


def readme(kind):
    return re.findall(rf"```{kind}\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def replay(session, folder, capsys):
    """Run the commands of a session, and return it with what they print."""
    shown = []
    for line in re.findall(r"^\$ (.*)\n", session, re.MULTILINE):
        shown.append(f"$ {line}\n")
        words = shlex.split(line)
        argv = words[: words.index("|")] if "|" in words else words
        if argv[0] == "tinyblock":
            _, out, err = run(capsys, *argv[1:])
            assert err == ""
            filters = line.partition(" | ")[2]
            done = subprocess.run(filters or "cat", shell=True, input=out, cwd=folder, capture_output=True, text=True)
        else:
            done = subprocess.run(line, shell=True, cwd=folder, capture_output=True, text=True)
        shown.append(done.stdout)
    return "".join(shown)


@pytest.mark.skipif(sys.platform != "linux", reason="the session uses GNU sed")
def test_readme_sessions_print_what_they_say(tmp_path, monkeypatch, capsys):
    taking, editing, updating = readme("console")
    monkeypatch.chdir(tmp_path)
    assert replay(taking + editing, tmp_path, capsys) == taking + editing
    shutil.rmtree("my_project")
    earlier = release(tmp_path / "earlier", __version__, ffn=old_text("ffn"))
    run(capsys, "add", "ffn", "--to", "my_project/layers", upstream=earlier)
    assert replay(updating, tmp_path, capsys) == updating


def test_readme_says_how_a_host_turns_the_checks_on(tmp_path, monkeypatch, capsys):
    [add] = [line for block in readme("sh") for line in block.splitlines() if line.startswith("tinyblock add")]
    [init] = [block for block in readme("python") if block.startswith("# my_project/layers/__init__.py\n")]
    monkeypatch.chdir(tmp_path)
    assert run(capsys, *shlex.split(add)[1:])[0] == 0
    (tmp_path / "my_project" / "layers" / "__init__.py").write_text(init)
    code = (
        "import sys, torch; sys.modules['tinyblock'] = None\n"
        "from my_project.layers.block import Block\n"
        "block = Block(24, 4); block(torch.randn(3, 24)); block(torch.randn(3, 23))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "my_project.layers.block.Block.forward" in done.stderr
    assert "f32[3,23]" in done.stderr


INTERRUPTED = """
import os, shutil, signal, sys
from tinyblock.__main__ main
def interrupting(module, name, at):
    real, calls = getattr(module, name), []
    def wrapper(*arguments, **options):
        result = real(*arguments, **options)
        calls.append(name)
        if len(calls) == at:
            os.kill(os.getpid(), getattr(signal, sys.argv[1]))
        return result
    setattr(module, name, wrapper)
interrupting({"os": os, "shutil": shutil}[sys.argv[2]], sys.argv[3], int(sys.argv[4]))
sys.exit(main(["add", "block", "--to", "layers"]))
""".replace("__main__ main", "__main__ import main")


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("number", "module", "function", "at", "is_done"),
    [
        ("SIGINT", "os", "fsync", 2, False),
        ("SIGHUP", "os", "fsync", 6, False),
        ("SIGINT", "os", "replace", 1, True),  # too late: what half a folder holds is finished
        ("SIGINT", "shutil", "rmtree", 1, True),
        ("SIGKILL", "os", "replace", 3, None),
    ],
)
def test_signal_leaves_all_or_nothing(number, module, function, at, is_done, tmp_path, capsys):
    arguments = [sys.executable, "-c", INTERRUPTED, number, module, function, str(at)]
    done = subprocess.run(arguments, cwd=tmp_path, env=WITH_PACKAGE, capture_output=True, text=True)
    folder = tmp_path / "layers"
    if is_done is None:
        assert done.returncode == -signal.SIGKILL
        assert_refused(capsys, tmp_path, ["add", "block", "--to", folder], "was killed: if none is, delete .*staging")
        assert {path.suffix for path in (folder / Staging.NAME).iterdir()} == {".new"}  # what it had not come to
        shutil.rmtree(folder / Staging.NAME)
        assert run(capsys, "add", "block", "--to", folder)[0] == 0
        assert states(capsys, folder)[0] == 0
    elif is_done:
        assert done.returncode == 0, done.stderr
        assert states(capsys, folder) == (
            0,
            dict.fromkeys(sorted(p.name for p in folder.iterdir() if p.name != LOCK), "pristine"),
        )
    else:
        assert (done.returncode, done.stderr) == (130, "tinyblock: interrupted\n")
        assert snapshot(tmp_path) == {}


@pytest.mark.skipif(os.name != "posix", reason="a shell of POSIX")
def test_closed_output_is_no_traceback(tmp_path):
    tinyblock = f"{shlex.quote(sys.executable)} -m tinyblock"
    for line in (f"{tinyblock} list >&-", f"{tinyblock} list --json | true"):
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=WITH_PACKAGE, capture_output=True, text=True)
        assert done.stderr == ""


def test_vendor_imports_the_standard_library_only():
    for name in ("vendor", "staging", "__main__"):
        imported = set(re.findall(r"^ *(?:from|import) ([\w.]+)", text_of(name), re.MULTILINE))
        own = {module for module in imported if module.startswith(".")}
        assert own <= {".", ".staging", ".vendor"}
        assert {module.partition(".")[0] for module in imported - own} <= sys.stdlib_module_names


def test_copies_can_be_used_from_python(layers, old):
    actions = Copies(layers, old).add(["rope"])
    assert {name: str(action) for name, action in actions.items()} == {
        "rope.py": "copied",
        "LICENSE.tinyblock": "copied",
    }
    copies = Copies(layers, Upstream.installed())
    assert copies.states()["rope.py"] == "outdated"
    copies.update()
    assert set(copies.states().values()) == {"pristine"}
