"""What follows from times and ceilings that are known."""

from dataclasses import replace

import pytest
from lab.costs import adamw_cost
from lab.machine import Rates
from lab.sizes import Size
from lab.timing import Spread
from profiles import machine, point_of, profile_of, samples_of
from profiling.analysis import analyze, beats_ceilings, ceiling_too_low

MACHINE = machine(flops_per_second=1e9, bytes_per_second=1e8)
SIZE = Size(
    batch_size=2, seq_len=5, d_model=12, num_heads=6, num_kv_heads=2, d_head=4, d_ff=20
)
STACK = replace(SIZE, num_layers=3)


def made(mode="forward", size=SIZE, ceilings=MACHINE, seconds=1.0, smallest=0.5):
    """Return a profile in which the whole takes 10 s forward, and a part `seconds`."""
    samples = samples_of(size, mode, seconds=seconds, whole=10.0, smallest=smallest)
    return profile_of(point_of(size, samples), mode=mode, ceilings=ceilings)


def analysis_of(profile):
    return analyze(profile.points[0], profile)


def test_pass_has_its_place_under_the_roofline():
    profile = made(ceilings=machine(1e9, 1e9), seconds=2.0)
    analysis = analysis_of(profile)
    for part in profile.points[0].parts:
        cost = SIZE.part_costs(4)[part.name]["forward"]
        least = max(cost.flops, cost.bytes) / 1e9
        assert analysis.roofline_seconds[part.name] == {"forward": least}
        assert analysis.roofline_fraction(part, "forward") == least / 2.0


def test_roofline_of_the_whole_is_the_sum_of_its_parts():
    analysis = analysis_of(made("step", STACK))
    forward, backward = 0.0, 0.0
    for name, costs in STACK.part_costs(4).items():
        count = 1 if name == "final norm" else 3
        for pass_name, cost in costs.items():
            least = count * max(cost.flops / 1e9, cost.bytes / 1e8)
            forward += least if pass_name == "forward" else 0.0
            backward += least if pass_name == "backward" else 0.0
    update = adamw_cost(STACK.parameters, 4).bytes / 1e8
    whole = analysis.roofline_seconds["whole"]
    assert whole["forward"] == pytest.approx(forward)
    assert whole["train"] == pytest.approx(forward + backward)
    assert whole["step"] == pytest.approx(forward + backward + update)


def test_mfu_is_of_both_attentions_and_of_both_peaks():
    causal, dense = 0, 0
    for costs in SIZE.part_costs(4).values():
        for cost in costs.values():
            causal += cost.matmul_flops
            dense += cost.dense_matmul_flops
    assert causal < dense
    profile = replace(made("train"), datasheet=Rates(4e9, 1.0))
    analysis = analysis_of(profile)
    # Forward and backward take 30 s.
    assert analysis.mfu_measured.causal == pytest.approx(causal / 30.0 / 1e9)
    assert analysis.mfu_measured.dense == pytest.approx(dense / 30.0 / 1e9)
    assert analysis.mfu_datasheet.causal == pytest.approx(causal / 30.0 / 4e9)
    assert analysis.mfu_datasheet.dense == pytest.approx(dense / 30.0 / 4e9)
    assert analysis_of(made("train")).mfu_datasheet is None


def test_shares_are_of_the_passes_of_the_mode():
    analysis = analysis_of(made("step"))
    # Forward and backward take 30 s, and the update 10 s: 5 s in AdamW, and 5 s that no part accounts for.
    assert analysis.tokens_per_second == 10 / 40.0
    assert analysis.overhead_share == (3 * 0.5 + 1) / 40.0
    assert analysis.whole_minus_parts == pytest.approx(40.0 - 8 * 3.0 - 5.0)


def losses(size=SIZE, smallest=0.0, ceilings=MACHINE, **lost):
    """Return the losses of a forward pass of 10 s in which these parts take so much longer than their least time."""
    seconds = {}
    for name, costs in size.part_costs(4).items():
        least = ceilings.rates.seconds(costs["forward"].flops, costs["forward"].bytes)
        seconds[name] = least + lost.get(name, 0.0)
    profile = made("forward", size, ceilings, seconds, smallest)
    return analysis_of(profile).losses


def test_losses_are_the_three_parts_that_lose_most_against_the_roofline():
    found = losses(ln1=1.0, rope=4.0, ffn=2.0, attention=3.0)
    assert [loss.name for loss in found] == ["rope", "attention", "ffn"]
    assert [loss.seconds for loss in found] == pytest.approx([4.0, 3.0, 2.0])
    assert [loss.share for loss in found] == pytest.approx([0.4, 0.3, 0.2])
    cost = SIZE.part_costs(4)["rope"]["forward"]
    least = MACHINE.rates.seconds(cost.flops, cost.bytes)
    assert found[0].roofline_fraction == pytest.approx(least / (least + 4.0))
    assert losses() == ()


def test_losses_of_a_stack_count_each_layer():
    assert losses(STACK, rope=1.0)[0].seconds == pytest.approx(3.0)


MANY_TOKENS = Size(
    batch_size=1,
    seq_len=400,
    d_model=64,
    num_heads=2,
    num_kv_heads=2,
    d_head=32,
    d_ff=64,
)
ONE_TOKEN = replace(MANY_TOKENS, seq_len=1)


def test_cause_is_products_where_computing_bounds_them():
    assert losses(MANY_TOKENS, ffn=5.0)[0].cause == "products"


def test_cause_is_weights_where_few_tokens_share_them():
    assert losses(ONE_TOKEN, ffn=5.0)[0].cause == "weights"


def test_cause_is_elementwise_work_even_on_a_slow_core():
    slow_core = machine(flops_per_second=1e6, bytes_per_second=1e8)
    assert losses(ONE_TOKEN, ceilings=slow_core, rope=5.0)[0].cause == "elementwise"


def test_cause_is_overhead_below_twice_the_time_of_the_calls():
    # The same calls without arithmetic take 8 s, and each of the 8 parts 1 s of it.
    (loss,) = losses(MANY_TOKENS, smallest=8.0, ffn=1.9)
    assert loss.cause == "overhead"
    (loss,) = losses(MANY_TOKENS, smallest=8.0, ffn=2.1)
    assert loss.cause == "products"


def test_losses_count_backward_and_the_optimizer():
    found = analysis_of(made("step")).losses
    assert found[0].name == "AdamW"
    update = adamw_cost(SIZE.parameters, 4).bytes / 1e8
    assert found[0].seconds == pytest.approx(5.0 - update)
    # A step without arithmetic takes 2.5 s, and 1 s of it for AdamW: its 5 s are not overhead.
    assert found[0].cause == "elementwise"
    # 1 s forward and 2 s backward, and little least time.
    assert found[1].seconds == pytest.approx(3.0, abs=0.1)


def test_gpu_is_judged_by_its_own_time_and_not_by_launches():
    gpu = {("whole", "forward"): [9.0]}
    for name in SIZE.part_costs(4):
        gpu[name, "forward"] = [0.001]
    gpu["ffn", "forward"] = [1.5]
    # The host takes 100 s to launch the same calls without arithmetic.
    samples = samples_of(SIZE, "forward", seconds=1.0, whole=10.0, smallest=100.0)
    profile = profile_of(point_of(SIZE, samples, gpu), ceilings=MACHINE)
    analysis = analysis_of(profile)
    loss = analysis.losses[0]
    assert (loss.name, loss.cause) == ("ffn", "weights")
    assert loss.seconds == pytest.approx(1.5, abs=0.01)
    [ffn] = [part for part in profile.points[0].parts if part.name == "ffn"]
    forward = ffn.passes["forward"]
    assert analysis.roofline_fraction(ffn, "forward") == loss.roofline_fraction
    assert forward.flops_per_second == pytest.approx(forward.cost.flops / 1.5)


def fast_ffn(flops_per_second):
    """Return a profile in which the ffn reaches this rate."""
    cost = SIZE.part_costs(4)["ffn"]["forward"]
    seconds = dict.fromkeys(SIZE.part_costs(4), 1.0)
    seconds["ffn"] = cost.flops / flops_per_second
    return made(seconds=seconds)


def test_ceiling_that_a_part_beats_is_too_low_and_gives_no_percentages():
    profile = fast_ffn(78e9)
    expected = "forward of ffn at 10 tokens reaches 78.0 GFLOP/s, and the ceiling is 1.00 GFLOP/s"
    assert ceiling_too_low(profile) == expected
    analysis = analysis_of(profile)
    assert analysis.mfu_measured is None
    assert analysis.roofline_seconds is None
    assert analysis.losses == ()
    assert analysis.roofline_fraction(profile.points[0].whole, "forward") is None
    assert ceiling_too_low(fast_ffn(0.99e9)) is None


def test_ceiling_is_not_too_low_for_samples_that_vary():
    profile = fast_ffn(1.2e9)
    assert ceiling_too_low(profile) is not None
    varying = Spread(1e9, 0.8e9, 1.3e9, 7)
    ceilings = replace(profile.ceilings, flops_per_second=varying)
    assert ceiling_too_low(replace(profile, ceilings=ceilings)) is None


def test_part_whose_data_fit_into_a_cache_may_beat_the_memory():
    cost = SIZE.part_costs(4)["rope"]["forward"]
    seconds = dict.fromkeys(SIZE.part_costs(4), 1.0)
    seconds["rope"] = cost.bytes / 5e8
    profile = made(seconds=seconds)
    assert cost.bytes < profile.ceilings.copy_bytes
    assert ceiling_too_low(profile) is None
    assert beats_ceilings(profile)
    assert not beats_ceilings(made())
    # A copy of less than that does not fit into a cache, either.
    small_cache = replace(profile.ceilings, copy_bytes=cost.bytes)
    too_low = ceiling_too_low(replace(profile, ceilings=small_cache))
    expected = (
        "forward of rope at 10 tokens reaches 500 MB/s, and the ceiling is 100 MB/s"
    )
    assert too_low == expected


def test_backward_that_noise_makes_short_shows_nothing_about_ceilings():
    samples = samples_of(SIZE, "train", seconds=1.0, whole=10.0, smallest=0.5)
    samples["ffn", "train"] = [1.0 + 1e-9] * 5
    profile = profile_of(point_of(SIZE, samples), mode="train", ceilings=MACHINE)
    assert ceiling_too_low(profile) is None
    assert not beats_ceilings(profile)
