"""Every figure of the report, calculated by hand from a clock that operations advance."""

import copy
import dataclasses
import gc
import itertools
import re
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lab.sizes import Size
from lab.timing import Spread
from profiling import roofline
from profiling.kernels import Kernel, Recording
from profiling.measure import is_shown, left_over, measure, total
from profiling.memory import Memory
from profiling.parts import PartTime, Stopwatch
from profiling.report import kernel_table, report
from profiling.roofline import Operation, Rates, Row
from profiling.subject import Settings
from profiling.times import Times
from profiling.work import seconds_of_a_call
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

CPU = torch.device("cpu")


class Clock(TorchDispatchMode):
    """A matmul takes a tick, an update of AdamW 1.75 s, and everything else no time."""

    def __init__(self, tick, growth):
        super().__init__()
        self.now, self.tick, self.growth = 0.0, tick, growth

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._overloadpacket.__name__
        if name in ("mm", "addmm"):
            self.now += self.tick
            self.tick *= self.growth
        if name == "addcdiv_":
            self.now += 1.75
        return function(*args, **(kwargs or {}))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8, bias=False)
        self.down = nn.Linear(8, 4, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, count=2):
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(count)])
        self.register_buffer("table", torch.zeros(100))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return {"x": x}


def cells(text):
    """Return the rows of the report's table, by name and column."""
    [table] = [part for part in text.split("\n\n") if part.startswith("part ")]
    header, *lines = table.splitlines()
    columns = re.split(" {2,}", header)
    ends = [header.index(column) + len(column) for column in columns]
    rows = {}
    for line in lines:
        name = re.split(" {2,}", line)[0]
        starts = [len(name), *ends[1:]]
        places = zip(columns[1:], starts, ends[1:], strict=False)
        rows[name] = {column: line[start:end].strip() for column, start, end in places}
    return rows


@pytest.fixture(scope="module")
def profile(rates):
    """Return a function that measures a model by the clock of its operations."""

    def run(build=Stack, mode="train", tick=1.0, growth=1.0, **options):
        clock = Clock(tick, growth)
        settings = Settings(CPU, torch.float32, mode, rounds=3, **options)
        with pytest.MonkeyPatch.context() as patch:
            rates(patch, 50.0, 100.0, 1e3)
            for module in ("lab.timing", "profiling.parts", "profiling.work"):
                patch.setattr(f"{module}.clock", lambda: clock.now)
            with torch.set_grad_enabled(settings.train), clock:
                return measure(lambda *_: build(), (2, 5, 4), "stack", settings)

    return run


@pytest.fixture(scope="module")
def step(profile):
    """Return the profile of the stack's training step. Tests do not change it."""
    return profile(mode="step")


@pytest.fixture(scope="module")
def measured_once(profile):
    return profile()


@pytest.fixture
def measured(measured_once):
    """Return the profile of the stack's forward and backward, for one test."""
    return copy.deepcopy(measured_once)


def part(measured, name):
    rows = {row.name: row for row in measured.rows}
    assert name in rows, f"no row {name}, only {list(rows)}"
    return rows[name]


def operations(row):
    return {each.name: (each.calls, each.total_s) for each in row.operations}


# --- All figures of one model ---------------------------------------------------------

# Each projection has 10 tokens and 4 x 8 weights, in 2 layers, and 3 products.
PRODUCT = 2 * 10 * 4 * 8


def test_row_of_a_projection(step):
    assert cells(report(step))["layers.*.up"] == {
        "calls": "2",
        # In each layer, a product in forward and two in backward, and 10 views.
        "ops": str(2 * (3 + 10)),
        "params": "64",
        "forward ms": "2000",
        "total ms": "6000",
        "share": "31.6%",
        # 3,840 FLOPs take 76.8 s at 50 FLOP/s.
        "roofline": "1280%",
        "limit": "compute",
        "kept": "320 B",
    }
    assert part(step, "layers.*.up").modules == 2


def test_rows_stand_in_the_order_of_forward(step):
    rows = cells(report(step))
    names = ["layers.*.up", "layers.*.down", "layers.*", "AdamW", "rest", "total"]
    assert list(rows) == names


def test_row_of_the_total(step):
    row = cells(report(step))["total"]
    assert row["calls"] == "7"  # of the stack, 2 layers, and 4 projections
    assert row["ops"] == str(sum(row.ops for row in step.rows))
    assert row["params"] == "128"
    assert (row["forward ms"], row["total ms"], row["share"]) == (
        "4000",
        "19000",
        "100%",
    )
    assert (row["limit"], row["kept"]) == ("", "960 B")
    assert step.whole.moved_bytes == sum(row.moved_bytes for row in step.rows)
    least = sum(row.least_s for row in step.rows)
    assert step.whole.of_roofline == pytest.approx(least / 19)
    assert step.whole.flops == {"float32": 12 * PRODUCT}


def test_row_of_adamw(step):
    row = cells(report(step))["AdamW"]
    assert (row["forward ms"], row["total ms"]) == ("0", "7000")  # 4 weights
    counters = 4 * 4  # bytes: a number of steps for each weight
    # It reads weights, gradients and two states of 512 bytes, and writes three of them.
    assert part(step, "AdamW").moved_bytes == 7 * 512 + 2 * counters
    assert part(step, "AdamW").flops == {}


def test_rest_of_each_round_is_what_the_rows_leave():
    rows = [Row("up"), Row("down")]
    taken = [{"up": PartTime(2.0), "down": PartTime(3.0), "outside": PartTime(9.0)}]
    assert Times([6.0], taken, {}).rest(rows) == [1.0]


def test_time_of_a_part_is_the_median_of_its_rounds():
    times = [(1.0, 0.5), (4.0, 3.0), (2.0, 1.0)]
    taken = [{"up": PartTime(total, forward)} for total, forward in times]
    row = Row("up")
    Times([], taken, {}).set_on(row)
    assert (row.total_s, row.forward_s) == (2.0, 1.0)
    # A fifth of the way up is 0.4 of the way from 1 to 2.
    assert row.p20_s == pytest.approx(1.4)
    assert row.varies == pytest.approx((3.2 - 1.4) / 2)


def test_parts_add_up_to_the_total(step):
    assert part(step, "rest").total_s == 0
    assert sum(row.total_s for row in step.rows) == step.whole.total_s == 19


def test_summary(step):
    assert step.tokens == 10
    text = report(step)
    assert "Time: 19.0 s (p20 to p80: 19.0 s to 19.0 s), 526 m tokens/s, " in text
    assert "matmul 50.0 FLOP/s, memory copy 100 B/s, " in text
    assert "an operation on one number 1.00 ms\n" in text
    # 7,680 FLOPs take 153.6 of 19 s.
    assert "MFU: 808% of the matmul rate" in text


def test_views_add_no_overhead(profile_of):
    """Three products, and two views."""

    class Views(nn.Module):
        def forward(self, x):
            return (2 * x.view(8, 1) * 3 * 4).view(2, 4)

    measured = profile_of(Views(), (1, 2, 4), mode="forward")
    assert (measured.whole.ops, measured.whole.computations) == (5, 3)
    assert measured.whole.overhead_s == pytest.approx(3e-9)
    assert "calling 3 operations besides views takes at least" in report(measured)


def test_memory(step):
    counters = 4 * 4
    memory = step.memory
    assert (memory.parameter_bytes, memory.gradient_bytes) == (512, 512)
    assert (memory.buffer_bytes, memory.other_tensor_bytes) == (400, 0)
    assert memory.adamw_bytes == 2 * 512 + counters
    held = 512 + 400 + 1024 + counters + 160
    # Gradients of weights, what is kept, and at most two of the gradients on the way.
    assert 0 <= memory.peak_bytes - held - 512 - 960 <= 2 * 320
    text = " ".join(report(step).split())
    assert "parameters 512 B, buffers 400 B, other tensors 0 B, gradients 512 B" in text
    assert "AdamW 1.04 kB, kept for backward 960 B" in text


def test_summary_has_median_and_percentiles_of_the_time(measured):
    measured.took_s = Spread(median=5.0, p20=4.0, p80=7.0)
    assert "Time: 5.00 s (p20 to p80: 4.00 s to 7.00 s), " in report(measured)


def test_summary_has_each_size_of_memory(measured):
    measured.whole.kept_bytes = 7000
    measured.memory = Memory(
        peak_bytes=1000,
        parameter_bytes=2000,
        buffer_bytes=3000,
        other_tensor_bytes=4000,
        gradient_bytes=5000,
        adamw_bytes=6000,
    )
    assert (
        "Memory: peak 1.00 kB, parameters 2.00 kB, buffers 3.00 kB, "
        "other tensors 4.00 kB, gradients 5.00 kB, AdamW 6.00 kB, "
        "kept for backward 7.00 kB "
    ) in " ".join(report(measured).split())


def test_long_lines_are_wrapped_for_a_terminal(measured):
    measured.whole.unknown = [f"library.operation_{i}" for i in range(20)]
    lines = report(measured).splitlines()[1:]  # the first names the machine
    assert max(map(len, lines)) <= 120
    assert any("operation_19" in line for line in lines)


def test_machine_and_title(step):
    text = report(step)
    assert f"threads, {torch.backends.cpu.get_cpu_capability()}; " in text
    assert f"; torch {torch.__version__}, python " in text
    assert "\nstack; float32, step, eager, training mode\n" in text


# --- Passes ---------------------------------------------------------------------------


def test_forward_alone_has_no_backward(profile):
    measured = profile(mode="forward", tick=1e-3)  # several runs in each sample
    rows = cells(report(measured))
    assert rows["total"]["total ms"] == rows["total"]["forward ms"] == "4.00"
    assert rows["layers.*.up"]["total ms"] == "2.00"
    assert part(measured, "layers.*.up").flops == {"float32": 2 * PRODUCT}
    assert {row["kept"] for row in rows.values()} == {""}


def test_forward_measures_eval_mode_and_others_the_model_as_built(profile):
    for mode, built, expected in (
        ("forward", Stack().train(), "eval"),
        ("train", Stack().train(), "training"),
        ("train", Stack().eval(), "eval"),
    ):
        title = profile(lambda built=built: built, mode=mode).title
        assert title == f"stack; float32, {mode}, eager, {expected} mode"


def test_backward_belongs_to_the_part_that_computed_forward(profile):
    class Gate(Layer):
        def forward(self, x):
            gate = self.up(x) @ self.down.weight.T  # before the call of another part
            out = (gate * self.down(self.up(x))) @ self.down.weight
            return out, x.sum()  # backward starts at the first

    rows = cells(report(profile(Gate)))
    taken = {name: row["total ms"] for name, row in rows.items()}
    assert taken["up"] == taken["sums"] == "6000"  # two matmuls each
    assert taken["down"] == "3000"


def test_part_without_operations_is_a_row_if_it_takes_time(profile_of):
    class Waits(nn.Module):
        def forward(self, x):
            time.sleep(0.02)
            return x

    model = nn.Sequential(Waits(), nn.Linear(4, 4))
    row = part(profile_of(model, (2, 5, 4), "forward"), "0")
    assert (row.calls, row.operations, row.limit) == (1, [], "Python")
    assert row.total_s > 0.01


@pytest.mark.parametrize(("seconds", "shown"), [(0.011, True), (0.009, False)])
def test_part_without_operations_is_shown_from_1_percent_on(seconds, shown):
    assert is_shown(Row("part", total_s=seconds), total_s=1.0) == shown
    called = Row("part", total_s=seconds, operations=[Operation("add", 1)])
    assert is_shown(called, total_s=1.0)


class SlowToRelease:
    def __del__(self):
        time.sleep(0.05)


class KeepsUntilTheGraphGoes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.kept = SlowToRelease()
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


@pytest.mark.parametrize("mode", ["train", "step"])
def test_release_of_the_graph_is_in_the_rest_and_in_no_part(mode, profile_of):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(4, 4)

        def forward(self, x):
            return KeepsUntilTheGraphGoes.apply(self.project(x))

    rows = profile_of(Model(), (2, 5, 4), mode).rows
    taken = {row.name: row.total_s for row in rows}
    assert taken.pop("rest") > 0.04
    assert max(taken.values()) < 0.04


def test_total_of_a_compiled_model_is_its_own_time(profile_of, monkeypatch):
    def compiled(model, dynamic):
        def run(x):
            time.sleep(0.02)
            return model(x)

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    measured = profile_of(nn.Linear(4, 4), (2, 5, 4), "forward", compile=True)
    assert measured.whole.total_s > 0.02
    assert part(measured, "sums").total_s < 0.02


def test_compiled_model_has_fixed_sizes(profile_of, monkeypatch):
    asked = []

    def compiled(model, **options):
        asked.append(options)
        return model

    monkeypatch.setattr(torch, "compile", compiled)
    profile_of(nn.Linear(4, 4), (2, 5, 4), "forward", compile=True)
    assert asked == [{"dynamic": False}]


@pytest.mark.parametrize(
    ("mode", "parts", "expected"),
    [
        ("train", [2.0, 1.0], 3.0),
        ("train", [4.0, 3.0], 5.0),
        ("forward", [2.0, 1.0], 5.0),
    ],
    ids=["the sum of the parts", "parts above the total", "all of a forward pass"],
)
def test_forward_of_the_total_is_at_most_the_total(mode, parts, expected):
    settings = Settings(CPU, torch.float32, mode)
    subject: Any = SimpleNamespace(settings=settings, weights=[])
    rows = [Row("part", forward_s=forward) for forward in parts]
    whole = total(rows, Spread(5.0, 5.0, 5.0), RATES, subject, parts_are_eager=False)
    assert whole.forward_s == expected


# --- What a part does -----------------------------------------------------------------


def test_operations_of_a_part_have_calls_and_times(measured):
    assert operations(part(measured, "layers.*.up"))["mm"] == (6, 6.0)
    ran = operations(part(measured, "layers.*"))
    assert ran["relu"] == ran["threshold_backward"] == (2, 0.0)
    assert operations(measured.whole)["mm"] == (12, 12.0)
    for row in (part(measured, "layers.*.up"), measured.whole):
        assert row.operations[0].name == "mm"  # the slowest, after views


def test_operations_are_what_the_model_calls_in_all_passes(profile_of):
    class Sine(nn.Module):
        def forward(self, x):
            return x.sin()

    whole = profile_of(Sine(), (2, 5, 4)).whole
    # Keeping x for backward is none.
    assert {each.name: each.calls for each in whole.operations} == {
        "sin": 1,
        "cos": 1,
        "mul": 1,
    }


def test_module_that_forward_makes_belongs_to_its_caller(profile_of):
    class Makes(nn.Module):
        def forward(self, x):
            return nn.ReLU()(x)

    assert "relu" in operations(part(profile_of(Makes(), (2, 5, 4)), "sums"))


def test_moved_bytes_are_what_a_part_reads_from_others_and_leaves_to_them(measured):
    # Forward moves x, weights and the result, 160 + 128 + 320 bytes; backward reads the
    # gradient (320), saved x and weight (288), and the gradient from the sum (160), and
    # writes two gradients (288).
    assert part(measured, "layers.*.up").moved_bytes == 2 * 1664


def test_parts_of_a_tensor_are_read_once_each(profile_of):
    class Halves(nn.Module):
        def forward(self, x):
            return x[..., :2] * x[..., 2:]

    row = part(profile_of(Halves(), (2, 5, 4), "forward"), "sums")
    assert row.moved_bytes == 160 + 80  # x, and a result of half its size


def test_slice_is_read_without_the_rest_and_an_expanded_tensor_once(profile_of):
    class Token(nn.Module):
        def forward(self, x):
            return x[:, :1] * x[0, 0, 0].expand(2, 1, 4)

    row = part(profile_of(Token(), (2, 5, 4), "forward"), "sums")
    assert row.moved_bytes == 32 + 4 + 32  # two tokens, a number, and the result


def test_views_move_nothing_and_changes_in_place_read_and_write(profile):
    stack = [nn.Unflatten(-1, (2, 2)), nn.Flatten(-2), Layer(), nn.ReLU(inplace=True)]
    measured = profile(lambda: nn.Sequential(*stack))
    moved = {row.name: row.moved_bytes for row in measured.rows}
    # Backward reads two tensors of 160 bytes, and writes one.
    assert (moved["0"], moved["1"], moved["3"]) == (0, 0, 5 * 160)


def test_lookup_moves_the_rows_that_it_takes(profile_of):
    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(1000, 4)

        def forward(self, x):
            return self.table(torch.arange(3))

    measured = profile_of(Lookup(), (2, 5, 4), "forward")
    # 3 positions of 8 bytes; three rows of 16 bytes are read and written.
    assert part(measured, "table").moved_bytes == 3 * 8 + 2 * 3 * 16


def test_what_is_overwritten_is_not_read(profile_of):
    class Cache(nn.Module):
        def __init__(self):
            super().__init__()
            self.kept: torch.Tensor
            self.register_buffer("kept", torch.zeros(2, 5, 4))

        def forward(self, x):
            self.kept.zero_()
            self.kept.fill_(1.0)
            self.kept.copy_(x)
            return x * 1

    measured = profile_of(Cache(), (2, 5, 4), "forward")
    # The part reads x once, and writes the buffer and the result.
    assert part(measured, "sums").moved_bytes == 3 * 160
    traffic = {each.name: each.moved_bytes for each in measured.whole.operations}
    assert traffic == {"zero_": 160, "fill_": 160, "copy_": 320, "mul": 320}


def test_overlapping_windows_are_read_once(profile_of):
    class Windows(nn.Module):
        def forward(self, x):
            return x.unfold(1, 3, 1) * 2  # 3 windows of 3 tokens

    [row, _] = profile_of(Windows(), (2, 5, 4), "forward").rows
    assert row.operation("mul").moved_bytes == 160 + 2 * 3 * 3 * 16


def test_traffic_counts_what_operations_move_between_them(profile_of):
    class Twice(nn.Module):
        def forward(self, x):
            return (x + 1) * 2

    row = part(profile_of(Twice(), (2, 5, 4), "forward"), "sums")
    assert row.moved_bytes == 2 * 160
    assert row.traffic_s == pytest.approx(4 * 160 / 1e9)  # at 1 GB/s


def test_noting_a_run_keeps_no_result_alive(profile_of):
    results = []

    class Unused(nn.Module):
        def forward(self, x):
            y = x.exp()  # autograd keeps it, and no backward releases it
            results.append(weakref.ref(y))
            return 2 * x

    gc.disable()  # it would release what only a cycle keeps
    try:
        profile_of(Unused(), (2, 5, 4))
    finally:
        gc.enable()
    assert [result() for result in results] == [None] * len(results)


def test_kept_tensors_count_in_the_first_part_that_keeps_them(measured):
    # relu keeps its result, which down keeps, too.
    assert part(measured, "layers.*").kept_bytes == 640
    assert part(measured, "layers.*.down").kept_bytes == 0


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_checkpointing_keeps_the_inputs_of_its_layers(reentrant, profile):
    class Checkpointed(Stack):
        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    assert profile(Checkpointed).whole.kept_bytes == 2 * 160


TABLE = torch.ones(1000, 4)


class WithTables(nn.Module):
    """Multiplies by tensors that are neither parameters nor buffers."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.table = torch.ones(100, 4)
        self.nested = {"tables": [torch.ones(10, 4)]}

    def forward(self, x):
        x = x * self.table[:5] * self.nested["tables"][0][:5]
        return x * self.scale * TABLE[:5]


def test_tables_in_attributes_are_held_and_not_kept(profile_of):
    measured = profile_of(WithTables(), (2, 5, 4))
    assert measured.memory.other_tensor_bytes == (100 + 10 + 1000) * 16
    assert measured.memory.peak_bytes > (100 + 10 + 1000) * 16
    # What is multiplied by the scale; the rest needs no gradient, or is a table.
    assert measured.whole.kept_bytes == 160


def test_tensor_that_forward_makes_from_numbers_is_made_in_the_run(profile_of):
    class Scales(nn.Module):
        def forward(self, x):
            return x * torch.tensor([1.0, 2.0, 3.0, 4.0])

    measured = profile_of(Scales(), (2, 5, 4))
    assert measured.memory.other_tensor_bytes == 0
    assert measured.whole.kept_bytes == 16


@pytest.mark.parametrize(("count", "text"), [(999, "999"), (1000, "1.00 k")])
def test_parameters_have_a_prefix_from_a_thousand_on(count, text, measured):
    measured.rows[0].parameters = count
    assert cells(report(measured))["layers.*.up"]["params"] == text


def test_shared_weight_counts_once(profile):
    class Tied(Layer):
        def __init__(self):
            super().__init__()
            self.again = nn.Linear(4, 8, bias=False)
            self.again.weight = self.up.weight

        def forward(self, x):
            return self.down(self.again(x)) + super().forward(x)

    measured = profile(Tied)
    assert (part(measured, "up").parameters, part(measured, "again").parameters) == (
        32,
        0,
    )
    assert measured.whole.parameters == 64


def test_weights_that_forward_does_not_use_are_parameters_of_the_total(profile):
    class Unused(Layer):
        def __init__(self):
            super().__init__()
            self.spare = nn.Linear(4, 8, bias=False)

    measured = profile(Unused)
    assert sum(row.parameters for row in measured.rows) == 64
    assert measured.whole.parameters == 96


# --- The machine, and what follows ----------------------------------------------------


def test_rates_count_two_flops_per_product_and_two_bytes_per_copy(monkeypatch):
    monkeypatch.setattr(roofline, "wall_sampler", lambda run: lambda: 1.0)
    with torch.no_grad():
        samplers = roofline.rate_samplers(CPU, [torch.float32, torch.bfloat16])
    assert samplers["matmul float32"]() == 1 / (2 * 1024**3)
    assert samplers["matmul bfloat16"]() == 1 / (2 * 1024**3)
    assert samplers["memory copy"]() == 1 / (2 * 2**27)
    assert samplers["an operation on one number"]() == 1 / 100
    with torch.enable_grad():
        samplers = roofline.rate_samplers(CPU, [])
    assert samplers["an operation on one number"]() == 1 / 200


def test_rate_of_the_dtype_is_measured_also_for_a_model_without_products(profile_of):
    measured = profile_of(nn.ReLU(), (2, 5, 4), "forward")
    assert list(measured.rates.flops_per_s) == ["float32"]


def test_rates_are_the_medians_of_the_samples():
    samples = {
        "matmul float32": [0.5, 0.1, 0.2],
        "matmul bfloat16": [0.1, 0.1, 0.1],
        "memory copy": [1.0, 2.0, 4.0],
        "an operation on one number": [0.25, 0.25, 0.5],
    }
    rates = Rates.of(samples)
    assert rates == Rates({"float32": 5.0, "bfloat16": 10.0}, 0.5, 4.0)


def test_each_dtype_is_compared_with_its_own_rate():
    row = Row("a part", flops={"float32": 100, "bfloat16": 100}, total_s=20.0)
    row.compare(Rates({"float32": 10.0, "bfloat16": 50.0}, 1.0, 1.0), on_gpu=False)
    assert row.compute_s == 10 + 2
    assert row.flops_per_s == 10


RATES = Rates({"float32": 100.0}, 10.0, 1.0)  # FLOPs, bytes, and calls per second
# Each row takes 10 s. What takes 5 s is its limit.
LIMITS: dict[str, dict[str, Any]] = {
    "compute": {"flops": {"float32": 500}},
    "memory": {"moved_bytes": 50},
    "overhead": {"operations": [Operation("add", 5, 9.0, 1), Operation("view", 3)]},
    "Python": {"operations": [Operation("add", 1, 5.0)]},
    "traffic": {"operations": [Operation("add", 1, 9.0, moved_bytes=50)]},
    "kernel": {
        "flops": {"float32": 499},
        "moved_bytes": 49,
        "operations": [Operation("add", 4, 5.1, moved_bytes=49)],
    },
}
REASONS = {
    "compute": "Computing takes 50% of the time.",
    "memory": "Reading and writing 50.0 B takes 50% of the time.",
    "overhead": "Calling 5 operations besides views takes at least 50% of the time.",
    "Python": "Python, autograd and calls take 50% of the time.",
    "traffic": "Its operations read and write 50.0 B (add 50.0 B), which takes 50% of the "
    "time, where 0 B must be moved.",
    "kernel": "Its operations are slow. At the machine's rates, FLOPs take 50% of the time, "
    "and all that they read and write (49.0 B) takes 49% of the time.",
}


@pytest.fixture
def with_row(measured):
    """Return a function that replaces the rows of a profile by one row and the rest."""

    def replace(**figures):
        figures = {"operations": [Operation("add", 1, 9.0)]} | figures
        row = Row("part", total_s=10.0, p20_s=10.0, **figures)
        row.compare(RATES, on_gpu=False)
        return row, dataclasses.replace(measured, rows=[row, measured.rows[-1]])

    return replace


@pytest.mark.parametrize("limit", LIMITS)
def test_limit_and_advice_name_what_takes_half_of_the_time(limit, with_row):
    row, measured = with_row(**LIMITS[limit])
    assert row.limit == limit
    assert REASONS[limit] in " ".join(report(measured).split())


@pytest.mark.parametrize(("varies", "doubtful"), [(0.49, False), (0.51, True)])
def test_reason_of_a_time_that_varies_by_half_is_doubtful(varies, doubtful, with_row):
    _, measured = with_row(varies=varies, **LIMITS["compute"])
    text = " ".join(report(measured).split())
    doubt = (
        "varies by 51%, so the reason may be wrong. Close other programs, and measure"
    )
    assert (doubt in text) == doubtful
    assert REASONS["compute"] in text


def test_part_without_flops_is_not_compared_with_the_matmul_rate(with_row):
    _, measured = with_row(operations=[Operation("add", 1, 9.0, moved_bytes=10)])
    text = " ".join(report(measured).split())
    assert "At the machine's rates, all that they read and write (10.0 B)" in text


def test_traffic_names_the_two_operations_that_move_the_most(with_row):
    moved = {"view": 0, "copy": 20, "add": 30, "cast": 10}
    called = [Operation(name, 1, 2.0, moved[name]) for name in moved]
    _, measured = with_row(operations=called)
    assert "(add 30.0 B, copy 20.0 B)" in " ".join(report(measured).split())


def test_advice_names_the_slowest_operation(with_row):
    called = [Operation("slow", 1, 6.0), Operation("add", 1, 0.1)]
    _, measured = with_row(operations=called)
    advice = "Try fewer and larger operations, or another one for slow."
    assert advice in " ".join(report(measured).split())


@pytest.mark.parametrize(
    ("traffic", "must_move", "fewer"),
    [(31, 15, True), (29, 14, False), (31, 16, False)],
    ids=["they save time", "too little traffic", "too little to save"],
)
def test_advice_is_fewer_passes_if_they_save_time(traffic, must_move, fewer, with_row):
    # At 10 B/s, 31 bytes take 31% of 10 s.
    called = [Operation("slow", 1, 6.0, moved_bytes=traffic)]
    row, measured = with_row(operations=called, moved_bytes=must_move)
    assert row.limit == "kernel"
    text = " ".join(report(measured).split())
    assert (
        "Try fewer passes over the data, --compile, fewer and larger" in text
    ) == fewer
    assert ("Try fewer and larger operations" in text) != fewer


def test_operations_in_backward_are_marked(step):
    def calls(name, operation):
        found = part(step, name).operation(operation)
        return found.calls, found.backward_calls

    assert calls("layers.*.up", "mm") == (6, 4)
    assert calls("layers.*", "relu") == (2, 0)
    assert calls("layers.*", "threshold_backward") == (2, 2)
    # AdamW runs after backward.
    for each in part(step, "AdamW").operations:
        assert each.backward_calls == 0
    assert step.whole.operation("mm").backward_calls == 8


def test_report_marks_operations_in_backward(with_row):
    called = [
        Operation("mm", 2006, 5.0, backward_calls=2004),
        Operation("add", 3, 2.5, backward_calls=3),
        Operation("relu", 1, 1.0),
    ]
    _, measured = with_row(operations=called)
    line = (
        "2,010 operations: mm x 2,006 (50%, 2,004 in backward), add x 3 (25%, backward), "
        "relu x 1 (10%)"
    )
    assert line in report(measured)


def test_operations_that_take_no_time_are_not_named(with_row):
    _, measured = with_row(operations=[Operation("add", 2, 0.09)])
    assert "\n    2 operations, which take less than 1% each\n" in report(measured)


def test_slowest_operations_have_their_share_of_the_part(with_row):
    times = {"mm": (6, 5.0), "add": (2000, 2.5), "view": (9, 0.05)}
    called = [Operation(name, *figures) for name, figures in times.items()]
    _, measured = with_row(operations=called)
    line = "\n    2,015 operations: mm x 6 (50%), add x 2,000 (25%)\n"
    assert line in report(measured)


def test_four_operations_are_named_from_the_slowest_on(with_row):
    called = [Operation(name, 1, 2.5 - 0.5 * i) for i, name in enumerate("abcde")]
    _, measured = with_row(operations=called)
    line = "5 operations: a x 1 (25%), b x 1 (20%), c x 1 (15%), d x 1 (10%)\n"
    assert f"    {line}" in report(measured)


def test_operations_of_the_total_are_sorted_by_their_time(step):
    times = [each.total_s for each in step.whole.operations]
    assert times == sorted(times, reverse=True)


def test_lost_time_is_more_than_the_least(with_row):
    _, measured = with_row(moved_bytes=30, flops={"float32": 400})
    measured.whole.total_s = 40.0
    # 10 - max(400 / 100, 30 / 10) s are 15% of 40 s.
    assert "  part: loses 6.00 s of its 10.0 s, 15.0% of the total\n" in report(
        measured
    )


def test_parts_that_lose_the_most_come_first(with_row):
    row, measured = with_row(flops={"float32": 400})
    rows = [
        dataclasses.replace(row, name=f"lost {lost}", least_s=10.0 - lost)
        for lost in (1, 3, 0, 4, 2)
    ]
    text = report(dataclasses.replace(measured, rows=[*rows, measured.rows[-1]]))
    named = re.findall(r"^  (lost \d): ", text, re.MULTILINE)
    assert named == ["lost 4", "lost 3", "lost 2"]


def test_rest_is_no_part_that_loses_time(with_row):
    _, measured = with_row()
    rest = dataclasses.replace(measured.rows[-1], total_s=99.0)
    text = report(dataclasses.replace(measured, rows=[measured.rows[0], rest]))
    assert re.findall(r"^  (\w+): loses ", text, re.MULTILINE) == ["part"]


def test_unknown_flops_mark_all_that_follows(with_row):
    row, measured = with_row(
        flops={"float32": 400}, unknown=["tests.copied"], operations=[]
    )
    measured.whole.unknown = ["tests.copied"]
    row.between_s, row.limit = 0.0, "unknown"
    text = report(measured)
    assert cells(text)["part"]["roofline"] == ">= 40.0%"
    assert cells(text)["total"]["roofline"].startswith(">= ")
    assert "  part: loses <= 6.00 s of its 10.0 s, <= " in text
    assert "    The FLOPs of tests.copied are unknown." in text
    assert "\nMFU: >= " in text
    assert re.search(r"tokens/s, >= \S+ of the roofline", text)
    assert "FLOPs without tests.copied: no formula" in text


def test_limit_of_unknown_work_is_unknown_unless_something_takes_half():
    row = Row("part", total_s=10.0, unknown=["tests.copied"])
    row.compare(RATES, on_gpu=True)
    assert row.limit == "unknown"
    row.moved_bytes = 50
    row.compare(RATES, on_gpu=True)
    assert row.limit == "memory"


def test_overhead_is_named_before_python_which_contains_it():
    row = Row(
        "part", total_s=10.0, p20_s=10.0, operations=[Operation("add", 5, 1.0, 1)]
    )
    row.compare(RATES, on_gpu=False)
    assert (row.overhead_s, row.between_s, row.limit) == (5.0, 9.0, "overhead")


def test_time_of_a_call_is_taken_by_the_clock(monkeypatch):
    ticks = itertools.count(step=0.25)
    monkeypatch.setattr("profiling.work.clock", lambda: next(ticks))
    assert seconds_of_a_call(CPU) == 0.25


def test_operations_take_what_they_need_beyond_a_call(profile, monkeypatch):
    monkeypatch.setattr("profiling.work.seconds_of_a_call", lambda device: 0.25)
    measured = profile()
    assert operations(part(measured, "layers.*.up"))["mm"] == (6, 6 * 0.75)
    assert operations(part(measured, "layers.*"))["relu"] == (2, 0.0)


def test_time_between_operations_is_what_they_leave_of_a_fast_run():
    row = Row("part", total_s=10.0, p20_s=8.0, operations=[Operation("add", 2, 3.0, 1)])
    row.compare(RATES, on_gpu=False)
    assert (row.between_s, row.overhead_s) == (5.0, 2.0)


def test_part_on_a_gpu_has_no_overhead_because_launches_overlap():
    row = Row("part", total_s=10.0, p20_s=8.0, operations=[Operation("add", 9, 3.0, 1)])
    row.compare(RATES, on_gpu=True)
    assert row.between_s is row.overhead_s is None
    assert row.limit == "kernel"


def test_part_on_a_gpu_starts_once_the_gpu_sleeps_and_takes_the_gpus_time(
    monkeypatch,
):
    """While the GPU sleeps, the host launches the part, whose time then has no gaps."""
    order = []
    event = SimpleNamespace(
        record=lambda: order.append("event"),
        elapsed_time=lambda end: 250.0,  # ms
    )
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append("sleep"))
    stopwatch = Stopwatch(nn.Linear(2, 2), on_gpu=True)
    stopwatch.begin()
    stopwatch.end()
    assert order == ["sleep", "event", "event"]
    stopwatch.runs = 1
    assert stopwatch._times() == {"outside of the model": PartTime(0.25, 0.25)}


def test_gpu_idle_is_the_time_without_a_kernel(profile, monkeypatch):
    kernels = [Kernel("l", 1, 8.0), Kernel("k", 3, 2.0)]
    recording = Recording(kernels, 0)
    monkeypatch.setattr("profiling.memory.record_run", lambda *_: recording)
    text = report(profile())
    rows = cells(text)
    assert rows["GPU idle"]["total ms"] == "2000"  # of 12 s
    assert rows["rest"]["total ms"] == "-2000"
    assert "    No kernel runs. Try" in text
    [table] = [each for each in text.split("\n\n") if each.startswith("kernel ")]
    assert table.splitlines() == [
        "kernel  launches     ms  share of GPU",
        "l              1   8000         80.0%",
        "k              3   2000         20.0%",
        "all            4  10000          100%",
    ]


def test_ten_kernels_are_named_and_all_are_summed():
    kernels = [Kernel(f"k{i}", 2, 1.0) for i in range(12)]
    _, *named, everything = kernel_table(Recording(kernels, 0)).splitlines()
    assert [line.split()[0] for line in named] == [f"k{i}" for i in range(10)]
    assert everything.split() == ["all", "24", "12000", "100%"]


# --- Noise ----------------------------------------------------------------------------


def test_noise_of_parts_is_named(profile):
    measured = profile(growth=1.01)
    assert len(measured.notes) == 1, measured.notes
    assert measured.notes[0].startswith("NOISY: layers.*.up by ")
    assert "; close other programs" in measured.notes[0]
    assert measured.whole.total_s == measured.took_s.median
    assert measured.took_s.p20 < measured.took_s.median
    assert measured.tokens_per_s == 10 / measured.took_s.median


def test_noise_of_rates_is_named():
    rates = {"float32 matmul": [1.0, 1.0, 1.0], "memory copy": [1.0, 2.0, 1.5]}
    notes = Times([], [], rates).noise([], Row("total", total_s=1.0), rest_varies=0.0)
    assert len(notes) == 1, notes
    # From 1.2 s to 1.8 s (p20 to p80), of 1.5 s.
    assert notes[0].startswith("NOISY: memory copy by 40% (")


def test_noise_of_a_part_below_5_percent_of_the_total_is_not_named():
    rows = [
        Row("small", total_s=4.9, varies=0.3),
        Row("large", total_s=5.1, varies=0.3),
    ]
    whole = Row("total", total_s=100.0)
    [note] = Times([], [], {}).noise(rows, whole, rest_varies=0.0)
    assert note.startswith("NOISY: large by 30% (")


def test_what_varies_by_more_than_5_percent_has_two_digits(measured):
    row = measured.rows[0]
    row.varies = 0.049
    assert cells(report(measured))["layers.*.up"]["share"] == "50.0%"
    row.varies = 0.051
    assert cells(report(measured))["layers.*.up"]["share"] == "50%"
    measured.whole.varies = 0.051
    assert "Time: 12 s (p20 to p80: 12 s to 12 s), 830 m tokens/s" in report(measured)


def test_rest_varies_in_percent_of_the_total(profile, monkeypatch):
    spread = Spread(0.0, -1.2, 1.8)  # of 12 s
    monkeypatch.setattr("profiling.times.Times.rest", lambda *_: [0.0])
    of = Spread.of
    monkeypatch.setattr(
        "profiling.measure.Spread.of",
        lambda samples: spread if samples == [0.0] else of(samples),
    )
    measured = profile()
    assert measured.rest_varies == 0.25
    assert "explains: 0% of the time, varies by 25% of it, so it is noise" in report(
        measured
    )
    assert cells(report(measured))["rest"]["limit"] == "noise"
    assert measured.notes == [
        "NOISY: rest by 25% of the total (p20 to p80); close other programs"
    ]


def rest_of(varies, taken=8.766):
    """Return what a part leaves of 10 s. The rest varies by a share of the 10 s."""
    rows = [Row("up", total_s=taken)]
    whole = Row("total", total_s=10.0)
    [rest] = left_over(rows, whole, Recording([], 0), varies)
    return rest


def test_rest_has_two_digits_if_its_noise_is_large():
    assert rest_of(0.05).varies == pytest.approx(0.5 / 1.234)
    assert (rest_of(0.001).digits, rest_of(0.05).digits) == (3, 2)


def test_rest_is_noise_if_it_varies_by_more_than_itself():
    assert (rest_of(0.123).limit, rest_of(0.124).limit) == ("", "noise")


def test_rest_below_zero_is_noise_if_it_varies_by_more_than_itself():
    taken = 11.234  # so the rest is -1.234 s
    assert (rest_of(0.123, taken).limit, rest_of(0.124, taken).limit) == ("", "noise")


def test_causal_attention_needs_the_scores_of_earlier_keys(profile_of):
    size = Size(2, 5, 32, 4, 2, d_head=16, d_ff=24)
    measured = profile_of(size.build, size.shape)
    flops = {row.name: row.flops.get("float32", 0) / 3 for row in measured.rows}
    # For each head, query, and key that is not later: two matmuls of d_head.
    assert flops["attn"] == 4 * 2 * 4 * (5 * 6 // 2) * 16
    first = "ln1 attn.q_proj attn.k_proj attn.v_proj attn.rope attn attn.output_proj"
    assert list(flops) == f"{first} ln2 ffn.w1 ffn.w3 ffn ffn.w2 sums rest".split()
