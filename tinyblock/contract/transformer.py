"""What the stack of blocks guarantees: block after block, all with one RoPE or with none, then a norm."""

import copy
import functools
from collections.abc import Callable
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from . import harness
from .attention import RELATIVE, SEQUENCE, mask_of
from .block import (
    EVERY_OPTION,
    OTHERS,
    normalize,
    part,
    pre_norm_block,
    resets,
    with_other_parts,
)
from .harness import Case, Layer, State, Violation, context, guarantees, supported
from .rope import POSITIONS, TABLE, rotary


def blocks_and_norm(
    x: Tensor,
    state: State,
    *,
    layers: int,
    norm: Callable[..., Tensor] = normalize,
    eps: float = 1e-5,
    **options: Any,
) -> Tensor:
    for layer in range(layers):
        x = pre_norm_block(
            x, part(state, f"layers.{layer}."), norm=norm, eps=eps, **options
        )
    return norm(x, part(state, "ln_final."), eps)


guarantees(RELATIVE)(lambda transformer: cases(transformer)[:1])


@guarantees(SEQUENCE)
def cases(transformer: Layer) -> list[Case]:
    def case(
        inputs: Any = None,
        layers: int = 2,
        theta: Any = 1e4,
        table: int = TABLE,
        **options: Any,
    ) -> Case:
        rope = None if theta is None else functools.partial(rotary, theta=theta)
        formula = functools.partial(
            blocks_and_norm, layers=layers, heads=4, **{"rope": rope, **options}
        )
        options |= {"max_seq_len": table} | ({} if theta == 1e4 else {"theta": theta})
        main: Any = {"representative": layers == 1}
        return Case(
            transformer.Transformer,
            (layers, 24, 4, 40),
            (2, 7, 24),
            formula,
            options,
            inputs or {},
            **main,
        )

    every = supported(transformer.Transformer, EVERY_OPTION)
    inputs = {"token_positions": POSITIONS, "mask": mask_of(2, 7, 7)}
    shortest = [case(theta=theta, table=7) for theta in (100.0, None)]
    return [
        case(),
        case(layers=1),
        case(**every),
        case(inputs, **every),
        case(rope=rotary),
        *shortest,
    ]


@guarantees("one table for all blocks")
def shares_its_table(transformer: Layer) -> None:
    """Look for tables of equal values, after what torch does to modules."""
    with context(
        'Transformer(3, 24, 4, max_seq_len=9).to(torch.bfloat16).to("meta").to_empty(), then copy.deepcopy'
    ):
        model = transformer.Transformer(3, 24, 4, max_seq_len=9).to(torch.bfloat16)
        model = copy.deepcopy(model.to("meta").to_empty(device="cpu"))
        tables = {
            table.data_ptr(): table
            for table in model.buffers()
            if table.dtype != torch.bool
        }
        for table, another in combinations(tables.values(), 2):
            if table.shape == another.shape and torch.equal(table, another):
                raise Violation(
                    f"there are two tables of the same values, of shape {tuple(table.shape)}"
                )


@guarantees("invalid inputs rejected")
def rejects_inputs(transformer: Layer) -> None:
    for theta in (100.0, None):
        with context(f"max_seq_len=9, {theta=}"):
            model = transformer.Transformer(1, 24, 4, max_seq_len=9, theta=theta)
            harness.rejects_inputs(model, 9, torch.zeros(10, 24), {})


SIZES = {"num_layers": 1, "d_model": 24, "num_heads": 4, "max_seq_len": 9}
INVALID: Any = {
    "num_layers": (0, -1),
    "num_heads": (5, 0),
    "d_model": (0,),
    "d_ff": (0,),
    "d_head": (3,),
}
INVALID |= {"max_seq_len": (0,), "theta": (0.0,), "eps": (-1.0,)}
guarantees(OTHERS)(lambda transformer: with_other_parts(cases(transformer)[0]))
guarantees("reset_parameters reaches every layer")(
    lambda transformer, ffn: resets(
        transformer.Transformer, ffn, 2, 24, 4, max_seq_len=9
    )
)
guarantees(harness.REJECTED)(
    lambda transformer: harness.rejects(transformer.Transformer, SIZES, **INVALID)
)
