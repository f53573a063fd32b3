"""What RoPE promises: consecutive pairs, as complex numbers, times exp(i position theta^(-2k/d_k))."""

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
from .harness import EVERY_LAYER, Case, Shape, State, Violation, close, given, promises, promises_all, public, randn

ROPE = "RotaryPositionalEmbedding"
DEFINES = (ROPE, "apply_rope")
TABLE = 200  # positions
POSITIONS = torch.tensor([[3, 9, 2, TABLE - 1, 0, 5, 5], [0, 1, 2, 3, 4, 5, 6]])


def angles_of(positions: Tensor, d_k: int, theta: float) -> Tensor:
    return positions[..., None] * torch.tensor([theta ** (-2 * k / d_k) for k in range(d_k // 2)], dtype=torch.float64)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    turned = torch.complex(x[..., 0::2], x[..., 1::2]) * torch.exp(1j * angles)
    return torch.stack((turned.real, turned.imag), dim=-1).flatten(-2)


@promises_all(EVERY_LAYER)
def cases(rope: ModuleType) -> list[Case]:
    def case(shape: Shape, positions: Tensor | None = None, **about: Any) -> Case:
        def formula(x: Tensor, state: State, token_positions: Tensor | None = None) -> Tensor:
            positions = torch.arange(shape[-2]) if token_positions is None else token_positions
            return rotate(x, angles_of(positions, shape[-1], 100.0))

        inputs = {} if positions is None else {"token_positions": positions}
        made = public(rope, ROPE), (100.0, shape[-1], TABLE), shape, formula
        return Case(*made, inputs=inputs, rounds_once=True, **about)

    placed = [case((2, 7, 6), POSITIONS[0], compiled=True), *(case((0, 7, 6), POSITIONS[:n]) for n in (0, 1))]
    return [case((2, 3, 11, 8), compiled=True), *placed, *map(case, [(1, 2), (5, 6), (0, 5, 6), (2, 0, 6)])]


@promises("apply_rope: equation and gradients")
def function(rope: ModuleType) -> None:
    angles = angles_of(torch.tensor([0, 1, 5, 100, 131071]), 8, 100.0)
    calls = [([(2, 3, 5, 8)], angles), ([(5, 8)], angles), ([(2, 7, 8)], angles_of(POSITIONS, 8, 100.0))]
    harness.function_follows(public(rope, "apply_rope"), rotate, calls, rounds_once=True)


@promises("table survives")
def survives(rope: ModuleType) -> None:
    """Compare at both ends of a long table, for all of its wavelengths, after what torch does to modules."""
    cls, arguments = public(rope, ROPE), (5e5, 16, 131072)
    positions = torch.cat((torch.arange(0, 131072, 61), torch.arange(131072 - 100, 131072)))
    x = nn.functional.normalize(randn(len(positions), 16), dim=-1)
    exact = rotate(x, angles_of(positions, 16, 5e5))

    def emptied(module: Any) -> Any:
        module = module.to("meta")
        _ = [torch.full((131072, 8, 2), math.nan) for _ in range(3)]  # else the memory may still hold the table
        return module.to_empty(device="cpu")

    made, on_meta = cls(*arguments), functools.partial(cls, *arguments, device="meta")
    with given(f"{ROPE}{arguments}, device='meta'"):
        if not all(table.is_meta for table in on_meta().buffers()):
            raise Violation("the table is not on meta")
    ways: dict[str, Callable[[], Any]] = {
        "as it was made": lambda: made,
        "copy.deepcopy, .to(torch.bfloat16)": lambda: copy.deepcopy(made).to(torch.bfloat16),
        ".half().float()": lambda: copy.deepcopy(made).half().float(),
        ".double()": lambda: copy.deepcopy(made).double(),
        '.to("meta").to_empty()': lambda: emptied(copy.deepcopy(made)),
        'on "meta", then .to(torch.bfloat16).to_empty()': lambda: emptied(on_meta().to(torch.bfloat16)),
        'on "meta", then called on the CPU': on_meta,
        "pickle": lambda: pickle.loads(pickle.dumps(made)),
    }
    for way in ways:
        with given(f"{ROPE}{arguments}", way, "unit vectors at every 61st of 131072 positions and the last 100"):
            module = ways[way]()
            close(module(x, positions), exact, 1e-10)
            close(module(x.float(), positions), exact, 1e-6)


@promises("relative positions only")
def is_relative(rope: ModuleType) -> None:
    q, k = randn(1, 8), randn(1, 8, seed=1)
    places = [(0, 0, 4000), (7, 3, 1), (3, 90, 511), (90, 2, 4000)]
    for theta, (i, j, by) in product((2.0, 1e4, 1e6), places):
        with given(f"q k^T of shape (1, 8), seeds 0 and 1, {theta=}, at positions {i} and {j}, and {by} further on"):
            module = public(rope, ROPE)(theta, 8, 4096)
            here, there = (module(q, torch.tensor([i + s])) * module(k, torch.tensor([j + s])) for s in (0, by))
            close(there.sum(), here.sum(), 1e-9)


@promises("compiled, the dtype of the input")
def keeps_dtype(rope: ModuleType) -> None:
    module, x = public(rope, ROPE)(100.0, 8, TABLE), randn(2, 5, 8, dtype=torch.bfloat16)
    with given("x of shape (2, 5, 8), seed 0, torch.bfloat16"), harness.compiled(module) as (run, _):
        close(run(x), module(x), torch.finfo(x.dtype).eps * harness.largest(x), x.dtype)


@promises("norms preserved")
def preserves_norms(rope: ModuleType) -> None:
    for case in cases(rope):
        with given(f"norms after {case}"):
            x = case.x()
            close(case.module()(x, **case.inputs).norm(dim=-1), x.norm(dim=-1), 1e-12 * harness.largest(x))


@promises("positions broadcast, in every signed integer dtype")
def broadcasts(rope: ModuleType) -> None:
    x, module = randn(2, 4, 5, 6), public(rope, ROPE)(10.0, 6, TABLE)
    shapes, dtypes = [(5,), (1, 5), (4, 5), (2, 1, 5), (2, 4, 5)], (torch.int64, torch.int32, torch.int16, torch.int8)
    for shape, dtype in product(shapes, dtypes):
        positions = torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(3)).to(dtype)
        with given(f"x of shape (2, 4, 5, 6), seed 0, token_positions {harness.show(positions)} of {dtype}"):
            exact = rotate(x, angles_of(positions.long(), 6, 10.0))
            close(module(x, positions), exact, 1e-12)
            close(module(x.float(), positions), exact, 1e-6)


@promises("any strides")
def takes_any_strides(rope: ModuleType) -> None:
    module, whole = public(rope, ROPE)(10.0, 6, 50), randn(6, 6, 13, dtype=torch.float32)
    views = {"[..., 1:7]": whole[..., 1:7], "[..., :6]": whole[..., :6], "[..., :12:2]": whole[..., :12:2]}
    views |= {"[:, :, :5].mT": whole[:, :, :5].mT, "[0, 0, :6].expand(4, 6)": whole[0, 0, :6].expand(4, 6)}
    for name, x in views.items():
        with given(f"x{name} of x of shape (6, 6, 13), seed 0, float32"):
            exact = rotate(x.double(), angles_of(torch.arange(x.shape[-2]), 6, 10.0))
            close(module(x), exact, 1e-6 * harness.largest(x))


@promises("positions off the table are refused")
def refuses_positions(rope: ModuleType) -> None:
    """Refuse them with the range and by a ValueError; in a compiled module, by any exception of torch's."""
    module = public(rope, ROPE)(10.0, 4, 8)
    with given("9 tokens in a table of 8"), harness.refused():
        module(torch.zeros(9, 4))
    with given("one token in a table of 1"):
        public(rope, ROPE)(10.0, 4, 1)(torch.zeros(1, 4))
    with harness.compiled(module) as (run, _):
        run(torch.zeros(3, 4), torch.tensor([0, 1, 7]))
        for positions in map(torch.tensor, [[0, 1, 8], [0, -1, 2], [10**9, 0, 0], [0, 0, 2**32]]):
            with given(f"token_positions {positions.tolist()} in a table of 8"):
                for dtype in (torch.float32, torch.float64):
                    with given(dtype), harness.refused(naming="7"):
                        module(torch.zeros(3, 4, dtype=dtype), positions)
                with given("compiled"), harness.refused((RuntimeError, IndexError, ValueError)):
                    run(torch.zeros(3, 4), positions)


BAD: list[Any] = [(10.0, 5, 8), (10.0, 0, 8), (10.0, -2, 8), (10.0, 4, 0), (10.0, 4, -1)]
BAD += [(theta, 4, 8) for theta in (0.0, -1.0, math.nan, math.inf)]
promises("keys of the state dict: none")(lambda rope: harness.has_state(public(rope, ROPE), (100.0, 6, 8), {}))
promises("bad hyperparameters refused")(lambda rope: harness.refuses(public(rope, ROPE), *BAD))
