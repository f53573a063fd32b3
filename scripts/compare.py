"""Compare a Block with the layers of other projects: time, kept bytes, and errors.

    python scripts/compare.py > my_machine.md
    python scripts/compare.py --cases 'train-*' --against ../before

All have equal weights, and the same input, dtype, and single thread. Before anything is
timed, the outputs and, in training, the gradients of the input must agree. Block and
peer then take turns. A cell has the median ratio and, in parentheses, the range: of all
rounds or, for one token, which varies more between processes than within one, of
several processes. `control` is a second copy of the Block: its ratios show the noise.
`reading` is a sum of all weights, which one token must read, too. `against` is the
Block of another checkout.

A case is named work-dtype-size-mode. "train" is a forward and a backward pass, and
"forward" a pass without gradients. The sizes are 2,048 tokens with d_model 768, one
token with d_model 768 ("token") and 64 ("tiny-token") and, on CUDA, the block of Llama
3.1 8B with 4 x 2,048 tokens ("llama-8b"), with 8,192 ("llama-8b-long"), and with one
("llama-8b-token"). The modes are eager, compiled, frozen (compiled with constant
weights, which torch merges) and, on CUDA, graphs (CUDA graphs).

The last case is named errors. An error is the root mean square of the difference from a
result in float64, relative to the result's. "rounded" is the exact result, rounded to
the dtype: no error can be smaller. RoPE rotates 128 positions from the one in its name.
"""

import argparse
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from lab.machine import environment
from lab.options import positive
from lab.sizes import PRESETS, Size
from lab.tables import markdown, number
from lab.timing import interleave, wall_sampler
from peers import (
    Peer,
    control,
    import_as,
    installed,
    make_block,
    of_package,
    rope_of_transformers,
    versions,
)
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tinyblock import RotaryPositionalEmbedding, apply_rope

LLAMA_8B = PRESETS["llama-3.1-8b"]
SIZES = {
    "768": Size(4, 512, d_model=768, num_heads=12),
    "token": Size(1, 1, d_model=768, num_heads=12),
    "tiny-token": Size(1, 1, d_model=64, num_heads=4),  # Python dominates
    "llama-8b": replace(LLAMA_8B, batch_size=4, seq_len=2048),
    "llama-8b-long": replace(LLAMA_8B, batch_size=1, seq_len=8192),
    "llama-8b-token": replace(LLAMA_8B, batch_size=1, seq_len=1),
}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """One pass of a Block: forward without gradients, or forward and backward."""

    name: str
    size: Size
    dtype: torch.dtype
    train: bool
    mode: str

    @property
    def tolerance(self) -> float:
        """Return the relative error that two roundings and the order of sums explain."""
        return max(2 * torch.finfo(self.dtype).eps, 2e-5)


def all_cases(device: torch.device) -> list[Case]:
    cases = []
    for name, size in SIZES.items():
        on_gpu = device.type == "cuda"
        if name.startswith("llama") and not on_gpu:
            continue
        train = size.tokens > 1
        modes = ["eager", "compiled"]
        if not train:
            modes += ["frozen", "graphs"] if on_gpu else ["frozen"]
        for dtype_name, dtype in DTYPES.items():
            if name == "tiny-token" and dtype_name == "bf16":
                continue  # Python takes the time, whatever the dtype
            for mode in modes:
                work = "train" if train else "forward"
                title = f"{work}-{dtype_name}-{name}-{mode}"
                cases.append(Case(title, size, dtype, train, mode))
    return cases


# --- Speed ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """The seconds of Block and peer in each round, and what each keeps for backward."""

    seconds: list[tuple[float, float]]
    differ_by: float
    kept: tuple[int, int]

    def ratio(self) -> str:
        ratios = [block / peer for block, peer in self.seconds]
        return f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"

    def details(self) -> list[str]:
        times = [number(1e3 * median(each)) for each in zip(*self.seconds, strict=True)]
        kept = [f"{each / 2**20:.1f}" if each else "" for each in self.kept]
        return [*times, f"{self.differ_by:.0e}", *kept]


Found = dict[str, Result | str]  # a result or an error, by the name of the peer


@dataclass(frozen=True)
class Contestant:
    """What to time, its first results, and the bytes that it keeps for backward."""

    run: Callable[[], Any]
    results: list[Tensor]
    kept: int


def prepare(peer: Peer, x: Tensor, case: Case) -> Contestant:
    x = x.clone().requires_grad_(case.train)
    inputs = [x, *peer.parameters]
    layer = in_mode(case.mode, peer.layers["Block"], inputs)

    def forward() -> Tensor:
        return first_of(layer(x))

    forward()  # compiles, before anything is counted
    output, kept = count_kept_bytes(forward, peer.parameters)
    # Cloned, because the next replay of a CUDA graph overwrites the output.
    results = [output.detach().clone()]
    if not case.train:
        return Contestant(forward, results, kept)
    torch.manual_seed(1)
    gradient = torch.randn_like(output)

    def train() -> Any:
        return torch.autograd.grad(forward(), inputs, gradient)

    results.append(train()[0].clone())
    return Contestant(train, results, kept)


def first_of(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def in_mode(mode: str, layer: Any, inputs: list[Tensor]) -> Any:
    if mode == "eager":
        return layer
    # Not options of torch.compile: they must be set before it traces.
    torch._inductor.config.freezing = mode == "frozen"
    torch._inductor.config.cpp.enable_concat_linear = mode == "frozen"
    if mode != "graphs":
        return torch.compile(layer, dynamic=False)
    for tensor in inputs:  # otherwise each replay copies them
        torch._dynamo.mark_static_address(tensor)
    compiled = torch.compile(layer, dynamic=False, mode="reduce-overhead")

    def replay(x: Tensor) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(x)

    return replay


def count_kept_bytes(
    forward: Callable[[], Tensor], parameters: Iterable[Tensor]
) -> tuple[Tensor, int]:
    """Return the output, and the bytes that autograd keeps, apart from parameters."""
    sizes = {tensor.untyped_storage().data_ptr(): 0 for tensor in parameters}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor.detach()  # otherwise an output would keep its own graph alive

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    return output, sum(sizes.values())


def relative_error(actual: Tensor, expected: Tensor) -> float:
    expected = expected.detach().double()
    return float((actual.detach().double() - expected).norm() / expected.norm())


def compare(mine: Contestant, theirs: Contestant, case: Case, rounds: int) -> Result:
    """Time two contestants in turns.

    Raises:
        RuntimeError: their outputs or gradients differ by more than roundings.
    """
    pairs = zip(theirs.results, mine.results, strict=True)
    errors = [relative_error(their, our) for their, our in pairs]
    if not all(error <= case.tolerance for error in errors):  # or one is NaN
        found = ", ".join(f"{error:.1e}" for error in errors)
        raise RuntimeError(
            f"outputs and gradients must be within {case.tolerance:.0e} of the Block's, "
            f"got relative errors of {found}"
        )
    seconds = time_in_turns(mine.run, theirs.run, rounds)
    return Result(seconds, max(errors), (mine.kept, theirs.kept))


def time_in_turns(
    mine: Callable[[], Any], theirs: Callable[[], Any], rounds: int
) -> list[tuple[float, float]]:
    samplers = {"mine": wall_sampler(mine, 0.2), "theirs": wall_sampler(theirs, 0.2)}
    samples = interleave(samplers, rounds)
    return list(zip(samples["mine"], samples["theirs"], strict=True))


def measure(
    case: Case, device: torch.device, against: Path | None, rounds: int
) -> Found:
    """Compare the Block with each peer, in this process."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # this project cannot mend what peers warn of
    peers: dict[str, Callable[[Any], Peer]] = {"control": control, **installed(device)}
    if against:
        package = import_as("tinyblock_against", against / "tinyblock" / "__init__.py")
        peers["against"] = lambda block: of_package(package, block)
    found: Found = {}
    with torch.set_grad_enabled(case.train):
        block, x = make_block(case.size, case.dtype, device)
        mine = prepare(control(block), x, case)
        for name, make_peer in peers.items():
            try:
                theirs = prepare(make_peer(block), x, case)
                found[name] = compare(mine, theirs, case, rounds)
            except Exception as error:  # the other peers can still be measured
                found[name] = repr(error)
        if not case.train:
            weights = [weight.detach().flatten() for weight in block.parameters()]
            # Every dtype is read as float32, which torch sums as fast as memory delivers.
            read = torch.cat(weights).view(torch.float32).sum
            seconds = time_in_turns(mine.run, read, rounds)
            found["reading"] = Result(seconds, 0.0, (mine.kept, 0))
    return found


def measure_in_processes(case: Case, processes: int, *arguments: Any) -> Found:
    """Measure a case in a new process or, for one token, in several.

    Then the times of a round are the medians of a process.
    """
    runs: list[Found] = []
    for _ in range(1 if case.train else processes):
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, spawn) as process:
            runs.append(process.submit(measure, case, *arguments).result())
    return runs[0] if case.train else {name: combine(runs, name) for name in runs[0]}


def combine(runs: list[Found], name: str) -> Result | str:
    """Return the result of a peer with the medians of each process, or its first error."""
    results = []
    for run in runs:
        result = run[name]
        if isinstance(result, str):
            return result
        results.append(result)
    seconds = []
    for result in results:
        block, peer = zip(*result.seconds, strict=True)
        seconds.append((median(block), median(peer)))
    differ_by = max(result.differ_by for result in results)
    return replace(results[0], seconds=seconds, differ_by=differ_by)


# --- Errors ---------------------------------------------------------------------------

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SEEDS = range(3)
SMALL = Size(batch_size=2, seq_len=128, d_model=128, num_heads=2, d_ff=320)
STARTS = [0, 2**13, 2**17, 2**20 - 128]  # of the positions that RoPE rotates
THETA, D_HEAD = 10000.0, 64

Errors = dict[str, list[float]]  # of each seed, by project


def errors_of(dtype: torch.dtype, device: torch.device) -> dict[str, Errors]:
    """Return the errors of each layer, of its output and of its input's gradient."""
    found: dict[str, Errors] = {}
    for seed in SEEDS:
        block, x = make_block(SMALL, dtype, device, seed)
        ours = control(block).layers  # copies, because the next lines change the block
        theirs = installed(device)["transformers"](block).layers
        exact = control(block.double()).layers
        for name in exact:
            record(found, name, x, exact[name], ours[name], theirs[name])
        x = torch.randn(2, 2, 128, D_HEAD, device=device).to(dtype)
        for start in STARTS:
            positions = torch.arange(start, start + 128, device=device)
            record(found, f"RoPE at {start:,}", x, *ropes_at(positions))
    return found


def ropes_at(positions: Tensor) -> list[Callable[[Tensor], Tensor]]:
    """Return the rotation by these positions: exact, tinyblock's, and transformers'."""
    with positions.device:
        rope = RotaryPositionalEmbedding(THETA, D_HEAD, int(positions.max()) + 1)
    even = torch.arange(0, D_HEAD, 2, device=positions.device).double()
    angles = torch.outer(positions.double(), THETA ** (-even / D_HEAD))
    return [
        lambda x: apply_rope(x, angles),
        lambda x: rope(x, positions),
        lambda x: rope_of_transformers(x, positions, THETA),
    ]


def record(
    found: dict[str, Errors], name: str, x: Tensor, exact: Any, ours: Any, theirs: Any
) -> None:
    """Append the errors of a rounded result, of tinyblock, and of transformers."""
    dy = torch.randn_like(x)
    expected = output_and_gradient(exact, x.double(), dy.double())
    projects = {
        "rounded": [result.to(x.dtype) for result in expected],
        "tinyblock": output_and_gradient(ours, x, dy),
        "transformers": output_and_gradient(theirs, x, dy),
    }
    for project, results in projects.items():
        for what, result, right in zip(
            ("", ", gradient"), results, expected, strict=True
        ):
            row = found.setdefault(f"{name}{what}", {})
            row.setdefault(project, []).append(relative_error(result, right))


def output_and_gradient(layer: Any, x: Tensor, dy: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    output = first_of(layer(x))
    [dx] = torch.autograd.grad(output, x, dy)
    return [output.detach(), dx]


# --- The command ----------------------------------------------------------------------


def print_speed(found: dict[str, Found]) -> list[str]:
    """Print the ratios of the cases, and what they come from; return the failures."""
    peers = list(dict.fromkeys(peer for results in found.values() for peer in results))
    table, details, failures = [], [], []
    for name, results in found.items():
        cells = dict.fromkeys(peers, "")
        for peer, result in results.items():
            if isinstance(result, str):
                cells[peer] = "failed"
                failures.append(f"{name}: {peer} failed: {result}")
            else:
                cells[peer] = result.ratio()
                details.append([f"{name}: {peer}", *result.details()])
        table.append([name, *cells.values()])
    print(markdown(["Block's time / peer's", *peers], table), end="\n\n")
    columns = [
        "",
        "Block ms",
        "peer ms",
        "differ by",
        "Block keeps MiB",
        "peer keeps MiB",
    ]
    print(markdown(columns, details), *failures, sep="\n\n")
    return failures


def print_errors(device: torch.device) -> None:
    for dtype in FLOATS:
        rows = []
        for name, errors in errors_of(dtype, device).items():
            rows.append([name, *(f"{median(each):.2e}" for each in errors.values())])
        title = str(dtype).removeprefix("torch.")
        columns = [title, "rounded", "tinyblock", "transformers"]
        print(f"\n{markdown(columns, rows)}", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases",
        default="*",
        metavar="PATTERN",
        help="measure the cases that match, such as '*-f32-*' or errors (default: all; "
        "without bfloat16 instructions, bf16 takes hours)",
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="CHECKOUT",
        help="also compare with the Block of this checkout of tinyblock",
    )
    parser.add_argument(
        "--device",
        type=torch.device,
        default="cpu",
        help="run on this device (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=positive,
        default=5,
        help="take so many samples of each (default: %(default)s)",
    )
    parser.add_argument(
        "--processes",
        type=positive,
        default=3,
        help="time one token in so many processes (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    if options.against and not (options.against / "tinyblock").is_dir():
        parser.error(
            f"--against must be a checkout of tinyblock, got {options.against}"
        )
    cases = [
        case for case in all_cases(options.device) if fnmatch(case.name, options.cases)
    ]
    has_errors = fnmatch("errors", options.cases)
    if not cases and not has_errors:
        names = ", ".join(case.name for case in all_cases(options.device))
        parser.error(f"--cases must match one of: {names}, errors")
    torch.set_num_threads(1)
    print(f"# {environment(options.device)}\n")
    print(f"{versions(list(installed(options.device)))}; `{' '.join(sys.argv)}`\n")
    found: dict[str, Found] = {}
    failures = []
    try:
        for case in cases:
            print(case.name, file=sys.stderr)
            found[case.name] = measure_in_processes(
                case, options.processes, options.device, options.against, options.rounds
            )
    finally:  # a crash or Ctrl-C does not lose the cases before it
        if found:
            failures = print_speed(found)
    if has_errors and "transformers" in installed(options.device):
        print_errors(options.device)
    elif has_errors:
        print("errors are left out: install transformers", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
