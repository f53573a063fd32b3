"""Measure how far the layers of tinyblock and of other projects are from the exact result, for exactness.py.

A Block in float64, with the same weights and inputs, already rounded to the dtype, computes the exact result.
"""

import copy
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from einops import rearrange
from lab.sizes import Size
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tinyblock import Block, RotaryPositionalEmbedding

from . import rotations
from .candidates import Peer, Unavailable, build_block
from .measuring import as_tuple, make_block
from .projects import PEERS, build_torch

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# eps is far below that of each dtype, because the norm of x-transformers has none.
SIZE = Size(
    batch_size=2,
    seq_len=128,
    d_model=128,
    num_heads=2,
    num_kv_heads=2,
    d_head=64,
    d_ff=320,
    theta=10000.0,
    eps=1e-12,
)
# Two heads: x-transformers has no output projection for one.
TINY = replace(SIZE, batch_size=1, d_ff=128)
SEEDS = 3
BLOCKS = 8
STACK = f"{BLOCKS} Blocks"
# Of the windows in which RoPE is measured.
STARTS = (0, *(2**power for power in range(7, 20)), 2**20 - SIZE.seq_len)
STARTS_OF_TABLES = (0, 2**13, 2**17, 2**20 - SIZE.seq_len)
QUICK_STARTS = (0, 2**13)


def rope_at(start: int) -> str:
    """Return the name of RoPE in the window from this position."""
    return f"RoPE from position {start:,}"


# The rows of the tables.
LAYERS = (
    "RMSNorm",
    "SwiGLU",
    "attention",
    "attention without RoPE",
    "Block",
    STACK,
    *(rope_at(start) for start in STARTS_OF_TABLES),
)
FORWARD = "forward"
GRADIENT = "gradient of x"
WEIGHTS = "gradient of the weights"
DIRECTIONS = (FORWARD, GRADIENT, WEIGHTS)
OURS = "tinyblock"
COMPILED = "tinyblock, compiled"
ROUNDED = "exact, rounded"


@dataclass(frozen=True)
class Error:
    """The root mean square error and the largest error, in units of eps; infinite if a result is not finite."""

    rms: float
    largest: float


@dataclass(frozen=True)
class Key:
    """What an error belongs to: a dtype, a direction, a layer and a project."""

    dtype: str
    direction: str
    layer: str
    project: str


Errors = Mapping[Key, Sequence[Error]]  # one error for each seed


@dataclass(frozen=True)
class Source:
    """The layers of a project, and its RoPE; None is a part that it lacks, or that is not measured."""

    peer: Peer | None
    rotation: rotations.Builder | None


EXACT = Source(Peer(build_block, "exact"), rotations.formula)
PROJECTS = {
    OURS: Source(Peer(build_block, OURS), RotaryPositionalEmbedding),
    "torch.nn": Source(Peer(build_torch, "torch.nn"), None),
    "Hugging Face": Source(PEERS["transformers"], rotations.hugging_face),
    "Meta": Source(None, rotations.meta),
    "litgpt": Source(PEERS["litgpt"], rotations.litgpt),
    "torchtune": Source(PEERS["torchtune"], rotations.torchtune),
    "x-transformers": Source(PEERS["x-transformers"], rotations.x_transformers),
    "rotary-embedding-torch": Source(None, rotations.rotary_embedding_torch),
}


@dataclass(frozen=True)
class Layer:
    """A function of x, the parameters of its Blocks, and the place of each of their elements in tinyblock's."""

    call: Callable[[Tensor], Any]
    parameters: Sequence[Tensor] = ()
    places: Tensor | None = None

    def results(self, x: Tensor, gradient: Tensor) -> dict[str, Tensor]:
        """Return the output, and the gradients of x and of the parameters."""
        x = x.detach().requires_grad_()
        y = as_tuple(self.call(x))[0]
        dx, *dw = torch.autograd.grad(
            y,
            [x, *self.parameters],
            gradient.to(y),
            allow_unused=True,
            materialize_grads=True,
        )
        results = {FORWARD: y.detach(), GRADIENT: dx}
        if dw:
            results[WEIGHTS] = torch.cat([each.flatten() for each in dw])
        return results

    def compiled(self) -> "Layer":
        """Compile the function; torch compiles it once for all positions."""
        return replace(
            self, call=torch.compile(self.call, fullgraph=True, dynamic=False)
        )


@dataclass(frozen=True)
class Inputs:
    """What all projects get: the weights of the Blocks, x, and the gradient of the output, rounded to the dtype."""

    size: Size
    blocks: Sequence[Block]
    x: Tensor
    gradient: Tensor

    @classmethod
    def draw(
        cls, size: Size, dtype: torch.dtype, device: torch.device, seed: int
    ) -> "Inputs":
        made = [
            make_block(size, dtype, device, seed * BLOCKS + index)
            for index in range(BLOCKS)
        ]
        blocks = [block for block, _ in made]
        (_, x), (_, gradient) = made[:2]
        return cls(size, blocks, x, gradient)

    def double(self) -> "Inputs":
        """Return the same numbers in float64."""
        blocks = [copy.deepcopy(block).double() for block in self.blocks]
        return Inputs(self.size, blocks, self.x.double(), self.gradient.double())


# --- The layers of a project -----------------------------------------------------------------------------------------


def layers_of(
    source: Source, inputs: Inputs, starts: Sequence[int]
) -> dict[str, Layer]:
    """Return a project's layers with the weights of the first Block, the stack of all Blocks, and RoPE from each start.

    Raises:
        Unavailable: the project is not installed.
    """
    layers: dict[str, Layer] = {}
    if source.peer is not None:
        layers.update(blocks_of(source.peer, inputs))
    if source.rotation is not None:
        device = inputs.x.device
        layers.update(ropes_of(source.rotation, inputs.size, tuple(starts), device))
    return layers


def blocks_of(peer: Peer, inputs: Inputs) -> dict[str, Layer]:
    """Return the layers of the first Block, and the stack of all Blocks if the project has blocks."""
    size = inputs.size
    candidates = [peer.build(block, size) for block in inputs.blocks]
    places = places_of(peer, size)
    first = candidates[0]
    layers = {
        name: Layer(call, first.parameters, places)
        for name, call in first.parts.items()
    }
    if "Block" not in layers:
        return layers

    def run_all(x: Tensor) -> Tensor:
        for candidate in candidates:
            x = as_tuple(candidate.parts["Block"](x))[0]
        return x

    parameters: list[Tensor] = []
    all_places = []
    for index, candidate in enumerate(candidates):
        parameters += candidate.parameters
        all_places.append(places + index * size.parameters)
    layers[STACK] = Layer(run_all, parameters, torch.cat(all_places))
    return layers


@functools.cache
def places_of(peer: Peer, size: Size) -> Tensor:
    """Return where a peer puts each weight of a Block: give it weights that count 0, 1, 2, ..., and look."""
    counting, _ = make_block(size, torch.float64, torch.device("cpu"), seed=0)
    numbers = torch.arange(size.parameters, dtype=torch.float64)
    vector_to_parameters(numbers, counting.parameters())
    candidate = peer.build(counting, size)
    places = parameters_to_vector(candidate.parameters)
    return places.detach().long()


@functools.cache
def ropes_of(
    build: rotations.Builder,
    size: Size,
    starts: Sequence[int],
    device: torch.device,
) -> dict[str, Layer]:
    """Return RoPE at the positions from each start."""
    split = "batch seq (heads d_head) -> batch heads seq d_head"
    merge = "batch heads seq d_head -> batch seq (heads d_head)"
    with torch.device(device):
        rotate = build(size.theta, size.d_head, starts[-1] + size.seq_len)

    def run(x: Tensor, positions: Tensor) -> Tensor:
        heads = rearrange(x, split, d_head=size.d_head)
        return rearrange(rotate(heads, positions), merge)

    layers = {}
    for start in starts:
        positions = torch.arange(start, start + size.seq_len, device=device)
        layers[rope_at(start)] = Layer(functools.partial(run, positions=positions))
    return layers


def layers_of_projects(
    inputs: Inputs, starts: Sequence[int]
) -> dict[str, dict[str, Layer]]:
    """Return the layers of all projects that are installed."""
    layers = {}
    for project, source in PROJECTS.items():
        with suppress(ImportError, Unavailable):
            layers[project] = layers_of(source, inputs, starts)
    return layers


def compiled_layers(layers: Mapping[str, Layer]) -> dict[str, Layer]:
    """Return the layers of the tables, compiled; the stack takes too long to compile."""
    # Otherwise later dtypes reach the limit of recompilations.
    torch.compiler.reset()
    return {name: layers[name].compiled() for name in LAYERS if name != STACK}


# --- Errors ----------------------------------------------------------------------------------------------------------


def measure(
    device: torch.device, quick: bool, begin: Callable[[str], None] = lambda what: None
) -> Errors:
    """Return the errors of all installed projects. Code is compiled for one seed.

    `quick` takes one seed, a small layer and two positions, and never compiles.
    """
    size = TINY if quick else SIZE
    starts = QUICK_STARTS if quick else STARTS
    seeds = 1 if quick else SEEDS
    errors: dict[Key, list[Error]] = defaultdict(list)
    for name, dtype in DTYPES.items():
        for seed in range(seeds):
            begin(f"{name}, seed {seed}")
            inputs = Inputs.draw(size, dtype, device, seed)
            projects = layers_of_projects(inputs, starts)
            if seed == 0 and not quick:
                projects[COMPILED] = compiled_layers(projects[OURS])
            exact = layers_of(EXACT, inputs.double(), starts)
            for layer, reference in exact.items():
                of_layer = {
                    project: layers[layer]
                    for project, layers in projects.items()
                    if layer in layers
                }
                found = errors_of(inputs, reference, of_layer)
                for direction, project, value in found:
                    errors[Key(name, direction, layer, project)].append(value)
    return errors


def errors_of(
    inputs: Inputs, reference: Layer, layers: Mapping[str, Layer]
) -> Iterator[tuple[str, str, Error]]:
    """Yield direction, project and error, also those of the exact result, rounded."""
    dtype = inputs.x.dtype
    exact = reference.results(inputs.x.double(), inputs.gradient.double())
    for direction, y in exact.items():
        yield direction, ROUNDED, error(y.to(dtype), y, dtype)
    for project, layer in layers.items():
        for direction, actual in layer.results(inputs.x, inputs.gradient).items():
            expected = exact[direction]
            if direction == WEIGHTS:
                expected = expected[layer.places]
            yield direction, project, error(actual, expected, dtype)


def error(actual: Tensor, exact: Tensor, dtype: torch.dtype) -> Error:
    """Return the error of a result in units of eps."""
    wrong = actual.double() - exact
    eps = torch.finfo(dtype).eps
    rms = wrong.norm() / exact.norm() / eps
    largest = wrong.abs().max() / exact.abs().max() / eps
    found = torch.stack([rms, largest]).nan_to_num(math.inf, math.inf)
    return Error(*found.tolist())
