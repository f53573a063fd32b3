"""Processes as torchrun starts them, forked from one that has imported torch once."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed import TCPStore

IMPORTED_ONCE = [
    "tinyblock",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.pipelining",
    "torch._dynamo",
]
USUAL_HANDLERS: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}


class Ended(NamedTuple):
    """The exit code of a process, and what it printed."""

    code: int | None
    out: str
    err: str


def set_usual_handlers() -> None:
    """Let signals have their usual effect, also where nohup or a job in the background ignores them."""
    for number, handler in USUAL_HANDLERS.items():
        signal.signal(number, handler)


@contextmanager
def usual_handlers() -> Iterator[None]:
    """Set the usual handlers of signals, and afterwards those from before."""
    before = {number: signal.getsignal(number) for number in USUAL_HANDLERS}
    set_usual_handlers()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_as_torchrun(code: str, count: int, folder: Path) -> list[Ended]:
    """Run code in `count` processes in this folder, and return how each has ended."""
    # The store must outlive all processes.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    logs = []
    processes = []
    for rank in range(count):
        paths = (folder / f"{rank}.out", folder / f"{rank}.err")
        for path in paths:
            path.write_text("")
        given = (code, rank, count, store.port, folder, paths)
        process = context.Process(target=_run, args=given, daemon=True)
        process.start()
        logs.append(paths)
        processes.append(process)
    _wait_for(processes)
    ended = []
    for process, (out, err) in zip(processes, logs, strict=True):
        ended.append(Ended(process.exitcode, out.read_text(), err.read_text()))
    return ended


def _wait_for(processes: Sequence[BaseProcess]) -> None:
    """Wait for all processes; kill those that run when one fails, or when none ends for 15 minutes."""
    running = processes
    while running:
        sentinels = [process.sentinel for process in running]
        finished = wait(sentinels, timeout=900)
        running = [process for process in running if process.sentinel not in finished]
        has_failed = any(process.exitcode for process in processes)
        if has_failed or not finished:
            for process in running:
                process.kill()


def _run(
    code: str, rank: int, count: int, port: int, folder: Path, logs: tuple[Path, Path]
) -> None:
    """Run code as the process of a rank, with the environment and the output that it would have."""
    os.chdir(folder)
    set_usual_handlers()
    for descriptor, path in enumerate(logs, start=1):
        os.dup2(os.open(path, os.O_WRONLY), descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(count),
        LOCAL_WORLD_SIZE=str(count),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="tests",
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    if count > 1:
        # torchrun sets OMP_NUM_THREADS=1, which has no effect after the fork.
        torch.set_num_threads(1)
    exec(code, {})
