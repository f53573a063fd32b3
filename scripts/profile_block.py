"""Show where the time and memory of a Transformer block go, and how close it comes to
this machine's limits.

python scripts/profile_block.py
python scripts/profile_block.py --preset llama-3.1-8b --seq-len 4096 --compile
PYTHONPATH=FOLDER python scripts/profile_block.py --block module:function --d-model 768
torchrun --nproc-per-node 2 scripts/profile_block.py --tp 2

It requires torch, einops and jaxtyping, and for --plot matplotlib.

--block takes your own model, in any Python environment with these packages. The folder of
MODULE must be on PYTHONPATH. FUNCTION is called without arguments, and returns an nn.Module,
which is called as block(x) with one tensor of shape (batch, seq, d_model). See
docs/profile.md.
"""

import argparse
import importlib
import json
import os
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

# Before tinyblock is imported: the shape checks cost little, but they need beartype.
os.environ["JAXTYPING_DISABLE"] = "1"
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch.profiler's engine is silent
# This checkout's tinyblock, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from lab.sizes import PRESETS, Size
from profiling.measure import Build, Settings, measure
from profiling.report import report

DTYPES = ["float32", "bfloat16", "float16"]
MODES = ["forward", "train", "step"]
SIZES = [field.name for field in fields(Size) if field.name != "qk_norm"]
OWN_SIZES = SIZES[3:]  # --block has the others: batch_size, seq_len and d_model


def main() -> None:
    parser = options()
    arguments = parser.parse_args()
    dtype = arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32")
    settings = Settings(
        device=torch.device(arguments.device),
        dtype=getattr(torch, dtype),
        mode=arguments.mode,
        compile=arguments.compile,
        rounds=arguments.rounds,
    )
    try:
        with torch.set_grad_enabled(settings.train):
            profile(arguments, size_of(arguments), settings)
    except ValueError as error:
        parser.error(str(error))


def options() -> argparse.ArgumentParser:
    presets = [
        f"  {name}: d_model {size.d_model}, {size.num_heads} heads"
        for name, size in PRESETS.items()
    ]
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--help] [option ...]",
        description=__doc__,
        epilog="\n".join(["presets:", *presets]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument_group("size (replaces the preset's)").add_argument
    add("--preset", choices=PRESETS, metavar="NAME", help="choose a size listed below")
    add(
        "--block",
        metavar="MODULE:FUNCTION",
        help="measure the model that FUNCTION() returns",
    )
    for name in SIZES:
        default = getattr(Size(), name)
        text = f"set {name}" + (f" (default: {default})" if default else "")
        add(option(name), type=positive, metavar="N", help=text)
    add = parser.add_argument_group("measurement").add_argument
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    add(
        "--device",
        choices=devices,
        default=devices[0],
        help="run on this device (default: %(default)s)",
    )
    add(
        "--dtype",
        choices=DTYPES,
        help="set the dtype (default: bfloat16 on cuda, float32 on cpu)",
    )
    add(
        "--mode",
        choices=MODES,
        default="train",
        help="run forward, forward and backward (train), or forward, backward and AdamW "
        "(step; default: train)",
    )
    add(
        "--compile", action="store_true", help="compile the model; the parts stay eager"
    )
    for name, default, text in (
        ("rounds", 15, "take N samples of each time (default: 15)"),
        ("tp", 1, "split each layer over N processes (default: 1)"),
        ("dp", 1, "give each of N processes a batch of its own (default: 1)"),
    ):
        add(f"--{name}", type=positive, default=default, metavar="N", help=text)
    add = parser.add_argument_group("output").add_argument
    for name, text in {
        "json": "write all figures",
        "plot": "draw the roofline and the parts",
        "trace": "write a trace of one run, which ui.perfetto.dev shows",
    }.items():
        add(f"--{name}", type=Path, metavar="FILE", help=text)
    return parser


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def size_of(arguments: argparse.Namespace) -> Size:
    """Return the preset's size with the numbers that were typed."""
    size = PRESETS.get(arguments.preset, Size())
    typed = {name: getattr(arguments, name) for name in SIZES}
    return replace(size, **{name: value for name, value in typed.items() if value})


def profile(arguments: argparse.Namespace, size: Size, settings: Settings) -> None:
    """Measure and report; raise a ValueError if options do not fit together."""
    processes = arguments.tp * arguments.dp
    if processes != int(os.environ.get("WORLD_SIZE", "1")):
        raise ValueError(f"--tp and --dp require torchrun --nproc-per-node {processes}")
    if processes > 1:
        reject(arguments, "--tp and --dp", ["block", "json", "plot", "trace"])
        from profiling import distributed  # takes seconds to import

        distributed.profile(size, settings, dp=arguments.dp, tp=arguments.tp)
        return
    if arguments.plot:
        from profiling.plot import plot  # matplotlib is optional
    if arguments.block:
        reject(arguments, "--block", ["preset", *OWN_SIZES])
        build = users_build(arguments.block)
        batch, seq, d_model = size.shape
        title = f"{arguments.block}: {batch} x {seq} tokens, d_model {d_model}"
        tiny = None
    else:
        build, title = size.build, size.title
        tiny = (size.smallest().build, size.smallest().shape)
    measured = measure((build, size.shape), title, settings, tiny, arguments.trace)
    print(report(measured))
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(measured), indent=1, default=str))
    if arguments.plot:
        plot(measured, arguments.plot)


def reject(arguments: argparse.Namespace, option_given: str, names: list[str]) -> None:
    given = [option(name) for name in names if getattr(arguments, name)]
    if given:
        raise ValueError(f"{option_given} must be used without {', '.join(given)}")


def users_build(name: str) -> Build:
    """Return how to build a user's model; raise a ValueError if it is not there."""
    module, _, function = name.partition(":")
    try:
        build = getattr(importlib.import_module(module), function)
    except (AttributeError, ModuleNotFoundError, ValueError) as error:
        raise ValueError(
            "--block must be MODULE:FUNCTION, with the folder of MODULE on PYTHONPATH, "
            f"got {name}: {error}"
        ) from error

    def build_there(device: torch.device, dtype: torch.dtype) -> Any:
        model = build().to(device)
        # A cast would make complex buffers real.
        return model if dtype == torch.float32 else model.to(dtype)

    return build_there


if __name__ == "__main__":
    main()
