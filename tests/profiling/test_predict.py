"""Predictions, against sums by hand."""

from dataclasses import replace

import pytest
import torch
from lab.machine import DATASHEETS
from lab.sizes import Size, adamw_cost
from profiling.collectives import Collective, Mesh
from profiling.predict import Links, compute_seconds, measured, predict, roofline
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

LLAMA = Size(16, 8192, 4096, 32, 8, 128, 14336, num_layers=32)
LINKS = Links(within=450e9, between=50e9)
H100 = DATASHEETS["NVIDIA H100 80GB HBM3"].ceilings(torch.bfloat16)
LEAST = roofline(H100)


def predicted(size, mesh, links, mode):
    return predict(size, mesh, LEAST, 989e12, links, mode, 2, recompute=False)


def profile_of(size):
    """Return as much of a profile as predictions read of a block, in which each part runs at its roofline."""

    def at_roofline(cost):
        seconds = {"median": H100.seconds(cost.flops, cost.bytes)}
        return {
            "seconds": seconds,
            "gpu_seconds": None,
            "matmul_flops": cost.matmul_flops,
            "bytes": cost.bytes,
        }

    costs = size.part_costs(2)
    parts = [
        {"name": name, "count": 1}
        | {p: at_roofline(cost) for p, cost in costs[name].items()}
        for name in costs
    ]
    sums = {
        p: sum(part[p]["seconds"]["median"] for part in parts)
        for p in ("forward", "backward")
    }
    whole = {p: {"seconds": {"median": seconds}} for p, seconds in sums.items()}
    return {
        "parts": parts,
        "whole": whole,
        "optimizer": at_roofline(adamw_cost(size.parameters, 2)),
    }


def test_link_that_is_crossed_decides():
    gather, in_half = Collective("all-gather", "dp", 1000), 2 * 1000 * 15 / 16
    # All of a machine is one group: what the other machine has comes by eight links, the rest is faster.
    assert LINKS.seconds(gather, Mesh(dp=16), 2) == pytest.approx(
        max(in_half / 450e9, 2 * 500 / 8 / 50e9)
    )
    # Each process of a machine is in another group: all comes by its own link.
    assert LINKS.seconds(gather, Mesh(dp=16, tp=8), 2) == pytest.approx(in_half / 50e9)
    assert Links(450e9).seconds(gather, Mesh(dp=16, tp=8), 2) == pytest.approx(
        in_half / 450e9
    )
    reduce = Collective("all-reduce", "tp", 1000)
    assert LINKS.seconds(reduce, Mesh(dp=16, tp=8), 2) == pytest.approx(
        2 * 2 * 1000 * 7 / 8 / 450e9
    )


def test_each_process_computes_its_share():
    # Products dominate: their FLOPs are shared exactly, so that an eighth is left on eight processes.
    one = compute_seconds(LLAMA, Mesh(), LEAST, "step", 2)
    for mesh in (Mesh(dp=8), Mesh(tp=8), Mesh(dp=4, tp=2)):
        eighth = compute_seconds(LLAMA, mesh, LEAST, "step", 2)
        for pass_ in (
            "forward",
            "backward",
        ):  # with whole activations beside a part of a weight
            assert one[pass_] / 8 <= eighth[pass_] < 1.02 * one[pass_] / 8
        assert eighth["optimizer"] == pytest.approx(one["optimizer"] / 8, rel=1e-3)


def test_data_parallel_collectives_hide_behind_all_but_one_of_the_layers():
    # Of 32 gathers of a block's weights and that of the norm, as long as the link makes them.
    for mesh, rate in ((Mesh(dp=2), 1e12), (Mesh(dp=2), 1e8), (Mesh(dp=2, tp=4), 1e12)):
        record = predicted(LLAMA, mesh, Links(rate), "forward")
        shorter, longer = sorted(
            (record["compute_seconds"] + record["tp_seconds"], record["dp_seconds"])
        )
        assert (longer == record["dp_seconds"]) == (rate == 1e8)
        assert record["seconds"] == pytest.approx(longer + shorter / 32)
    assert predicted(LLAMA, Mesh(tp=2), Links(1e9), "forward")["hidden_seconds"] == 0
    on_cpu = predicted(LLAMA, Mesh(dp=2), Links(1e12, overlap=False), "forward")
    assert on_cpu["seconds"] == pytest.approx(
        on_cpu["compute_seconds"] + on_cpu["dp_seconds"]
    )


def test_prediction_of_a_model_is_that_of_its_parts():
    record = predicted(LLAMA, Mesh(dp=2, tp=8), LINKS, "step")
    sbh = 8 * 8192 * 4096
    of_stream = 2 * sbh * 7 / 8 / 450e9
    assert record["tp_seconds"] == pytest.approx(
        2 * (4 * 32 + 1) * of_stream, rel=1e-3
    )  # the gains are small
    # 16 processes: 3 Psi of bfloat16 of an eighth of the weights, half of which the other machine has.
    assert record["dp_seconds"] == pytest.approx(
        3 * 2 * LLAMA.parameters / 8 / 2 / 50e9, rel=1e-3
    )
    assert record["state_bytes"] == pytest.approx(
        4 * 2 * LLAMA.parameters / 16, rel=1e-3
    )
    six_n_d = 6 * (LLAMA.parameters - 65 * 4096) * LLAMA.tokens
    attention = 3 * 32 * 4 * 4096 * 16 * 8192 * 8193 / 2
    assert LLAMA.costs("step").matmul_flops == six_n_d + attention
    assert record["mfu"] == pytest.approx(
        (six_n_d + attention) / 16 / 989e12 / record["seconds"]
    )


def test_vocabulary_adds_six_flops_a_weight_of_the_head_and_a_gather_of_both_tables():
    size, mesh, table = replace(LLAMA, vocab=128256), Mesh(dp=2, tp=8), 128256 * 4096
    assert size.parameters == 8_030_261_248  # as published
    assert (
        size.costs("train").matmul_flops - LLAMA.costs("train").matmul_flops
        == 6 * table * LLAMA.tokens
    )
    more, less = (predicted(each, mesh, LINKS, "step") for each in (size, LLAMA))
    assert more["state_bytes"] - less["state_bytes"] == 4 * 2 * 2 * table / 16
    # One gather and one scatter among 16 processes, half of them on the other machine.
    assert more["dp_seconds"] - less["dp_seconds"] == pytest.approx(
        2 * 2 * (2 * table / 8) / 2 / 50e9
    )
    # Along tp, the embedding scatters tokens and the head their gradients.
    of_stream = 2 * 8 * 8192 * 4096 * 7 / 8 / 450e9
    assert more["tp_seconds"] - less["tp_seconds"] == pytest.approx(2 * of_stream)
    products = 6 * table * LLAMA.tokens / 16 / 989e12
    # Beside the head: the logits once and the stream twice forward, twice and once back; tables and moments.
    logits, stream, rest = 8 * 8192 * 128256 / 8, 8 * 8192 * 4096 / 8, 128256 * 4096 / 8
    moved = 2 * (3 * logits + 3 * stream + rest + 7 * 2 * rest / 2)
    assert more["compute_seconds"] - less["compute_seconds"] == pytest.approx(
        products + moved / 3350e9, rel=1e-3
    )


def test_recomputing_costs_the_products_that_torch_repeats():
    size = Size(2, 6, 16, 4, 2, 4, 24)
    block, x = (
        size.build("cpu", torch.float32),
        torch.randn(2, 6, 16, requires_grad=True),
    )

    def flops(part, pass_, cost):
        return 0 if part == "attention" else cost.matmul_flops

    for recompute in (False, True):
        with FlopCounterMode(display=False) as counter:
            out = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
            out.sum().backward()
        predicted_flops = compute_seconds(size, Mesh(), flops, "train", 4, recompute)
        counted = counter.get_flop_counts()[
            "Global"
        ].items()  # later torch counts attention on a CPU, too
        assert sum(predicted_flops.values()) == sum(
            count for of, count in counted if "attention" not in str(of)
        )


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=8), Mesh(dp=2, tp=4)])
def test_profile_at_the_roofline_predicts_what_the_roofline_does(mesh):
    # Of a block without vocabulary, with other sizes of the batch: products by FLOPs, the rest by bytes.
    of_profile, model = (
        measured(profile_of(replace(LLAMA, batch_size=2, num_layers=None))),
        replace(LLAMA, vocab=128256),
    )
    seconds, least = (
        compute_seconds(model, mesh, price, "step", 2, recompute=True)
        for price in (of_profile, LEAST)
    )
    assert seconds == pytest.approx(least, rel=1e-3)
