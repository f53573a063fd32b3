"""The processes that torchrun starts: they join, agree, and end together; the first of them speaks."""

import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

Result = TypeVar("Result")

_store: Any = None  # torchrun's own, which outlives a process that fails


def launched() -> int:
    """Return how many processes torchrun has started; 1 without it."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def is_first() -> bool:
    return launched() == 1 or os.environ["RANK"] == "0"


def run_together(main: Callable[[], int]) -> int:
    """Run `main` in each process that torchrun has started, and return its exit code.

    The first process has the standard output. One that fails ends all: torchrun stops the others, and shows the
    traceback that is recorded here.
    """
    global _store
    if launched() == 1:
        return main()
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        if torch.cuda.is_available():  # NCCL has one process a device; too many processes are refused by `main`
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        dist.init_process_group()
        _store = dist.distributed_c10d._get_default_store()
        with open(os.devnull, "w") as nowhere, redirect_stdout(sys.stdout if is_first() else nowhere):
            code = main()
        if code == 0:
            dist.destroy_process_group()
            return 0
    except SystemExit as refusal:
        code = refusal.code if isinstance(refusal.code, int) else 1
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        if first_to_fail():  # the others lose their connection to it
            handler = get_error_handler()
            handler.initialize()
            handler.record_exception(error)
            what = f"rank {os.environ['RANK']}: {type(error).__name__}: {' '.join(str(error).split())}"
            print(f"profile_block.py: error: {what}", file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # at once: the others may wait in a collective, and what would be torn down with them


def first_to_fail() -> bool:
    """Tell whether this process is the first that asks, and so the one to say what went wrong."""
    return _store is None or _store.add("failures", 1) == 1


def least(number: int) -> int:
    """Return the least that a process has called this with, once all have."""
    if launched() > 1:
        numbers = torch.tensor(number)
        dist.all_reduce(numbers, dist.ReduceOp.MIN)
        number = int(numbers)
    return number


def from_first(get: Callable[[], Result]) -> Result:
    """Return what the first process gets, while the others wait."""
    if launched() == 1:
        return get()
    values = [get() if is_first() else None]
    dist.broadcast_object_list(values)
    return cast(Result, values[0])


def from_all(value: Result) -> list[Result]:
    """Return what each process has called this with, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
