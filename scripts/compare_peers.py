"""Compare the speed of a Block with the layers of other projects.

    python scripts/compare_peers.py > my_machine.md
    python scripts/compare_peers.py --cases 'train-bf16-*' --peers transformers,control
    python scripts/compare_peers.py --against ../before     # before and after a change

Block and peer have their own copies of equal weights, and the same input, dtype and
threads. Their outputs and, in training, the gradients of the input must agree before
anything is timed. Then they take turns in one process. A cell shows the median ratio
and, in parentheses, the range of all rounds. One token varies more between processes
than within one, so its cell shows the median and the range of five processes. The
output is Markdown. These peers are not other projects:

    control     a second copy of the Block: its ratio shows the noise
    unchecked   the Block without shape checks
    operations  the torch functions that an eager Block calls, without modules
    against     the Block of another checkout

For one token, the last column compares with "reading", a sum of all weights. A layer
reads every weight for a token, and the sum does little else, so it shows how fast a layer
can be.

A case is named work-dtype-size-mode, such as train-bf16-768-compiled. "forward" is a
pass without gradients, and "train" is a forward and a backward pass. The sizes are
2,048 tokens at d_model 768, one token at d_model 768 ("token") and 64 ("tiny-token")
and, on CUDA, the block of Llama 3.1 8B with 8,192 tokens ("llama-8b": 4 sequences,
"llama-8b-long": one) and with one token. The modes are eager, compiled, frozen (compiled
with constant weights, which torch may merge; for forward) and, on CUDA, graphs (CUDA
graphs).
"""

import argparse
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import filter as matching
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from lab.machine import environment
from lab.sizes import PRESETS, Size
from lab.tables import markdown, number
from lab.timing import Sampler, interleave, wall_sampler
from peers.own import (
    OWN,
    Layer,
    Peer,
    import_as,
    make_block,
    of_package,
    ours,
    relative_error,
)
from peers.projects import PROJECTS, installed, print_left_out, versions
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

MakePeer = Callable[[Any], Peer]
Outputs = tuple[Tensor, ...]

SIZES = {
    "768": Size(4, 512, d_model=768, num_heads=12),
    "token": Size(1, 1, d_model=768, num_heads=12),
    # So small that Python dominates.
    "tiny-token": Size(1, 1, d_model=64, num_heads=4),
}
LLAMA_8B = PRESETS["llama-3.1-8b"]
GPU_SIZES = {
    "llama-8b": replace(LLAMA_8B, batch_size=4, seq_len=2048),
    "llama-8b-long": replace(LLAMA_8B, batch_size=1, seq_len=8192),
    "llama-8b-token": replace(LLAMA_8B, batch_size=1, seq_len=1),
}
SAMPLE_SECONDS = 0.2
PROCESSES = 5  # for one token
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
READING = "reading"  # of weights: a bound for one token, and no peer


@dataclass(frozen=True)
class Case:
    """One pass of a Block: forward without gradients, or forward and backward."""

    name: str
    size: Size
    dtype: torch.dtype
    train: bool
    mode: str

    @property
    def is_token(self) -> bool:
        return self.size.tokens == 1

    @property
    def tolerance(self) -> float:
        """Return the relative error that two roundings and the order of sums explain."""
        return max(2 * torch.finfo(self.dtype).eps, 2e-5)


def all_cases(device: torch.device) -> dict[str, Case]:
    sizes = dict(SIZES)
    modes = ["eager", "compiled", "frozen"]
    if device.type == "cuda":
        sizes.update(GPU_SIZES)
        modes.append("graphs")
    cases = {}
    axes = product(modes, sizes.items(), DTYPES.items(), ("train", "forward"))
    for mode, (size_name, size), (dtype_name, dtype), work in axes:
        train = work == "train"
        if not train or (size.tokens > 1 and mode != "frozen"):
            name = f"{work}-{dtype_name}-{size_name}-{mode}"
            cases[name] = Case(name, size, dtype, train, mode)
    return cases


# --- Preparing and timing -------------------------------------------------------------


@dataclass(frozen=True)
class Contestant:
    """What to time, its first results, and the bytes that it keeps for backward."""

    sampler: Sampler
    results: dict[str, Tensor]
    kept: int


def prepare(peer: Peer, x: Tensor, case: Case) -> Contestant:
    x = x.clone().requires_grad_(case.train)
    inputs = [x, *peer.parameters]
    layer = in_mode(case.mode, peer.layers["Block"], inputs)

    def forward() -> Outputs:
        outputs = layer(x)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    forward()  # compiles, before anything is counted
    outputs, kept = count_kept_bytes(forward, peer.parameters)
    # Cloned, because the next replay of a CUDA graph overwrites the outputs.
    results = {"outputs": outputs[0].clone()}
    if not case.train:
        return Contestant(wall_sampler(forward, SAMPLE_SECONDS), results, kept)
    torch.manual_seed(1)
    gradients = [torch.randn_like(output) for output in outputs]

    def train() -> Outputs:
        return torch.autograd.grad(forward(), inputs, gradients)

    results["gradients"] = train()[0].clone()
    return Contestant(wall_sampler(train, SAMPLE_SECONDS), results, kept)


def in_mode(mode: str, layer: Layer, inputs: list[Tensor]) -> Layer:
    """Return the layer itself, or compiled in a mode."""
    # Not an option of torch.compile, because it matters from the start of tracing.
    torch._inductor.config.freezing = mode == "frozen"
    torch._inductor.config.cpp.enable_concat_linear = mode == "frozen"
    if mode == "eager":
        return layer
    if mode in ("compiled", "frozen"):
        return torch.compile(layer, dynamic=False)
    for tensor in inputs:  # otherwise each replay copies them
        torch._dynamo.mark_static_address(tensor)
    compiled = torch.compile(layer, dynamic=False, mode="reduce-overhead")

    def replay(x: Tensor) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(x)

    return replay


def count_kept_bytes(
    forward: Callable[[], Outputs], parameters: Iterable[Tensor]
) -> tuple[Outputs, int]:
    """Return the outputs, and the bytes that autograd keeps, apart from parameters."""
    sizes = {tensor.untyped_storage().data_ptr(): 0 for tensor in parameters}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor.detach()  # otherwise an output would keep its own graph alive

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = forward()
    return outputs, sum(sizes.values())


@dataclass(frozen=True)
class Result:
    """The samples of one process, or the medians of several processes."""

    block_seconds: list[float]
    peer_seconds: list[float]
    errors: dict[str, float]
    block_kept: int
    peer_kept: int

    def ratio(self) -> str:
        pairs = zip(self.block_seconds, self.peer_seconds, strict=True)
        ratios = [block / peer for block, peer in pairs]
        return f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"

    def details(self) -> list[str]:
        """Return the cells of DETAILS."""
        cells = []
        for samples in (self.block_seconds, self.peer_seconds):
            cells.append(number(1e3 * median(samples)))
        cells.append(", ".join(f"{error:.0e}" for error in self.errors.values()))
        for kept in (self.block_kept, self.peer_kept):
            cells.append(f"{kept / 2**20:.1f}" if kept else "")
        return cells


Found = dict[str, Result | str]  # by the name of the peer
DETAILS = ["Block ms", "peer ms", "differ by", "Block keeps MiB", "peer keeps MiB"]


class Reference:
    """The Block of a case, prepared once for all peers."""

    def __init__(self, case: Case, device: torch.device) -> None:
        torch.compiler.reset()  # otherwise later cases reach the limit of recompilations
        self.case = case
        self.block, self.x = make_block(case.size, case.dtype, device)
        self.contestant = self.prepare(ours(self.block))

    def prepare(self, peer: Peer) -> Contestant:
        with torch.set_grad_enabled(self.case.train):
            return prepare(peer, self.x, self.case)

    def compare(self, make_peer: MakePeer, rounds: int) -> Result:
        """Time the Block and a peer, which take turns.

        Raises:
            RuntimeError: their outputs or gradients differ by more than roundings.
        """
        mine = self.contestant
        peer = make_peer(self.block)
        theirs = self.prepare(peer)
        errors = {}
        for what, expected in mine.results.items():
            errors[what] = relative_error(theirs.results[what], expected)
            if not errors[what] <= self.case.tolerance:  # or is NaN
                raise RuntimeError(
                    f"{what} must be within {self.case.tolerance:.0e} of the Block's {what}, "
                    f"got a relative error of {errors[what]:.1e}"
                )
        return self.time(theirs.sampler, rounds, errors, theirs.kept)

    def compare_with_reading(self, rounds: int) -> Result:
        """Time the Block and a sum of all weights, which take turns."""
        weights = [weight.detach().flatten() for weight in self.block.parameters()]
        # Every dtype is read as float32, which torch sums as fast as memory delivers it.
        run = torch.cat(weights).view(torch.float32).sum
        sampler = wall_sampler(run, SAMPLE_SECONDS)
        return self.time(sampler, rounds, errors={}, peer_kept=0)

    def time(
        self, peer: Sampler, rounds: int, errors: dict[str, float], peer_kept: int
    ) -> Result:
        samplers = {"block": self.contestant.sampler, "peer": peer}
        with torch.set_grad_enabled(self.case.train):
            samples = interleave(samplers, rounds)
        return Result(
            block_seconds=samples["block"],
            peer_seconds=samples["peer"],
            errors=errors,
            block_kept=self.contestant.kept,
            peer_kept=peer_kept,
        )


def compare_all(case: Case, options: argparse.Namespace) -> Found:
    """Return the result of each peer, or its error."""
    reference = Reference(case, options.device)
    found: Found = {}
    for name, make_peer in chosen_peers(options).items():
        if name == "operations" and case.mode != "eager":
            continue  # inductor generates no code for complex products
        print(f"{case.name}: {name}", file=sys.stderr)
        try:
            found[name] = reference.compare(make_peer, options.rounds)
        except Exception as error:  # the other peers can still be measured
            found[name] = repr(error)
    if case.is_token:
        found[READING] = reference.compare_with_reading(options.rounds)
    return found


def compare_in_processes(case: Case, options: argparse.Namespace) -> Found:
    """Compare in several new processes, and return the median of each process."""
    runs = []
    for _ in range(PROCESSES):
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, spawn, initializer=set_up_process) as process:
            runs.append(process.submit(compare_all, case, options).result())
    found: Found = {}
    for name in runs[0]:
        results = []
        for run in runs:
            result = run[name]
            if isinstance(result, str):
                found[name] = result
                break
            results.append(result)
        else:
            found[name] = replace(
                results[0],
                block_seconds=[median(result.block_seconds) for result in results],
                peer_seconds=[median(result.peer_seconds) for result in results],
            )
    return found


def set_up_process() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # this project cannot fix what the peers warn of


# --- The command ----------------------------------------------------------------------


def parse() -> tuple[argparse.Namespace, list[Case]]:
    """Return the options, and the cases that they select."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases",
        default="*-eager",
        help="measure the cases that match, such as '*-f32-*,*token*' (default: '%(default)s'; "
        "a CPU that has only AVX2 takes hours for bfloat16)",
    )
    parser.add_argument(
        "--peers",
        default="*",
        help="measure the peers that match, such as 'litgpt,c*' (default: all)",
    )
    parser.add_argument(
        "--against", type=Path, help="also compare with this checkout of tinyblock"
    )
    parser.add_argument(
        "--device",
        type=torch.device,
        default="cpu",
        help="run on this device (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=7,
        help="take this many samples of each (default: %(default)s)",
    )
    options = parser.parse_args()
    if options.against and not package_of(options.against).is_file():
        parser.error(
            "--against must be a checkout of tinyblock, "
            f"but has no {package_of(options.against)}"
        )
    try:
        cases = select(all_cases(options.device), options.cases)
        chosen_peers(options)
    except ValueError as error:
        parser.error(str(error))
    return options, list(cases.values())


def chosen_peers(options: argparse.Namespace) -> dict[str, MakePeer]:
    """Return the peers that --peers selects, and the checkout of --against.

    Raises:
        ValueError: a pattern of --peers matches no peer.
    """
    peers = select(OWN | installed(PROJECTS, options.device), options.peers)
    if options.against:
        package = import_as("tinyblock_against", package_of(options.against))
        peers["against"] = partial(of_package, package)
    return peers


def package_of(checkout: Path) -> Path:
    return checkout / "tinyblock" / "__init__.py"


def select(items: dict[str, Any], patterns: str) -> dict[str, Any]:
    """Return the items whose names match one of the patterns, in their order."""
    found = set()
    for pattern in patterns.split(","):
        names = matching(items, pattern)
        if not names:
            raise ValueError(f"{pattern!r} matches none of: {', '.join(items)}")
        found.update(names)
    return {name: item for name, item in items.items() if name in found}


def main() -> int:
    options, cases = parse()
    set_up_process()
    print_left_out(PROJECTS, options.device)
    print(f"# {environment(options.device)}\n")
    print(f"{versions(PROJECTS)}; `{' '.join(sys.argv)}`\n")
    columns = [*chosen_peers(options)]
    if any(case.is_token for case in cases):
        columns.append(READING)
    table = []
    details = []
    failures = []
    for case in cases:
        compare = compare_in_processes if case.is_token else compare_all
        found = compare(case, options)
        cells = dict.fromkeys(columns, "")
        for name, result in found.items():
            if isinstance(result, str):
                cells[name] = "failed"
                failures.append(f"{case.name}: {name} failed: {result}")
            else:
                cells[name] = result.ratio()
                details.append([f"{case.name}: {name}", *result.details()])
        table.append([case.name, *cells.values()])
    print(markdown(["Block's time / peer's", *columns], table), end="\n\n")
    print(markdown(["", *DETAILS], details), *failures, sep="\n\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
