"""Measure the errors of the layers of tinyblock and of other projects.

    python scripts/exactness.py --plot rope.png > my_machine.md
    python scripts/exactness.py --model HuggingFaceTB/SmolLM2-135M-Instruct
    python scripts/exactness.py --model FOLDER_OR_GGUF_FILE

All projects get equal weights and inputs, already rounded to the dtype. The Block in
float64, or RoPE's formula in float64, computes the exact result. An error is relative:
the root mean square error, divided by the root mean square of the exact result. A cell
is the median of three seeds. "Rounded" is the exact result, rounded to the dtype. No
error can be smaller. The output is Markdown. "RoPE at 8,192" rotates the 128 positions
from 8,192 on. --model measures only the logits of that model.
"""

import argparse
import copy
import sys
import warnings
from collections import defaultdict
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "examples"))

import torch
from lab.machine import environment
from lab.sizes import Size
from lab.tables import markdown
from peers.own import Layer, make_block, ours, relative_error
from peers.projects import PROJECTS, installed, print_left_out, versions
from peers.ropes import D_HEAD, MAX_SEQ_LEN, OWN_ROPES, PROJECT_ROPES, Rotation
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZE = Size(batch_size=2, seq_len=128, d_model=128, num_heads=2, d_ff=320)
# Far below the precision of each dtype, because x-transformers' norm has no eps.
EPS = 1e-12
SEEDS = range(3)
# The first positions at which RoPE is measured, up to a million.
STARTS = [0, *(2**power for power in range(7, 20)), MAX_SEQ_LEN - SIZE.seq_len]
STARTS_OF_TABLE = [0, 2**13, 2**17, MAX_SEQ_LEN - SIZE.seq_len]

OUTPUTS = "outputs"
GRADIENTS = "gradients of the input"

# The error of each seed, by layer, project, and OUTPUTS or GRADIENTS.
Errors = dict[tuple[str, str, str], list[float]]


def layer_errors(dtype: torch.dtype, device: torch.device) -> Errors:
    """Return the errors of the layers of each project."""
    errors: Errors = defaultdict(list)
    projects = installed(PROJECTS, device)
    for seed in SEEDS:
        block, x = make_block(SIZE, dtype, device, seed, EPS)
        layers = {"tinyblock": ours(block).layers}
        layers["exact"] = ours(copy.deepcopy(block).double()).layers
        for name, make in projects.items():
            layers[name] = make(block).layers
        for layer in layers["exact"]:
            runs = {name: own[layer] for name, own in layers.items()}
            record(errors, layer, runs, x)
    return errors


def rope_errors(dtype: torch.dtype, device: torch.device) -> Errors:
    """Return the errors of RoPE at the positions from each start on."""
    errors: Errors = defaultdict(list)
    with device:
        makers = OWN_ROPES | installed(PROJECT_ROPES, device)
        ropes = {name: make() for name, make in makers.items()}
    for seed in SEEDS:
        torch.manual_seed(seed)
        x = torch.randn(2, 2, SIZE.seq_len, D_HEAD, device=device).to(dtype)
        for start in STARTS:
            positions = torch.arange(start, start + SIZE.seq_len, device=device)
            runs: dict[str, Layer] = {}
            for name, rotate in ropes.items():
                runs[name] = at(positions, rotate)
            record(errors, rope_at(start), runs, x)
    return errors


def at(positions: Tensor, rotate: Rotation) -> Layer:
    return lambda x: rotate(x, positions)


def rope_at(start: int) -> str:
    return f"RoPE at {start:,}"


def record(errors: Errors, layer: str, runs: dict[str, Layer], x: Tensor) -> None:
    """Append the errors of each project, measured against the run named exact."""
    dy = torch.randn_like(x)
    expected = results(runs["exact"], x.double(), dy.double())
    found = {"rounded": [result.to(x.dtype) for result in expected]}
    for project, run in runs.items():
        if project != "exact":
            found[project] = results(run, x, dy)
    for project, (output, gradient) in found.items():
        output_error = relative_error(output, expected[0])
        gradient_error = relative_error(gradient, expected[1])
        errors[layer, project, OUTPUTS].append(output_error)
        errors[layer, project, GRADIENTS].append(gradient_error)


def results(layer: Layer, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Return the output of a layer, and the gradient of its input."""
    x = x.detach().requires_grad_()
    output = layer(x)
    if isinstance(output, tuple):
        output = output[0]
    [dx] = torch.autograd.grad(output, x, dy)
    return [output.detach(), dx]


def table(title: str, errors: Errors, what: str) -> str:
    hidden = {rope_at(start) for start in STARTS if start not in STARTS_OF_TABLE}
    layers = [layer for layer, _, _ in errors if layer not in hidden]
    projects = dict.fromkeys(project for _, project, _ in errors)
    rows = []
    for layer in dict.fromkeys(layers):
        found = [errors.get((layer, project, what)) for project in projects]
        cells = [f"{median(seeds):.2e}" if seeds else "" for seeds in found]
        rows.append([layer, *cells])
    return f"## {title}, {what}\n\n{markdown(['', *projects], rows)}\n"


def plot(path: Path, by_dtype: dict[str, Errors]) -> None:
    """Draw RoPE's relative error versus the position."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    panels = figure.subplots(1, len(by_dtype), sharey=True)
    middles = [start + SIZE.seq_len / 2 for start in STARTS]
    for axes, (dtype, errors) in zip(panels, by_dtype.items(), strict=True):
        projects = dict.fromkeys(project for _, project, _ in errors)
        for index, project in enumerate(projects):
            found = [errors[rope_at(start), project, OUTPUTS] for start in STARTS]
            line = [median(seeds) for seeds in found]
            # Thinner than those below it, so that equal lines are all visible.
            width = 0.8 * (len(projects) - index)
            axes.loglog(middles, line, label=project, linewidth=width)
        axes.set(title=dtype, xlabel="position in tokens")
    panels[0].set(ylabel="relative error of RoPE")
    panels[0].legend(frameon=False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        help="measure the logits of a folder, a GGUF file, or a name on the hub "
        "(default: measure layers)",
    )
    parser.add_argument(
        "--device",
        type=torch.device,
        default="cpu",
        help="run on this device (default: %(default)s)",
    )
    parser.add_argument("--plot", type=Path, help="draw RoPE's errors into this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # this project cannot fix what the peers warn of
    torch.set_num_threads(1)
    print_left_out(PROJECTS, options.device)
    print(f"# {environment(options.device)}\n")
    print(f"{versions(PROJECTS)}; `{' '.join(sys.argv)}`\n")
    if options.model:
        from peers import real_model  # here, because it requires more packages

        print(real_model.measure(options.model, options.device))
        return
    ropes = {}
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        ropes[name] = rope_errors(dtype, options.device)
        errors = layer_errors(dtype, options.device) | ropes[name]
        for what in (OUTPUTS, GRADIENTS):
            print(table(name, errors, what), flush=True)
    if options.plot:
        plot(options.plot, ropes)


if __name__ == "__main__":
    main()
