"""Start processes that have imported torch, and do not see CUDA.

Each is a fork of a server, which has imported what takes seconds. A fork of the tests' own
process could not run a backward pass where torch sees a GPU, such as a Mac's, because
autograd has started threads.
"""

import gc
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "torch._dynamo",  # with DTensor and FSDP
        "torch.distributed.checkpoint.state_dict",
        "beartype",
        "tinyblock",
        "pytest",
    ]
)


def run(script, *arguments, processes=2):
    """Run a script as torchrun does; return whether a process failed, and what all printed.

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
    with socket.create_server(("localhost", 0)) as listener:
        port = listener.getsockname()[1]
    common = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(number),
    }
    with tempfile.NamedTemporaryFile("r") as output:
        started = [
            start(
                _run_script,
                command,
                output=output.name,
                environment={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(number)
        ]
        for process in started:
            process.join()
        return any(process.exitcode for process in started), output.read()


def _run_script(command):
    sys.argv = command
    sys.path.insert(0, os.path.dirname(command[0]))
    runpy.run_path(command[0], run_name="__main__")


def start(function, *arguments, output, environment=None):
    """Start a process that calls a function, and writes what it prints to a file."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **(environment or {})}
    process = SERVER.Process(
        target=_call, args=(function, arguments, output, environment)
    )
    process.start()
    return process


def _call(function, arguments, output, environment):
    gc.freeze()  # do not look for garbage in all that the server imported
    with open(output, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    function(*arguments)
