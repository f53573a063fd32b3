"""The command line of profile_block.py: options, checks before anything is measured, and the order of events."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from lab.cli import Parser, check_outputs, device_of, run
from lab.machine import memory_bytes
from lab.presets import PRESETS
from lab.processes import launched
from lab.sizes import PASSES, Size
from lab.timing import Clock, clock

from tinyblock import Block

from .collectives import Mesh
from .records import Settings
from .session import Outputs, profile

_DEFAULTS: dict[str, Any] = {
    "batch_size": 1,
    "seq_len": 128,
    "d_model": 512,
    "num_heads": 8,
    "vocab": 0,
}
_DEFAULTS |= {"dtype": "float32", "mode": "train", "compile": False}
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_SWEEPS = ("seq-len", "batch-size", "d-model")

_EXAMPLES = """examples:
  profile_block.py                                            a small block, forward and backward
  profile_block.py --preset llama-3.2-1b --dtype bfloat16 --mode step
  profile_block.py --preset small --seq-len 1 --mode forward  one token: what do the launches cost?
  profile_block.py --sweep seq-len=128,256,512 --plot scaling.png
  profile_block.py --json old.json                            ... change something ...
  compare_profiles.py old.json new.json
  torchrun --nproc-per-node 4 scripts/profile_block.py --tp 2 --dp 2 --batch-size 2 --num-layers 4 --mode step
"""


def main(argv: Sequence[str] | None = None, clock: Clock = clock) -> int:
    """Profile as `argv` says, and return the exit code.

    0: done. 1: nothing could be measured. 2: rejected before measuring. 130: interrupted; the finished sizes are shown.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    with parser.reporting():
        options = argparse.Namespace(**_merged(arguments, {}))
        sizes = [_size(_merged(arguments, swept)) for swept in _sweep(arguments.sweep)]
        settings = Settings(
            device=device_of(options.device),
            dtype=_DTYPES[options.dtype],
            mode=options.mode,
            compile=options.compile,
            rounds=options.rounds,
            seed=options.seed,
            mesh=Mesh(options.dp_replicate, options.dp, options.tp),
            preset=options.preset,
            sweep=options.sweep and options.sweep.partition("=")[0],
        )
        _check(options, settings, sizes)
    outputs = Outputs(
        options.json, options.plot, options.trace, options.memory_snapshot
    )
    return run(parser, lambda: profile(sizes, settings, outputs, clock))


def _parser() -> Parser:
    about = "Show where the time and memory of a Transformer block go, and how far it is from this machine's limit."
    parser = Parser("profile_block.py", about, _EXAMPLES)
    add = parser.add_argument_group("size of the model").add_argument
    add(
        "--preset",
        choices=PRESETS,
        metavar="NAME",
        help=f"the block of a known model: {', '.join(PRESETS)}",
    )
    add(
        "--batch-size",
        type=int,
        metavar="N",
        help="sequences in the batch (default: 1)",
    )
    add(
        "--seq-len",
        type=int,
        metavar="N",
        help="tokens in each sequence (default: 128)",
    )
    add(
        "--d-model", type=int, metavar="N", help="width (default: 512, or the preset's)"
    )
    add(
        "--num-heads",
        type=int,
        metavar="N",
        help="query heads (default: 8, or the preset's)",
    )
    add(
        "--num-kv-heads",
        type=int,
        metavar="N",
        help="key and value heads (default: --num-heads)",
    )
    add(
        "--d-head",
        type=int,
        metavar="N",
        help="size of a head (default: d_model / num_heads)",
    )
    add(
        "--d-ff",
        type=int,
        metavar="N",
        help="inner width of SwiGLU (default: 8/3 d_model)",
    )
    add(
        "--num-layers",
        type=int,
        metavar="N",
        help="a Transformer of N blocks (default: one Block, no final norm)",
    )
    add(
        "--qk-norm",
        action="store_true",
        default=None,
        help="normalize queries and keys",
    )
    add(
        "--sweep",
        metavar="AXIS=A,B,...",
        help=f"measure several sizes; AXIS is one of {', '.join(_SWEEPS)}",
    )
    measurement = parser.add_argument_group("measurement")
    add = measurement.add_argument
    passes = "forward, train (forward and backward) or step (train and AdamW)"
    add("--mode", choices=PASSES, help=f"passes to measure: {passes} (default: train)")
    parser.add_device(measurement)
    add(
        "--dtype",
        choices=_DTYPES,
        help="dtype of weights and inputs (default: float32)",
    )
    add(
        "--compile",
        action="store_true",
        default=None,
        help="compile the whole, and each part separately",
    )
    add(
        "--rounds",
        type=int,
        default=15,
        metavar="N",
        help="samples of each time (default: 15)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of weights and inputs (default: 0)",
    )
    processes = "torchrun --nproc-per-node N scripts/profile_block.py ... starts N = tp * dp * dp_replicate processes"
    add = parser.add_argument_group("several processes", processes).add_argument
    add(
        "--tp",
        type=int,
        default=1,
        metavar="N",
        help="split each layer over N processes (default: 1)",
    )
    add(
        "--dp",
        type=int,
        default=1,
        metavar="N",
        help="split batch, weights and optimizer state over N (default: 1)",
    )
    add(
        "--dp-replicate",
        type=int,
        default=1,
        metavar="N",
        help="replicas, each with a part of the batch (default: 1)",
    )
    add = parser.add_argument_group("output").add_argument
    add(
        "--json",
        type=Path,
        metavar="FILE",
        help="write all figures; scripts/profiling/records.py explains them",
    )
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw roofline and parts, or the sweep: .png, .svg or .pdf",
    )
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write a Chrome trace of one more run, for ui.perfetto.dev",
    )
    add(
        "--memory-snapshot",
        type=Path,
        metavar="FILE",
        help="write CUDA's allocations, for pytorch.org/memory_viz",
    )
    return parser


def _sweep(text: str | None) -> list[dict[str, int]]:
    """Return what each size of the sweep has in place of the options; nothing, of a single size."""
    if text is None:
        return [{}]
    axis, _, values = text.partition("=")
    if axis not in _SWEEPS or not all(value.isdecimal() for value in values.split(",")):
        raise ValueError(
            f"--sweep must be one of {', '.join(_SWEEPS)} and values, as in seq-len=128,256, got {text!r}"
        )
    return [{axis.replace("-", "_"): int(value)} for value in values.split(",")]


def _merged(arguments: argparse.Namespace, swept: dict[str, int]) -> dict[str, Any]:
    """Merge the defaults, --preset, the command line and a point of a sweep: each overrides those before it.

    Values of a preset that belong to another width, or to other heads, are left out.
    """
    chosen = {
        name: value for name, value in vars(arguments).items() if value is not None
    } | swept
    options = dict(_DEFAULTS)
    if arguments.preset is not None:
        of_block = asdict(PRESETS[arguments.preset]) | {"num_layers": None}
        options |= {
            name: value
            for name, value in of_block.items()
            if name not in ("batch_size", "seq_len")
        }
    for option, belonging in {
        "d_model": ("d_ff", "d_head"),
        "num_heads": ("num_kv_heads", "d_head"),
    }.items():
        if option in chosen:
            options = {
                name: value for name, value in options.items() if name not in belonging
            }
    return vars(arguments) | options | chosen


def _size(options: dict[str, Any]) -> Size:
    """Return the size that the options give, once the layers have accepted it without allocating anything."""
    of_size = {
        field.name: options[field.name]
        for field in fields(Size)
        if options.get(field.name) is not None
    }
    for name, value in of_size.items():
        if isinstance(value, int) and value >= 2**63:
            raise ValueError(
                f"impossible size: {name} must be below 2**63, got {value}"
            )
    of_block = ("d_model", "num_heads", "num_kv_heads", "d_head", "d_ff")
    try:
        block = Block(
            **{name: of_size[name] for name in of_block if name in of_size},
            device="meta",
        )
        of_size |= {
            "num_kv_heads": block.attn.num_kv_heads,
            "d_head": block.attn.d_head,
            "d_ff": block.ffn.d_ff,
        }
        size = Size(**of_size)
        one_layer = replace(
            size, num_layers=size.num_layers and min(size.num_layers, 1)
        )  # the others are like it
        one_layer.build("meta", torch.float32)
        torch.empty(size.batch_size, size.seq_len, size.d_model, device="meta")
    except (RuntimeError, OverflowError, TypeError) as error:
        reason = str(error).strip().split("\n")[0].split(". ")[0].rstrip(".")
        raise ValueError(f"impossible size: {reason}") from None
    return size


def _check(options: argparse.Namespace, settings: Settings, sizes: list[Size]) -> None:
    """Raise a ValueError for options that contradict each other, or that this machine cannot run."""
    _check_settings(settings)
    _check_combinations(options, settings)
    check_outputs(options, "json", "plot", "trace", "memory_snapshot")
    settings.mesh.require(max(sizes, key=lambda size: size.batch_size))
    _check_processes(settings.mesh)
    _check_memory(settings, sizes)


def _check_settings(settings: Settings) -> None:
    if settings.rounds < 1:
        raise ValueError(f"--rounds must be at least 1, got {settings.rounds}")
    if not -(2**63) <= settings.seed < 2**64:
        raise ValueError(f"--seed must fit into 64 bits, got {settings.seed}")
    if settings.mode == "step" and settings.dtype == torch.float16:
        raise ValueError(
            "--mode step in float16 gives NaN, as AdamW's eps is 0 there: use bfloat16, or --mode train"
        )


def _check_combinations(options: argparse.Namespace, settings: Settings) -> None:
    """Raise a ValueError for an option that has no meaning together with the others."""
    recorded = ["trace", "memory_snapshot"]
    for unusable, names, why in (
        (
            settings.device.type != "cuda",
            ["memory_snapshot"],
            f"needs CUDA, and the device is {settings.device}",
        ),
        (options.sweep, recorded, "records one size: leave --sweep out"),
        (
            settings.mesh.processes > 1,
            ["sweep", "plot", *recorded],
            "is for one process: leave --tp and --dp out",
        ),
    ):
        for name in names:
            if unusable and getattr(options, name):
                raise ValueError(f"--{name.replace('_', '-')} {why}")


def _check_processes(mesh: Mesh) -> None:
    """Raise a ValueError unless as many processes run as the mesh has."""
    if mesh.processes == launched():
        return
    start = "python"
    if mesh.axes:
        options = [
            f"--{axis.replace('_', '-')} {count}" for axis, count in mesh.axes.items()
        ]
        start = f"torchrun --nproc-per-node {mesh.processes} {sys.argv[0]} {' '.join(options)} ..."
    raise ValueError(
        f"{mesh} needs {mesh.processes} processes, but {launched()} is running: start with {start}"
    )


def _check_memory(settings: Settings, sizes: list[Size]) -> None:
    """Raise a ValueError if no size fits. In a sweep, a size that is too large is a row."""
    parameters = min(size.parameters for size in sizes)
    weights = parameters * settings.dtype.itemsize
    memory = memory_bytes(settings.device)
    if weights > memory:
        needed, available = (f"{size / 2**30:.1f} GiB" for size in (weights, memory))
        raise ValueError(
            f"a model of {needed} of weights does not fit: {settings.device} has {available}"
        )
