"""The command line of profile_block.py: what can be asked for, what is refused, and the order of events."""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import config as jaxtyping_config
from lab.cli import Parser, check_outputs, device_of, run
from lab.environment import device_name, environment
from lab.files import atomic
from lab.machine import DATASHEETS, Ceilings, datasheet, measure_ceilings, memory_bytes
from lab.presets import PRESETS
from lab.processes import from_first, is_first, launched
from lab.progress import Progress
from lab.sizes import Size
from lab.tables import show

from tinyblock import Block

from .collectives import ONE_PROCESS, Mesh
from .compare import SCHEMA, compare, load
from .measure import BACKENDS, MODES, Settings, measure, require_attention_backend
from .predict import Links, predict
from .report import report
from .report_processes import prediction_report, spread_report
from .spread import measure_spread
from .tracing import nsys_command

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
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
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Profile what `argv` asks for, and return the exit code.

    0: done. 1: nothing could be measured. 2: refused before measuring. 130: interrupted; what was measured is written.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    with parser.reporting():
        settings, sizes, earlier = _checked(arguments)
    if arguments.nvtx:
        print(f"To record the ranges: {nsys_command(sys.argv[1:] if argv is None else argv)}", flush=True)
    if arguments.predict is not None:
        return run(parser, lambda: _predict(arguments, settings, sizes))
    return run(parser, lambda: _profile(arguments, settings, sizes, earlier))


def _parser() -> Parser:
    parser = Parser(
        prog="profile_block.py",
        description="Show where the time and memory of a Transformer block go, and how far the machine's limit is.",
        epilog=_EXAMPLES,
    )
    size = parser.add_argument_group("size")
    size.add_argument("--preset", choices=PRESETS, metavar="NAME", help=f"the block of a model: {', '.join(PRESETS)}")
    size.add_argument("--batch-size", type=int, default=1, metavar="N", help="sequences (1)")
    size.add_argument("--seq-len", type=int, default=128, metavar="N", help="tokens of each (128)")
    size.add_argument("--d-model", type=int, metavar="N", help="width (512)")
    size.add_argument("--num-heads", type=int, metavar="N", help="query heads (8)")
    size.add_argument("--num-kv-heads", type=int, metavar="N", help="key and value heads (as many)")
    size.add_argument("--d-head", type=int, metavar="N", help="head size (d_model / num_heads)")
    size.add_argument("--d-ff", type=int, metavar="N", help="inner width of SwiGLU (8/3 d_model)")
    size.add_argument("--qk-norm", action="store_true", help="normalize queries and keys")
    size.add_argument("--num-layers", type=int, metavar="N", help="a Transformer of N blocks that share one RoPE")
    size.add_argument("--sweep", metavar="AXIS=A,B,...", help=f"measure several sizes; AXIS: {', '.join(_SWEEPS)}")

    how = parser.add_argument_group("how")
    how.add_argument(
        "--mode", choices=MODES, default="train", help="forward, train (and backward; default), step (and AdamW)"
    )
    how.add_argument("--device", metavar="D", help="cpu, cuda or cuda:1 (CUDA where there is one)")
    how.add_argument("--dtype", choices=_DTYPES, default="float32", help="of weights and inputs (float32)")
    how.add_argument("--compile", action="store_true", help="torch.compile the whole, and each part on its own")
    how.add_argument("--attention-backend", choices=BACKENDS, help="the only one that SDPA may use (torch chooses)")
    how.add_argument("--rounds", type=int, default=15, metavar="N", help="samples of every run (15)")
    how.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and inputs (0)")

    spread = parser.add_argument_group("several processes", "started by torchrun: --nproc-per-node is the product")
    for axis, what in (
        ("tp", "that each layer is split over"),
        ("dp", "that the batch and what is stored are split over"),
        ("dp-replicate", "groups of --dp, that the batch is split over"),
    ):
        spread.add_argument(f"--{axis}", type=int, default=1, metavar="N", help=f"processes {what} (1)")

    paper = parser.add_argument_group("on paper")
    paper.add_argument(
        "--predict",
        nargs="+",
        metavar="MESH",
        help="tell what these meshes would take, as in tp=8,dp=64",
    )
    paper.add_argument(
        "--link", metavar="A[,B]", help="bytes/s that a device receives from its own machine of 8, and from others"
    )
    paper.add_argument(
        "--ceilings",
        choices=DATASHEETS,
        metavar="GPU",
        help="a datasheet's, as in 'NVIDIA H200', instead of those measured on --device",
    )

    out = parser.add_argument_group("output")
    out.add_argument("--json", type=Path, metavar="FILE", help="write everything; see docs/profile_schema.md")
    out.add_argument("--compare", type=Path, metavar="OLD.json", help="show the ratios to an earlier --json")
    out.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw roofline and parts, or a sweep's scaling: .png, .svg, .pdf"
    )
    out.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace, of a run without timings")
    out.add_argument(
        "--memory-snapshot", type=Path, metavar="FILE", help="write CUDA's allocations, for pytorch.org/memory_viz"
    )
    out.add_argument("--nvtx", action="store_true", help="mark the parts for nsys, and print its command line")
    return parser


def _checked(arguments: argparse.Namespace) -> tuple[Settings, list[Size], dict[str, Any] | None]:
    """Return how to measure, what, and the profile to compare with, once all that can be checked before is checked."""
    settings = Settings(
        device=device_of(arguments.device),
        dtype=_DTYPES[arguments.dtype],
        mode=arguments.mode,
        compile=arguments.compile,
        attention_backend=arguments.attention_backend,
        rounds=arguments.rounds,
        seed=arguments.seed,
        trace=arguments.trace,
        memory_snapshot=arguments.memory_snapshot,
        nvtx=arguments.nvtx,
        mesh=Mesh(arguments.dp_replicate, arguments.dp, arguments.tp),
    )
    if settings.rounds < 1:
        raise ValueError(f"--rounds must be at least 1, got {settings.rounds}")
    if not -(2**63) <= settings.seed < 2**64:
        raise ValueError(f"--seed must fit into 64 bits, got {settings.seed}")
    if settings.mode == "step" and settings.dtype == torch.float16:
        raise ValueError("--mode step in float16 gives NaN, as AdamW's eps is 0 there: use bfloat16, or --mode train")
    sizes = [_possible_size(arguments, settings, swept) for swept in _sweep(arguments.sweep)]
    if arguments.predict is not None:
        _check_prediction(arguments, settings, sizes)
        return settings, sizes, None
    if arguments.link or arguments.ceilings:
        raise ValueError("--link and --ceilings are for --predict")
    _check_mesh(arguments, settings, sizes)
    _check_layers(sizes, settings)
    if settings.device.type != "cuda":
        _refuse(arguments, f"needs CUDA, and the device is {settings.device}", "memory_snapshot", "nvtx")
    if arguments.sweep and (settings.trace or settings.memory_snapshot or settings.nvtx):
        raise ValueError("--trace, --memory-snapshot and --nvtx record one size: leave --sweep out")
    check_outputs(arguments, "json", "plot", "trace", "memory_snapshot")
    earlier = None if arguments.compare is None else load(arguments.compare)
    if earlier is not None and not any(point["size"] == asdict(size) for point in earlier["points"] for size in sizes):
        raise ValueError(f"{arguments.compare} has none of the sizes that are asked for")
    if settings.attention_backend is not None:
        _check_backend(sizes, settings)
    if settings.compile:
        _check_compile(settings)
    return settings, sizes, earlier


def _sweep(text: str | None) -> list[dict[str, int]]:
    """Return what each size of the sweep has in place of the options; nothing, of a single size."""
    if text is None:
        return [{}]
    axis, _, values = text.partition("=")
    try:
        numbers = [int(value) for value in values.split(",")]
    except ValueError:
        numbers = []
    if axis not in _SWEEPS or not numbers:
        raise ValueError(
            f"--sweep takes one of {', '.join(_SWEEPS)} and its values, as in seq-len=128,256, got {text!r}"
        )
    return [{axis.replace("-", "_"): number} for number in numbers]


def _possible_size(arguments: argparse.Namespace, settings: Settings, swept: dict[str, int]) -> Size:
    """Return the size that is asked for, once torch and the layers have taken it without allocating anything."""
    try:
        size = _size(arguments, swept)
        one_layer = replace(size, num_layers=size.num_layers and min(size.num_layers, 1))  # the others are like it
        one_layer.build("meta", settings.dtype)
        torch.empty(size.batch_size, size.seq_len, size.d_model, device="meta", dtype=settings.dtype)
    except (RuntimeError, OverflowError, TypeError) as error:
        raise ValueError(f"impossible size: {_first_sentence(error)}") from None
    return size


def _refuse(arguments: argparse.Namespace, why: str, *options: str) -> None:
    for option in options:
        if getattr(arguments, option):
            raise ValueError(f"--{option.replace('_', '-')} {why}")


def _check_mesh(arguments: argparse.Namespace, settings: Settings, sizes: list[Size]) -> None:
    mesh, processes = settings.mesh, launched()
    for size in sizes:
        mesh.require(size)
    if mesh.processes != processes:
        options = " ".join(f"--{axis.replace('_', '-')} {count}" for axis, count in mesh.axes.items())
        start = f"torchrun --nproc-per-node {mesh.processes} {sys.argv[0]} {options} ..." if options else "python"
        raise ValueError(f"{mesh} makes {mesh.processes}, and there are {processes}: start with {start}")
    if processes > 1:
        _refuse(arguments, "is for one process: leave --tp and --dp out", "sweep", "trace", "memory_snapshot", "nvtx")


def _check_prediction(arguments: argparse.Namespace, settings: Settings, sizes: list[Size]) -> None:
    """Refuse what a prediction cannot be made of, or makes nothing of."""
    if arguments.link is None:
        raise ValueError("--predict needs --link, as in --link 450e9,50e9: bytes/s within and between machines")
    if launched() > 1 or settings.mesh.processes > 1:
        raise ValueError("--predict is for one process: name the mesh behind it, as in --predict tp=2,dp=2")
    _refuse(arguments, "needs a measurement: leave --predict out", "compare", "trace", "memory_snapshot", "nvtx")
    check_outputs(arguments, "json", "plot", "trace", "memory_snapshot")
    if arguments.plot is not None and not arguments.sweep:
        raise ValueError("--plot of a prediction draws a sweep: add --sweep batch-size=64,128,256")
    _links(arguments.link)
    for text in arguments.predict:
        _mesh(text).require(max(sizes, key=lambda size: size.batch_size))  # of a sweep, a smaller one need not split
    if arguments.ceilings is not None:
        DATASHEETS[arguments.ceilings].ceilings(settings.dtype)


def _links(text: str) -> Links:
    try:
        rates = [float(rate) for rate in text.split(",")]
    except ValueError:
        rates = []
    if not 1 <= len(rates) <= 2 or not all(0 < rate < float("inf") for rate in rates):
        raise ValueError(f"--link takes bytes/s within and between machines, as in 450e9,50e9, got {text!r}")
    return Links(rates[0], rates[1] if len(rates) == 2 else None)


def _mesh(text: str) -> Mesh:
    axes = {axis: count for axis, _, count in (part.partition("=") for part in text.split(","))}
    if axes.keys() <= asdict(ONE_PROCESS).keys() and all(count.isdecimal() for count in axes.values()):
        return Mesh(**{axis: int(count) for axis, count in axes.items()})
    raise ValueError(f"--predict takes meshes as in tp=8,dp=64, got {text!r}")


def _check_layers(sizes: list[Size], settings: Settings) -> None:
    """Refuse a stack whose weights alone are larger than the memory: it would only be built until that is full.

    In a sweep a size that is too large is a row, as long as a smaller one can be measured.
    """
    smallest = min(sizes, key=lambda size: size.parameters)
    weights, memory = smallest.parameters * settings.dtype.itemsize, memory_bytes(settings.device)
    if smallest.num_layers is not None and memory is not None and weights > memory:
        makes, has = (f"{size / 2**30:.1f} GiB" for size in (weights, memory))
        raise ValueError(
            f"--num-layers {smallest.num_layers} makes {makes} of weights, and {settings.device} has {has}"
        )


def _size(arguments: argparse.Namespace, swept: dict[str, int]) -> Size:
    """Return the size that the options add up to; the layers fill in what is left open and refuse the impossible."""
    names = ("batch_size", "seq_len", "d_model", "num_heads", "num_kv_heads", "d_head", "d_ff", "num_layers")
    given = {name: getattr(arguments, name) for name in names} | swept
    defaults: dict[str, Any] = {"d_model": 512, "num_heads": 8}
    numerics: dict[str, Any] = {"qk_norm": arguments.qk_norm}
    if arguments.preset is not None:
        preset = PRESETS[arguments.preset]
        numerics = {"theta": preset.theta, "eps": preset.eps, "qk_norm": preset.qk_norm or arguments.qk_norm}
        defaults = {"d_model": preset.d_model, "num_heads": preset.num_heads, "num_kv_heads": preset.num_kv_heads}
        # Its head size and d_ff belong to its width and heads: with others the layers' own defaults hold.
        if given["d_model"] is None:
            defaults["d_ff"] = preset.d_ff
            if given["num_heads"] is None:
                defaults["d_head"] = preset.d_head
        if given["num_heads"] is not None:
            del defaults["num_kv_heads"]
    size: dict[str, Any] = {name: defaults.get(name) if chosen is None else chosen for name, chosen in given.items()}
    block = Block(**{name: size[name] for name in names[2:-1]}, device="meta")
    size |= {"num_kv_heads": block.attn.num_kv_heads, "d_head": block.attn.d_head, "d_ff": block.ffn.d_ff}
    return Size(**size, **numerics)


def _check_backend(sizes: list[Size], settings: Settings) -> None:
    try:
        for size in sizes:
            require_attention_backend(size, settings)
    except RuntimeError as error:
        where = f"on {settings.device} in {str(settings.dtype).removeprefix('torch.')} with these heads"
        raise ValueError(
            f"--attention-backend {settings.attention_backend} cannot run {where}: {_first_sentence(error)}"
        ) from None


def _check_compile(settings: Settings) -> None:
    try:
        torch.compile(lambda x: x + 1)(torch.ones(2, device=settings.device))
    except Exception as error:  # whatever a missing or broken compiler leads to
        raise ValueError(f"--compile: torch.compile does not work here: {_first_sentence(error)}") from None
    finally:
        torch.compiler.reset()


def _first_sentence(error: Exception) -> str:
    return str(error).strip().split("\n")[0].split(". ")[0].rstrip(".")


def _profile(
    arguments: argparse.Namespace, settings: Settings, sizes: list[Size], earlier: dict[str, Any] | None
) -> int:
    """Measure the sizes, write and show the result, and return the exit code."""
    with Progress() as progress:
        progress.start("measuring the ceilings")
        ceilings = from_first(lambda: measure_ceilings(settings.device, settings.dtype))
        sheet = datasheet(device_name(settings.device))
        document = _document(arguments, settings, ceilings, {"datasheet": sheet and sheet.peaks(settings.dtype)})
        points = document["points"]
        for index, size in enumerate(sizes, 1):
            progress.prefix = f"{index}/{len(sizes)} " if arguments.sweep else ""
            try:
                if settings.mesh.processes > 1:
                    points.append(measure_spread(size, settings, ceilings, progress))
                else:
                    points.append(measure(size, settings, ceilings, sheet, progress))
                if points[-1]["status"] == "interrupted":
                    document["status"] = "interrupted"
            except KeyboardInterrupt:
                document["status"] = "interrupted"
            _write(document, arguments.json)  # after every point: a process that is killed leaves those until then
            if document["status"] == "interrupted":
                break
    measured = [point for point in points if "whole" in point]
    if not is_first():
        return 0 if measured else 1
    try:  # the report first, so that a plot that fails does not lose it
        show((spread_report if settings.mesh.processes > 1 else report)(document))
        if earlier is not None:
            show(["", *compare(document, earlier)])
    finally:  # for somebody, too, who does not read the report to its end
        if arguments.plot is not None and measured:
            from .plot import plot

            with atomic(arguments.plot) as temporary:
                plot(document, temporary)
    if document["status"] == "interrupted":
        return 130
    return 0 if measured else 1


def _predict(arguments: argparse.Namespace, settings: Settings, sizes: list[Size]) -> int:
    """Predict the sizes on the meshes, write and show the result, and return the exit code."""
    links, dtype = _links(arguments.link), settings.dtype
    source = f"measured on {device_name(settings.device)}"
    if arguments.ceilings is None:
        ceilings = measure_ceilings(settings.device, dtype)
    else:
        ceilings, source = DATASHEETS[arguments.ceilings].ceilings(dtype), f"{arguments.ceilings} datasheet"
    predictions = []
    for size in sizes:
        for mesh in map(_mesh, arguments.predict):
            with suppress(ValueError):  # of a sweep, what does not split has no point
                mesh.require(size)
                predictions.append(predict(size, mesh, ceilings, links, settings.mode, dtype))
    document = _document(arguments, settings, ceilings, {"datasheet": None, "source": source})
    document |= {"links": asdict(links), "predictions": predictions}
    _write(document, arguments.json)
    show(prediction_report(document))
    if arguments.plot is not None:
        from .plot import plot_predictions

        with atomic(arguments.plot) as temporary:
            plot_predictions(document, temporary)
    return 0


def _document(
    arguments: argparse.Namespace, settings: Settings, ceilings: Ceilings, source: dict[str, Any]
) -> dict[str, Any]:
    """Return a document that has all but its points; `source` is what is said of the ceilings."""
    axis = arguments.sweep and arguments.sweep.partition("=")[0]
    return {
        "schema": SCHEMA,
        "status": "ok",
        "environment": environment(settings.device, settings.seed),
        "settings": _as_json(settings) | {"preset": arguments.preset, "sweep": axis},
        "ceilings": asdict(ceilings) | {"ridge": ceilings.ridge} | source,
        "points": [],
    }


def _write(document: dict[str, Any], path: Path | None) -> None:
    if path is not None and is_first():
        with atomic(path) as temporary:
            temporary.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")


def _as_json(settings: Settings) -> dict[str, Any]:
    return {
        "device": str(settings.device),
        "dtype": str(settings.dtype).removeprefix("torch."),
        "mode": settings.mode,
        "compile": settings.compile,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "attention_backend": settings.attention_backend,
        "mesh": asdict(settings.mesh),
        "rounds": settings.rounds,
        "seed": settings.seed,
        "shape_checks": not jaxtyping_config.jaxtyping_disable,
    }
