"""Processes as torchrun starts them, forked from one that has imported torch once."""

import multiprocessing
import os
import sys
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed import TCPStore

IMPORTED_ONCE = [
    "tinyblock",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.pipelining",
    "torch._dynamo",
]


class Ended(NamedTuple):
    """The exit code of a process, and what it printed."""

    code: int | None
    out: str
    err: str


def run_as_torchrun(code: str, count: int, folder: Path) -> list[Ended]:
    """Run code in `count` processes in this folder; they end when one fails, or none ends for 15 minutes."""
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )  # which outlives all of them
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    processes, logs = (
        [],
        [
            [folder / f"{rank}.{name}" for name in ("out", "err")]
            for rank in range(count)
        ],
    )
    for rank, paths in enumerate(logs):
        for path in paths:
            path.write_text("")
        given = (code, rank, count, store.port, paths)
        processes.append(context.Process(target=_run, args=given, daemon=True))
        processes[-1].start()
    running = processes
    while running:
        finished = wait([process.sentinel for process in running], timeout=900)
        running = [process for process in running if process.sentinel not in finished]
        if not finished or any(process.exitcode for process in processes):
            for process in running:
                process.kill()
    ended = zip(processes, logs, strict=True)
    return [
        Ended(process.exitcode, *(path.read_text() for path in paths))
        for process, paths in ended
    ]


def _run(code: str, rank: int, count: int, port: int, logs: list[Path]) -> None:
    os.chdir(logs[0].parent)
    for descriptor, path in enumerate(logs, 1):
        os.dup2(os.open(path, os.O_WRONLY), descriptor)
    sys.stdout, sys.stderr = (
        os.fdopen(descriptor, "w", buffering=1) for descriptor in (1, 2)
    )
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    os.environ |= {
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(count),
        "TORCHELASTIC_RUN_ID": "tests",
    }
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if count > 1:
        torch.set_num_threads(
            1
        )  # torchrun sets OMP_NUM_THREADS=1, which has no effect after the fork
    exec(code, {})
