"""Stop a command at each of its changes, repeat it, and compare with one that was not stopped.

    python stopping.py TINYBLOCK FOLDER ARGUMENTS...

TINYBLOCK is the folder of the release that runs, and FOLDER the folder of copies. Each
command runs in a process of its own. It ends without cleaning up before it makes, opens or
renames a file or folder in FOLDER, or in the middle of a file; or it gets an error there,
as on a full disk.
"""

import importlib
import os
import resource
import shutil
import signal
import sys
from pathlib import Path

STOPPED = 99
FAILED = 2
NEVER = 10**9
TINYBLOCK, FOLDER, *COMMAND = sys.argv[1:]
sys.path.insert(0, TINYBLOCK)
copies = importlib.import_module("copies")


def run(changes=NEVER, size=NEVER, is_full=False):
    """Run the command in a process, and return its exit code.

    The process stops after so many changes, or when a file has so many bytes. If the
    disk is full then, it gets an error instead.
    """
    process = os.fork()
    if process == 0:
        if not is_full:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        stop_after(changes, size)
        os._exit(copies.main(COMMAND))
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status)


def stop_after(changes, size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    def count(event, arguments):
        nonlocal changes
        is_write = event == "open" and "w" in str(arguments[1])
        is_change = is_write or event in ("os.mkdir", "os.chmod", "os.rename")
        if is_change and FOLDER in str(arguments[0]):
            if changes == 0:
                os._exit(STOPPED)
            changes -= 1

    sys.addaudithook(count)


def contents():
    """Return the bytes of each file in the folder."""
    files = filter(Path.is_file, Path(FOLDER).rglob("*"))
    return {str(path.relative_to(FOLDER)): path.read_bytes() for path in files}


def main():
    """Print how often the command was stopped."""
    Path(FOLDER).mkdir(parents=True, exist_ok=True)
    shutil.copytree(FOLDER, "before")
    before = contents()
    code = run()
    after = contents()

    def stop_and_repeat(**where):
        """Return whether there was something to stop."""
        shutil.rmtree(FOLDER)
        shutil.copytree("before", FOLDER)
        stopped = run(**where)
        if stopped not in (STOPPED, -signal.SIGXFSZ, FAILED):
            assert (stopped, contents()) == (code, after)
            return False
        for name, text in contents().items():
            is_whole = text in (before.get(name), after.get(name))
            is_left = name.endswith(".partial") and stopped != FAILED
            assert is_whole or is_left, (where, name)
        assert run() == code, where
        assert contents() == after, where
        return True

    stops = 0
    while stop_and_repeat(changes=stops):
        stops += 1
    written = [len(text) for name, text in after.items() if text != before.get(name)]
    for size in sorted({0, max(written) - 1, *(size // 2 for size in written)}):
        assert stop_and_repeat(size=size), size
        assert stop_and_repeat(size=size, is_full=True), size
        stops += 2
    print(f"stopped {stops} times, {len(written)} files written")


if __name__ == "__main__":
    main()
