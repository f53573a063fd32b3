"""Every figure of the report, calculated by hand from a clock that operations advance."""

import dataclasses
from itertools import cycle

import profiling.measure
import pytest
import torch
from lab.sizes import Size
from profiling import roofline
from profiling.kernels import Recording
from profiling.measure import Settings, measure
from profiling.report import report
from profiling.roofline import Rates
from torch import nn
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import TorchDispatchMode

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
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.register_buffer("table", torch.zeros(100))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return {"x": x}


def cells(text):
    """Return the rows of the report's first table, by name and column."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    columns, _, *rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in lines
    ]
    return {row[0]: dict(zip(columns, row, strict=True)) for row in rows}


@pytest.fixture
def profile(monkeypatch):
    """Return a function that measures a model by the clock of its operations."""

    def run(build=Stack, mode="train", matmul=(1e-3,), tiny=None, tick=1.0, growth=1.0):
        clock = Clock(tick, growth)
        samplers = {"matmul": cycle(matmul).__next__, "memory copy": lambda: 1e-2}
        monkeypatch.setattr(profiling.measure, "rate_samplers", lambda *_: samplers)
        for module in ("lab.timing", "profiling.parts", "profiling.measure"):
            monkeypatch.setattr(f"{module}.clock", lambda: clock.now)
        settings = Settings(CPU, torch.float32, mode, rounds=3)
        with torch.set_grad_enabled(settings.train), clock:
            return measure((lambda *_: build(), (2, 5, 4)), "stack", settings, tiny)

    return run


def test_times_are_sums_of_all_copies_and_add_up(profile):
    rows = cells(report(profile(tick=1e-4)))
    up = {"forward ms": "0.200", "total ms": "0.600"}
    assert list(rows) == [
        *("layers.*.up", "layers.*.down", "layers.*", "rest", "the whole")
    ]
    assert rows["layers.*.up"].items() >= {**up, "share": "50.0%", "count": "2"}.items()
    whole = {"forward ms": "0.400", "total ms": "1.20"}
    assert rows["the whole"].items() >= {**whole, "share": "100%"}.items()
    assert rows["layers.*"].items() >= {"total ms": "0", "count": "2"}.items()
    assert abs(float(rows["rest"]["total ms"])) < 1e-6


def test_rest_is_what_the_parts_leave(profile):
    class Faster(Stack):
        """It computes less where a clock watches its modules."""

        def forward(self, x):
            if not modules._global_forward_hooks:
                x = x + (x @ self.layers[0].up.weight[:4]).detach()
            return super().forward(x)

    rows = cells(report(profile(Faster)))
    assert rows["the whole"]["total ms"] == "13000"
    assert rows["rest"].items() >= {"total ms": "1000", "share": "7.7%"}.items()


def test_backward_belongs_to_the_part_that_computed_forward(profile):
    class Gate(Layer):
        def forward(self, x):
            gate = self.up(x) @ self.down.weight.T  # before the call of another part
            return gate * self.down(self.up(x))

    rows = cells(report(profile(Gate)))
    taken = {name: row["total ms"] for name, row in rows.items()}
    assert taken["up"] == "6000"  # two calls
    assert taken["sums"] == taken["down"] == "3000"


def test_rates_roofline_and_mfu(profile):
    measured = profile()
    text = report(measured)
    row = cells(text)["layers.*.up"]
    # Two layers, three matmuls of 10 tokens: 2 * 3 * 2 * 10 * 4 * 8 FLOPs in 6 s.
    assert row["FLOP/s"] == "640"
    # 3.84 s at 1000 FLOP/s. Bytes: 2 * (160 + 128 + 320) forward; backward reads gradients
    # (320), saved x and weight (288), and the gradient from the sum (160), and writes
    # two gradients (288): 33.28 s.
    assert row["of roofline"] == "555%"
    assert row["limit"] == "memory"
    assert "matmul 1.00 kFLOP/s, memory copy 100 B/s" in text
    assert "MFU: 64.0% of the matmul rate" in text
    line = "backward: 12.0 s (p20 to p80: 12.0 s to 12.0 s), 833 m tokens/s"
    least = sum(row.least for row in measured.rows)
    assert f"{line}, {least / 12:.0%} of the roofline" in text


def test_views_move_nothing_and_unknown_operations_are_named(profile):
    class Vector(Layer):
        def forward(self, x):
            return super().forward(x) + (x @ self.up.weight[0])[..., None]

    stack = [nn.Unflatten(-1, (2, 2)), nn.Flatten(-2), Vector(), nn.ReLU(inplace=True)]
    measured = profile(lambda: nn.Sequential(*stack))
    bytes = {row.name: row.bytes for row in measured.rows}
    # A change in place reads and writes; backward reads two tensors, and writes one.
    assert (bytes["0"], bytes["1"], bytes["3"]) == (0, 0, 5 * 160)
    assert "FLOPs without aten.mv: no formula" in report(measured)


def test_frozen_weights_have_no_pass(profile):
    def build():
        model = Stack()
        for layer in model.layers:
            layer.up.requires_grad_(False)
        return model

    measured = profile(build)
    row = next(row for row in measured.rows if row.name == "layers.*.up")
    assert row.flops == 2 * 2 * 640
    assert measured.whole.flops == 2 * (2 + 3) * 640
    assert measured.memory["parameters"] == 512
    assert measured.memory["gradients"] == 2 * 128
    assert "MFU: 64.0% of the matmul rate" in report(measured)  # 6,400 FLOPs in 10 s


def test_memory_counts_buffers_weights_and_what_is_kept(profile):
    measured = profile(mode="step")
    assert measured.memory["parameters"] == 2 * 2 * 128
    assert measured.memory["buffers"] == 400
    assert measured.memory["gradients"] == 512
    assert measured.memory["AdamW"] == 1024
    held = 512 + 400 + 1024 + 160
    # Gradients of weights, what is kept, and at most two of the gradients on the way.
    assert 0 <= measured.memory["peak"] - held - 512 - 960 <= 2 * 320
    text = report(measured)
    assert "parameters 512 B, buffers 400 B, gradients 512 B, AdamW 1.02 kB" in text
    rows = cells(text)
    # up keeps x, and relu keeps its result, which down keeps, too.
    kept = {name.removeprefix("layers.*"): row["kept"] for name, row in rows.items()}
    assert (kept[".up"], kept[".down"], kept[""]) == ("320 B", "0 B", "640 B")
    assert rows["the whole"]["kept"] == "960 B"
    assert "kept for backward 960 B" in text


def test_adamw_is_a_row_and_no_part_of_mfu_flops(profile):
    measured = profile(mode="step")
    rows = cells(report(measured))
    assert rows["AdamW"]["total ms"] == "7000"
    assert rows["the whole"]["total ms"] == "19000"
    assert rows["rest"]["total ms"] == "0"
    adamw = next(row for row in measured.rows if row.name == "AdamW")
    steps = 4 * 4  # bytes of a counter for each weight
    assert adamw.bytes == 7 * 512 + 2 * steps
    assert adamw.flops == 0
    assert "MFU: 40.4%" in report(measured)  # 7,680 FLOPs in 19 s


def test_gpu_idle_is_the_time_without_a_kernel(profile, monkeypatch):
    recording = Recording("flash", {"k": (3, 8.0), "l": (1, 2.0)}, {}, 0)
    monkeypatch.setattr(profiling.measure, "record_run", lambda *_: recording)
    text = report(profile())
    assert "GPU: 4 kernels, copies and fills, busy 83.3% of the time: not" in text
    parts, kernels = text.split("| kernel ")
    rows = cells(parts)
    assert rows["GPU idle"]["total ms"] == "2000"
    assert rows["rest"]["total ms"] == "-2000"
    taken = {"calls": "3", "ms": "8000", "share of GPU": "80.0%"}
    assert cells(f"| kernel {kernels}")["k"].items() >= taken.items()


def test_forward_alone_has_no_backward(profile):
    text = report(profile(mode="forward"))
    rows = cells(text)
    assert rows["the whole"]["total ms"] == "4000"
    assert rows["layers.*.up"]["FLOP/s"] == "640"
    assert {row["kept"] for row in rows.values()} == {"0 B"}
    assert "gradients 0 B" in text


def test_overhead_is_known_for_a_tiny_model_alone(profile):
    measured = profile(tiny=(lambda *_: Stack(), (1, 1, 4)))
    rows = cells(report(measured))
    assert rows["the whole"]["overhead"] == "12.0 s"
    assert measured.rows[0].overhead == 6.0
    measured.rows[0].overhead = 2.0
    assert cells(report(measured))["layers.*.up"]["overhead"] == "2.00 s"
    assert "tiny input: 12.0 s" in report(measured)
    text = report(profile())
    assert "unknown for a block of your own" in text
    assert cells(text)["the whole"]["overhead"] == ""


def test_noise_of_rates_and_rows_is_named(profile):
    measured = profile()
    assert "NOISY" not in report(measured)
    measured.rows[0].varies = 0.25
    assert cells(report(measured))["layers.*.up"]["varies"] == "25.0%"
    text = report(profile(matmul=(1e-3, 2e-3, 3e-3)))
    assert "NOISY: matmul 60.0% vary" in text
    assert "matmul 500 FLOP/s" in text
    [line] = [line for line in profile(growth=1.01).notes if "NOISY" in line]
    assert "layers.*.up" in line
    assert "the whole" in line
    assert "layers.* " not in line


def test_rates_count_two_flops_per_product_and_two_bytes_per_copy(monkeypatch):
    monkeypatch.setattr(roofline, "wall_sampler", lambda run, **_: lambda: 1.0)
    samplers = roofline.rate_samplers(CPU, torch.float32)
    assert samplers["matmul"]() == 1 / (2 * 1024**3)
    assert samplers["memory copy"]() == 1 / (2 * 2**27)


def test_advice_follows_the_measured_cause(profile):
    measured = profile()
    for row in measured.rows:
        row.compare(Rates(1e9, 1e3))
    # 3,328 bytes take 3.33 of 6 s.
    lost = "layers.*.up: 2.67 s, 22.3%; it waits for memory, so fusion, --compile"
    assert lost in report(measured)
    for row in measured.rows:
        row.bytes = 0
        row.compare(Rates(1e3, 1e9))
    # 3,840 FLOPs take 3.84 of 6 s.
    lost = "layers.*.up: 2.16 s, 18.0%; it computes at the matmul rate"
    text = report(measured)
    assert "  layers.*: " not in text  # it loses nothing
    measured.rows[1].total = 7.0
    text = report(measured)
    assert 0 < text.index("layers.*.down: 3.16 s") < text.index(lost)
    for row in measured.rows:
        row.compare(Rates(1e9, 1e9))
    slow = report(measured)
    assert cells(slow)["layers.*.up"]["limit"] == "kernel"
    assert "its kernels are slow" in slow
    measured.rows[0].flops, measured.rows[0].overhead = 10, 5.0
    measured.rows[0].compare(Rates(1e9, 1e9))
    assert measured.rows[0].limit == "overhead"
    assert measured.rows[0].least == 10 / 1e9
    assert "its calls take longer than its work" in report(measured)
    compiled = dataclasses.replace(measured.settings, compile=True)
    text = report(dataclasses.replace(measured, settings=compiled))
    assert "Most time lost" not in text


def test_causal_attention_needs_the_scores_of_earlier_keys(profile):
    size = Size(2, 5, 32, 4, 2, d_head=16, d_ff=24)
    chosen = Settings(CPU, torch.float32, rounds=1)
    with torch.set_grad_enabled(True):
        measured = measure((size.build, size.shape), "block", chosen)
    flops = {row.name: row.flops / 3 for row in measured.rows}
    # For each head, query, and key that is not later: two matmuls of d_head.
    assert flops["attn"] == 4 * 2 * 4 * (5 * 6 // 2) * 16
    assert flops["attn.k_proj"] == 2 * 10 * 32 * 32
    first = "ln1 attn.q_proj attn.k_proj attn.v_proj attn.rope attn attn.output_proj"
    assert list(flops) == f"{first} ln2 ffn.w1 ffn.w3 ffn ffn.w2 sums rest".split()
