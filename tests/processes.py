"""Processes as torchrun starts them, forked from one that has imported torch once."""

import multiprocessing
import os
import sys
from itertools import chain
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

from torch.distributed import TCPStore

IMPORTED_ONCE = ["tinyblock", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch._dynamo"]


class Ended(NamedTuple):
    """The exit code of a process, and what it printed."""

    code: int | None
    out: str
    err: str


def run_as_torchrun(code: str, count: int, folder: Path) -> list[Ended]:
    """Run code in `count` processes in this folder; they end when one fails, or none ends for five minutes."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # which outlives all of them
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    given = [(code, rank, count, store.port, folder) for rank in range(count)]
    processes = [context.Process(target=_run, args=args, daemon=True) for args in given]
    paths = [(folder / f"{rank}.out", folder / f"{rank}.err") for rank in range(count)]
    for path in chain(*paths):
        path.write_text("")
    for process in processes:
        process.start()
    running = processes
    while running:
        ended = wait([process.sentinel for process in running], timeout=300)
        running = [process for process in running if process.sentinel not in ended]
        if not ended or any(process.exitcode for process in processes):
            for process in running:
                process.kill()
    outputs = [(out.read_text(), err.read_text()) for out, err in paths]
    return [Ended(process.exitcode, *output) for process, output in zip(processes, outputs, strict=True)]


def _run(code: str, rank: int, count: int, port: int, folder: Path) -> None:
    os.chdir(folder)
    for name, descriptor in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{rank}.{name}", os.O_WRONLY), descriptor)
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", buffering=1) for descriptor in (1, 2))
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count), "TORCHELASTIC_RUN_ID": "tests"}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    exec(code, {})
