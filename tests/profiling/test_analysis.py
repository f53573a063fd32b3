"""What is made of samples that are known."""

import math
from dataclasses import replace

import pytest
import torch
from lab.costs import adamw_cost
from lab.machine import Ceilings, Datasheet
from lab.sizes import Size
from lab.timing import Spread
from profiling.analysis import analyze

MACHINE = Ceilings(Spread(1e9, 1e9, 1e9, 1), Spread(1e8, 1e8, 1e8, 1), 1e9, 1024, 2**20)
ADAMW = ("AdamW", "optimizer")
SIZE = Size(
    batch_size=2, seq_len=5, d_model=12, num_heads=6, num_kv_heads=2, d_head=4, d_ff=20
)
STACK = replace(SIZE, num_layers=3)


def point(mode, size=SIZE, more=(), gpu=(), machine=MACHINE, sheet=None):
    """Return the figures of three rounds, with these seconds for each pass, unless `more` has other samples.

    Forward takes each part 1, 2 and 3 s, and backward twice that; the whole, 10, 20 and 30 times.
    """
    samples = {}
    for name, factor in [
        *((name, 1) for name in size.part_costs(4)),
        ("whole", 10),
        ("smallest", 0.5),
    ]:
        samples[name, "forward"] = [factor * t for t in (1.0, 2.0, 3.0)]
        if mode != "forward":
            samples[name, "train"] = [3 * factor * t for t in (1.0, 2.0, 3.0)]
    if mode == "step":
        samples |= {
            ("whole", "step"): [70.0] * 3,
            ("smallest", "step"): [7.0] * 3,
            ADAMW: [4.0, 5.0, 6.0],
        }
    idle = {"waited_share": 0.0, "others_share": 0.0}
    return analyze(
        samples | dict(more), dict(gpu), size, mode, torch.float32, machine, sheet, idle
    )


def test_analysis_takes_backward_from_the_difference_of_each_round():
    more = {
        ("ffn", "forward"): [1.0, 5.0, 2.0],
        ("ffn", "train"): [4.0, 6.0, 9.0],
        ("rope", "train"): [1.0, 2.0, 3.0],
    }
    parts = {part["name"]: part for part in point("train", more=more)["parts"]}
    assert parts["ffn"]["forward"]["seconds"]["median"] == 2.0
    assert parts["ffn"]["backward"]["seconds"] == {
        "median": 3.0,
        "p20": 1.8,
        "p80": 5.4,
        "samples": 3,
    }  # of 3, 1 and 7
    rope = parts["rope"]["backward"]  # to which the noise left no time
    assert (rope["flops_per_second"], rope["roofline_fraction"]) == (None, None)


def test_analysis_adds_up_the_parts_of_a_stack_once_a_layer():
    result = point("train", STACK)
    assert [part["count"] for part in result["parts"]] == [3] * 8 + [1]
    for pass_, seconds in (("forward", 2.0), ("backward", 4.0), ("train", 6.0)):
        assert result["sum_of_parts"][pass_]["seconds"]["median"] == 25 * seconds
        assert result["sum_of_parts"][pass_]["of_whole"] == {
            "median": 2.5,
            "p20": 2.5,
            "p80": 2.5,
            "samples": 3,
        }
        if pass_ != "train":
            assert math.isclose(
                sum(part[pass_]["share"] for part in result["parts"]), 1.0
            )
            assert result["whole"][pass_]["bytes"] == STACK.pass_cost(pass_, 4).bytes


def test_analysis_places_a_pass_under_the_roofline():
    parts = point(
        "forward", machine=replace(MACHINE, bytes_per_second=Spread(1e9, 1e9, 1e9, 1))
    )["parts"]
    for name, bound in (("ffn", "compute"), ("ln1", "memory")):
        record = next(part["forward"] for part in parts if part["name"] == name)
        cost = SIZE.part_costs(4)[name]["forward"]
        floor = max(cost.flops, cost.bytes) / 1e9
        assert (record["roofline_seconds"], record["roofline_fraction"]) == (
            floor,
            floor / 2.0,
        )
        assert (record["flops_per_second"], record["bound"]) == (
            cost.flops / 2.0,
            bound,
        )


def test_analysis_gives_mfu_of_both_attentions_and_both_peaks():
    costs = [cost for costs in SIZE.part_costs(4).values() for cost in costs.values()]
    causal, dense = (
        sum(getattr(cost, name) for cost in costs)
        for name in ("matmul_flops", "dense_matmul_flops")
    )
    assert causal < dense
    mfu = point("train", sheet=Datasheet(half=0, float32=4e9, bytes_per_second=1))[
        "mfu"
    ]
    assert mfu["causal"] == {
        "measured": causal / 60.0 / 1e9,
        "datasheet": causal / 60.0 / 4e9,
    }
    assert mfu["dense"] == {
        "measured": dense / 60.0 / 1e9,
        "datasheet": dense / 60.0 / 4e9,
    }
    assert point("train")["mfu"]["causal"]["datasheet"] is None


def test_analysis_of_a_step_has_the_optimizer():
    result = point("step")
    optimizer, train, step = (
        result["optimizer"],
        result["whole"]["train"],
        result["whole"]["step"],
    )
    assert optimizer["seconds"]["median"] == 5.0
    assert optimizer["bytes"] == adamw_cost(SIZE.parameters, 4).bytes
    assert step["bytes"] == train["bytes"] + optimizer["bytes"]
    assert step["roofline_seconds"] == pytest.approx(
        train["roofline_seconds"] + optimizer["roofline_seconds"]
    )
    passes = [
        part[pass_]["roofline_seconds"]
        for part in result["parts"]
        for pass_ in ("forward", "backward")
    ]
    assert train["roofline_seconds"] == pytest.approx(sum(passes))
    assert result["tokens_per_second"] == 10 / 70.0
    assert result["overhead"] == {
        "seconds": {"median": 7.0, "p20": 7.0, "p80": 7.0, "samples": 3},
        "share": 0.1,
    }


def losses(size=SIZE, smallest=0.0, machine=MACHINE, **lost):
    """Return the losses of a forward pass of 10 s in which these parts take so much longer than their least time."""
    costs = {name: cost["forward"] for name, cost in size.part_costs(4).items()}
    taken = {
        name: machine.seconds(cost.flops, cost.bytes) + lost.get(name, 0.0)
        for name, cost in costs.items()
    }
    more = {
        (name, "forward"): [time] * 3
        for name, time in (taken | {"whole": 10.0, "smallest": smallest}).items()
    }
    return point("forward", size, more, machine=machine)["losses"]


def test_analysis_names_the_three_parts_that_lose_most_against_the_roofline():
    found = losses(ln1=1.0, rope=4.0, ffn=2.0, attention=3.0)
    assert [loss["name"] for loss in found] == ["rope", "attention", "ffn"]
    assert [loss["seconds"] for loss in found] == pytest.approx([4.0, 3.0, 2.0])
    assert [loss["share"] for loss in found] == pytest.approx([0.4, 0.3, 0.2])
    cost = SIZE.part_costs(4)["rope"]["forward"]
    least = MACHINE.seconds(cost.flops, cost.bytes)
    assert found[0]["roofline_fraction"] == pytest.approx(least / (least + 4.0))
    assert losses(STACK, rope=1.0)[0]["seconds"] == pytest.approx(3.0)
    assert losses() == []


def test_analysis_tells_the_cause_of_a_loss_by_its_figures():
    many_tokens, one_token = (
        Size(1, 400, 64, 2, 2, 32, 64),
        Size(1, 1, 64, 2, 2, 32, 64),
    )
    slow_core = replace(
        MACHINE, flops_per_second=Spread(1e6, 1e6, 1e6, 1)
    )  # where even rope has to wait
    for cause, found in (
        ("products", losses(many_tokens, ffn=5.0)),
        ("weights", losses(one_token, ffn=5.0)),
        ("elementwise", losses(one_token, machine=slow_core, rope=5.0)),
        # The same calls without arithmetic take 8 s, each of the 8 parts 1 s: more than half of 1.9 s, not of 2.1 s.
        ("overhead", losses(many_tokens, ffn=1.9, smallest=8.0)),
        ("products", losses(many_tokens, ffn=2.1, smallest=8.0)),
    ):
        assert found[0]["cause"] == cause


def test_analysis_counts_backward_and_the_optimizer_among_the_losses():
    result = point("step", more={ADAMW: [40.0] * 3})
    optimizer, second, _ = result["losses"]
    assert (optimizer["name"], optimizer["cause"]) == ("AdamW", "elementwise")
    assert optimizer["seconds"] == pytest.approx(
        40.0 - result["optimizer"]["roofline_seconds"]
    )
    assert second["seconds"] == pytest.approx(
        6.0, abs=0.1
    )  # 2 s forward and 4 s backward, and little least time
    # Without arithmetic a step takes 7 s, and 3 s of them without the optimizer.
    for seconds, cause in ((7.9, "overhead"), (8.1, "elementwise")):
        assert point("step", more={ADAMW: [seconds] * 3})["losses"][0]["cause"] == cause


def test_analysis_judges_a_gpu_by_its_own_time_and_not_by_launches():
    gpu = {(name, "forward"): [0.001] for name in SIZE.part_costs(4)} | {
        ("ffn", "forward"): [1.5]
    }
    launches = {
        ("smallest", "forward"): [100.0] * 3
    }  # the host takes 12.5 s for a part
    result = point("forward", more=launches, gpu=gpu)
    assert result["parts"][-1]["forward"]["gpu_seconds"] == 1.5
    assert (result["losses"][0]["name"], result["losses"][0]["cause"]) == (
        "ffn",
        "weights",
    )  # and not overhead
    assert result["losses"][0]["seconds"] == pytest.approx(1.5, abs=0.01)
    assert point("forward")["parts"][-1]["forward"]["gpu_seconds"] is None
