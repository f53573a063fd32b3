"""What the stack of blocks guarantees: block after block, all with one RoPE or with none, then a norm."""

import copy
import functools
from collections.abc import Callable
from itertools import combinations
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import harness
from .attention import ROTARY, mask_of, stretch
from .block import EVERY_OPTION, OTHERS, normalize, part, pre_norm_block, resets, with_other_parts
from .harness import Case, State, Violation, context, guarantees, guarantees_all, rejected, require, supported
from .rope import POSITIONS, TABLE, rotary

DEFINES = ("Transformer",)


def blocks_and_norm(
    x: Tensor, state: State, *, norm: Callable[..., Tensor] = normalize, eps: float = 1e-5, **options: Any
) -> Tensor:
    for layer in range(1 + max(int(key.split(".")[1]) for key in state if key.startswith("layers."))):
        x = pre_norm_block(x, part(state, f"layers.{layer}."), norm=norm, eps=eps, **options)
    return norm(x, part(state, "ln_final."), eps)


@guarantees_all(ROTARY)
def cases(transformer: ModuleType) -> list[Case]:
    cls = require(transformer, "Transformer")

    def case(theta: float | None = 1e4, inputs: Any = None, layers: int = 2, **options: Any) -> Case:
        rope = None if theta is None else functools.partial(rotary, theta)
        formula = functools.partial(blocks_and_norm, heads=4, **{"rope": rope, **options})
        options |= {"max_seq_len": TABLE} | ({} if theta == 1e4 else {"theta": theta})
        return Case(cls, (layers, 24, 4, 40), (2, 7, 24), formula, options, inputs or {}, compiled=layers == 1)

    every, inputs = supported(cls, EVERY_OPTION), {"token_positions": POSITIONS, "mask": mask_of(2, 7, 7)}
    options = case(layers=1), case(**every), case(inputs=inputs, **every)
    return [case(), *options, case(rope=stretch), case(theta=100.0), case(theta=None)]


@guarantees_all(OTHERS)
def other_cases(transformer: ModuleType) -> list[Case]:
    return with_other_parts(cases(transformer)[0])


@guarantees("one table for all blocks")
def shares_its_table(transformer: ModuleType) -> None:
    """Look for tables of equal values, and for one that is not on the device of the weights."""
    cls = require(transformer, "Transformer")
    ways: dict[str, Callable[[Any], Any]] = {
        "as constructed": lambda model: model,
        "copy.deepcopy": copy.deepcopy,
        ".to(torch.bfloat16)": lambda model: model.to(torch.bfloat16),
        '.to("meta").to_empty()': lambda model: model.to("meta").to_empty(device="cpu"),
    }
    for way, move in ways.items():
        with context("Transformer(3, 24, 4, max_seq_len=9)", way):
            model = move(cls(3, 24, 4, max_seq_len=9))
            tables = {table.data_ptr(): table for table in model.buffers() if table.dtype != torch.bool}
            for table, another in combinations(tables.values(), 2):
                if table.shape == another.shape and torch.equal(table, another):
                    raise Violation(f"there are two tables of the same values, of shape {tuple(table.shape)}")
    harness.require_parameters(cls, "device")
    with context("Transformer(3, 24, 4, max_seq_len=9, device='meta')"):
        if not all(
            table.is_meta or table.dtype == torch.bool
            for table in cls(3, 24, 4, max_seq_len=9, device="meta").buffers()
        ):
            raise Violation("the table is not on meta")


@guarantees("a sequence longer than max_seq_len rejected")
def rejects_length(transformer: ModuleType) -> None:
    for theta in (100.0, None):
        model = require(transformer, "Transformer")(1, 24, 4, max_seq_len=9, theta=theta)
        with context(f"max_seq_len=9, {theta=}, 9 tokens"):
            model(torch.zeros(9, 24))
        with context(f"max_seq_len=9, {theta=}, 10 tokens"), rejected(9, 10):
            model(torch.zeros(10, 24))


SIZES = {"num_layers": 1, "d_model": 24, "num_heads": 4, "max_seq_len": 9}
INVALID: Any = {"num_layers": (0, -1), "num_heads": (5, 0), "d_model": (0,), "d_ff": (0,), "d_head": (3,)}
INVALID |= {"max_seq_len": (0,), "theta": (0.0,), "eps": (-1.0,)}
guarantees(harness.REJECTED)(lambda transformer: harness.rejects(require(transformer, "Transformer"), SIZES, **INVALID))


@guarantees("reset_parameters reaches every layer")
def reset(transformer: ModuleType) -> None:
    resets(require(transformer, "Transformer"), 2, 24, 4, max_seq_len=9)
