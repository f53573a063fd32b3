"""Predictions, against sums by hand."""

import pytest
import torch
from lab.machine import DATASHEETS
from lab.sizes import Size
from profiling.collectives import Collective, Mesh
from profiling.predict import Links, compute_seconds, predict

LLAMA = Size(16, 8192, 4096, 32, 8, 128, 14336, num_layers=32)
LINKS = Links(within=450e9, between=50e9)
H100 = DATASHEETS["NVIDIA H100 80GB HBM3"].ceilings(torch.bfloat16)


def test_link_that_is_crossed_decides():
    gather, in_half = Collective("all-gather", "dp", 1000), 2 * 1000 * 15 / 16
    # All of a machine is one group: what the other machine has comes by eight links, the rest is faster.
    assert LINKS.seconds(gather, Mesh(dp=16), 2) == pytest.approx(max(in_half / 450e9, 2 * 500 / 8 / 50e9))
    # Each process of a machine is in another group: all comes by its own link.
    assert LINKS.seconds(gather, Mesh(dp=16, tp=8), 2) == pytest.approx(in_half / 50e9)
    assert Links(450e9).seconds(gather, Mesh(dp=16, tp=8), 2) == pytest.approx(in_half / 450e9)
    reduce = Collective("all-reduce", "tp", 1000)
    assert LINKS.seconds(reduce, Mesh(dp=16, tp=8), 2) == pytest.approx(2 * 2 * 1000 * 7 / 8 / 450e9)


def test_each_process_computes_its_share():
    # Products dominate: their FLOPs are shared exactly, so that an eighth is left on eight processes.
    one = compute_seconds(LLAMA, Mesh(), H100, 2)
    for mesh in (Mesh(dp=8), Mesh(tp=8), Mesh(dp=4, tp=2)):
        eighth = compute_seconds(LLAMA, mesh, H100, 2)
        for pass_ in ("forward", "backward"):
            assert (
                one[pass_] / 8 <= eighth[pass_] < 1.02 * one[pass_] / 8
            )  # whole activations beside a part of a weight
        assert eighth["optimizer"] == pytest.approx(one["optimizer"] / 8, rel=1e-3)


def test_data_parallel_collectives_hide_behind_all_but_one_of_the_layers():
    # Of 32 gathers of a block's weights and that of the norm, as long as the link makes them.
    def sums(mesh, rate):
        return predict(LLAMA, mesh, H100, Links(rate), "forward", torch.bfloat16)

    for mesh, rate, dp_is_longer in (
        (Mesh(dp=2), 1e12, False),
        (Mesh(dp=2), 1e8, True),
        (Mesh(dp=2, tp=4), 1e12, False),
    ):
        record = sums(mesh, rate)
        beside = record["compute_seconds"] + record["tp_seconds"]
        shorter, longer = sorted((beside, record["dp_seconds"]))
        assert (longer == record["dp_seconds"]) == dp_is_longer
        assert record["seconds"] == pytest.approx(longer + shorter / 32)
    assert sums(Mesh(tp=2), 1e9)["hidden_seconds"] == 0


def test_prediction_of_a_model_is_that_of_its_parts():
    record = predict(LLAMA, Mesh(dp=2, tp=8), H100, LINKS, "step", torch.bfloat16)
    sbh = 8 * 8192 * 4096
    of_stream = 2 * sbh * 7 / 8 / 450e9
    assert record["tp_seconds"] == pytest.approx(2 * (4 * 32 + 1) * of_stream, rel=1e-3)  # the gains are small
    # 16 processes: 3 Psi of bfloat16 of an eighth of the weights, half of which the other machine has.
    assert record["dp_seconds"] == pytest.approx(3 * 2 * LLAMA.parameters / 8 / 2 / 50e9, rel=1e-3)
    assert record["state_bytes"] == pytest.approx(4 * 2 * LLAMA.parameters / 16, rel=1e-3)
    six_n_d = 6 * (LLAMA.parameters - 65 * 4096) * LLAMA.tokens
    attention = 3 * 32 * 4 * 4096 * 16 * 8192 * 8193 / 2
    assert LLAMA.costs("step").matmul_flops == six_n_d + attention
    assert record["mfu"] == pytest.approx((six_n_d + attention) / 16 / 989e12 / record["seconds"])
