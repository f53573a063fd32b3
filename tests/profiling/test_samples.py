"""The records that are made of samples."""

from dataclasses import replace

import pytest
from lab.costs import adamw_cost
from lab.sizes import Size
from lab.timing import Spread
from profiles import point_of, samples_of

SIZE = Size(
    batch_size=2, seq_len=5, d_model=12, num_heads=6, num_kv_heads=2, d_head=4, d_ff=20
)
STACK = replace(SIZE, num_layers=3)


def test_backward_is_the_difference_of_each_round():
    samples = samples_of(SIZE, "train", 1.0, whole=10.0, smallest=0.5, rounds=3)
    samples["ffn", "forward"] = [1.0, 5.0, 2.0]
    samples["ffn", "train"] = [4.0, 6.0, 9.0]
    samples["rope", "train"] = [0.9, 1.1, 1.1]
    parts = {part.name: part.passes for part in point_of(SIZE, samples).parts}
    assert parts["ffn"]["forward"].seconds.median == 2.0
    # Of 3, 1 and 7.
    assert parts["ffn"]["backward"].seconds == Spread(3.0, 1.8, 5.4, 3)
    # Where noise leaves no time to some of the differences, there is no rate.
    assert parts["rope"]["backward"].seconds.median > 0
    assert parts["rope"]["backward"].flops_per_second is None
    assert parts["ln1"]["backward"].flops_per_second is not None


def test_parts_of_a_stack_add_up_once_a_layer():
    samples = samples_of(STACK, "train", seconds=2.0, whole=20.0, smallest=0.5)
    point = point_of(STACK, samples)
    # Three layers of 8 parts, and the final norm.
    assert [part.count for part in point.parts] == [3] * 8 + [1]
    number_of_parts = 3 * 8 + 1
    for name, seconds in (("forward", 2.0), ("backward", 4.0), ("train", 6.0)):
        total = point.sum_of_parts[name]
        assert total.seconds.median == number_of_parts * seconds
        # In the forward pass, 25 parts of 2 s beside a whole of 20 s.
        assert total.of_whole == Spread(median=2.5, p20=2.5, p80=2.5, samples=5)


def test_sums_of_parts_are_those_of_each_round():
    samples = samples_of(SIZE, "forward", 1.0, whole=1.0, smallest=0.5, rounds=3)
    samples["ln1", "forward"] = [1.0, 2.0, 3.0]
    samples["ffn", "forward"] = [3.0, 2.0, 1.0]
    samples["whole", "forward"] = [10.0, 5.0, 2.5]
    sums = point_of(SIZE, samples).sum_of_parts["forward"]
    assert sums.seconds == Spread(10.0, 10.0, 10.0, 3)
    assert sums.of_whole.median == 2.0


def test_costs_of_the_whole_are_those_of_its_passes():
    samples = samples_of(STACK, "step", seconds=1.0, whole=10.0, smallest=0.5)
    point = point_of(STACK, samples)
    passes, optimizer = point.whole.passes, point.optimizer
    for name in ("forward", "backward"):
        assert passes[name].cost == STACK.pass_cost(name, 4)
    for name in ("train", "step"):
        assert passes[name].cost == STACK.costs(name, 4)
    assert optimizer.passes["optimizer"].cost == adamw_cost(STACK.parameters, 4)
    assert optimizer.passes["optimizer"].seconds.median == 5.0


def test_gpu_has_times_of_its_own():
    samples = samples_of(SIZE, "train", seconds=1.0, whole=10.0, smallest=0.5)
    gpu = {("ffn", "forward"): [0.25, 0.5], ("ffn", "train"): [1.0, 1.0]}
    ffn = point_of(SIZE, samples, gpu).parts[-1]
    assert ffn.passes["forward"].gpu_seconds.median == pytest.approx(0.375)
    assert ffn.passes["forward"].own_seconds == pytest.approx(0.375)
    # Train minus forward.
    assert ffn.passes["backward"].own_seconds == pytest.approx(1.0 - 0.375)
    assert point_of(SIZE, samples).parts[-1].passes["forward"].own_seconds == 1.0
