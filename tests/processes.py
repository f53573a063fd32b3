"""Start several processes as torchrun does, in less time: torch is imported once."""

import gc
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile

# Each process is a fork of a server, which imports this once.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        "torch._dynamo",  # DTensor imports it, which takes as long as importing torch
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "tinyblock",
        "pytest",
    ]
)


def run(script, *arguments, processes=2):
    """Run a script in several processes; return whether one failed, and what all printed.

    gloo of torch 2.13 aborts a process at its end now and then, also after a plain
    all_reduce. The processes are started again in this case, and in no other.
    """
    command = [str(script), *map(str, arguments)]
    for _ in range(4):
        failed, printed = _run_once(command, processes)
        if "terminate called without an active exception" not in printed:
            break
    return failed, printed


def _run_once(command, number):
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(number),
    }
    with tempfile.NamedTemporaryFile("r") as output:
        started = []
        for rank in range(number):
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = PROCESSES.Process(
                target=_run_script, args=(command, own, output.name)
            )
            process.start()
            started.append(process)
        for process in started:
            process.join()
        return any(process.exitcode for process in started), output.read()


def _run_script(command, environment, output):
    """Be one of the processes."""
    gc.freeze()  # do not look for garbage in all that the server imported
    with open(output, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    sys.argv = command
    sys.path.insert(0, os.path.dirname(command[0]))
    runpy.run_path(command[0], run_name="__main__")
