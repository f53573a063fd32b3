"""The stack: block after block, all with one RoPE or with none, then a norm."""

import copy
import functools
from unittest.mock import Mock, call

import pytest
import torch

from .checks import EPS, TABLE, case_of, randn
from .every_layer import EveryLayer
from .test_attention import OPTIONS, OTHER_THETA, ROPE, mask_of
from .test_block import Double, pre_norm_block
from .test_rmsnorm import rms_norm
from .test_rope import POSITIONS, rope_of_positions


def blocks_and_norm(
    x,
    weights,
    token_positions=None,
    mask=None,
    *,
    d_model,
    num_layers,
    max_seq_len,
    theta=1e4,
    rope=None,
    eps=EPS,
    **sizes,
):
    if rope is None and theta is not None:
        rope = functools.partial(rope_of_positions, theta=theta)
    for number in range(num_layers):
        of_layer = weights.of(f"layers.{number}")
        options = {"d_model": d_model, "rope": rope, "eps": eps, **sizes}
        x = pre_norm_block(x, of_layer, token_positions, mask, **options)
    return rms_norm(x, weights.get_of("ln_final.weight", d_model), eps)


case = functools.partial(
    case_of,
    "transformer",
    "Transformer",
    blocks_and_norm,
    d_model=24,
    num_layers=2,
    num_heads=4,
    d_ff=64,
    max_seq_len=TABLE,
)


class TestTransformer(EveryLayer):
    cases = {
        "default theta": case(num_layers=1),
        "another head size": case(d_head=20),
        "all options": case(positions=POSITIONS, mask=mask_of(2, 7, 7), **OPTIONS),
        "another theta, a table of 7 positions": case(
            axes=(7,), theta=100.0, max_seq_len=7
        ),
        "more tokens than positions": case(
            axes=(7,), positions=torch.arange(7) % 5, max_seq_len=5
        ),
        "no RoPE": case(theta=None, max_seq_len=7),
        "a RoPE that is passed": case(theta=None, **OTHER_THETA),
    }
    typical = ["default theta"]
    rejected = {
        "theta": (0.0,),
        "d_head": (3,),
        "num_heads": (7,),
        "num_layers": (0,),
        "max_seq_len": (0,),
    }


def test_one_table_for_all_blocks():
    """Also after all that torch does to modules."""
    stack = case().construct().to(torch.bfloat16)
    stack = copy.deepcopy(stack.to("meta").to_empty(device="cpu"))
    assert len({table.data_ptr() for table in stack.buffers()}) == 1


def test_builds_any_block_and_norm():
    norm = Mock(return_value=Double())
    block = Mock(return_value=Double())
    shared = {"eps": 1e-3, "device": "cpu", "dtype": torch.float32}
    options = {**shared, **ROPE, "norm": norm, "d_head": 20, "window": 3}
    stack = case().construct(block=block, **options)
    assert block.call_args_list == [call(24, 4, 64, **options)] * 2
    norm.assert_called_once_with(24, **shared)
    x = randn(2, 7, 24)
    assert torch.equal(stack(x), 2 * 2 * 2 * x)  # two blocks and a norm


def test_rejects_a_sequence_longer_than_max_seq_len():
    """Also without RoPE."""
    stack = case(theta=None, max_seq_len=9).build()
    with pytest.raises(ValueError, match=r"max_seq_len=9.* 10"):
        stack(randn(10, 24))
