"""Start several processes as torchrun does, in half the time: torch is imported twice."""

import os
import runpy
import socket
import subprocess
import sys
import tempfile


def run(script, *arguments, processes=2):
    """Run a script in several processes; return whether one failed, and what all printed.

    A set of names has another order in every other process, as it may have for users.
    gloo of torch 2.13 aborts a process at its end now and then, also after a plain
    all_reduce. The processes are started again in this case, and in no other.
    """
    for _ in range(4):
        failed, printed = _run_once([str(script), *map(str, arguments)], processes)
        if "terminate called without an active exception" not in printed:
            break
    return failed, printed


def _run_once(command, processes):
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(processes),
    }
    with tempfile.TemporaryFile("w+") as output:
        halves = [
            subprocess.Popen(
                [sys.executable, __file__, str(parity), *command],
                env=environment | {"PYTHONHASHSEED": str(parity)},
                stdout=output,
                stderr=output,
            )
            for parity in (0, 1)
        ]
        codes = [half.wait() for half in halves]
        output.seek(0)
        return any(codes), output.read()


def _fork(parity, command):
    """Become the processes of even or of odd rank, and run the script in each."""
    import torch._dynamo  # DTensor imports it, which takes as long as importing torch
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp  # noqa: F401

    children = []
    for rank in range(parity, int(os.environ["WORLD_SIZE"]), 2):
        child = os.fork()
        if child == 0:
            os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
            sys.argv = command
            sys.path[0] = os.path.dirname(sys.argv[0])
            runpy.run_path(sys.argv[0], run_name="__main__")
            sys.exit()
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(any(codes))


if __name__ == "__main__":
    _fork(int(sys.argv[1]), sys.argv[2:])
