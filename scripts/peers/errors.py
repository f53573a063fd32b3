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
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from tinyblock import Block, RotaryPositionalEmbedding

from . import rotations
from .candidates import Candidate, Peer, build_control, weights_of
from .measuring import as_tuple, make_block
from .projects import PEERS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SEEDS, BLOCKS = 3, 8
STACK = f"{BLOCKS} Blocks"
# eps is far below that of each dtype, because the norm of x-transformers has none.
SIZE = Size(2, 128, 256, 4, 4, 64, 704, theta=10000.0, eps=1e-12)
STARTS = (0, *(2**power for power in range(7, 20)), 2**20 - SIZE.seq_len)  # of the windows in which RoPE is measured
ROPES = tuple(f"RoPE at {start:,}" for start in STARTS)
SECTIONS = (  # of the page
    "RMSNorm",
    "SwiGLU",
    "attention",
    "attention without RoPE",
    "Block",
    STACK,
    *(ROPES[i] for i in (0, 7, 11, -1)),
)
FORWARD, GRADIENT, WEIGHTS = PASSES = ("forward", "gradient of x", "gradient of the weights")
OURS, COMPILED, ROUNDED = "tinyblock", "tinyblock, compiled", "the exact result, rounded"
# By section, dtype, project and pass: the root mean square error and the largest, one pair for each seed.
Errors = dict[tuple[str, str, str, str], list[tuple[float, float]]]


def build_torch(block: Block, size: Size) -> Candidate:
    """Return torch's own norm and attention with the weights of a Block."""
    weights, like = weights_of(block), next(block.parameters())
    with torch.device(like.device):
        norm = nn.RMSNorm(size.d_model, size.eps, dtype=like.dtype)
        attention = nn.MultiheadAttention(size.d_model, size.num_heads, bias=False, batch_first=True, dtype=like.dtype)
        mask = nn.Transformer.generate_square_subsequent_mask(size.seq_len, dtype=like.dtype)
    norm.load_state_dict({"weight": weights["ln1"]})
    in_proj = torch.cat([weights[name] for name in "qkv"])
    attention.load_state_dict({"in_proj_weight": in_proj, "out_proj.weight": weights["o"]})
    causal = functools.partial(attention, need_weights=False, attn_mask=mask, is_causal=True)
    parts: dict[str, Callable[[Tensor], Any]] = {"norm": norm, "attention without RoPE": lambda x: causal(x, x, x)}
    return Candidate(norm, [*norm.parameters(), *attention.parameters()], parts=parts)


# The layers and the RoPE of each project, if it has them.
PROJECTS: dict[str, tuple[Peer | None, rotations.Builder | None]] = {
    OURS: (Peer(build_control, OURS), RotaryPositionalEmbedding),
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
    """A function of x, the parameters of its Block, and the place of each of their elements in tinyblock's Block."""

    call: Callable[[Tensor], Any]
    parameters: Sequence[Tensor] = ()
    places: Tensor | None = None

    def passes(self, x: Tensor, gradient: Tensor) -> dict[str, Tensor]:
        """Return the output, and the gradients of x and of the parameters."""
        x = x.detach().clone().requires_grad_()
        y = as_tuple(self.call(x))[0]
        inputs = [x, *self.parameters]
        dx, *dw = torch.autograd.grad(y, inputs, gradient.to(y), allow_unused=True, materialize_grads=True)
        passes = {FORWARD: y.detach(), GRADIENT: dx}
        return passes | ({WEIGHTS: torch.cat([each.flatten() for each in dw])} if dw else {})


def layers_of(peer: Peer, blocks: Sequence[Block]) -> dict[str, Layer]:
    """Return the layers of a peer with the weights of the first Block, and a stack of all Blocks."""
    candidates, places = [peer.build(block, SIZE) for block in blocks], places_of(peer)
    names = {"norm": "RMSNorm", "ffn": "SwiGLU"}
    calls = {names.get(name, name): call for name, call in candidates[0].parts.items()}
    if isinstance(block := candidates[0].call, Block):  # at position 0, RoPE rotates nothing
        nowhere = torch.zeros(SIZE.seq_len, dtype=torch.long, device=next(block.parameters()).device)
        calls["attention without RoPE"] = lambda x: block.attn(x, nowhere)
    stack = [functools.partial(each.call, **each.keywords) for each in candidates]
    if whole := "SwiGLU" in calls:
        calls["Block"] = stack[0]
    layers = {name: Layer(call, candidates[0].parameters, places) for name, call in calls.items()}
    if whole:
        layers[STACK] = Layer(
            lambda x: functools.reduce(lambda h, call: as_tuple(call(h))[0], stack, x),
            [parameter for each in candidates for parameter in each.parameters],
            torch.cat([places + index * SIZE.parameters for index in range(len(blocks))]),
        )
    return layers


@functools.cache
def places_of(peer: Peer) -> Tensor:
    """Give a peer weights that count 0, 1, 2, ..., and return where it puts them."""
    counting, _ = make_block(SIZE, torch.float64, torch.device("cpu"), seed=0)
    vector_to_parameters(torch.arange(SIZE.parameters, dtype=torch.float64), counting.parameters())
    return torch.cat([each.detach().flatten() for each in peer.build(counting, SIZE).parameters]).long()


@functools.cache
def ropes_of(build: rotations.Builder, starts: Sequence[int], device: torch.device) -> dict[str, Layer]:
    """Return RoPE at the positions from each start, as layers that rotate each head of x."""
    with torch.device(device):
        rotation = build(SIZE.theta, SIZE.d_head, starts[-1] + SIZE.seq_len)

    def at(positions: Tensor) -> Callable[[Tensor], Tensor]:
        def rotate(x: Tensor) -> Tensor:
            heads = rearrange(x, "batch seq (heads d_head) -> batch heads seq d_head", d_head=SIZE.d_head)
            return rearrange(rotation(heads, positions), "batch heads seq d_head -> batch seq (heads d_head)")

        return rotate

    return {f"RoPE at {a:,}": Layer(at(torch.arange(a, a + SIZE.seq_len, device=device))) for a in starts}


def measure(device: torch.device, quick: bool, begin: Callable[[str], None] = lambda what: None) -> Errors:
    """Return the errors of all installed projects. Code is compiled for one seed.

    `quick` takes one seed and fewer positions, and never compiles.
    """
    starts = STARTS[:6] if quick else STARTS
    errors: Errors = defaultdict(list)
    for name, dtype in DTYPES.items():
        torch.compiler.reset()  # otherwise later dtypes reach the limit of recompilations
        for seed in range(1 if quick else SEEDS):
            begin(f"{name}, seed {seed}")
            made = [make_block(SIZE, dtype, device, seed * BLOCKS + index) for index in range(BLOCKS)]
            blocks, x, gradient = [block for block, _ in made], made[0][1], made[1][1]
            layers = all_layers(blocks, starts)
            if not quick and seed == 0:
                layers[COMPILED] = {
                    section: replace(layer, call=torch.compile(layer.call, fullgraph=True, dynamic=False))
                    for section, layer in layers[OURS].items()
                    if section in SECTIONS and section != STACK
                }
            doubles = layers_of(Peer(build_control, OURS), [copy.deepcopy(block).double() for block in blocks])
            exact = {
                section: layer.passes(x.double(), gradient.double())
                for section, layer in (doubles | ropes_of(rotations.exact, starts, device)).items()
            }
            for section, passes in exact.items():
                for what, y in passes.items():
                    errors[section, name, ROUNDED, what].append(error(y.to(dtype), y, dtype))
                for project in layers:
                    if layer := layers[project].get(section):
                        for what, actual in layer.passes(x, gradient).items():
                            expected = passes[what][layer.places] if what == WEIGHTS else passes[what]
                            errors[section, name, project, what].append(error(actual, expected, dtype))
    return errors


def all_layers(blocks: Sequence[Block], starts: Sequence[int]) -> dict[str, dict[str, Layer]]:
    """Return the layers of each installed project, RoPE included."""
    layers: dict[str, dict[str, Layer]] = {}
    for project, (peer, rotation) in PROJECTS.items():
        with suppress(ImportError):
            ropes = ropes_of(rotation, starts, next(blocks[0].parameters()).device) if rotation else {}
            layers[project] = (layers_of(peer, blocks) if peer else {}) | ropes
    return layers


def error(actual: Tensor, exact: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """Return the root mean square error and the largest, in units of eps; infinite if not finite."""
    wrong, eps = actual.double() - exact, torch.finfo(dtype).eps
    errors = (float(wrong.norm(p) / exact.norm(p)) / eps for p in (2, math.inf))
    root_mean_square, largest = (each if math.isfinite(each) else math.inf for each in errors)
    return root_mean_square, largest
