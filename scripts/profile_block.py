"""Show where the time and memory of a Transformer block go, how close it comes to this
machine's limits, and why its slowest parts are slow.

python scripts/profile_block.py
python scripts/profile_block.py --preset llama-3.1-8b --seq-len 4096 --compile
PYTHONPATH=FOLDER python scripts/profile_block.py --block module:function --d-model 768

It requires torch, einops and jaxtyping, and for --plot matplotlib.

--block takes your own model, in any Python environment with these packages. The folder of
MODULE must be on PYTHONPATH. FUNCTION is called without arguments, and returns an nn.Module
and its inputs: a tuple, or a mapping of keywords. An nn.Module alone is called as block(x) with
one tensor of shape (batch, seq, d_model). See docs/profile.md.
"""

import argparse
import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch.profiler's engine is silent
    # This checkout's tinyblock, installed or not.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from lab.options import Refused, positive
from lab.progress import show_progress
from lab.sizes import PRESETS, Size
from lab.timing import clock_of
from profiling.measure import measure
from profiling.report import report
from profiling.roofline import rate_samplers
from profiling.runs import Build, Built, Settings
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

DTYPES = ["float32", "bfloat16", "float16"]
MODES = ["forward", "train", "step"]
# What --block does not have, because it is a matter of the user's own model.
INPUT_SIZES = ["batch_size", "seq_len", "d_model"]
OWN_SIZES = ["num_heads", "num_kv_heads", "d_head", "d_ff", "num_layers"]


def main(typed: list[str] | None = None) -> None:
    """Run the command with the options that were typed, here or on the command line."""
    try:
        run(typed)
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        sys.exit(130)


def run(typed: list[str] | None) -> None:
    """Measure a model; print and write what the options name."""
    parser = options()
    arguments = parser.parse_args(typed)
    try:
        size, build = size_of(arguments), build_of(arguments)
    except ValueError as error:
        parser.error(str(error))
    dtype = arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32")
    settings = Settings(
        device=torch.device(arguments.device),
        dtype=getattr(torch, dtype),
        mode=arguments.mode,
        compile=arguments.compile,
        rounds=arguments.rounds,
    )
    # Of compiled models: the profiler needs global hooks, and a copy of the input.
    warnings.filterwarnings(
        "ignore", "Using `torch.compile.module.` when there are global"
    )
    warnings.filterwarnings(
        "ignore", "The .grad attribute of a Tensor that is not a leaf"
    )
    title = arguments.block or size.model
    if arguments.plot:
        from profiling.plot import draw  # before measuring: matplotlib is optional
    clock = clock_of(settings.device)
    try:
        with torch.set_grad_enabled(settings.train):
            profile = measure(
                build,
                size.shape,
                title,
                settings,
                clock,
                rate_samplers,
                arguments.trace,
                show_progress,
            )
    finally:
        show_progress("")  # an error begins on a line of its own
    print(report(profile, arguments.explain, arguments.all_parts))
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(profile), indent=1, default=str))
    if arguments.plot:
        draw(profile).savefig(arguments.plot, dpi=144)


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
    add("--batch-size", type=positive, metavar="N", help="set the batch (default: 1)")
    add("--seq-len", type=positive, metavar="N", help="set the tokens (default: 128)")
    add("--d-model", type=positive, metavar="N", help="set the width (default: 512)")
    add("--num-heads", type=positive, metavar="N", help="set the heads (default: 8)")
    add("--num-kv-heads", type=positive, metavar="N", help="set the heads of keys")
    add("--d-head", type=positive, metavar="N", help="set the width of a head")
    add("--d-ff", type=positive, metavar="N", help="set the width of the FFN")
    add("--num-layers", type=positive, metavar="N", help="measure a stack of N blocks")
    add = parser.add_argument_group("measurement").add_argument
    add_device(add)
    add(
        "--dtype",
        choices=DTYPES,
        help="set the dtype (default: bfloat16 on cuda, float32 on cpu)",
    )
    add(
        "--mode",
        choices=MODES,
        default="train",
        help="run forward in eval mode (forward), forward and backward of the model as it "
        "was built (train), or also fused AdamW (step; default: train)",
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
    add = parser.add_argument_group("output").add_argument
    add(
        "--all-parts",
        action="store_true",
        help="show each part, also those below 0.5%% of the time",
    )
    add("--explain", action="store_true", help="say what the words and figures mean")
    add("--json", type=new_file, metavar="FILE", help="write all figures")
    add("--plot", type=picture, metavar="FILE", help="draw the roofline and the parts")
    add(
        "--trace",
        type=new_file,
        metavar="FILE",
        help="write a trace of one run, which ui.perfetto.dev shows",
    )
    return parser


def add_device(add: Callable[..., object]) -> None:
    add(
        "--device",
        type=device,
        choices=["cuda", "cpu"],
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="run on this device (default: %(default)s)",
    )


def device(text: str) -> str:
    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(
            "torch sees no GPU; check nvidia-smi and torch.version.cuda, or use "
            "--device cpu"
        )
    return text


def new_file(text: str) -> Path:
    """Return a path that can be written once everything is measured."""
    path = Path(text)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"FILE must be in a folder that exists and can be written, got {text}"
        )
    return path


def picture(text: str) -> Path:
    """Return a path whose suffix names a format that matplotlib can write."""
    path = new_file(text)
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise argparse.ArgumentTypeError(
            "matplotlib must be installed: python -m pip install matplotlib"
        ) from error
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise argparse.ArgumentTypeError(
            f"FILE must end with .{', .'.join(known)}, got {text}"
        )
    return path


def size_of(arguments: argparse.Namespace) -> Size:
    """Return the preset's size with the numbers that were typed."""
    size = PRESETS.get(arguments.preset, Size())
    names = [field.name for field in fields(Size) if field.name != "qk_norm"]
    typed = {name: getattr(arguments, name) for name in names}
    return replace(size, **{name: value for name, value in typed.items() if value})


def build_of(arguments: argparse.Namespace) -> Build:
    """Return how to build the model.

    Raises:
        ValueError: options do not fit together, or name nothing.
    """
    if not arguments.block:
        size = size_of(arguments)
        size.build(torch.device("meta"), torch.float32)  # a layer may reject the size
        return size.build
    given = [name for name in ("preset", *OWN_SIZES) if getattr(arguments, name)]
    if given:
        names = ", ".join(map(option, given))
        raise ValueError(f"--block must be used without {names}")
    typed = [name for name in INPUT_SIZES if getattr(arguments, name)]
    return users_build(arguments.block, [option(name) for name in typed])


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def moved(device: torch.device, dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Return a tensor on the device, in the dtype if it is of floats. float32 casts nothing."""
    tensor = tensor.to(device)
    is_cast = tensor.is_floating_point() and dtype != torch.float32
    return tensor.to(dtype) if is_cast else tensor


def users_build(
    name: str, typed: Sequence[str] = (), given_by: str = "--block"
) -> Build:
    """Return how to build a user's model. Errors in it appear as Python shows them.

    typed: the options that set the size of x, which a model with its own inputs has not.
    given_by: the option that names the function.

    Raises:
        Refused: there is no such module or function.
    """
    module_name, _, function_name = name.partition(":")
    wrong = f"{given_by} must be MODULE:FUNCTION, got {name}"
    if not (module_name and function_name):
        raise Refused(wrong)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = f"{error.name}."
        if not f"{module_name}.".startswith(missing):
            raise  # the module is there, and imports what is not
        raise Refused(
            f"{wrong}, but no module {error.name} is on PYTHONPATH"
        ) from error
    if not hasattr(module, function_name):
        raise Refused(f"{wrong}, but {module.__file__} has no {function_name}")
    function = getattr(module, function_name)

    def build(device: torch.device, dtype: torch.dtype) -> Built:
        model, inputs = model_and_inputs(name, function())
        move = partial(moved, device, dtype)
        model._apply(move)  # model.to would make complex buffers real
        if inputs is None:
            return model
        if isinstance(inputs, Mapping):  # a tokenizer returns one that is no dict
            inputs = dict(inputs)
        if typed:
            raise SystemExit(
                f"{name} returns inputs, so it must be used without {', '.join(typed)}"
            )
        return model, tree_map_only(Tensor, move, inputs)

    return build


def model_and_inputs(name: str, built: Any) -> tuple[nn.Module, Any]:
    """Return what a user's function returned: a module, and its inputs or None.

    Raises:
        TypeError: it returned something else.
    """
    is_pair = isinstance(built, tuple) and len(built) == 2
    model, inputs = built if is_pair else (built, None)
    if not isinstance(model, nn.Module):
        got = type(model).__name__
        if isinstance(built, tuple) and not is_pair:
            got = f"a tuple of {len(built)}; return model, (x, y)"
        elif callable(model):
            got += "; put the call into the forward of a module"
        raise TypeError(
            f"{name} must return an nn.Module, or one with its inputs, got {got}"
        )
    if inputs is not None and not isinstance(inputs, (tuple, Mapping)):
        raise TypeError(
            f"the inputs that {name} returns must be a tuple, or a mapping of keywords, "
            f"got {type(inputs).__name__}; return model, (x,)"
        )
    return model, inputs


if __name__ == "__main__":
    if not options().parse_args().block:
        # The shape checks of tinyblock cost little, but they need beartype. For a model of
        # the user's own, the user decides.
        os.environ["JAXTYPING_DISABLE"] = "1"
    main()
