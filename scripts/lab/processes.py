"""The processes that torchrun starts: they join, agree, and end together. Only the first prints."""

import os
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

Result = TypeVar("Result")


def launched() -> int:
    """Return the number of processes that torchrun has started; 1 without it."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def is_first() -> bool:
    return launched() == 1 or os.environ["RANK"] == "0"


def run_together(main: Callable[[], int]) -> int:
    """Run `main` in the default process group; only the first process prints to standard output.

    If a process raises, torchrun ends the others and shows the exception of the first that did.
    """
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def recorded() -> int:
        dist.init_process_group()
        code = _run_quietly(main)
        # Not after an exception: the others may wait in a collective.
        dist.destroy_process_group()
        return code

    return cast(int, recorded())


def _run_quietly(main: Callable[[], int]) -> int:
    """Run `main`, without standard output unless this is the first process."""
    if is_first():
        return main()
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        try:
            return main()
        except RuntimeError:
            # The first process may have reported an error and left: torchrun then ends this process.
            time.sleep(10)
            raise


def least(number: int) -> int:
    """Return the least number that a process has passed, once all have."""
    if launched() > 1:
        numbers = torch.tensor(number)
        dist.all_reduce(numbers, dist.ReduceOp.MIN)
        number = int(numbers)
    return number


def from_first(get: Callable[[], Result]) -> Result:
    """Return what `get` returns in the first process, while the others wait."""
    return cast(Result, from_all(get() if is_first() else None)[0])


def from_all(value: Result) -> list[Result]:
    """Return the value of each process, by rank."""
    values: list[Any] = [value] * launched()
    if launched() > 1:
        dist.all_gather_object(values, value)
    return values
