"""The bytes of collectives, against the formulas of the papers. That these calls are made, tests/parallelize counts."""

import pytest
from lab.sizes import Size
from profiling.collectives import Collective, Mesh, collectives_of

SIZE = Size(batch_size=8, seq_len=32, d_model=64, num_heads=8, num_kv_heads=4, d_head=8, d_ff=192, num_layers=3)


def moved(calls, axis, processes):
    return sum(count * call.moved(processes) for call, count in calls.items() if call.axis == axis)


def test_tensor_parallelism_moves_what_four_all_reduces_a_layer_do():
    # Korthikanti et al., section 4.2.2: sequence parallelism moves as many bytes as Megatron's all-reduces of s b h, of
    # which a layer has two each way. The output's gather, and that of the input's gradient, are beside.
    calls = collectives_of(SIZE, Mesh(tp=4))
    sbh = 32 * 8 * 64
    all_reduce = 2 * sbh * (4 - 1) / 4
    large = {pass_: {c: n for c, n in counter.items() if c.kind != "all-reduce"} for pass_, counter in calls.items()}
    for counter in large.values():
        assert moved(counter, "tp", 4) == 3 * 2 * all_reduce + sbh * 3 / 4
    small = {call: count for call, count in calls["backward"].items() if call.kind == "all-reduce"}
    assert small == {Collective("all-reduce", "tp", 64): 7}  # two norms a block, and the last
    again = collectives_of(SIZE, Mesh(tp=4), recompute=True)["backward"] - calls["backward"]
    assert again == {Collective("all-gather", "tp", sbh): 2 * 3, Collective("reduce-scatter", "tp", sbh): 3}


def test_fsdp_moves_three_times_the_weights_and_hsdp_a_sum_of_its_shard():
    # Rajbhandari et al., section 7: 3 Psi for each process, of which the last norm is not gathered again.
    mesh = Mesh(dp_replicate=2, dp=4)
    calls = collectives_of(SIZE, mesh)
    psi, of_norm = SIZE.parameters, 64
    in_all = sum(moved(counter, "dp", 4) for counter in calls.values())
    assert in_all == (3 * psi - of_norm) * (4 - 1) / 4
    assert moved(calls["backward"], "dp_replicate", 2) == 2 * (psi / 4) / 2  # an all-reduce over two processes


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (Mesh(dp=3), "batch of 8 does not split over dp=3: use a multiple of 3"),
        (Mesh(tp=8), "num_kv_heads=4 is not a multiple of tp=8"),
        (Mesh(dp_replicate=2), "use dp alone"),
        (Mesh(tp=0), "at least 1 process"),
    ],
)
def test_mesh_refuses_what_does_not_split(mesh, message):
    with pytest.raises(ValueError, match=message):
        mesh.require(SIZE)
