"""Predictions, against sums by hand."""

from dataclasses import replace

import pytest
import torch
from lab.machine import DATASHEETS
from lab.sizes import Size
from profiling.collectives import Collective, Mesh
from profiling.predict import Links, Work, predict, shares_of
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

LLAMA = Size(
    batch_size=16,
    seq_len=8192,
    d_model=4096,
    num_heads=32,
    num_kv_heads=8,
    d_head=128,
    d_ff=14336,
    num_layers=32,
)
TOKENS = 16 * 8192
PEAK, BANDWIDTH = 989e12, 3350e9
H100 = DATASHEETS["NVIDIA H100 80GB HBM3"].rates(torch.bfloat16)
LINKS = Links(within=450e9, between=50e9)
STEP = Work("step", element_size=2)
FORWARD = Work("forward", element_size=2)


def test_mesh_is_parsed_in_any_order():
    assert Mesh.parse("tp=8,dp=64") == Mesh(dp=64, tp=8)
    assert Mesh.parse("dp_replicate=2,dp=4") == Mesh(dp_replicate=2, dp=4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("dp=8,dp=4", "must have each axis once", id="an axis twice"),
        pytest.param("pp=2", "must consist of dp_replicate, dp, tp", id="another axis"),
        pytest.param("dp", "must consist of", id="no number"),
        pytest.param("dp=-2", "must consist of", id="a negative number"),
    ],
)
def test_mesh_that_cannot_be_read_is_rejected(text, message):
    with pytest.raises(ValueError, match=f"a mesh {message}.*, got '{text}'"):
        Mesh.parse(text)


@pytest.mark.parametrize("text", ["1e9,0", "x", "1,2,3", "", "inf", "nan"])
def test_links_that_cannot_be_read_are_rejected(text):
    with pytest.raises(ValueError, match="--link must be bytes/s"):
        Links.parse(text)


def test_link_within_a_machine_has_the_bytes_of_all_others():
    reduce = Collective("all-reduce", "tp", 1000)
    # A sum moves twice as much: what the others have, and what they get.
    expected = 2 * 2 * 1000 * 7 / 8 / 450e9
    assert LINKS.seconds(reduce, Mesh(dp=16, tp=8), 2) == pytest.approx(expected)


def test_group_of_two_machines_receives_the_other_half_by_eight_links():
    gather = Collective("all-gather", "dp", 1000)
    within = 2 * 1000 * 15 / 16 / 450e9
    between = 2 * 500 / 8 / 50e9
    expected = max(within, between)
    assert LINKS.seconds(gather, Mesh(dp=16), 2) == pytest.approx(expected)


def test_process_alone_on_its_machine_receives_all_by_its_own_link():
    gather = Collective("all-gather", "dp", 1000)
    expected = 2 * 1000 * 15 / 16 / 50e9
    assert LINKS.seconds(gather, Mesh(dp=16, tp=8), 2) == pytest.approx(expected)


def test_link_without_machines_is_that_of_one_machine():
    gather = Collective("all-gather", "dp", 1000)
    expected = 2 * 1000 * 15 / 16 / 450e9
    assert Links(450e9).seconds(gather, Mesh(dp=16, tp=8), 2) == pytest.approx(expected)


def compute_seconds(mesh):
    """Return how long one device computes in each pass of a step."""
    seconds = {}
    for name, shares in shares_of(LLAMA, mesh, STEP).items():
        times = [
            share.count * H100.seconds(share.cost.flops, share.cost.bytes)
            for share in shares
        ]
        seconds[name] = sum(times)
    return seconds


@pytest.mark.parametrize("mesh", [Mesh(dp=8), Mesh(tp=8), Mesh(dp=4, tp=2)], ids=str)
def test_each_process_computes_its_share(mesh):
    one, eighth = compute_seconds(Mesh()), compute_seconds(mesh)
    # Products dominate, and their FLOPs are shared exactly. A little more is left, as a device with a part of a
    # weight still reads whole activations.
    for name in ("forward", "backward"):
        assert one[name] / 8 <= eighth[name] < 1.02 * one[name] / 8
    assert eighth["optimizer"] == pytest.approx(one["optimizer"] / 8, rel=1e-3)


def test_computation_hides_the_gathers_of_all_layers_except_one():
    found = predict(LLAMA, Mesh(dp=2), FORWARD, H100, Links(1e12))
    assert found.dp_seconds < found.compute_seconds
    expected = found.compute_seconds + found.dp_seconds / 32
    assert found.seconds == pytest.approx(expected)


def test_slow_gathers_hide_the_computation_of_all_layers_except_one():
    found = predict(LLAMA, Mesh(dp=2), FORWARD, H100, Links(1e8))
    assert found.dp_seconds > found.compute_seconds
    expected = found.dp_seconds + found.compute_seconds / 32
    assert found.seconds == pytest.approx(expected)


def test_gathers_of_weights_also_hide_behind_tensor_parallel_collectives():
    found = predict(LLAMA, Mesh(dp=2, tp=4), FORWARD, H100, Links(1e12))
    busy = found.compute_seconds + found.tp_seconds
    assert found.seconds == pytest.approx(busy + found.dp_seconds / 32)


def test_nothing_hides_tensor_parallel_collectives():
    found = predict(LLAMA, Mesh(tp=2), FORWARD, H100, Links(1e9))
    assert found.tp_seconds > 0
    assert found.seconds == pytest.approx(found.compute_seconds + found.tp_seconds)


def test_prediction_of_a_model_is_that_of_its_parts():
    found = predict(LLAMA, Mesh(dp=2, tp=8), STEP, H100, LINKS)
    stream = 2 * 8 * 8192 * 4096 * 7 / 8 / 450e9
    # Gains are small.
    expected_tp = 2 * (4 * 32 + 1) * stream
    assert found.tp_seconds == pytest.approx(expected_tp, rel=1e-3)
    # 3 Psi of bfloat16 for an eighth of the weights, and the other machine has half of that.
    expected_dp = 3 * 2 * LLAMA.parameters / 8 / 2 / 50e9
    assert found.dp_seconds == pytest.approx(expected_dp, rel=1e-3)
    # Weight, gradient and two moments, in two bytes each.
    expected_states = 4 * 2 * LLAMA.parameters / 16
    assert found.state_bytes == pytest.approx(expected_states, rel=1e-3)


def test_mfu_counts_six_flops_a_weight_and_token_and_causal_attention():
    found = predict(LLAMA, Mesh(dp=2, tp=8), STEP, H100, LINKS)
    gains = 65 * 4096
    weights = 6 * (LLAMA.parameters - gains) * TOKENS
    attention = 3 * 32 * 4 * 4096 * 16 * 8192 * 8193 / 2
    expected = (weights + attention) / 16 / PEAK / found.seconds
    assert found.mfu == pytest.approx(expected)


def differences(mesh):
    """Return what the vocabulary of Llama 3.1 adds to seconds and states of a step."""
    with_vocab = predict(replace(LLAMA, vocab=128256), mesh, STEP, H100, LINKS)
    without = predict(LLAMA, mesh, STEP, H100, LINKS)
    names = ("compute_seconds", "tp_seconds", "dp_seconds", "state_bytes")
    return {name: getattr(with_vocab, name) - getattr(without, name) for name in names}


def test_vocabulary_adds_embedding_and_head():
    mesh = Mesh(dp=2, tp=8)
    table = 128256 * 4096
    more = differences(mesh)
    assert more["state_bytes"] == 4 * 2 * 2 * table / 16
    # One gather and one scatter among 16 processes, half of them on the other machine.
    expected_dp = 2 * 2 * (2 * table / 8) / 2 / 50e9
    assert more["dp_seconds"] == pytest.approx(expected_dp)
    # The embedding scatters tokens, and the head scatters their gradients.
    stream = 2 * 8 * 8192 * 4096 * 7 / 8 / 450e9
    assert more["tp_seconds"] == pytest.approx(2 * stream)
    products = 6 * table * TOKENS / 16 / PEAK
    # Logits: written and read in forward, read in backward. Activations: written by the embedding and read by its
    # backward pass. The table's gradient, and seven times what AdamW reads and writes.
    logits = 8 * 8192 * 128256 / 8
    stream_elements = 8 * 8192 * 4096 / 8
    of_table = table / 8
    moved = 2 * (3 * logits + 3 * stream_elements + of_table + 7 * 2 * of_table / 2)
    expected = products + moved / BANDWIDTH
    assert more["compute_seconds"] == pytest.approx(expected, rel=1e-3)


def test_vocabulary_completes_the_published_number_of_parameters():
    assert replace(LLAMA, vocab=128256).parameters == 8_030_261_248


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_recomputing_costs_the_products_that_torch_repeats(recompute):
    size = Size(
        batch_size=2,
        seq_len=6,
        d_model=16,
        num_heads=4,
        num_kv_heads=2,
        d_head=4,
        d_ff=24,
    )
    block = size.build("cpu", torch.float32)
    x = torch.randn(2, 6, 16, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        out = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        out.sum().backward()
    counted = 0
    for operation, flops in counter.get_flop_counts()["Global"].items():
        # Later versions of torch count attention on a CPU, too.
        if "attention" not in str(operation):
            counted += flops
    predicted = 0.0
    for shares in shares_of(size, Mesh(), Work("train", 4, recompute)).values():
        for share in shares:
            if share.part != "attention":
                predicted += share.count * share.cost.matmul_flops
    assert predicted == counted
