"""Start several processes by torchrun, as users do."""

import os
import subprocess
import sys


def torchrun(script, *arguments, processes=2, **environment):
    """Run a script in several processes, and return how torchrun ended.

    gloo of torch 2.13 aborts a process at its end now and then, also after a plain
    all_reduce. The processes are started again in this case, and in no other.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), str(script), *map(str, arguments)]
    for _ in range(4):
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        if "terminate called without an active exception" not in done.stderr:
            break
    return done
