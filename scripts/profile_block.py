"""Show where the time and memory of a Transformer block go, and how close it comes to
this machine's limits.

python scripts/profile_block.py
python scripts/profile_block.py --preset llama-3.1-8b --seq-len 4096 --compile
PYTHONPATH=FOLDER python scripts/profile_block.py --block module:function --d-model 768
torchrun --nproc-per-node 2 scripts/profile_block.py --tp 2

It requires torch, einops and jaxtyping, and for --plot matplotlib.

--block takes your own model, in any Python that has these. The folder of MODULE must be on
PYTHONPATH. FUNCTION is called without arguments, and returns an nn.Module, which is called as
block(x) with one tensor of shape (batch, seq, d_model). See docs/profile.md.
"""

import argparse
import importlib
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

# Before tinyblock is imported: the shape checks cost little, but they need beartype.
os.environ["JAXTYPING_DISABLE"] = "1"
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch.profiler's engine is silent
# This checkout's tinyblock, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from lab.sizes import PRESETS, Size
from profiling.measure import Build, Settings, measure
from profiling.record import tensors_in
from profiling.report import MODES, report
from torch import nn

DTYPES = ["float32", "bfloat16", "float16"]
DEFAULT_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
USERS_SIZES = ["batch_size", "seq_len", "d_model"]
OWN_SIZES = ["num_heads", "num_kv_heads", "d_head", "d_ff", "num_layers"]


def main() -> None:
    parser = options()
    arguments = parser.parse_args()
    size = size_of(arguments)
    try:
        check(arguments, size)
    except ValueError as error:
        parser.error(str(error))
    dtype = arguments.dtype or DEFAULT_DTYPES[arguments.device]
    settings = Settings(
        device=torch.device(arguments.device),
        dtype=getattr(torch, dtype),
        mode=arguments.mode,
        compile=arguments.compile,
        rounds=arguments.rounds,
    )
    try:
        with torch.set_grad_enabled(settings.train):
            if arguments.tp * arguments.dp > 1:
                profile_together(size, settings, arguments)
            else:
                profile_alone(size, settings, arguments)
    except ValueError as error:
        parser.error(str(error))
    except RuntimeError as error:
        if not re.search("out of memory|allocate memory", str(error)):
            raise
        reason = str(error).splitlines()[0]
        parser.error(f"too little memory, use smaller sizes: {reason}")


def options() -> argparse.ArgumentParser:
    sizes = []
    for name, size in PRESETS.items():
        sizes.append(f"{name}: d_model {size.d_model}, {size.num_heads} heads")
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--help] [option ...]",
        description=__doc__,
        epilog="presets:\n  " + "\n  ".join(sizes),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    title = "size: an option replaces the preset's number"
    add = parser.add_argument_group(title).add_argument
    add("--preset", choices=PRESETS, metavar="NAME", help="choose a size listed below")
    add(
        "--block",
        metavar="MODULE:FUNCTION",
        help="measure the model that FUNCTION() returns",
    )
    for name in (*USERS_SIZES, *OWN_SIZES):
        default = getattr(Size(), name)
        text = f"set {name}" + (f" (default: {default})" if default else "")
        add(option(name), type=positive, metavar="N", help=text)
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    add = parser.add_argument_group("measurement").add_argument
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
        help="run forward, with backward (train), and with AdamW (step; default: train)",
    )
    add(
        "--compile", action="store_true", help="compile the model; the parts stay eager"
    )
    add(
        "--rounds",
        type=positive,
        default=15,
        metavar="N",
        help="take N samples of each time (default: 15)",
    )
    text = "split each layer over N processes (default: 1)"
    add("--tp", type=positive, default=1, metavar="N", help=text)
    text = "split the batch over N processes (default: 1)"
    add("--dp", type=positive, default=1, metavar="N", help=text)
    add = parser.add_argument_group("output").add_argument
    add("--json", type=output, metavar="FILE", help="write all figures")
    add("--plot", type=picture, metavar="FILE", help="draw the roofline and the parts")
    add(
        "--trace",
        type=output,
        metavar="FILE",
        help="write a trace, which ui.perfetto.dev shows",
    )
    return parser


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def output(text: str) -> Path:
    """Return the path of a file to write, before minutes are spent on its content."""
    path = Path(text)
    target = path if path.exists() else path.parent
    if path.is_dir() or not os.access(target, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {text}")
    return path


def picture(text: str) -> Path:
    if not text.endswith((".png", ".svg", ".pdf")):
        raise argparse.ArgumentTypeError(f"must end in .png, .svg or .pdf, got {text}")
    return output(text)


def size_of(arguments: argparse.Namespace) -> Size:
    """Return the preset's size with the numbers that were typed."""
    values = {name: getattr(arguments, name) for name in (*USERS_SIZES, *OWN_SIZES)}
    typed = {name: value for name, value in values.items() if value is not None}
    size = PRESETS.get(arguments.preset, Size())
    if any(typed.get(name, value) != value for name, value in _width(size).items()):
        # The preset's belong to another width.
        size = replace(size, d_ff=None, d_head=None, num_kv_heads=None)
    return replace(size, **typed)


def _width(size: Size) -> dict[str, int]:
    return {"d_model": size.d_model, "num_heads": size.num_heads}


def check(arguments: argparse.Namespace, size: Size) -> None:
    """Raise a ValueError if options do not fit together."""
    processes = arguments.tp * arguments.dp
    if processes != int(os.environ.get("WORLD_SIZE", "1")):
        raise ValueError(f"--tp and --dp require torchrun --nproc-per-node {processes}")
    if processes > 1 and (arguments.json or arguments.plot or arguments.trace):
        raise ValueError("--json, --plot and --trace require one process")
    if arguments.block:
        others = [name for name in ("preset", *OWN_SIZES) if getattr(arguments, name)]
        if others or processes > 1:
            named = ", ".join(map(option, others or ("tp", "dp")))
            raise ValueError(f"--block must be used without {named}")
    elif size.batch_size % arguments.dp:
        raise ValueError(
            f"--batch-size must be a multiple of --dp, got {size.batch_size}"
        )
    else:
        # Layers reject sizes that do not fit together; on meta, no weight is allocated.
        size.build(torch.device("meta"), torch.float32)


def load(name: str) -> Callable[[], nn.Module]:
    """Return the function that MODULE:FUNCTION names; raise a ValueError if it is none."""
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ValueError(f"--block must be MODULE:FUNCTION, got {name}")
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--block: {error}; add the folder of {module} to PYTHONPATH"
        ) from error
    build = getattr(loaded, function, None)
    if build is None:
        raise ValueError(f"--block: {module} has no function {function}")
    if isinstance(build, type | nn.Module) or not callable(build):
        kind = "a class" if isinstance(build, type) else "an instance"
        raise ValueError(
            f"--block must name a function that returns a model, got {kind}"
        )
    return build


def users_build(name: str, shape: tuple[int, int, int]) -> Build:
    """Return how to build a user's model; raise a ValueError if it rejects the shape."""
    build = load(name)
    model = build()
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise ValueError(f"--block: {name} must return an nn.Module, got {kind}")
    weights = [*model.parameters(), torch.empty(0)]
    try:
        out = model(torch.randn(shape, device=weights[0].device).to(weights[0].dtype))
    except (RuntimeError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise ValueError(
            f"--block fails for x of shape {shape}, set --d-model: {reason}"
        ) from error
    if not tensors_in(out):
        raise ValueError(f"--block: {name} must return a tensor, got {out!r}")
    return lambda device, dtype: build().to(device, dtype)


def profile_alone(
    size: Size, settings: Settings, arguments: argparse.Namespace
) -> None:
    if arguments.plot:
        from profiling.plot import plot  # matplotlib is optional
    build: Build = size.build
    title, tiny = size.title, None
    if arguments.block:
        build = users_build(arguments.block, size.shape)
        batch, seq, d_model = size.shape
        title = f"{arguments.block}: {batch} x {seq} tokens, d_model {d_model}"
    else:
        tiny = (size.smallest().build, size.smallest().shape)
    profile = measure(build, size.shape, title, settings, tiny, arguments.trace)
    print(report(profile))
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(profile), indent=1, default=str))
    if arguments.plot:
        plot(profile, arguments.plot)


def profile_together(
    size: Size, settings: Settings, arguments: argparse.Namespace
) -> None:
    from profiling import distributed  # takes seconds to import

    try:
        run = distributed.prepare(size, settings, dp=arguments.dp, tp=arguments.tp)
    except ValueError as error:
        sys.exit(f"profile_block.py: error: {error}")  # from parallelize
    distributed.profile(run, size, settings)


if __name__ == "__main__":
    main()
