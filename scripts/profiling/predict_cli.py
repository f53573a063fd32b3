"""The command line of predict_scaling.py: options, checks, and the order of events."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from lab.cli import Parser, check_outputs, positive_int, run
from lab.files import write_json
from lab.machine import DATASHEETS, Rates
from lab.model_options import (
    DTYPES,
    add_dtype,
    add_mode,
    add_size_options,
    naming_options,
    sizes_of,
)
from lab.presets import PRESETS
from lab.sizes import Size
from lab.tables import show

from .collectives import Mesh
from .predict import Links, Prediction, Work, is_rate, predict_all
from .report import describe
from .report_prediction import Basis, prediction_report

SCHEMA = "tinyblock.prediction/1"

_EXAMPLES = """examples:
  compare two meshes of 8 devices:
    python scripts/predict_scaling.py dp=8 dp=4,tp=2 --preset llama-3.1-8b --vocab 128256 --batch-size 16 \\
      --seq-len 8192 --dtype bfloat16 --mode step --ceilings "NVIDIA H200" --link 450e9,50e9
  draw the MFU of two meshes over the batch size:
    python scripts/predict_scaling.py tp=8,dp=64 dp=512 --preset llama-3.1-8b --seq-len 8192 \\
      --sweep batch-size=512,1024,2048 --dtype bfloat16 --mode step --ceilings "NVIDIA H200" --link 450e9,50e9 \\
      --plot scaling.png
  predict for a device without a datasheet:
    python scripts/predict_scaling.py dp=2 --num-layers 4 --batch-size 8 --ceilings 2e12,300e9 --link 10e9
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    with parser.reporting():
        check_outputs(arguments, "json", "plot")
        if arguments.plot is not None and arguments.sweep is None:
            raise ValueError("--plot draws a sweep: add --sweep batch-size=64,128")
        sizes = _sizes(arguments)
        meshes = [Mesh.parse(text) for text in arguments.meshes]
        # A mesh splits the batch and the width. Smaller sizes of a sweep need not split over each mesh.
        largest = max(sizes, key=lambda size: (size.batch_size, size.d_model))
        for mesh in meshes:
            with naming_options():
                mesh.require(largest)
        left_out = _left_out(sizes, meshes)
        basis = _basis(arguments)

    def work() -> int:
        predictions = predict_all(sizes, meshes, basis.work, basis.rates, basis.links)
        if arguments.json is not None:
            _write(arguments.json, basis, predictions)
        sections = prediction_report(basis, predictions)
        if left_out:
            sections.append("\n".join(left_out))
        show(sections)
        if arguments.plot is not None:
            _plot(arguments, sizes, basis, predictions)
        return 0

    return run(parser, work)


def _plot(
    arguments: argparse.Namespace,
    sizes: Sequence[Size],
    basis: Basis,
    predictions: Sequence[Prediction],
) -> None:
    # It imports matplotlib.
    from .plot_prediction import plot_predictions

    axis = arguments.sweep.axis
    about = describe(*sizes)
    plot_predictions(basis, predictions, axis, about, arguments.plot)


def _parser() -> Parser:
    about = "Predict a lower bound on the time of a pass or a training step on many devices, without running it."
    parser = Parser("predict_scaling.py", about, _EXAMPLES)
    parser.add_argument(
        "meshes",
        nargs="+",
        metavar="MESH",
        help="devices along each axis, such as dp=512 or tp=8,dp=64: "
        "tp splits each layer, and dp splits the batch and all weights",
    )
    add_size_options(
        parser,
        preset_help="a model with all its layers: a GPT-2-like size from CS336, or a published model",
        layers_help="a Transformer of N blocks (default: the preset's number, or one Block)",
    )
    group = parser.add_argument_group("computation")
    group.add_argument(
        "--vocab",
        type=positive_int,
        metavar="N",
        help="add embedding, head and loss of a vocabulary of N (default: none)",
    )
    add_mode(group)
    add_dtype(group)
    group.add_argument(
        "--recompute",
        action="store_true",
        help="count activation checkpointing of each block",
    )
    group = parser.add_argument_group("devices")
    group.add_argument(
        "--ceilings",
        required=True,
        metavar="GPU",
        help=f"a GPU with a datasheet ({', '.join(DATASHEETS)}); or FLOP/s and bytes/s, as in 989e12,3350e9",
    )
    group.add_argument(
        "--link",
        required=True,
        metavar="A[,B]",
        help="bytes/s that a device receives from its machine of 8 devices and, "
        "with B, from other machines, as in 450e9,50e9",
    )
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json", type=Path, metavar="FILE", help="write all predictions, in seconds"
    )
    group.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the MFU over a sweep: .png, .svg or .pdf",
    )
    return parser


def _sizes(arguments: argparse.Namespace) -> list[Size]:
    if arguments.preset is not None and arguments.num_layers is None:
        arguments.num_layers = PRESETS[arguments.preset].num_layers
    if arguments.vocab is not None and arguments.num_layers is None:
        raise ValueError(
            "--vocab requires --num-layers: a single Block has no embedding"
        )
    return sizes_of(arguments)


def _left_out(sizes: Sequence[Size], meshes: Sequence[Mesh]) -> list[str]:
    """Return a line for each size of a sweep that does not split over a mesh."""
    lines = []
    for size in sizes:
        for mesh in meshes:
            try:
                with naming_options():
                    mesh.require(size)
            except ValueError as error:
                lines.append(f"left out: {describe(size)}; {mesh}: {error}")
    return lines


def _basis(arguments: argparse.Namespace) -> Basis:
    dtype = DTYPES[arguments.dtype]
    if arguments.ceilings in DATASHEETS:
        rates = DATASHEETS[arguments.ceilings].rates(dtype)
        source = f"{arguments.ceilings} (datasheet)"
    else:
        rates = _rates(arguments.ceilings)
        source = "each device"
    return Basis(
        dtype=arguments.dtype,
        work=Work(arguments.mode, dtype.itemsize, arguments.recompute),
        source=source,
        rates=rates,
        links=Links.parse(arguments.link),
    )


def _rates(text: str) -> Rates:
    """Return the rates of a text such as "989e12,3350e9"; raise a ValueError if it is none."""
    try:
        flops_per_second, bytes_per_second = map(float, text.split(","))
    except ValueError:
        flops_per_second = bytes_per_second = 0.0
    if not (is_rate(flops_per_second) and is_rate(bytes_per_second)):
        similar = [name for name in DATASHEETS if text.lower() in name.lower()]
        advice = f": did you mean {' or '.join(similar)}?" if similar else ""
        raise ValueError(
            f"--ceilings must be a GPU of --help, or FLOP/s and bytes/s, as in 989e12,3350e9, got {text!r}{advice}"
        )
    return Rates(flops_per_second, bytes_per_second)


def _write(path: Path, basis: Basis, predictions: Sequence[Prediction]) -> None:
    """Write the fields of `Basis` and `Prediction`, and what follows from a prediction."""
    records = []
    for prediction in predictions:
        record = {
            "seconds": prediction.seconds,
            "tokens_per_second": prediction.tokens_per_second,
            "mfu": prediction.mfu,
            **asdict(prediction),
        }
        records.append(record)
    document = {
        "schema": SCHEMA,
        "command": shlex.join(["python", *sys.argv]),
        "basis": asdict(basis),
        "predictions": records,
    }
    write_json(path, document)
