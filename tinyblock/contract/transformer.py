"""What the stack of blocks promises: block after block, all with one RoPE or with none, then a norm."""

import copy
import functools
from collections.abc import Callable
from itertools import combinations
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import harness
from .attention import ROTARY, mask_of, roundings_of, takes_any_rope
from .block import EVERY_OPTION, NORM_AND_SUM, block_state, part, pre_norm_block, takes_any_layers
from .ffn import SWIGLU_ROUNDINGS
from .harness import Case, Shape, State, Violation, accepted, close, given, promises, promises_all, public, require
from .rmsnorm import rms_norm
from .rope import POSITIONS, TABLE

DEFINES = ("Transformer",)


def blocks_and_norm(x: Tensor, state: State, *, eps: float = 1e-5, **options: Any) -> Tensor:
    for layer in range(1 + max(int(key.split(".")[1]) for key in state if key.startswith("layers."))):
        x = pre_norm_block(x, part(state, f"layers.{layer}."), eps=eps, **options)
    return rms_norm(x, state["ln_final.weight"], eps)


@promises_all(ROTARY)
def cases(transformer: ModuleType) -> list[Case]:
    def case(inputs: Any = None, compiled: bool = False, **options: Any) -> Case:
        eps, theta = options.get("eps", 1e-5), options.get("theta", 1e4)
        formula = functools.partial(blocks_and_norm, heads=4, theta=theta, eps=eps)
        layers = 1 if compiled else 2  # which take twice as long
        made = (
            public(transformer, "Transformer"),
            (layers, 24, 4),
            (2, 7, 24),
            formula,
            {"max_seq_len": TABLE, **options},
        )
        roundings = 2 * (roundings_of(theta is not None, **options) + SWIGLU_ROUNDINGS + 2 * NORM_AND_SUM) + 1
        return Case(*made, inputs or {}, compiled=compiled, roundings=roundings)

    options = accepted(public(transformer, "Transformer"), {"theta": 100.0, **EVERY_OPTION})
    inputs = {"token_positions": POSITIONS, "mask": mask_of(2, 7, 7)}
    return [case(), case(compiled=True), case(**options), case(inputs, **options), case(theta=None)]


@promises("keys of the state dict")
def keys(transformer: ModuleType) -> None:
    cls = public(transformer, "Transformer")
    for num_layers, options in ((3, {}), (1, accepted(cls, EVERY_OPTION))):
        state: dict[str, Shape] = {"ln_final.weight": (24,)}
        for layer in range(num_layers):
            state |= block_state(40, f"layers.{layer}.", **options)
        harness.has_state(cls, (num_layers, 24, 4, 40), state, max_seq_len=9, **options)


@promises("any norm and any ffn serve")
def any_layers(transformer: ModuleType) -> None:
    takes_any_layers(public(transformer, "Transformer"), (2, 24, 4), max_seq_len=9)


@promises("any callable serves as rope, for all blocks")
def any_rope(transformer: ModuleType) -> None:
    takes_any_rope(public(transformer, "Transformer"), (2, 24, 4), blocks_and_norm, max_seq_len=9)


@promises("one table for all blocks, and in float32")
def shares_its_table(transformer: ModuleType) -> None:
    """Look for tables of equal values, whatever they hold, and for what a rounded one does at far positions."""
    cls, options = public(transformer, "Transformer"), {"max_seq_len": 131072}
    inputs = {"token_positions": torch.tensor([0, 1, 1000, 65537, 131000, 131070, 131071])}
    require(cls.forward, *inputs)
    formula = functools.partial(blocks_and_norm, heads=4, theta=1e4)
    case = Case(cls, (3, 24, 4), (2, 7, 24), formula, options, inputs)
    ways: dict[str, Callable[[Any], Any]] = {
        "as it was made": lambda model: model,
        "copy.deepcopy": copy.deepcopy,
        ".to(torch.bfloat16)": lambda model: model.to(torch.bfloat16),
        ".double()": lambda model: model.double(),
        '.to("meta").to_empty()': lambda model: model.to("meta").to_empty(device="cpu"),
    }
    if accepted(cls, {"device": None}):
        with given(case, "with device='meta'"):
            tables = cls(*case.arguments, **options, device="meta").buffers()
            if not all(table.is_meta or table.dtype == torch.bool for table in tables):
                raise Violation("the table is not on meta")
    for way, move in ways.items():
        with given(case, way):
            model = move(cls(*case.arguments, **options))
            tables = {table.data_ptr(): table for table in model.buffers() if table.dtype != torch.bool}
            for table, another in combinations(tables.values(), 2):
                if table.shape == another.shape and torch.equal(table, another):
                    raise Violation(f"there are two tables of the same values, of shape {tuple(table.shape)}")
            x = case.x(torch.float32)
            harness.fill(model.float())
            exact = case.exact(model, x)
            with given("then .float() and the weights of `fill`"):
                close(model(x, **inputs), exact, 1e-5 * harness.largest(exact))


@promises("a sequence longer than max_seq_len is refused")
def refuses_length(transformer: ModuleType) -> None:
    for theta in (100.0, None):
        model = public(transformer, "Transformer")(1, 24, 4, max_seq_len=9, theta=theta)
        with given(f"max_seq_len=9, {theta=}, 9 tokens"):
            model(torch.zeros(9, 24))
        with given(f"max_seq_len=9, {theta=}, 10 tokens"), harness.refused():
            model(torch.zeros(10, 24))


@promises("initial weights")
def weights(transformer: ModuleType) -> None:
    options = {"max_seq_len": 9, "num_kv_heads": 2, "qk_norm": True}
    harness.draws_weights(public(transformer, "Transformer"), 2, 96, 4, 160, **options)


@promises("bad hyperparameters refused")
def hyperparameters(transformer: ModuleType) -> None:
    sizes = (0, 24, 4), (-1, 24, 4), (1, 24, 5), (1, 24, 0), (1, 24, 8), (1, 24, 4, 0)
    options = [(1, 24, 4, option) for option in ({"max_seq_len": 0}, {"theta": 0.0}, {"eps": -1.0})]
    harness.refuses(public(transformer, "Transformer"), *sizes, *options, max_seq_len=9)
