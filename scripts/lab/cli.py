"""The command line that all programs share: a parser, the device, the output files, and how a program ends."""

import argparse
import importlib.util
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch

from .files import require_writable
from .memory import is_out_of_memory
from .processes import is_first, launched, run_together
from .tables import plural

_PLOTS = (".png", ".svg", ".pdf")


class Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line and exits with 2."""

    def __init__(self, prog: str, description: str, epilog: str) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(
            prog,
            description=description,
            epilog=epilog,
            formatter_class=layout,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        if not is_first():
            time.sleep(
                10
            )  # the first process reports what all of them reject, and torchrun then ends the others
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Report a ValueError as an error of the command line."""
        try:
            yield
        except ValueError as error:
            self.error(str(error))

    def add_device(self, group: Any) -> None:
        group.add_argument(
            "--device",
            metavar="D",
            help="cpu, cuda or cuda:N (default: cuda where there is a GPU)",
        )


def device_of(name: str | None) -> torch.device:
    """Return the device of an option --device, with an index if it is a GPU, and make that the current one."""
    count = torch.cuda.device_count()
    name = name or ("cuda" if count else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    if not (parsed := re.fullmatch(r"cuda(?::(\d+))?", name)):
        raise ValueError(f"--device must be cpu, cuda or cuda:N, got {name!r}")
    index = int(parsed[1] or 0)
    needed = index + 1
    if launched() > 1:
        if parsed[1]:
            raise ValueError(
                f"--device {name}: each process has a GPU of its own: use cuda"
            )
        index, needed = (
            int(os.environ["LOCAL_RANK"]),
            int(os.environ["LOCAL_WORLD_SIZE"]),
        )
    if needed > count:
        found = f"finds {count}: " + ", ".join(f"cuda:{gpu}" for gpu in range(count))
        found += f"; lower --nproc-per-node to {count}" * (launched() > 1)
        if count == 0:
            found = f"{'finds none' if torch.backends.cuda.is_built() else 'is built without CUDA'}: use --device cpu"
        raise ValueError(
            f"--device {name} needs {plural(needed, 'GPU')}, and torch {found}"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def check_outputs(arguments: argparse.Namespace, *options: str) -> None:
    """Raise a ValueError unless each of these options, if it is given, names a file that can be written."""
    paths: dict[str, Path] = {
        option: path for option in options if (path := getattr(arguments, option))
    }
    if "plot" in paths and paths["plot"].suffix not in _PLOTS:
        raise ValueError(
            f"--plot must end in {', '.join(_PLOTS)}, got {str(paths['plot'])!r}"
        )
    if "plot" in paths and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "--plot needs matplotlib: pip install matplotlib, or leave --plot out"
        )
    resolved = [path.resolve() for path in paths.values()]
    for option, path in paths.items():
        try:
            require_writable(path)
        except OSError as error:
            raise ValueError(
                f"--{option.replace('_', '-')}: cannot write {path}: {error.strerror}"
            ) from None
        if resolved.count(path.resolve()) > 1:
            raise ValueError(f"two outputs have the same path: {path}")


def run(parser: Parser, main: Callable[[], int]) -> int:
    """Run `main`, in each process that torchrun has started, and return the exit code of the program.

    That is 0 if the reader closes the pipe, 130 after Ctrl-C, and 1 if memory runs out, which one line says.
    """
    try:
        return main() if launched() == 1 else run_together(main)
    except BrokenPipeError:  # the reader has seen enough; the files are written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        code, message = 130, "interrupted"
    except (RuntimeError, MemoryError) as error:
        if launched() > 1 or not is_out_of_memory(error):
            raise
        code, message = 1, f"error: out of memory: {' '.join(str(error).split())}"
    if is_first():
        print(f"{parser.prog}: {message}", file=sys.stderr)
    return code
