"""Compare the errors of a Block and its layers with those of transformers.

    python scripts/accuracy.py > my_errors.md

An error is the root mean square of the difference from a result in float64, relative to
the result's: the median of three random inputs and weights. "rounded" is the exact
result, rounded to the dtype: no error can be smaller. "gradient" is that of the input.
RoPE rotates 128 positions from the one in its name. It requires transformers.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from lab.machine import environment
from lab.progress import show_progress
from lab.sizes import Size
from lab.tables import markdown
from peers import (
    Layer,
    control,
    first_of,
    installed,
    make_block,
    relative_error,
    rope_of_transformers,
    transformers,
    versions,
)
from torch import Tensor

from tinyblock import RotaryPositionalEmbedding, apply_rope

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SEEDS = [0, 1, 2]
SIZE = Size(batch_size=2, seq_len=128, d_model=128, num_heads=2, d_ff=320)
STARTS = [0, 2**13, 2**17, 2**20 - 128]  # of the positions that RoPE rotates
THETA, D_HEAD = 10000.0, 64

# The errors of each seed, by row and by column.
Errors = dict[str, dict[str, list[float]]]


def errors_in(
    dtype: torch.dtype, device: torch.device, seeds: list[int] = SEEDS
) -> Errors:
    """Return the errors of each layer, of its output and of its input's gradient."""
    found: Errors = {}
    ropes = {start: ropes_from(start, device) for start in STARTS}
    for seed in seeds:
        block, x = make_block(SIZE, dtype, device, seed)
        ours = control(block).layers  # copies, because the next lines change the block
        theirs = transformers(block).layers
        exact = control(block.double()).layers
        for name in exact:
            add_errors(found, name, x, exact[name], ours[name], theirs[name])
        x = torch.randn(2, 2, 128, D_HEAD, device=device).to(dtype)
        for start, rotations in ropes.items():
            add_errors(found, f"RoPE at {start:,}", x, *rotations)
    return found


def ropes_from(start: int, device: torch.device) -> list[Layer]:
    """Return the rotation by 128 positions: exact, tinyblock's, and transformers'."""
    positions = torch.arange(start, start + 128, device=device)
    rope = RotaryPositionalEmbedding(THETA, D_HEAD, start + 128, device=device)
    even = torch.arange(0, D_HEAD, 2, device=device).double()
    angles = torch.outer(positions.double(), THETA ** (-even / D_HEAD))
    return [
        lambda x: apply_rope(x, angles),
        lambda x: rope(x, positions),
        lambda x: rope_of_transformers(x, positions, THETA),
    ]


def add_errors(
    found: Errors, name: str, x: Tensor, exact: Layer, ours: Layer, theirs: Layer
) -> None:
    """Append the errors of a rounded result, of tinyblock, and of transformers."""
    dy = torch.randn_like(x)
    expected = output_and_gradient(exact, x.double(), dy.double())
    columns = {
        "rounded": [result.to(x.dtype) for result in expected],
        "tinyblock": output_and_gradient(ours, x, dy),
        "transformers": output_and_gradient(theirs, x, dy),
    }
    for column, results in columns.items():
        for row, result, right in zip(
            (name, f"{name}, gradient"), results, expected, strict=True
        ):
            errors = found.setdefault(row, {}).setdefault(column, [])
            errors.append(relative_error(result, right))


def output_and_gradient(layer: Layer, x: Tensor, dy: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    output = first_of(layer(x))
    [dx] = torch.autograd.grad(output, x, dy)
    return [output.detach(), dx]


def table(dtype: torch.dtype, found: Errors) -> str:
    """Return the medians of the seeds."""
    columns = [str(dtype).removeprefix("torch."), *next(iter(found.values()))]
    rows = [
        [row, *(f"{median(errors):.2e}" for errors in cells.values())]
        for row, cells in found.items()
    ]
    return markdown(columns, rows)


def main(
    typed: list[str] | None = None,
    errors_in: Callable[[torch.dtype, torch.device], Errors] = errors_in,
) -> None:
    """Print a report. errors_in returns the errors in a dtype on a device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device",
        type=torch.device,
        default="cpu",
        help="run on this device (default: %(default)s)",
    )
    device: torch.device = parser.parse_args(typed).device
    if "transformers" not in installed(device):
        parser.error(
            "transformers must be installed: python -m pip install transformers"
        )
    torch.set_num_threads(1)
    print(f"# {environment(device)}\n")
    print(f"{versions(['transformers'])}; `scripts/accuracy.py`")
    for dtype in DTYPES:
        show_progress(str(dtype))
        errors = errors_in(dtype, device)
        show_progress("")
        print(f"\n{table(dtype, errors)}", flush=True)


if __name__ == "__main__":
    main()
