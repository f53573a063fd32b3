"""Stop a command wherever it changes a file, and go on in each way that users do.

    python stopping.py TINYBLOCK NEWER FOLDER ARGUMENTS...

TINYBLOCK is the folder of the release that runs, NEWER that of a later one, and FOLDER the
folder of copies. Each command runs in a process of its own. It ends without cleaning up
before it makes, opens, renames or deletes a file or folder in FOLDER, or in the middle of
a file; or it gets an error there, as on a full disk.
"""

import os
import resource
import runpy
import shutil
import signal
import sys
from pathlib import Path

STOPPED = 99
FAILED = 2
NEVER = 10**9
CHANGES = ("os.mkdir", "os.chmod", "os.rename", "os.remove")
TINYBLOCK, NEWER, NAME, *COMMAND = sys.argv[1:]
FOLDER = Path(NAME)
release = runpy.run_path(f"{TINYBLOCK}/copies.py")["main"]
newer_release = runpy.run_path(f"{NEWER}/copies.py")["main"]


def run(command, main=release, changes=NEVER, size=NEVER, is_full=False):
    """Run a command in a process, and return its exit code.

    The process stops after so many changes, or when a file has so many bytes. If the
    disk is full then, it gets an error instead.
    """
    process = os.fork()
    if process == 0:
        if not is_full:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        stop_after(changes, size)
        os._exit(main(command))
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status)


def stop_after(changes, size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    def count(event, arguments):
        nonlocal changes
        is_write = event == "open" and "w" in str(arguments[1])
        if (is_write or event in CHANGES) and NAME in str(arguments[0]):
            if changes == 0:
                os._exit(STOPPED)
            changes -= 1

    sys.addaudithook(count)


def contents():
    """Return the bytes of each file in the folder."""
    files = filter(Path.is_file, FOLDER.rglob("*"))
    return {path.relative_to(FOLDER).as_posix(): path.read_bytes() for path in files}


def save(name):
    shutil.rmtree(name, ignore_errors=True)
    shutil.copytree(FOLDER, name, symlinks=True)


def restore(name):
    shutil.rmtree(FOLDER)
    shutil.copytree(name, FOLDER, symlinks=True)


def stops():
    """Stop the command in each place, and yield the place and the exit code."""
    changes = 0
    stopped = STOPPED
    while stopped == STOPPED:
        restore("before")
        stopped = run(COMMAND, changes=changes)
        yield f"change {changes}", stopped
        changes += 1
    for size in sorted({len(text) // 2 for text in contents().values()}):
        for is_full in (False, True):
            restore("before")
            yield f"byte {size}", run(COMMAND, size=size, is_full=is_full)


def check_each_way(before, after, newer, code):
    """Check the copies after a stop, and after what users may do next."""
    save("stopped")
    for name, text in contents().items():
        is_whole = text in (before.get(name), after.get(name))
        assert is_whole or name.endswith(".partial"), name

    run(["check", NAME])
    checked = contents()
    assert not [name for name in checked if name.endswith(".partial")]
    for base in (name for name in after if name.endswith(".base")):
        copy = base.removeprefix(".tinyblock/").removesuffix(".base")
        pairs = [(files.get(copy), files.get(base)) for files in (before, after)]
        assert (checked.get(copy), checked.get(base)) in pairs, f"{copy} and its base"

    restore("stopped")
    assert run(COMMAND) == code
    assert contents() == after, "after a repetition"

    restore("stopped")
    names = edit(path.name for path in FOLDER.glob("*.py"))
    assert run(COMMAND) == code
    edited = contents()
    restore("after")
    edit(names)
    assert edited == contents(), "after an edit"

    restore("stopped")
    run(["update", NAME], newer_release)
    for name, text in contents().items():
        if name.endswith((".py", ".base")):
            one_of = [files.get(name) for files in newer]
            assert text in one_of, f"{name} after a newer release"


def edit(names):
    """Insert a line above the heads of copies, where no release has changed anything."""
    names = list(names)
    for name in names:
        path = FOLDER / name
        path.write_bytes(b"# late\n" + path.read_bytes())
    return names


def main():
    """Print how often the command was stopped, and how many states it left."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    save("before")
    before = contents()
    code = run(COMMAND)
    save("after")
    after = contents()
    newer = []  # what a newer release makes of both
    for state in ("before", "after"):
        restore(state)
        run(["update", NAME], newer_release)
        newer.append(contents())
    count = 0
    states = []
    for place, stopped in stops():
        state = contents()
        count += 1
        if stopped == FAILED:
            assert not [name for name in state if name.endswith(".partial")], place
        if state not in states:
            print(f"stopped before {place}", file=sys.stderr)  # names it in a failure
            states.append(state)
            check_each_way(before, after, newer, code)
    print(f"{count} stops, {len(states)} states")


if __name__ == "__main__":
    main()
