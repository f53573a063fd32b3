"""Compare the speed of a Block with that of other projects' layers, and what they keep.

    python scripts/compare.py > my_machine.md
    python scripts/compare.py --cases 'train-*' --against ../before

All have equal weights, and the same input, dtype, and single thread. Before anything is
timed, the outputs and, in training, the gradients of the input must agree. Block and
other layer then run alternately. A cell has the median ratio and, in parentheses, the
range: of all rounds or, for one token, which varies more between processes than within
one, of several processes. `control` is a second copy of the Block: its ratios show the
noise. `reading` is a sum of all weights, which one token must read, too. `against` is
the Block of another checkout.

A case is named work-dtype-size-mode. "train" is a forward and a backward pass, and
"forward" a pass without gradients. The sizes are 2,048 tokens with d_model 768, one
token with d_model 768 ("token") and 64 ("tiny-token") and, on CUDA, the block of Llama
3.1 8B with 4 x 2,048 tokens ("llama-8b"), with 8,192 ("llama-8b-long"), and with one
("llama-8b-token"). The modes are eager, compiled, frozen (compiled with constant
weights, which torch merges) and, on CUDA, graphs (CUDA graphs). In "token-merged", the
Block has the merged weights of examples/merged.py, and its control has not.
"""

import argparse
import multiprocessing
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from lab.machine import environment
from lab.options import positive
from lab.progress import show_progress
from lab.sizes import PRESETS, Size
from lab.tables import markdown, number
from lab.timing import HOST, Clock, interleave, wall_sampler
from merged import merge
from peers import (
    MakePeer,
    Peer,
    control,
    first_of,
    installed,
    make_block,
    of_checkout,
    relative_error,
    versions,
)
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

LLAMA_8B = PRESETS["llama-3.1-8b"]
SIZES = {
    "768": Size(4, 512, d_model=768, num_heads=12),
    "token": Size(1, 1, d_model=768, num_heads=12),
    "token-merged": Size(1, 1, d_model=768, num_heads=12),
    "tiny-token": Size(1, 1, d_model=64, num_heads=4),  # Python dominates
    "llama-8b": replace(LLAMA_8B, batch_size=4, seq_len=2048),
    "llama-8b-long": replace(LLAMA_8B, batch_size=1, seq_len=8192),
    "llama-8b-token": replace(LLAMA_8B, batch_size=1, seq_len=1),
}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
CASES = [
    "train-f32-768-eager",
    "train-f32-768-compiled",
    "train-bf16-768-eager",
    "train-bf16-768-compiled",
    "forward-f32-token-eager",
    "forward-f32-token-compiled",
    "forward-f32-token-frozen",
    "forward-bf16-token-eager",
    "forward-bf16-token-compiled",
    "forward-bf16-token-frozen",
    "forward-f32-token-merged-eager",
    "forward-f32-token-merged-compiled",
    "forward-bf16-token-merged-eager",
    "forward-bf16-token-merged-compiled",
    "forward-f32-tiny-token-eager",
    "forward-f32-tiny-token-compiled",
    "forward-f32-tiny-token-frozen",
]
CASES_ON_CUDA = [
    "forward-f32-token-graphs",
    "forward-bf16-token-graphs",
    "forward-f32-tiny-token-graphs",
    "train-bf16-llama-8b-eager",
    "train-bf16-llama-8b-compiled",
    "train-bf16-llama-8b-long-eager",
    "train-bf16-llama-8b-long-compiled",
    "forward-bf16-llama-8b-token-eager",
    "forward-bf16-llama-8b-token-compiled",
    "forward-bf16-llama-8b-token-frozen",
    "forward-bf16-llama-8b-token-graphs",
]


@dataclass(frozen=True)
class Case:
    """One pass of a Block: forward without gradients, or forward and backward."""

    name: str
    size: Size
    dtype: torch.dtype
    train: bool
    mode: str

    @classmethod
    def of(cls, name: str) -> "Case":
        """Return the case of a name such as train-bf16-llama-8b-eager."""
        work, dtype, *size, mode = name.split("-")
        return cls(name, SIZES["-".join(size)], DTYPES[dtype], work == "train", mode)

    @property
    def is_merged(self) -> bool:
        return "-merged-" in self.name

    @property
    def tolerance(self) -> float:
        """Return the relative error that two roundings and the order of sums explain."""
        return max(2 * torch.finfo(self.dtype).eps, 2e-5)


def cases_on(device: torch.device) -> list[Case]:
    names = CASES + CASES_ON_CUDA if device.type == "cuda" else CASES
    return [Case.of(name) for name in names]


# --- Modes ----------------------------------------------------------------------------


def in_mode(mode: str, layer: Any, inputs: list[Tensor]) -> Any:
    """Return the layer as it runs in a mode. `inputs` are x and the parameters."""
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


# --- One layer ------------------------------------------------------------------------


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


# --- Two layers -----------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """The Block and another layer: their seconds in each round, and the bytes they keep.

    differ_by: the larger of the relative errors of the output and of x's gradient.
    """

    block: list[float]
    other: list[float]
    differ_by: float
    block_keeps: int
    other_keeps: int

    def ratio(self) -> str:
        rounds = zip(self.block, self.other, strict=True)
        ratios = [block / other for block, other in rounds]
        return f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"

    def details(self) -> list[str]:
        return [
            number(1e3 * median(self.block)),
            number(1e3 * median(self.other)),
            f"{self.differ_by:.0e}",
            mebibytes(self.block_keeps),
            mebibytes(self.other_keeps),
        ]


def mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f}" if count else ""


Found = dict[str, Result | str]  # a result or an error, by the name of the other layer


def difference(block: Contestant, other: Contestant, tolerance: float) -> float:
    """Return the larger of the relative errors of the output and of x's gradient.

    Raises:
        RuntimeError: it is larger than roundings explain.
    """
    pairs = zip(other.results, block.results, strict=True)
    errors = [relative_error(their, our) for their, our in pairs]
    if not all(error <= tolerance for error in errors):  # or one is NaN
        found = ", ".join(f"{error:.1e}" for error in errors)
        raise RuntimeError(
            f"outputs and gradients must be within {tolerance:.0e} of the Block's, "
            f"got relative errors of {found}"
        )
    return max(errors)


@dataclass(frozen=True)
class Bench:
    """What measures a case: with which other layers, where, and how often.

    peers: what builds a layer from a Block, by the name of its column.
    """

    peers: Mapping[str, MakePeer]
    device: torch.device
    rounds: int
    threads: int
    clock: Clock
    progress: Callable[[str], None]

    def measure(self, case: Case) -> Found:
        """Compare the Block with each other layer, in this process."""
        torch.set_num_threads(self.threads)
        warnings.simplefilter("ignore")  # this project cannot fix what others warn of
        found: Found = {}
        with torch.set_grad_enabled(case.train):
            block, x = make_block(case.size, case.dtype, self.device)
            own = control(block)
            layer: Any = own.layers["Block"]
            if case.is_merged:
                merge(layer)
            ours = prepare(own, x, case)
            for name, make_peer in self.peers.items():
                say = partial(self.say, case, name)
                say("preparing")
                try:
                    theirs = prepare(make_peer(block), x, case)
                    differ_by = difference(ours, theirs, case.tolerance)
                    times = self.time_alternately(ours.run, theirs.run, say)
                except Exception as error:  # the others can still be measured
                    found[name] = repr(error)
                else:
                    found[name] = Result(*times, differ_by, ours.kept, theirs.kept)
            if not case.train:
                weights = [weight.detach().flatten() for weight in block.parameters()]
                # In float32, whatever the dtype: torch sums it as fast as memory delivers.
                read = torch.cat(weights).view(torch.float32).sum
                say = partial(self.say, case, "reading")
                times = self.time_alternately(ours.run, read, say)
                found["reading"] = Result(*times, 0.0, 0, 0)
        return found

    def time_alternately(
        self,
        block: Callable[[], Any],
        other: Callable[[], Any],
        say: Callable[[str], None],
    ) -> tuple[list[float], list[float]]:
        """Return the seconds of both in each round."""
        samplers = {
            "block": wall_sampler(block, 0.2, self.clock),
            "other": wall_sampler(other, 0.2, self.clock),
        }
        samples = interleave(samplers, self.rounds, say)
        return samples["block"], samples["other"]

    def say(self, case: Case, name: str, doing: str) -> None:
        self.progress(f"{case.name}: {name}, {doing}")


# --- Several processes ----------------------------------------------------------------

Call = Callable[[Callable[[Case], Found], Case], Found]


def in_a_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function where no earlier case has compiled or allocated anything."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as process:
        return process.submit(function, *arguments).result()


def combine(runs: list[Found]) -> Found:
    """Return results whose rounds are the medians of processes, or first errors."""
    return {name: combined([run[name] for run in runs]) for name in runs[0]}


def combined(results: list[Result | str]) -> Result | str:
    right = []
    for result in results:
        if isinstance(result, str):
            return result
        right.append(result)
    return replace(
        right[0],
        block=[median(result.block) for result in right],
        other=[median(result.other) for result in right],
        differ_by=max(result.differ_by for result in right),
    )


# --- The command ----------------------------------------------------------------------


def report(found: Mapping[str, Found]) -> str:
    """Return the ratios of the cases, what they come from, and what failed."""
    names = list(dict.fromkeys(name for results in found.values() for name in results))
    ratios, details = [], []
    for case, results in found.items():
        cells = dict.fromkeys(names, "")
        for name, result in results.items():
            if isinstance(result, str):
                cells[name] = "failed"
            else:
                cells[name] = result.ratio()
                details.append([f"{case}: {name}", *result.details()])
        ratios.append([case, *cells.values()])
    columns = [
        "",
        "Block ms",
        "other ms",
        "differ by",
        "Block keeps MiB",
        "other keeps MiB",
    ]
    tables = [
        markdown(["Block's time / other layer's", *names], ratios),
        markdown(columns, details),
    ]
    return "\n\n".join([*tables, *failures(found)])


def failures(found: Mapping[str, Found]) -> list[str]:
    return [
        f"{case}: {name} failed: {result}"
        for case, results in found.items()
        for name, result in results.items()
        if isinstance(result, str)
    ]


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases",
        default="*",
        metavar="PATTERN",
        help="measure the cases that match, such as '*-f32-*' (default: all; without "
        "bfloat16 instructions, bf16 takes hours)",
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
    return parser


def main(
    typed: list[str] | None = None,
    cases_on: Callable[[torch.device], list[Case]] = cases_on,
    peers_on: Callable[[torch.device], Mapping[str, MakePeer]] = installed,
    clock: Clock = HOST,
    threads: int = 1,
    call: Call = in_a_new_process,
    progress: Callable[[str], None] = show_progress,
) -> int:
    """Print a report; return 1 if another layer failed.

    cases_on, peers_on: return what a device can run.
    call: calls a function that measures a case.
    """
    parser = options()
    typed = sys.argv[1:] if typed is None else typed
    chosen = parser.parse_args(typed)
    known = cases_on(chosen.device)
    cases = [case for case in known if fnmatch(case.name, chosen.cases)]
    if not cases:
        parser.error(f"--cases must match one of: {', '.join(c.name for c in known)}")
    others = peers_on(chosen.device)
    peers: dict[str, MakePeer] = {"control": control, **others}
    if chosen.against:
        if not (chosen.against / "tinyblock").is_dir():
            parser.error(
                f"--against must be a checkout of tinyblock, got {chosen.against}"
            )
        peers["against"] = partial(of_checkout, chosen.against)
    bench = Bench(peers, chosen.device, chosen.rounds, threads, clock, progress)
    torch.set_num_threads(threads)  # which the next line names
    print(f"# {environment(chosen.device)}\n")
    print(f"{versions(others)}; `{shlex.join(['scripts/compare.py', *typed])}`\n")
    found: dict[str, Found] = {}
    try:
        for case in cases:
            processes = 1 if case.train else chosen.processes
            runs = [call(bench.measure, case) for _ in range(processes)]
            found[case.name] = runs[0] if case.train else combine(runs)
    finally:  # a crash or Ctrl-C does not lose the cases before it
        progress("")
        if found:
            print(report(found))
    return 1 if failures(found) else 0


if __name__ == "__main__":
    sys.exit(main())
