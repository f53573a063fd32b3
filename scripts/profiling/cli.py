"""The command line of profile_block.py: options, and checks before anything is measured."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from lab.cli import Parser, check_outputs, device_of, positive_int, run, seed
from lab.machine import memory_bytes
from lab.model_options import (
    DTYPES,
    add_dtype,
    add_mode,
    add_size_options,
    naming_options,
    sizes_of,
)
from lab.processes import launched
from lab.sizes import Size
from lab.timing import Clock, clock

from .collectives import Mesh
from .outputs import Outputs
from .records import Settings
from .session import profile

_EXAMPLES = """examples:
  measure a small block, forward and backward:
    python scripts/profile_block.py
  measure a training step of a block of a published model:
    python scripts/profile_block.py --preset llama-3.2-1b --dtype bfloat16 --mode step
  measure one token, to see what the launches cost:
    python scripts/profile_block.py --preset small --seq-len 1 --mode forward
  measure several sizes, and draw their times:
    python scripts/profile_block.py --sweep seq-len=128,256,512 --plot scaling.png
  keep all figures, to compare them with those of a later version by compare_profiles.py:
    python scripts/profile_block.py --json old.json
  measure four processes, which share each layer and the batch:
    torchrun --nproc-per-node 4 scripts/profile_block.py --tp 2 --dp 2 --batch-size 2 --num-layers 4 --mode step
"""

_PREDICTS = "scripts/predict_scaling.py predicts a lower bound on the time"
_REMOVED = {
    "--predict": _PREDICTS,
    "--link": _PREDICTS,
    "--vocab": _PREDICTS,
    "--recompute": _PREDICTS,
    "--ceilings": _PREDICTS,
    "--from": "profile the size itself; scripts/predict_scaling.py predicts a lower bound",
    "--compare": "run scripts/compare_profiles.py OLD.json NEW.json",
    "--nvtx": "use nsys's own option for PyTorch, which docs/cuda.md names",
}


def main(argv: Sequence[str] | None = None, clock: Clock = clock) -> int:
    """Profile as `argv` says, and return the exit code.

    0: done. 1: nothing could be measured, or a file could not be written. 2: rejected before measuring. 130:
    interrupted; the finished sizes are shown.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    with parser.reporting():
        sizes = sizes_of(arguments)
        settings = _settings(arguments)
        _check(arguments, settings, sizes)
    outputs = Outputs(
        json=arguments.json,
        plot=arguments.plot,
        trace=arguments.trace,
        memory_snapshot=arguments.memory_snapshot,
    )

    def work() -> int:
        code = profile(sizes, settings, outputs, clock)
        # `profile` has kept these errors, so that the measurements were shown first.
        for path, error in outputs.errors.items():
            reason = error.strerror or error
            line = f"{parser.prog}: error: cannot write {path}: {reason}"
            print(line, file=sys.stderr)
            code = code or 1
        return code

    return run(parser, work)


def _parser() -> Parser:
    about = "Show where the time and memory of a Transformer block go, and how close it comes to this machine's limits."
    parser = Parser("profile_block.py", about, _EXAMPLES, _REMOVED)
    add_size_options(
        parser,
        preset_help="one block of a GPT-2-like size from CS336, or of a published model",
        layers_help="a Transformer of N blocks (default: one Block, no final norm)",
    )
    _add_measurement(parser)
    _add_processes(parser)
    _add_outputs(parser)
    return parser


def _add_measurement(parser: Parser) -> None:
    group = parser.add_argument_group("measurement")
    add_mode(group)
    parser.add_device(group)
    add_dtype(group)
    group.add_argument(
        "--compile",
        action="store_true",
        help="compile the Block or Transformer, and each part by itself",
    )
    group.add_argument(
        "--rounds",
        type=positive_int,
        default=15,
        metavar="N",
        help="number of timing samples (default: 15)",
    )
    group.add_argument(
        "--seed",
        type=seed,
        default=0,
        metavar="N",
        help="seed of weights and inputs (default: 0)",
    )


def _add_processes(parser: Parser) -> None:
    group = parser.add_argument_group(
        "several processes",
        "Start tp * dp * dp_replicate processes: torchrun --nproc-per-node COUNT scripts/profile_block.py ...",
    )
    group.add_argument(
        "--tp",
        type=positive_int,
        default=1,
        metavar="N",
        help="split each layer over N processes (default: 1)",
    )
    group.add_argument(
        "--dp",
        type=positive_int,
        default=1,
        metavar="N",
        help="split batch, weights and optimizer state over N processes (default: 1)",
    )
    group.add_argument(
        "--dp-replicate",
        type=positive_int,
        default=1,
        metavar="N",
        help="replicas, each with a part of the batch (default: 1)",
    )


def _add_outputs(parser: Parser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write all figures; scripts/profiling/records.py explains them",
    )
    group.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw roofline and parts, or the sweep: .png, .svg or .pdf",
    )
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write a Chrome trace of one more run, for ui.perfetto.dev",
    )
    group.add_argument(
        "--memory-snapshot",
        type=Path,
        metavar="FILE",
        help="write CUDA's allocations, for pytorch.org/memory_viz",
    )


def _settings(arguments: argparse.Namespace) -> Settings:
    return Settings(
        device=device_of(arguments.device),
        dtype=DTYPES[arguments.dtype],
        mode=arguments.mode,
        compile=arguments.compile,
        rounds=arguments.rounds,
        seed=arguments.seed,
        mesh=Mesh(arguments.dp_replicate, arguments.dp, arguments.tp),
        preset=arguments.preset,
        sweep=None if arguments.sweep is None else arguments.sweep.axis,
    )


def _check(
    arguments: argparse.Namespace, settings: Settings, sizes: list[Size]
) -> None:
    """Raise a ValueError for options that contradict each other, or that this machine cannot run."""
    if settings.mode == "step" and settings.dtype == torch.float16:
        raise ValueError(
            "--dtype must be float32 or bfloat16 with --mode step, got float16, in which AdamW's eps rounds to 0: "
            "use --dtype bfloat16 or --mode train"
        )
    _check_recordings(arguments, settings)
    if settings.mesh.processes > 1:
        _check_options_of_one_process(arguments)
    check_outputs(arguments, "json", "plot", "trace", "memory_snapshot")
    for size in sizes:
        with naming_options():
            settings.mesh.require(size)
    _check_processes(settings.mesh)
    _check_memory(settings, sizes)


def _check_recordings(arguments: argparse.Namespace, settings: Settings) -> None:
    if arguments.memory_snapshot and settings.device.type != "cuda":
        raise ValueError(
            f"--memory-snapshot requires CUDA, got --device {settings.device}: leave --memory-snapshot out"
        )
    for option in ("trace", "memory_snapshot"):
        if getattr(arguments, option) and arguments.sweep:
            name = option.replace("_", "-")
            raise ValueError(f"--{name} records one size: leave --sweep out")


def _check_options_of_one_process(arguments: argparse.Namespace) -> None:
    for option in ("sweep", "plot", "trace", "memory_snapshot"):
        if getattr(arguments, option):
            name = option.replace("_", "-")
            raise ValueError(f"--{name} is for one process: leave --tp and --dp out")


def _check_processes(mesh: Mesh) -> None:
    """Raise a ValueError unless as many processes run as the mesh has."""
    if mesh.processes == launched():
        return
    if mesh.axes:
        options = [
            f"--{axis.replace('_', '-')} {count}" for axis, count in mesh.axes.items()
        ]
        start = f"torchrun --nproc-per-node {mesh.processes} {sys.argv[0]} {' '.join(options)} ..."
    else:
        start = "python"
    raise ValueError(
        f"{mesh} requires {mesh.processes} processes, but {launched()} is running: start with {start}"
    )


def _check_memory(settings: Settings, sizes: list[Size]) -> None:
    """Raise a ValueError if no size fits. In a sweep, a size that is too large is a row."""
    parameters = min(size.parameters for size in sizes)
    weights = parameters * settings.dtype.itemsize
    memory = memory_bytes(settings.device)
    if weights > memory:
        raise ValueError(
            f"a model of {_gib(weights)} of weights does not fit: {settings.device} has {_gib(memory)}"
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
