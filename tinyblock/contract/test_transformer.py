"""The stack: block after block, all with one RoPE or with none, then a norm."""

import copy
import functools
from unittest.mock import Mock, call

import pytest
import torch

from .checks import EPS, TABLE, case_of, randn
from .every_layer import EveryLayerWithWeights
from .test_attention import BOTH, OPTIONS, ROPE
from .test_block import Double, pre_norm_block
from .test_rmsnorm import rms_norm
from .test_rope import rope_of_positions


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
    num_layers=2,
    num_heads=4,
    d_ff=96,
    max_seq_len=TABLE,
)
LOW = {"token_positions": torch.arange(7) % 5}


class TestTransformer(EveryLayerWithWeights):
    cases = {
        "default theta": case(2, 7, 24, num_layers=1),
        "another head size": case(2, 7, 24, d_head=20),
        "all options": case(2, 7, 24, inputs=BOTH, eps=1e-3, **OPTIONS),
        "another theta, a table of 7 positions": case(
            7, 24, theta=100.0, max_seq_len=7
        ),
        "more tokens than positions": case(7, 24, inputs=LOW, max_seq_len=5),
        "no RoPE": case(2, 7, 24, theta=None, max_seq_len=7),
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
    stack = case(2, 7, 24).construct().to(torch.bfloat16)
    stack = copy.deepcopy(stack.to("meta").to_empty(device="cpu"))
    assert len({table.data_ptr() for table in stack.buffers()}) == 1


def test_builds_any_block_and_norm():
    norm = Mock(return_value=Double())
    block = Mock(return_value=Double())
    shared = {"eps": 1e-3, "device": "cpu", "dtype": torch.float32}
    options = {**shared, **ROPE, "norm": norm, "d_head": 20, "window": 3}
    stack = case(2, 7, 24).construct(block=block, **options)
    assert block.call_args_list == [call(24, 4, 96, **options)] * 2
    norm.assert_called_once_with(24, **shared)
    x = randn(2, 7, 24)
    assert torch.equal(stack(x), 2 * 2 * 2 * x)  # two blocks and a norm


def test_rejects_a_sequence_longer_than_max_seq_len():
    """Also without RoPE."""
    stack = case(2, 7, 24, theta=None, max_seq_len=9).build()
    with pytest.raises(ValueError, match=r"max_seq_len=9.* 10"):
        stack(randn(10, 24))
