"""Measure how far the layers of tinyblock and of other projects are from the exact result, for exactness.py.

A Block in float64, with the same weights and inputs, already rounded to the dtype, computes the exact result.
"""

import copy
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from einops import rearrange
from lab.sizes import Size
from torch import Tensor
from torch.nn.utils import vector_to_parameters

from tinyblock import Block, RotaryPositionalEmbedding

from . import rotations
from .candidates import Peer, build_block
from .measuring import as_tuple, make_block
from .projects import PEERS, build_torch

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# eps is far below that of each dtype, because the norm of x-transformers has none.
SIZE = Size(2, 128, 128, 2, 2, 64, 320, theta=10000.0, eps=1e-12)
TINY = Size(1, 128, 64, 1, 1, 64, 128, theta=10000.0, eps=1e-12)
SEEDS, BLOCKS = 3, 8
STACK = f"{BLOCKS} Blocks"
STARTS = (
    0,
    *(2**power for power in range(7, 20)),
    2**20 - SIZE.seq_len,
)  # of the windows in which RoPE is measured
ROPES = {
    f"RoPE at {start:,}": start + SIZE.seq_len / 2 for start in STARTS
}  # and the middle of each window
LAYERS = ("RMSNorm", "SwiGLU", "attention", "attention without RoPE", "Block", STACK)
SECTIONS = (
    *LAYERS,
    *(f"RoPE at {start:,}" for start in (0, 2**13, 2**17, STARTS[-1])),
)  # of the page
FORWARD, GRADIENT, WEIGHTS = ("forward", "gradient of x", "gradient of the weights")
OURS, COMPILED, ROUNDED = (
    "tinyblock",
    "tinyblock, compiled",
    "the exact result, rounded",
)
# By section of the page, dtype and pass, then by project: for each seed the root mean square error and the largest.
Errors = dict[tuple[str, str, str], dict[str, list[tuple[float, float]]]]
# The layers and the RoPE of a project, if it has them.
Sources = tuple[Peer | None, rotations.Builder | None]
EXACT: Sources = (Peer(build_block, "exact"), rotations.formula)
PROJECTS: dict[str, Sources] = {
    OURS: (Peer(build_block, OURS), RotaryPositionalEmbedding),
    "torch.nn": (Peer(build_torch, "torch.nn"), None),
    "Hugging Face": (PEERS["transformers"], rotations.hugging_face),
    "Meta": (None, rotations.meta),
    "litgpt": (PEERS["litgpt"], rotations.litgpt),
    "torchtune": (PEERS["torchtune"], rotations.torchtune),
    "x-transformers": (PEERS["x-transformers"], rotations.x_transformers),
    "rotary-embedding-torch": (None, rotations.rotary_embedding_torch),
}


@dataclass(frozen=True)
class Layer:
    """A function of x, the parameters of its Blocks, and the place of each of their elements in tinyblock's."""

    call: Callable[[Tensor], Any]
    parameters: Sequence[Tensor] = ()
    places: Tensor | None = None

    def passes(self, x: Tensor, gradient: Tensor) -> dict[str, Tensor]:
        """Return the output, and the gradients of x and of the parameters."""
        x = x.detach().requires_grad_()
        y = as_tuple(self.call(x))[0]
        inputs = [x, *self.parameters]
        dx, *dw = torch.autograd.grad(
            y, inputs, gradient.to(y), allow_unused=True, materialize_grads=True
        )
        passes = {FORWARD: y.detach(), GRADIENT: dx}
        return passes | (
            {WEIGHTS: torch.cat([each.flatten() for each in dw])} if dw else {}
        )

    def compiled(self) -> "Layer":
        """Compile the function; torch compiles it once for all positions."""
        return replace(
            self, call=torch.compile(self.call, fullgraph=True, dynamic=False)
        )


def layers_of(
    sources: Sources, blocks: Sequence[Block], size: Size, starts: Sequence[int]
) -> dict[str, Layer]:
    """Return the layers with the weights of the first Block, the stack with those of all, and RoPE from each start."""
    peer, rotation = sources
    layers = (
        ropes_of(rotation, size, starts, next(blocks[0].parameters()).device)
        if rotation
        else {}
    )
    if peer is None:
        return layers
    candidates, places = (
        [peer.build(block, size) for block in blocks],
        places_of(peer, size),
    )
    parameters = [candidate.parameters for candidate in candidates]
    layers = {
        name: Layer(call, parameters[0], places)
        for name, call in candidates[0].parts.items()
    } | layers
    if "Block" in layers:
        stack = [candidate.parts["Block"] for candidate in candidates]
        layers[STACK] = Layer(
            lambda x: functools.reduce(
                lambda h, block: as_tuple(block(h))[0], stack, x
            ),
            [parameter for of_block in parameters for parameter in of_block],
            torch.cat(
                [places + index * size.parameters for index in range(len(blocks))]
            ),
        )
    return layers


@functools.cache
def places_of(peer: Peer, size: Size) -> Tensor:
    """Give a peer weights that count 0, 1, 2, ..., and return where it puts them."""
    counting, _ = make_block(size, torch.float64, torch.device("cpu"), seed=0)
    vector_to_parameters(
        torch.arange(size.parameters, dtype=torch.float64), counting.parameters()
    )
    return torch.cat(
        [each.detach().flatten() for each in peer.build(counting, size).parameters]
    ).long()


@functools.cache
def ropes_of(
    build: rotations.Builder, size: Size, starts: Sequence[int], device: torch.device
) -> dict[str, Layer]:
    """Return RoPE at the positions from each start."""
    with torch.device(device):
        rotate = build(size.theta, size.d_head, starts[-1] + size.seq_len)
        windows = {
            f"RoPE at {start:,}": torch.arange(start, start + size.seq_len)
            for start in starts
        }

    def run(x: Tensor, positions: Tensor) -> Tensor:
        heads = rearrange(
            x, "batch seq (heads d_head) -> batch heads seq d_head", d_head=size.d_head
        )
        return rearrange(
            rotate(heads, positions),
            "batch heads seq d_head -> batch seq (heads d_head)",
        )

    return {
        name: Layer(functools.partial(run, positions=positions))
        for name, positions in windows.items()
    }


def measure(
    device: torch.device, quick: bool, begin: Callable[[str], None] = lambda what: None
) -> Errors:
    """Return the errors of all installed projects. Code is compiled for one seed.

    `quick` takes one seed, tiny layers and two positions, and never compiles.
    """
    size, starts, seeds = (TINY, (0, 2**13), 1) if quick else (SIZE, STARTS, SEEDS)
    errors: Errors = defaultdict(lambda: defaultdict(list))
    for name, dtype in DTYPES.items():
        for seed in range(seeds):
            begin(f"{name}, seed {seed}")
            made = [
                make_block(size, dtype, device, seed * BLOCKS + index)
                for index in range(BLOCKS)
            ]
            blocks, x, gradient = [block for block, _ in made], made[0][1], made[1][1]
            layers = {}
            for project, sources in PROJECTS.items():
                with suppress(ImportError):
                    layers[project] = layers_of(sources, blocks, size, starts)
            if not quick and seed == 0:
                torch.compiler.reset()  # otherwise later dtypes reach the limit of recompilations
                layers[COMPILED] = {
                    each: layers[OURS][each].compiled()
                    for each in SECTIONS
                    if each != STACK
                }
            doubles = [copy.deepcopy(block).double() for block in blocks]
            for section, reference in layers_of(EXACT, doubles, size, starts).items():
                exact = reference.passes(x.double(), gradient.double())
                for what, y in exact.items():
                    errors[section, name, what][ROUNDED].append(
                        error(y.to(dtype), y, dtype)
                    )
                for project in (
                    project for project in layers if section in layers[project]
                ):
                    layer = layers[project][section]
                    for what, actual in layer.passes(x, gradient).items():
                        expected = (
                            exact[what][layer.places]
                            if what == WEIGHTS
                            else exact[what]
                        )
                        errors[section, name, what][project].append(
                            error(actual, expected, dtype)
                        )
    return errors


def error(actual: Tensor, exact: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """Return the root mean square error and the largest, in units of eps; infinite if not finite."""
    wrong, eps = actual.double() - exact, torch.finfo(dtype).eps
    errors = torch.stack([wrong.norm(p) / exact.norm(p) / eps for p in (2, math.inf)])
    root_mean_square, largest = errors.nan_to_num(math.inf, math.inf).tolist()
    return root_mean_square, largest
