"""What RoPE guarantees: each consecutive pair is rotated by its position times theta^(-2k/d_k), k the pair's number."""

import copy
import functools
import math
import pickle
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from . import harness
from .harness import (
    DTYPES,
    EVERY_LAYER,
    Case,
    Layer,
    Shape,
    State,
    close,
    context,
    guarantees,
    randn,
)

TABLE = 200  # positions
POSITIONS = torch.tensor([[3, 9, 2, TABLE - 1, 0, 5, 5], [0, 1, 2, 3, 4, 5, 6]])


def angles_of(positions: Tensor, d_k: int, theta: float) -> Tensor:
    frequencies = torch.tensor(
        [theta ** (-2 * k / d_k) for k in range(d_k // 2)], dtype=torch.float64
    )
    return positions[..., None] * frequencies.to(positions.device)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    turned = torch.complex(x[..., 0::2].double(), x[..., 1::2].double()) * torch.exp(
        1j * angles
    )
    return torch.stack((turned.real, turned.imag), dim=-1).flatten(-2).to(x.dtype)


def rotary(
    x: Tensor, token_positions: Tensor | None = None, theta: float = 100.0
) -> Tensor:
    positions = (
        torch.arange(x.shape[-2], device=x.device)
        if token_positions is None
        else token_positions
    )
    return rotate(x, angles_of(positions, x.shape[-1], theta))


@guarantees("relative positions only")
def is_relative(rope: Layer) -> None:
    q, k = randn(1, 8), randn(1, 8, seed=1)
    for theta, (i, j, by) in product(
        (2.0, 1e4, 1e6), [(0, 0, 4000), (7, 3, 1), (3, 90, 511), (90, 2, 4000)]
    ):
        with context(
            f"q k^T of shape (1, 8), seeds 0 and 1, {theta=}, at positions {i} and {j}, and {by} further on"
        ):
            module = rope.RotaryPositionalEmbedding(theta, 8, 4096)
            here, there = (
                module(q, torch.tensor([i + s])) * module(k, torch.tensor([j + s]))
                for s in (0, by)
            )
            close(there.sum(), here.sum(), 1e-9)


@guarantees(EVERY_LAYER)
def cases(rope: Layer) -> list[Case]:
    def formula(
        x: Tensor, state: State, token_positions: Tensor | None = None
    ) -> Tensor:
        return rotary(x, token_positions)

    def case(
        shape: Shape, *positions: Tensor, table: int = TABLE, **about: Any
    ) -> Case:
        inputs = dict(zip(["token_positions"], positions, strict=False))
        arguments = (100.0, shape[-1], table)
        return Case(
            rope.RotaryPositionalEmbedding,
            arguments,
            shape,
            formula,
            inputs=inputs,
            rounds_once=True,
            **about,
        )

    seeded = torch.Generator().manual_seed(3)
    shapes = [(5,), (1, 5), (4, 5), (2, 1, 5), (2, 4, 5)]
    broadcast = [torch.randint(0, 50, shape, generator=seeded) for shape in shapes]
    return [
        case((2, 3, 11, 8), representative=True),
        case((2, 7, 6), POSITIONS[0], representative=True),
        case((1, 2), table=1),
        *map(case, [(5, 6), (0, 5, 6), (2, 0, 6)]),
        *(case((0, 7, 6), POSITIONS[:n]) for n in (0, 1)),
        *(case((2, 4, 5, 6), positions) for positions in broadcast),
        *(
            case((2, 4, 5, 6), broadcast[2].to(dtype))
            for dtype in (torch.int32, torch.int16, torch.int8)
        ),
    ]


angles = angles_of(torch.tensor([0, 1, 5, 100, 131071]), 8, 100.0)
calls = [
    ([(2, 3, 5, 8)], angles),
    ([(5, 8)], angles),
    ([(2, 7, 8)], angles_of(POSITIONS, 8, 100.0)),
]
harness.guarantees_function("rope", "apply_rope", rotate, *calls, rounds_once=True)


@guarantees("exact table after every copy, cast and move")
def keeps_its_table(rope: Layer) -> None:
    """Compare at both ends of a long table, for all of its wavelengths, after what torch does to modules."""
    arguments = (5e5, 16, 131072)
    positions = torch.cat(
        (torch.arange(0, 131072, 61), torch.arange(131072 - 100, 131072))
    )
    x = nn.functional.normalize(randn(len(positions), 16), dim=-1)
    exact = rotary(x, positions, 5e5)

    def emptied(module: Any) -> Any:
        module = module.to("meta")
        _ = [
            torch.full((131072, 8, 2), math.nan) for _ in range(3)
        ]  # else the memory may still hold the table
        return module.to_empty(device="cpu")

    build = functools.partial(rope.RotaryPositionalEmbedding, *arguments)
    on_meta = functools.partial(build, device="meta")
    ways: dict[str, Callable[[], Any]] = {
        "as constructed": build,
        "copy.deepcopy, .to(torch.bfloat16)": lambda: copy.deepcopy(build()).to(
            torch.bfloat16
        ),
        "pickle, .half().double()": lambda: (
            pickle.loads(pickle.dumps(build())).half().double()
        ),
        '.to("meta").to_empty()': lambda: emptied(build()),
        'on "meta", then .to(torch.bfloat16).to_empty()': lambda: emptied(
            on_meta().to(torch.bfloat16)
        ),
        'on "meta", then called on the CPU': on_meta,
    }
    for way in ways:
        with context(
            f"RotaryPositionalEmbedding{arguments}",
            way,
            "unit vectors at each 61st position and the last 100",
        ):
            module = ways[way]()
            close(module(x, positions), exact, 1e-10)
            close(module(x.float(), positions), exact, 1e-6)


@guarantees("invalid inputs rejected")
def rejects_inputs(rope: Layer) -> None:
    module, x = rope.RotaryPositionalEmbedding(10.0, 4, 8), torch.zeros(3, 4)
    harness.rejects_inputs(module, 9, torch.zeros(9, 4), {})
    for dtype in (torch.bool, *DTYPES):
        harness.rejects_inputs(
            module, dtype, x, {"token_positions": torch.zeros(3, dtype=dtype)}
        )
    out_of_range = [
        {"token_positions": torch.tensor(p)}
        for p in ([0, 1, 8], [0, -1, 2], [10**9, 0, 0], [0, 0, 2**32])
    ]
    for dtype in harness.ALLOWED:
        harness.rejects_inputs(module, 7, x.to(dtype), *out_of_range, by_torch=True)


VALID: Any = {"theta": 10.0, "d_k": 4, "max_seq_len": 8}
INVALID: Any = {
    "theta": (0.0, -1.0, math.nan, math.inf),
    "d_k": (5, 0, -2),
    "max_seq_len": (0, -1),
}
guarantees(harness.REJECTED)(
    lambda rope: harness.rejects(rope.RotaryPositionalEmbedding, VALID, **INVALID)
)
