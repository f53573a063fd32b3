"""Every figure of the report, calculated by hand from a clock that operations advance."""

import dataclasses
from itertools import cycle

import profiling.measure
import pytest
import torch
from lab.sizes import Size
from lab.tables import share
from profiling import roofline
from profiling.kernels import Recording
from profiling.measure import Settings, measure
from profiling.report import report
from profiling.roofline import Rates
from torch import nn
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
    def __init__(self, count=2):
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(count)])
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
        for module in ("lab.timing", "profiling.parts"):
            monkeypatch.setattr(f"{module}.clock", lambda: clock.now)
        settings = Settings(CPU, torch.float32, mode, rounds=3)
        with torch.set_grad_enabled(settings.train), clock:
            return measure((lambda *_: build(), (2, 5, 4)), "stack", settings, tiny)

    return run


def test_figures_of_all_passes(profile):
    measured = profile(mode="step", matmul=[2e-2])
    text = report(measured)
    rows = cells(text)
    assert measured.notes == []
    names = ["layers.*.up", "layers.*.down", "layers.*", "AdamW", "rest", "total"]
    assert list(rows) == names
    assert rows["layers.*.up"] == {
        "part": "layers.*.up",
        "count": "2",
        # In each layer, one matmul in forward, and two in backward.
        "forward ms": "2000",
        "total ms": "6000",
        "varies": "",
        "share": "31.6%",
        # Of 10 tokens: 2 * 3 * 2 * 10 * 4 * 8 FLOPs, which take 76.8 s at 50 FLOP/s.
        "FLOP/s": "640",
        "of roofline": "1280%",
        "limit": "compute",
        "overhead": "",
        "kept": "320 B",
    }
    # Forward moves 160 + 128 + 320 bytes; backward reads gradients (320), saved x and
    # weight (288), and the gradient from the sum (160), and writes two gradients (288).
    assert measured.rows[0].bytes == 2 * 1664
    # relu keeps its result, which down keeps, too.
    assert (rows["layers.*"]["kept"], rows["layers.*.down"]["kept"]) == ("640 B", "0 B")
    adamw = measured.rows[3]
    counters = 4 * 4  # bytes: a number of steps for each weight
    assert (adamw.bytes, adamw.flops) == (7 * 512 + 2 * counters, 0)
    assert rows["AdamW"]["total ms"] == "7000"
    assert rows["rest"]["total ms"] == "0"
    whole = {
        "forward ms": "4000",
        "total ms": "19000",
        "share": "100%",
        "kept": "960 B",
    }
    assert rows["total"].items() >= whole.items()
    least = sum(row.least for row in measured.rows)
    assert (
        f"(p20 to p80: 19.0 s to 19.0 s), 526 m tokens/s, {share(least / 19)}" in text
    )
    assert (
        f"threads, {torch.backends.cpu.get_cpu_capability()}; torch {torch.__version__}"
        in text
    )
    assert "matmul 50.0 FLOP/s, memory copy 100 B/s" in text
    assert "MFU: 808% of the matmul rate" in text  # 7,680 FLOPs in 19 s
    sizes = "parameters 512 B, buffers 400 B, gradients 512 B, AdamW 1.04 kB"
    assert f"{sizes}, kept for backward 960 B" in text
    held = 512 + 400 + 1024 + counters + 160
    # Gradients of weights, what is kept, and at most two of the gradients on the way.
    assert 0 <= measured.memory["peak"] - held - 512 - 960 <= 2 * 320


def test_forward_alone_has_no_backward(profile):
    text = report(profile(mode="forward", tick=1e-3))  # several runs in each sample
    rows = cells(text)
    assert rows["total"]["total ms"] == "4.00"
    assert rows["layers.*.up"]["total ms"] == "2.00"
    assert rows["layers.*.up"]["FLOP/s"] == "640 k"
    assert {row["kept"] for row in rows.values()} == {"0 B"}


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


@torch.library.custom_op("tests::copied", mutates_args=())
def copied(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def test_views_move_nothing_and_unknown_operations_are_named(profile):
    class Vector(Layer):
        def forward(self, x):
            dots = copied(x.detach()) @ self.up.weight[0]
            return super().forward(x) + dots[..., None]

    stack = [nn.Unflatten(-1, (2, 2)), nn.Flatten(-2), Vector(), nn.ReLU(inplace=True)]
    measured = profile(lambda: nn.Sequential(*stack))
    bytes = {row.name: row.bytes for row in measured.rows}
    # A change in place reads and writes; backward reads two tensors, and writes one.
    assert (bytes["0"], bytes["1"], bytes["3"]) == (0, 0, 5 * 160)
    assert measured.notes == ["FLOPs without aten.mv, tests.copied: no formula"]


def test_gpu_idle_is_the_time_without_a_kernel(profile, monkeypatch):
    recording = Recording({"k": (3, 2.0), "l": (1, 8.0)}, {}, 0)
    monkeypatch.setattr(profiling.measure, "record_run", lambda *_: recording)
    parts, kernels = report(profile()).split("| kernel ")
    rows = cells(parts)
    assert rows["GPU idle"]["total ms"] == "2000"
    assert rows["rest"]["total ms"] == "-2000"
    assert kernels.startswith(
        "| calls |    ms | share of GPU |\n"
        "| ------ | ----: | ----: | -----------: |\n"
        "| l      |     1 |  8000 |        80.0% |\n"
        "| k      |     3 |  2000 |        20.0% |\n"
        "| all    |     4 | 10000 |         100% |\n"
    )


def test_overhead_is_the_time_of_a_tiny_model(profile):
    text = report(profile(tiny=(lambda *_: Stack(1), (1, 1, 4))))
    assert cells(text)["total"]["overhead"] == "6.00 s"
    assert cells(text)["layers.*.up"]["overhead"] == "3.00 s"
    assert "tiny input: 6.00 s" in text


def test_noise_of_rates_and_rows_is_named(profile):
    measured = profile(matmul=(1e-3, 2e-3, 3e-3))
    assert measured.notes == ["NOISY: matmul 60.0% vary; close other programs"]
    assert measured.rates.flops == 500
    measured = profile(growth=1.01)
    assert "layers.*.up" in measured.notes[0]
    assert measured.whole.total == measured.took.median
    small = nn.Sequential(*[Layer() for _ in range(20)])
    [line] = profile(lambda: small, growth=1.002).notes
    assert line.startswith("NOISY: total ")
    measured.rows[0].varies = 0.25
    assert cells(report(measured))["layers.*.up"]["varies"] == "25.0%"


def test_rates_count_two_flops_per_product_and_two_bytes_per_copy(monkeypatch):
    monkeypatch.setattr(roofline, "wall_sampler", lambda run: lambda: 1.0)
    samplers = roofline.rate_samplers(CPU, torch.float32)
    assert samplers["matmul"]() == 1 / (2 * 1024**3)
    assert samplers["memory copy"]() == 1 / (2 * 2**27)


@pytest.mark.parametrize(
    ("rates", "overhead", "lost"),
    [
        # 3,328 bytes take 3.33 of 6 s, and 3,840 FLOPs take 3.84 of 6 s.
        (Rates(1e9, 1e3), None, "2.67 s, 22.3%; moving bytes takes"),
        (Rates(1e3, 1e9), None, "2.16 s, 18.0%; computing takes"),
        (Rates(1e9, 1e9), 3.1, "6.00 s, 50.0%; calling operations"),
        (Rates(1e9, 1e9), 2.9, "6.00 s, 50.0%; its kernels or, with"),
    ],
)
def test_advice_follows_the_measured_cause(rates, overhead, lost, profile):
    measured = profile()
    for row in measured.rows:
        row.overhead = overhead
        row.compare(rates)
    text = report(measured)
    assert f"  layers.*.up: {lost}" in text
    assert "  layers.*: " not in text  # it loses nothing
    measured.rows[1].total = 7.0
    text = report(measured)
    assert 0 < text.index("  layers.*.down: ") < text.index("  layers.*.up: ")
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
    first = "ln1 attn.q_proj attn.k_proj attn.v_proj attn.rope attn attn.output_proj"
    assert list(flops) == f"{first} ln2 ffn.w1 ffn.w3 ffn ffn.w2 sums rest".split()
