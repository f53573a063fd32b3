"""RoPE: rotate the k-th pair, x[2k] and x[2k+1], by the angle position * theta^(-2k / d_k).

The rotation is rounded once to the dtype of x. Its table stays exact, whatever the
dtype of the model.
"""

import copy
import functools
import math

import pytest
import torch

from .checks import (
    HALVES,
    TABLE,
    THETA,
    Case,
    case_of,
    check_close,
    for_each,
    name_of,
    randn,
)
from .every_layer import EveryLayer, check_rounds_once, numbers
from .target import load

POSITIONS = torch.tensor([[3, 9, 2, TABLE - 1, 0, 5, 5], [0, 1, 2, 3, 4, 5, 6]])
OF_FOUR = torch.cat((POSITIONS, POSITIONS + 1)).clamp(max=TABLE - 1)
FAR = torch.tensor([0, 1, 5, 100, 131071])


def angles_of(positions, d_k, theta=THETA):
    """Return the angle of each pair in radians, in float64."""
    frequencies = [theta ** (-2 * k / d_k) for k in range(d_k // 2)]
    row = torch.tensor(frequencies, dtype=torch.float64, device=positions.device)
    return positions[..., None] * row


def rotate(x, angles):
    """Rotate each pair as a complex number, in float64."""
    pairs = torch.complex(x[..., 0::2].double(), x[..., 1::2].double())
    rotated = pairs * torch.exp(1j * angles)
    return torch.stack((rotated.real, rotated.imag), dim=-1).flatten(-2).to(x.dtype)


def rope_of_positions(x, token_positions=None, theta=THETA):
    if token_positions is None:
        token_positions = torch.arange(x.shape[-2], device=x.device)
    return rotate(x, angles_of(token_positions, x.shape[-1], theta))


def of_layer(
    x, weights, token_positions=None, *, theta, formula=rope_of_positions, **sizes
):
    return formula(x, token_positions, theta)


case = functools.partial(
    case_of,
    "rope",
    "RotaryPositionalEmbedding",
    of_layer,
    d_k=8,
    theta=THETA,
    max_seq_len=TABLE,
)


class TestRoPE(EveryLayer):
    cases = {
        "positions 0, 1, 2, ...": case(d_k=10, positions=torch.arange(7)),
        "positions for each sequence": case(positions=POSITIONS),
        "another theta": case(positions=POSITIONS, theta=1e4),
        "one token, one pair, a table of one position": case(
            axes=(1,), d_k=2, positions=POSITIONS[1, :1], max_seq_len=1
        ),
        "empty batch": case(axes=(0, 7), positions=POSITIONS[0], is_common=False),
        "positions for all sequences": case(positions=POSITIONS[0]),
        "two batch axes": case(
            axes=(4, 4, 7), positions=OF_FOUR[:, None].expand(4, 4, 7)
        ),
        "no batch axis": case(axes=(7,), positions=POSITIONS[0]),
        "no positions, a table that is full": case(max_seq_len=7, is_common=False),
        "positions for all heads, as many as sequences": case(
            axes=(4, 4, 7), positions=OF_FOUR[:, None], is_common=False
        ),
        "positions of the last batch axis": case(
            axes=(3, 2, 7), positions=POSITIONS, is_common=False
        ),
        "positions of int32": case(positions=POSITIONS.int(), is_common=False),
        "function": Case(
            "rope",
            "apply_rope",
            rotate,
            shape=(2, 3, 5, 8),
            inputs={"angles": angles_of(FAR, 8)},
            weights=[],
        ),
    }
    typical = ["positions for each sequence"]
    rejected = {
        "theta": (0.0, math.nan, math.inf),
        "d_k": (0, 5),
        "max_seq_len": (0,),
    }

    @pytest.mark.parametrize("half", HALVES, ids=name_of)
    def test_rounds_once(self, half, device):
        for_each(self.every(), lambda case: check_rounds_once(case, half, device))


EACH = TestRoPE.cases["positions for each sequence"]
# Two instances that differ in one option.
INSTANCES = {
    "theta": (TestRoPE.cases["another theta"], EACH),
    "d_k": (case(d_k=6, positions=POSITIONS), EACH),
    # With a theta of their own, so that no test before has built a longer table.
    "max_seq_len": (
        case(positions=torch.arange(7), theta=70.0, max_seq_len=7),
        case(positions=POSITIONS, theta=70.0),
    ),
}


@numbers
def test_each_instance_has_its_own_table():
    def check(instances):
        built = [(case, case.build(dtype=torch.float32)) for case in instances]
        for case, rope in built:
            case.check(*case.run(module=rope), torch.float32)

    for_each(INSTANCES, check)


def test_table_is_exact_at_far_positions(device):
    """After all that torch does to modules, the table is that of float64, in float32."""
    far = case(d_k=16, theta=5e5, max_seq_len=131072)
    with torch.device("meta"):
        rope = far.construct().bfloat16()
    rope = copy.deepcopy(rope.to_empty(device="cpu").half()).double().to(device)
    assert [table.dtype for table in rope.buffers()] == [torch.float32]
    positions = torch.cat((torch.arange(0, 131072, 61), torch.arange(130972, 131072)))
    x = randn(len(positions), 16)
    expected = rope_of_positions(x, positions, theta=5e5)
    for dtype, allowed in {torch.float64: 1e-10, torch.float32: 1e-7}.items():
        actual = rope(x.to(device, dtype), positions.to(device))
        check_close(str(dtype), actual, expected, allowed * expected.norm())


def test_frequencies_may_be_overridden():
    class Slower(load("rope").RotaryPositionalEmbedding):
        def frequencies(self):
            return super().frequencies() / 8

    rope = Slower(THETA, 6, TABLE)
    x = randn(7, 6)
    expected = rotate(x, angles_of(POSITIONS[0], 6) / 8)
    for dtype in (torch.float64, torch.float32):
        actual = rope(x.to(dtype), POSITIONS[0]).double()
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def test_rejects_a_sequence_longer_than_the_table():
    with pytest.raises(ValueError, match=r"max_seq_len=8.* 9"):
        case(max_seq_len=8).build()(torch.zeros(9, 8))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=name_of)
@pytest.mark.parametrize("position", [8, -1, 2**32, 2.5, True])
def test_rejects_positions_out_of_range_and_not_integers(position, dtype):
    rope = case(max_seq_len=8).build()
    error, message = (TypeError, RuntimeError), "."  # of the shape check, or of torch
    if type(position) is int:
        error, message = ValueError, rf"0 \.\.\. 7.*{position}"
    with pytest.raises(error, match=message):
        rope(torch.zeros(3, 8, dtype=dtype), torch.full((3,), position))
