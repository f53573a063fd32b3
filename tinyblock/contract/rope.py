"""What RoPE guarantees: each consecutive pair is rotated by its position times theta^(-2k/d_k), k the pair's number."""

import copy
import functools
import math
import pickle
from collections.abc import Callable
from itertools import product
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from . import harness
from .harness import EVERY_LAYER, Case, Shape, State, Violation, close, context, guarantees, guarantees_all, require

ROPE = "RotaryPositionalEmbedding"
DEFINES = (ROPE, "apply_rope")
TABLE = 200  # positions
POSITIONS = torch.tensor([[3, 9, 2, TABLE - 1, 0, 5, 5], [0, 1, 2, 3, 4, 5, 6]])


def angles_of(positions: Tensor, d_k: int, theta: float) -> Tensor:
    return positions[..., None] * torch.tensor([theta ** (-2 * k / d_k) for k in range(d_k // 2)], dtype=torch.float64)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    turned = torch.complex(x[..., 0::2].double(), x[..., 1::2].double()) * torch.exp(1j * angles)
    return torch.stack((turned.real, turned.imag), dim=-1).flatten(-2).to(x.dtype)


def rotary(theta: float, x: Tensor, token_positions: Tensor | None) -> Tensor:
    positions = torch.arange(x.shape[-2]) if token_positions is None else token_positions
    return rotate(x, angles_of(positions, x.shape[-1], theta))


@guarantees_all(EVERY_LAYER)
def cases(rope: ModuleType) -> list[Case]:
    def formula(x: Tensor, state: State, token_positions: Tensor | None = None) -> Tensor:
        return rotary(100.0, x, token_positions)

    def case(shape: Shape, *positions: Tensor, **about: Any) -> Case:
        inputs = dict(zip(["token_positions"], positions, strict=False))
        arguments = (100.0, shape[-1], TABLE)
        return Case(require(rope, ROPE), arguments, shape, formula, inputs=inputs, rounds_once=True, **about)

    seeded = torch.Generator().manual_seed(3)
    shapes = [(5,), (1, 5), (4, 5), (2, 1, 5), (2, 4, 5)]
    broadcast = [torch.randint(0, 50, shape, generator=seeded) for shape in shapes]
    return [
        case((2, 3, 11, 8), compiled=True),
        case((2, 7, 6), POSITIONS[0], compiled=True),
        *map(case, [(1, 2), (5, 6), (0, 5, 6), (2, 0, 6)]),
        *(case((0, 7, 6), POSITIONS[:n]) for n in (0, 1)),
        *(case((2, 4, 5, 6), positions) for positions in broadcast),
        *(case((2, 4, 5, 6), broadcast[2].to(dtype)) for dtype in (torch.int32, torch.int16, torch.int8)),
    ]


@guarantees("apply_rope: equation and gradients")
def function(rope: ModuleType) -> None:
    angles = angles_of(torch.tensor([0, 1, 5, 100, 131071]), 8, 100.0)
    calls = [([(2, 3, 5, 8)], angles), ([(5, 8)], angles), ([(2, 7, 8)], angles_of(POSITIONS, 8, 100.0))]
    harness.function_matches(require(rope, "apply_rope"), rotate, calls, rounds_once=True)


@guarantees("exact table after every copy, cast and move")
def keeps_its_table(rope: ModuleType) -> None:
    """Compare at both ends of a long table, for all of its wavelengths, after what torch does to modules."""
    cls, arguments = require(rope, ROPE), (5e5, 16, 131072)
    positions = torch.cat((torch.arange(0, 131072, 61), torch.arange(131072 - 100, 131072)))
    x = nn.functional.normalize(harness.randn(len(positions), 16), dim=-1)
    exact = rotate(x, angles_of(positions, 16, 5e5))

    def emptied(module: Any) -> Any:
        module = module.to("meta")
        _ = [torch.full((131072, 8, 2), math.nan) for _ in range(3)]  # else the memory may still hold the table
        return module.to_empty(device="cpu")

    original, on_meta = cls(*arguments), functools.partial(cls, *arguments, device="meta")
    with context(f"{ROPE}{arguments}, device='meta'"):
        if not all(table.is_meta for table in on_meta().buffers()):
            raise Violation("the table is not on meta")
    ways: dict[str, Callable[[], Any]] = {
        "as constructed": lambda: original,
        "copy.deepcopy, .to(torch.bfloat16)": lambda: copy.deepcopy(original).to(torch.bfloat16),
        ".half().float()": lambda: copy.deepcopy(original).half().float(),
        ".double()": lambda: copy.deepcopy(original).double(),
        '.to("meta").to_empty()': lambda: emptied(copy.deepcopy(original)),
        'on "meta", then .to(torch.bfloat16).to_empty()': lambda: emptied(on_meta().to(torch.bfloat16)),
        'on "meta", then called on the CPU': on_meta,
        "pickle": lambda: pickle.loads(pickle.dumps(original)),
    }
    for way in ways:
        with context(f"{ROPE}{arguments}", way, "unit vectors at every 61st of 131072 positions and the last 100"):
            module = ways[way]()
            close(module(x, positions), exact, 1e-10)
            close(module(x.float(), positions), exact, 1e-6)


@guarantees("relative positions only")
def is_relative(rope: ModuleType) -> None:
    q, k = harness.randn(1, 8), harness.randn(1, 8, seed=1)
    places = [(0, 0, 4000), (7, 3, 1), (3, 90, 511), (90, 2, 4000)]
    for theta, (i, j, by) in product((2.0, 1e4, 1e6), places):
        with context(f"q k^T of shape (1, 8), seeds 0 and 1, {theta=}, at positions {i} and {j}, and {by} further on"):
            module = require(rope, ROPE)(theta, 8, 4096)
            here, there = (module(q, torch.tensor([i + s])) * module(k, torch.tensor([j + s])) for s in (0, by))
            close(there.sum(), here.sum(), 1e-9)


@guarantees("any strides")
def takes_any_strides(rope: ModuleType) -> None:
    module, whole = require(rope, ROPE)(10.0, 6, 50), harness.randn(6, 6, 13, dtype=torch.float32)
    views = {"[..., 1:7]": whole[..., 1:7], "[..., :6]": whole[..., :6], "[..., :12:2]": whole[..., :12:2]}
    views |= {"[:, :, :5].mT": whole[:, :, :5].mT, "[0, 0, :6].expand(4, 6)": whole[0, 0, :6].expand(4, 6)}
    for name, x in views.items():
        with context(f"x{name} of x of shape (6, 6, 13), seed 0, float32"):
            close(module(x), rotary(10.0, x.double(), None), 1e-6 * harness.largest(x))


@guarantees("positions out of range rejected")
def rejects_positions(rope: ModuleType) -> None:
    """Expect a ValueError with the range; in a compiled module, an exception of torch's own."""
    module = require(rope, ROPE)(10.0, 4, 8)
    with context("9 tokens in a table of 8"), harness.rejected(9, 8):
        module(torch.zeros(9, 4))
    with context("one token in a table of 1"):
        require(rope, ROPE)(10.0, 4, 1)(torch.zeros(1, 4))
    with harness.compiled(module) as (run, _):
        run(torch.zeros(3, 4), torch.tensor([0, 1, 7]))
        for positions in map(torch.tensor, [[0, 1, 8], [0, -1, 2], [10**9, 0, 0], [0, 0, 2**32]]):
            with context(f"token_positions {positions.tolist()} in a table of 8"):
                for dtype in (torch.float32, torch.float64):
                    with context(dtype), harness.rejected(7):
                        module(torch.zeros(3, 4, dtype=dtype), positions)
                with context("compiled"), harness.rejected(errors=(RuntimeError, IndexError, ValueError)):
                    run(torch.zeros(3, 4), positions)


@guarantees("positions that are not integers rejected")
def rejects_other_dtypes(rope: ModuleType) -> None:
    module, x = require(rope, ROPE)(10.0, 4, 8), torch.zeros(3, 4)
    with harness.compiled(module, fullgraph=False) as (run, _):
        for dtype, (how, call) in product((torch.bool, *harness.DTYPES), {"eager": module, "compiled": run}.items()):
            with context(how, f"token_positions [0, 0, 0] of {dtype}"), harness.rejected(dtype):
                call(x, torch.zeros(3, dtype=dtype))


VALID: Any = {"theta": 10.0, "d_k": 4, "max_seq_len": 8}
INVALID: Any = {"theta": (0.0, -1.0, math.nan, math.inf), "d_k": (5, 0, -2), "max_seq_len": (0, -1)}
guarantees(harness.REJECTED)(lambda rope: harness.rejects(require(rope, ROPE), VALID, **INVALID))
