"""The command line that all programs share: a parser, the device, the output files, and how a program ends."""

import argparse
import difflib
import importlib.util
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """A parser that reports an error in one line and exits with 2.

    For an option that does not exist, the line has the nearest one that does. `removed` has what replaces an option of
    earlier versions.
    """

    def __init__(
        self,
        prog: str,
        description: str,
        epilog: str,
        removed: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self._removed = removed or {}

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        arguments, unknown = self.parse_known_args(args)
        options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        if options:
            self.error(self._about_unknown(options[0]))
        if unknown:
            self.error(f"unknown argument {unknown[0]!r}: see --help")
        return arguments

    def _about_unknown(self, option: str) -> str:
        if option in self._removed:
            return f"{option} was removed: {self._removed[option]}"
        known = [name for action in self._actions for name in action.option_strings]
        nearest = difflib.get_close_matches(option, known, n=1)
        if nearest:
            return f"unknown option {option}: did you mean {nearest[0]}?"
        return f"unknown option {option}: see --help"

    def error(self, message: str) -> NoReturn:
        if not is_first():
            # All processes reject the same: the first one reports it, and torchrun then ends the others.
            time.sleep(10)
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


def positive_int(text: str) -> int:
    """Return the number that an option gives; raise an error of argparse if it is below 1."""
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")


def seed(text: str) -> int:
    """Return the seed that an option gives; raise an error of argparse unless it fits into 64 bits, with a sign."""
    try:
        found = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None
    if not -(2**63) <= found < 2**63:
        raise argparse.ArgumentTypeError(
            f"must fit into 64 bits (-2**63 to 2**63 - 1), got {found}"
        )
    return found


def device_of(name: str | None) -> torch.device:
    """Return the device of an option --device, with an index if it is a GPU, and make that the current one."""
    if name is None:
        name = "cuda" if torch.cuda.device_count() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    named = re.fullmatch(r"cuda(?::(\d+))?", name)
    if not named:
        raise ValueError(f"--device must be cpu, cuda or cuda:N, got {name!r}")
    if launched() == 1:
        index = int(named[1] or 0)
        needed = index + 1
    elif named[1]:
        raise ValueError(
            f"--device must be cuda, got {name!r}: each process has a GPU of its own"
        )
    else:
        index = int(os.environ["LOCAL_RANK"])
        needed = int(os.environ["LOCAL_WORLD_SIZE"])
    if needed > torch.cuda.device_count():
        raise ValueError(
            f"--device {name} requires {plural(needed, 'GPU')}, but torch {_found_gpus()}"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _found_gpus() -> str:
    """Return which GPUs torch finds, and what to do if they are too few."""
    count = torch.cuda.device_count()
    if count == 0:
        if torch.backends.cuda.is_built():
            return "finds none: use --device cpu"
        return "is built without CUDA: use --device cpu"
    found = f"finds {count}: {', '.join(f'cuda:{index}' for index in range(count))}"
    if launched() > 1:
        found += f"; lower --nproc-per-node to {count}"
    return found


def check_outputs(arguments: argparse.Namespace, *options: str) -> None:
    """Raise a ValueError unless each of these options, if it is given, names a file that can be written."""
    paths: dict[str, Path] = {}
    for option in options:
        path = getattr(arguments, option)
        if path is not None:
            paths[option] = path
    if "plot" in paths:
        _check_plot(paths["plot"])
    seen = set[Path]()
    for option, path in paths.items():
        try:
            require_writable(path)
        except OSError as error:
            raise ValueError(
                f"--{option.replace('_', '-')}: cannot write {path}: {error.strerror}"
            ) from None
        if path.resolve() in seen:
            raise ValueError(f"two outputs have the same path: {path}")
        seen.add(path.resolve())


def _check_plot(path: Path) -> None:
    if path.suffix not in _PLOTS:
        raise ValueError(f"--plot must end in {', '.join(_PLOTS)}, got {str(path)!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "--plot requires matplotlib: pip install matplotlib, or leave --plot out"
        )


def run(parser: Parser, main: Callable[[], int]) -> int:
    """Run `main`, in each process that torchrun has started, and return the exit code of the program.

    That is 0 if the reader closes the pipe, 130 after Ctrl-C, and 1 if memory runs out or a file cannot be read or
    written. It reports each of these in one line.
    With several processes, running out of memory is raised: torchrun then ends the other processes.
    """
    try:
        return main() if launched() == 1 else run_together(main)
    except BrokenPipeError:
        # The reader, such as head, has seen enough. Without this, Python's last flush would fail, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        code, message = 130, "interrupted"
    except (RuntimeError, MemoryError) as error:
        if launched() > 1 or not is_out_of_memory(error):
            raise
        code, message = 1, f"error: out of memory: {' '.join(str(error).split())}"
    except OSError as error:
        if launched() > 1:
            raise
        code, message = 1, f"error: {error}"
    if is_first():
        print(f"{parser.prog}: {message}", file=sys.stderr)
    return code
