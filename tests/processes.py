"""Start several processes as torchrun does, in less time: torch is imported once."""

import gc
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import traceback


def run(script, *arguments, processes=2, hash_seeds=(0,)):
    """Run a script in several processes; return whether one failed, and what all printed.

    With two seeds, a set of names has another order in every other process, as it may
    have for users. Each seed takes the seconds in which Python imports torch.
    gloo of torch 2.13 aborts a process at its end now and then, also after a plain
    all_reduce. The processes are started again in this case, and in no other.
    """
    for _ in range(4):
        failed, printed = _run_once(
            [str(script), *map(str, arguments)], processes, hash_seeds
        )
        if "terminate called without an active exception" not in printed:
            break
    return failed, printed


def _run_once(command, processes, hash_seeds):
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
        interpreters = []
        for first, seed in enumerate(hash_seeds):
            environment["PYTHONHASHSEED"] = str(seed)
            interpreter = subprocess.Popen(
                [sys.executable, __file__, str(first), str(len(hash_seeds)), *command],
                env=environment,
                stdout=output,
                stderr=output,
            )
            interpreters.append(interpreter)
        codes = [interpreter.wait() for interpreter in interpreters]
        output.seek(0)
        return any(codes), output.read()


def _fork(first, step, command):
    """Become the processes of these ranks, and run the script in each."""
    import torch._dynamo  # DTensor imports it, which takes as long as importing torch
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp  # noqa: F401

    gc.freeze()  # otherwise each process looks for garbage in all that torch imported
    children = []
    for rank in range(first, int(os.environ["WORLD_SIZE"]), step):
        child = os.fork()
        if child == 0:
            os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
            _run_script(command)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(any(codes))


def _run_script(command):
    sys.argv = command
    sys.path[0] = os.path.dirname(sys.argv[0])
    code = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # Python would free first, in seconds, what torch imported


if __name__ == "__main__":
    _fork(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
