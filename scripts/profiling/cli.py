"""The command line of profile_block.py: options, checks before anything is measured, and the order of events."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import config as jaxtyping_config
from lab.cli import Parser, check_outputs, device_of, run
from lab.environment import device_name, environment
from lab.files import read_json, write_json
from lab.machine import DATASHEETS, Ceilings, Datasheet, measure_ceilings, memory_bytes
from lab.presets import PRESETS
from lab.processes import from_first, is_first, launched
from lab.progress import Progress
from lab.sizes import PASSES, Size
from lab.tables import Section, show
from lab.timing import Clock, clock

from tinyblock import Block

from .collectives import Mesh
from .compare import SCHEMA, compare
from .measure import Settings, measure
from .predict import Links, measured, predict, roofline
from .report import report
from .report_distributed import distributed_report, prediction_report

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
  profile_block.py --compare old.json
  torchrun --nproc-per-node 4 scripts/profile_block.py --tp 2 --dp 2 --batch-size 2 --num-layers 4 --mode step
  profile_block.py --predict dp=8 tp=8,dp=64 --link 450e9,50e9 --ceilings "NVIDIA H200" --dtype bfloat16
      --preset llama-3.1-8b --num-layers 32 --batch-size 512 --seq-len 8192 --mode step
  profile_block.py --predict dp=8 --link 450e9 --from profile.json --batch-size 16 --num-layers 32 --vocab 128256
"""


def main(argv: Sequence[str] | None = None, clock: Clock = clock) -> int:
    """Profile as `argv` says, and return the exit code.

    0: done. 1: nothing could be measured. 2: rejected before measuring. 130: interrupted; the finished sizes are shown.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    with parser.reporting():
        path = getattr(arguments, "from")
        profile = read_json(path, SCHEMA, "--from") if path else None
        if profile and ["parts" in point for point in profile["points"]] != [True]:
            raise ValueError(
                f"--from: {path} must be a profile of one size in one process"
            )
        options = argparse.Namespace(**_merged(arguments, profile, {}))
        sizes = [
            _size(_merged(arguments, profile, swept))
            for swept in _sweep(arguments.sweep)
        ]
        recorded = {
            name: getattr(options, name)
            for name in ("rounds", "seed", "trace", "memory_snapshot")
        }
        device, mesh = (
            device_of(options.device),
            Mesh(options.dp_replicate, options.dp, options.tp),
        )
        settings = Settings(
            device,
            _DTYPES[options.dtype],
            options.mode,
            options.compile,
            mesh=mesh,
            **recorded,
        )
        _check(options, settings, sizes, profile)
        earlier = (
            read_json(options.compare, SCHEMA, "--compare") if options.compare else None
        )
        if earlier and not any(
            Size(**point["size"]) in sizes for point in earlier["points"]
        ):
            raise ValueError(f"--compare: {options.compare} has none of these sizes")
    if options.predict is not None:
        return run(parser, lambda: _predict(options, settings, sizes, profile, clock))
    return run(parser, lambda: _profile(options, settings, sizes, earlier, clock))


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
    kinds = "a lower bound on the time of a step or, with --from, an estimate of it"
    add = parser.add_argument_group("prediction", kinds).add_argument
    add(
        "--predict",
        nargs="+",
        type=_mesh,
        metavar="MESH",
        help="predict for these meshes, such as dp=8 tp=8,dp=64",
    )
    add(
        "--link",
        type=_links,
        metavar="A[,B]",
        help="bytes/s to a device from its own machine of 8, and from others",
    )
    add(
        "--from",
        type=Path,
        metavar="OLD.json",
        help="predict from this profile; its options become the defaults",
    )
    add(
        "--vocab",
        type=int,
        metavar="N",
        help="add embedding, head and loss of a vocabulary of N (default: 0)",
    )
    add(
        "--recompute",
        action="store_true",
        help="count activation checkpointing of each block",
    )
    datasheets = "take the ceilings from a datasheet, such as 'NVIDIA H200' (default: measure --device)"
    add("--ceilings", choices=DATASHEETS, metavar="GPU", help=datasheets)
    add = parser.add_argument_group("output").add_argument
    add(
        "--json",
        type=Path,
        metavar="FILE",
        help="write all figures; docs/profile_schema.md explains them",
    )
    add(
        "--compare",
        type=Path,
        metavar="OLD.json",
        help="show the ratios to the times in the --json of an earlier run",
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


def _merged(
    arguments: argparse.Namespace, profile: dict[str, Any] | None, swept: dict[str, int]
) -> dict[str, Any]:
    """Merge the defaults, --from, --preset, the command line and a point of a sweep: each overrides those before it.

    Values of a profile or preset that belong to another width, or to other heads, are left out.
    """
    chosen = {
        name: value for name, value in vars(arguments).items() if value is not None
    } | swept
    options = dict(_DEFAULTS)
    if profile is not None:
        options |= {
            name: profile["settings"][name] for name in ("dtype", "mode", "compile")
        }
        options |= profile["points"][0]["size"]
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


def _check(
    options: argparse.Namespace,
    settings: Settings,
    sizes: list[Size],
    profile: dict[str, Any] | None,
) -> None:
    """Raise a ValueError for options that contradict each other, or that this machine cannot run."""
    _check_settings(settings)
    _check_combinations(options, settings, profile)
    check_outputs(options, "json", "plot", "trace", "memory_snapshot")
    if profile is not None:
        _check_profile(options, settings.mode, profile)
    if options.predict is not None and options.link is None:
        raise ValueError(
            "--predict needs --link, as in --link 450e9,50e9: bytes/s within and between machines"
        )
    if options.vocab < 0 or (options.vocab and options.num_layers is None):
        raise ValueError(
            f"--vocab {options.vocab} must be positive and needs --num-layers: a Block has no embedding"
        )
    if options.ceilings is not None:
        DATASHEETS[options.ceilings].ceilings(settings.dtype)
    # Of a sweep that is predicted, a smaller size need not split.
    largest = max(sizes, key=lambda size: size.batch_size)
    for wanted in options.predict or [settings.mesh]:
        wanted.require(largest)
    _check_processes(settings.mesh)
    if options.predict is None:
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


def _check_combinations(
    options: argparse.Namespace, settings: Settings, profile: dict[str, Any] | None
) -> None:
    """Raise a ValueError for an option that has no meaning together with the others."""
    predicting = options.predict is not None
    recorded = ["trace", "memory_snapshot"]
    for unusable, names, why in (
        (
            not predicting,
            ["link", "ceilings", "from", "vocab", "recompute"],
            "is for --predict",
        ),
        (
            predicting,
            ["compare", *recorded],
            "needs a measurement: leave --predict out",
        ),
        (
            settings.device.type != "cuda",
            recorded[1:],
            f"needs CUDA, and the device is {settings.device}",
        ),
        (options.sweep, recorded, "records one size: leave --sweep out"),
        (
            settings.mesh.processes > 1,
            ["predict", "sweep", "plot", *recorded],
            "is for one process: leave --tp and --dp out",
        ),
        (
            predicting and not options.sweep,
            ["plot"],
            "of a prediction draws a sweep: add --sweep batch-size=64,128",
        ),
        (
            profile,
            ["ceilings"],
            "contradicts --from, whose profile has ceilings: leave --ceilings out",
        ),
    ):
        for name in names:
            if unusable and getattr(options, name):
                raise ValueError(f"--{name.replace('_', '-')} {why}")


def _check_profile(
    options: argparse.Namespace, mode: str, profile: dict[str, Any]
) -> None:
    """Raise a ValueError unless the profile of --from has times in this dtype and for this mode."""
    dtype = profile["settings"]["dtype"]
    if options.dtype != dtype:
        raise ValueError(
            f"--dtype must be {dtype}, as in the profile of --from, got {options.dtype}: leave --dtype out, "
            f"or profile in {options.dtype}"
        )
    profiled = set(PASSES[profile["settings"]["mode"]])
    modes = [name for name, passes in PASSES.items() if profiled.issuperset(passes)]
    if mode not in modes:
        raise ValueError(
            f"--mode must be {' or '.join(modes)}, as in the profile of --from, got {mode}: leave --mode out, "
            f"or profile in mode {mode}"
        )


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


def _links(text: str) -> Links:
    with suppress(ValueError):
        rates = [*map(float, text.split(","))]
        if len(rates) <= 2 and all(0 < rate < float("inf") for rate in rates):
            return Links(rates[0], rates[1] if len(rates) == 2 else None)
    raise argparse.ArgumentTypeError(
        f"must be bytes/s within and between machines, as in 450e9,50e9, got {text!r}"
    )


def _mesh(text: str) -> Mesh:
    with suppress(ValueError, TypeError):
        return Mesh(
            **{
                axis: int(count)
                for axis, _, count in (part.partition("=") for part in text.split(","))
            }
        )
    raise argparse.ArgumentTypeError(f"must be meshes, as in tp=8,dp=64, got {text!r}")


def _profile(
    options: argparse.Namespace,
    settings: Settings,
    sizes: list[Size],
    earlier: dict[str, Any] | None,
    clock: Clock,
) -> int:
    """Measure the sizes, write and show the result, and return the exit code."""
    with Progress() as progress:
        progress.start("measuring the ceilings")
        ceilings = from_first(
            lambda: measure_ceilings(settings.device, settings.dtype, clock=clock)
        )
        sheet = DATASHEETS.get(device_name(settings.device))
        document = _document(
            options, settings, asdict(ceilings) | {"ridge": ceilings.ridge}
        )
        if sheet is not None:
            document["ceilings"]["datasheet"] = sheet.peaks(settings.dtype)
        for index, size in enumerate(sizes, 1):
            progress.prefix = f"{index}/{len(sizes)} " if options.sweep else ""
            try:
                document["points"].append(
                    _measured(size, settings, ceilings, sheet, progress, clock)
                )
            except KeyboardInterrupt:
                if not document["points"]:
                    raise
                break
            document["status"] = "ok" if index == len(sizes) else "interrupted"
            if options.json is not None and is_first():
                write_json(
                    options.json, document
                )  # after every point: if the process is killed, those are left
    code = 0 if any("whole" in point for point in document["points"]) else 1
    if is_first():
        sections = (
            distributed_report(document)
            if settings.mesh.processes > 1
            else report(document)
        )
        _show(sections, document, options.plot if code == 0 else None, earlier)
    return 130 if document["status"] == "interrupted" else code


def _measured(
    size: Size,
    settings: Settings,
    ceilings: Ceilings,
    sheet: Datasheet | None,
    progress: Progress,
    clock: Clock,
) -> dict[str, Any]:
    if settings.mesh.processes == 1:
        return measure(size, settings, ceilings, sheet, progress, clock)
    from .distributed import (
        measure_distributed,
    )  # torch.distributed takes seconds to import

    with torch.set_grad_enabled(settings.train):
        return measure_distributed(size, settings, ceilings, progress, clock)


def _predict(
    options: argparse.Namespace,
    settings: Settings,
    sizes: list[Size],
    profile: dict[str, Any] | None,
    clock: Clock,
) -> int:
    """Predict the sizes on the meshes, write and show the result, and return the exit code."""
    mode, dtype, recompute = settings.mode, settings.dtype, options.recompute
    if profile is not None:
        price, device = measured(profile["points"][0]), profile["settings"]["device"]
        figures = profile["ceilings"] | {"source": profile["environment"]["device"]}
    else:
        device, source = str(settings.device), device_name(settings.device)
        if options.ceilings is not None:
            device, source = "cuda", f"{options.ceilings} datasheet"
            ceilings = DATASHEETS[options.ceilings].ceilings(dtype)
        else:
            ceilings = measure_ceilings(settings.device, dtype, clock=clock)
        price, figures = (
            roofline(ceilings),
            asdict(ceilings) | {"ridge": ceilings.ridge, "source": source},
        )
    links = replace(options.link, overlap=device != "cpu")
    peak, predictions = figures["flops_per_second"]["median"], []
    for size in sizes:
        for mesh in options.predict:
            with suppress(ValueError):  # of a sweep, what does not split has no point
                mesh.require(size)
                predictions.append(
                    predict(
                        size, mesh, price, peak, links, mode, dtype.itemsize, recompute
                    )
                )
    document = _document(options, settings, figures)
    document |= {
        "links": asdict(links),
        "recompute": recompute,
        "from": profile,
        "predictions": predictions,
    }
    if options.json is not None:
        write_json(options.json, document)
    _show(prediction_report(document), document, options.plot)
    return 0


def _show(
    sections: list[Section],
    document: dict[str, Any],
    path: Path | None,
    earlier: dict[str, Any] | None = None,
) -> None:
    try:  # the report first, so that neither a comparison nor a plot that fails loses it
        show(sections)
        if earlier is not None:
            show(["", *compare(document, earlier)])
    finally:  # also if the reader closes the pipe
        if path is not None:
            from .plot import plot

            plot(document, path)


def _document(
    options: argparse.Namespace, settings: Settings, ceilings: dict[str, Any]
) -> dict[str, Any]:
    """Return a document that has all but its points."""
    return {
        "schema": SCHEMA,
        "status": "ok",
        "environment": environment(settings.device, settings.seed),
        "settings": {
            **{
                name: getattr(options, name)
                for name in ("dtype", "mode", "compile", "rounds", "seed", "preset")
            },
            "device": str(settings.device),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "mesh": asdict(settings.mesh),
            "shape_checks": not jaxtyping_config.jaxtyping_disable,
            "sweep": options.sweep and options.sweep.partition("=")[0],
        },
        "ceilings": {"datasheet": None} | ceilings,
        "points": [],
    }
