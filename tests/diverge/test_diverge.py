"""Mistakes are named where they are, rounding is none, and its figures are those of a hand."""

import copy
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diverge import answer, main
from diverging.mistakes import Answer, compare
from diverging.runs import subjects_of
from fused_port import TOKENS, WIDTH, Fused, Norm, Plain
from pages import block_with, blocks, require_shown
from torch import nn

CPU = torch.device("cpu")


def plain(tied=False):
    return Plain(tied), (TOKENS,)


def fused(*wrong, tied=False):
    return Fused(wrong, tied).load(Plain(tied)), {"tokens": TOKENS}


def build_in_dtype(build, device, dtype):
    pair = build()
    if isinstance(pair, tuple) and dtype != torch.float32:
        return pair[0].to(dtype), tuple(each.to(dtype) for each in pair[1])
    return pair


def builds_of(*functions) -> list[Any]:
    return [partial(build_in_dtype, function) for function in functions if function]


def compared(ours, theirs=None, dtype=torch.float32, compiled=False) -> Answer:
    """Compare what functions build."""
    return answer(builds_of(ours, theirs), CPU, dtype, compiled)


def are_same(ours, theirs) -> bool:
    """Compare what functions build in float64, but not their rounding."""
    found = compare(*subjects_of(builds_of(ours, theirs), CPU, torch.float32))
    return not isinstance(found, Answer)


def require(found: Answer, line: str, exit_code: int):
    assert found.line.startswith(line), found.line
    assert found.exit_code == exit_code, found.line


# --- The same function --------------------------------------------------------------------


def test_a_right_port_is_the_same_function():
    """Compiled, in another module, and computed in other ways."""

    def port():
        model, _ = fused(
            "silu written out", "sum reordered", "q scaled", "weights split"
        )
        return torch.compile(nn.Sequential(model)), (TOKENS,)

    found = compared(port, plain)
    require(found, "SAME FUNCTION; in float32, ", 0)
    assert not any("_orig_mod" in row[0] for row in found.rows)  # of torch.compile


class Table(nn.Module):
    angles: torch.Tensor

    def __init__(self, frequencies):
        super().__init__()
        angles = torch.outer(torch.arange(100000, 100004).float(), frequencies)
        self.register_buffer("angles", angles)
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x * self.angles.cos() * self.weight


def test_frozen_weights_are_compared_too():
    def frozen():
        model, inputs = plain()
        return model.requires_grad_(False), inputs

    assert are_same(frozen, plain)


def test_tables_are_built_again_in_float64():
    """In float32, angles of position 100,000 are off by 0.01."""

    def build(frequencies):
        steps = torch.arange(8).float() / 8
        x = torch.ones(4, 8)
        x[0, 0] = -torch.inf  # as in a mask
        return Table(frequencies(steps)), (x,)

    assert are_same(
        lambda: build(lambda steps: 10000.0**-steps),
        lambda: build(lambda steps: torch.exp(-steps * math.log(10000.0))),
    )


def untied():
    model, inputs = plain(tied=True)
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    return model, inputs


def test_tied_weights_equal_untied_ones():
    assert are_same(lambda: fused(tied=True), untied)


class Twice(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.order = [0, len(layers) - 1]

    def forward(self, x):
        for place in self.order:
            x = x + self.layers[place](x).tanh()
        return x


def test_a_layer_that_is_called_twice_equals_two_layers_with_one_weight():
    def build(copies):
        torch.manual_seed(0)
        layers = [nn.Linear(5, 5) for _ in range(copies)]
        for layer in layers:
            layer.weight, layer.bias = layers[0].weight, layers[0].bias
        return Twice(layers), (torch.ones(3, 5),)

    assert are_same(lambda: build(1), lambda: build(2))


class TanhLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x.tanh())


def test_a_module_that_gets_another_input_is_not_compared_in_backward():
    def build(*layers):
        torch.manual_seed(0)
        return nn.Sequential(*[layer() for layer in layers]), (torch.ones(3, 5),)

    linear, tanh_linear = partial(nn.Linear, 5, 5), partial(TanhLinear, 5, 5)
    assert are_same(
        lambda: build(linear, tanh_linear), lambda: build(linear, nn.Tanh, linear)
    )


def test_ports_of_models_of_transformers_are_the_same_function():
    """Their rows of queries are permuted, their biases and experts fused or transposed."""
    transformers = pytest.importorskip(
        "transformers", reason="requires the extra examples"
    )
    from hugging_face import convert

    sizes = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 32,
    }

    def theirs(kind):
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(kind, **sizes)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for name, weight in model.named_parameters():
            torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.2)
        return model, {"input_ids": TOKENS}

    for kind in ("qwen2", "qwen3"):
        assert are_same(
            lambda kind=kind: (convert(theirs(kind)[0]), (TOKENS,)),
            lambda kind=kind: theirs(kind),
        )


# --- Mistakes -----------------------------------------------------------------------------

FORWARD = {
    "eps": "blocks.1.norm1 (layers.1.norm1)",
    "conjugate": "blocks.1.attention (layers.1.attention)",
    "heads repeated": "blocks.1.attention (layers.1.attention)",
    "no mask": "blocks.1.attention (layers.1.attention)",
    "scale": "blocks.1.attention (layers.1.attention)",
    "heads not transposed": "blocks.1.attention (layers.1.attention)",
    "o transposed": "blocks.1.attention.o (layers.1.attention.o)",
    "gate and up exchanged": "blocks.1.ffn (layers.1.ffn)",
    "gelu": "blocks.1.ffn (layers.1.ffn)",
    "parallel": "blocks.1 (layers.1)",
    "residual skipped": "blocks.1 (layers.1)",
    "theta": "blocks.0.attention (layers.0.attention)",
    "rows in halves": "blocks.0.attention (layers.0.attention)",
    "embedding scaled": "the model (the model)",
    "no last norm": "the model (the model)",
}
BACKWARD = {
    "norm detached": "blocks.1.norm1 (layers.1.norm1)",
    "k detached": "blocks.1.attention (layers.1.attention)",
    "gradient of silu": "blocks.1.ffn (layers.1.ffn)",
    "gradient of a weight": "blocks.1.ffn (layers.1.ffn)",
    "residual detached": "blocks.1 (layers.1)",
}


@pytest.mark.parametrize("wrong", FORWARD)
def test_a_mistake_in_forward_is_named_in_its_module(wrong):
    found = compared(lambda: fused(wrong), plain)
    require(found, f"MISTAKE in forward, in {FORWARD[wrong]}: its result is off", 1)


@pytest.mark.parametrize("wrong", BACKWARD)
def test_a_mistake_in_backward_is_named_in_its_module(wrong):
    found = compared(lambda: fused(wrong, tied=True), lambda: plain(tied=True))
    require(found, f"MISTAKE in backward, in {BACKWARD[wrong]}: its gradients", 1)


def test_a_detached_head_is_a_mistake_of_backward_though_it_has_no_module():
    def ours():
        model, inputs = fused(tied=True)
        del model.output
        model.output = lambda x: x @ model.tokens.weight.detach().mT
        return model, inputs

    found = compared(ours, untied)
    require(found, "MISTAKE in backward, in the model (the model)", 1)


def gelu(ffn):
    return lambda x: ffn.down(nn.functional.gelu(ffn.gate(x)) * ffn.up(x))


def test_a_module_that_gets_a_tensor_twice_has_its_whole_gradient():
    """As in attention(x, x, x)."""

    def ours():
        model, inputs = plain()
        for layer in model.layers:
            compute = layer.ffn.forward
            layer.ffn.forward = lambda x, y, compute=compute: compute(0.5 * (x + y))
            layer.forward = calls_twice(layer)
        return model, inputs

    def calls_twice(layer):
        def forward(x, angles):
            x = x + layer.attention(layer.norm1(x), angles)
            h = layer.norm2(x)
            return x + layer.ffn(h, h)

        return forward

    require(compared(ours, plain), "SAME FUNCTION", 0)


def test_a_mistake_before_a_sum_in_place_is_named():
    def ours():
        model, inputs = plain()
        for layer in model.layers:
            layer.forward = adds_in_place(layer)
        model.layers[1].ffn.forward = gelu(model.layers[1].ffn)
        return model, inputs

    def adds_in_place(layer):
        def forward(x, angles):
            h = layer.attention(layer.norm1(x), angles)
            h += x
            y = layer.ffn(layer.norm2(h))
            y += h
            return y

        return forward

    found = compared(ours, plain)
    require(found, "MISTAKE in forward, in layers.1.ffn (layers.1.ffn)", 1)


def test_a_module_that_is_only_cut_differently_is_not_named():
    """Its attention adds the residual, which is right; the mistake comes later."""

    def ours():
        model, inputs = plain()
        for layer in model.layers:
            layer.forward = cut_differently(layer)
        model.layers[1].ffn.forward = gelu(model.layers[1].ffn)
        return model, inputs

    def cut_differently(layer):
        attend = layer.attention.forward
        layer.attention.forward = lambda x, angles, residual: (
            residual + attend(x, angles)
        )

        def forward(x, angles):
            x = layer.attention(layer.norm1(x), angles, x)
            return x + layer.ffn(layer.norm2(x))

        return forward

    require(compared(ours, plain), "MISTAKE in forward, in layers.1.ffn (", 1)


def test_a_norm_that_a_port_forgot_is_named_as_other_weights():
    def normed():
        model, inputs = plain()
        attention = model.layers[1].attention
        attend, attention.norm = attention.forward, Norm()
        attention.norm.weight.data.uniform_(1, 2)
        attention.forward = lambda x, angles: attention.norm(attend(x, angles))
        return model, inputs

    line = "OTHER WEIGHTS in blocks.1.attention (layers.1.attention), and perhaps a"
    require(compared(fused, normed), line, 1)


# --- Other weights ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "module"),
    {
        "o not loaded": "blocks.1.attention.o",
        "norm not loaded": "blocks.1.norm2",
        "embedding not loaded": "tokens",
    }.items(),
)
def test_a_weight_that_was_not_loaded_is_named(wrong, module):
    found = compared(lambda: fused(wrong), plain)
    require(found, "OTHER WEIGHTS in 1 module, else the same function", 1)
    assert [row[0] for row in found.rows] == [module]


def test_layers_of_one_size_that_were_not_loaded_are_partners_in_their_order():
    """By chance, each is a bit nearer to the other's partner."""

    def ours():
        model, inputs = plain()
        k, v = model.layers[1].attention.k, model.layers[1].attention.v
        k.weight.data, v.weight.data = v.weight.data / 3, k.weight.data / 3
        q = model.layers[0].attention.q  # holds other numbers, but is the same function
        q.weight.data *= 2
        q.forward = lambda x: nn.functional.linear(x, q.weight / 2)
        return model, inputs

    require(compared(ours, plain), "OTHER WEIGHTS in 2 modules, else the same", 1)


class Int8Linear(nn.Module):
    weight: torch.Tensor
    scales: torch.Tensor

    def __init__(self, linear):
        super().__init__()
        scales = linear.weight.abs().amax(1) / 127
        whole = (linear.weight / scales[:, None]).round().to(torch.int8)
        self.register_buffer("weight", whole)
        self.register_buffer("scales", scales)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype)) * self.scales


def quantized(scale=1.0):
    """Quantize all linear layers. One feed-forward calls them in another order."""
    model, inputs = plain()
    ffn = model.layers[1].ffn
    ffn.forward = lambda x: ffn.down(ffn.up(x) * nn.functional.silu(ffn.gate(x)))
    for module in [*model.modules()]:
        for name, child in [*module.named_children()]:
            if isinstance(child, nn.Linear):
                setattr(module, name, Int8Linear(child))
    attention = model.layers[1].attention
    attend = attention.forward
    attention.forward = lambda x, angles: scale * attend(x, angles)
    return model, inputs


def test_quantized_weights_are_no_mistake():
    found = compared(quantized, plain)
    require(found, "OTHER WEIGHTS in 15 modules, else the same function", 1)
    assert all(0 < row[-1] < 0.02 for row in found.rows)


@pytest.mark.filterwarnings("default::DeprecationWarning")
def test_weights_of_torchao_are_no_mistake(capsys):
    """They cannot be built in float64, so constants stay rounded in both models."""
    torchao = pytest.importorskip(
        "torchao.quantization", reason="requires the extra examples"
    )

    def ours():
        model, inputs = plain()
        torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
        return model, inputs

    found = compared(ours, plain)
    require(found, "OTHER WEIGHTS in 15 modules, else the same function", 1)
    assert "Constants stay rounded" in capsys.readouterr().err


def test_a_mistake_beside_quantized_weights_is_named():
    found = compared(lambda: quantized(1.01), plain)
    line = "OTHER WEIGHTS in layers.1.attention (layers.1.attention), and perhaps a"
    require(found, line, 1)


class Adapted(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(x))


def test_an_adapter_that_was_merged_and_rounded_is_no_mistake():
    def adapted():
        model, inputs = plain()
        for layer in model.layers:
            layer.attention.q = Adapted(layer.attention.q)
        return model.bfloat16(), inputs

    def merged():
        model, inputs = adapted()
        for layer in model.layers:
            parts = layer.attention.q
            parts.linear.weight.data += parts.up.weight @ parts.down.weight
            layer.attention.q = parts.linear
        return model, inputs

    line = "OTHER WEIGHTS in 2 modules, else the same function"
    require(compared(merged, adapted), line, 1)


# --- Rounding -----------------------------------------------------------------------------


def relative_error(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


class Chain(nn.Module):
    """Return b(a(x) + x)."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return self.b(self.a(x) + x)


def test_errors_and_shares_are_those_of_each_step_by_hand():
    torch.manual_seed(0)
    model = Chain().bfloat16()
    x = torch.randn(6, 8, dtype=torch.bfloat16)
    a, b = model.a.weight.double(), model.b.weight.double()
    first = model.a(x)
    total = first + x
    result = model.b(total)
    off = result.double() - (x.double() @ a.T + x.double()) @ b.T
    exact = {
        "a": x.double() @ a.T,
        "the model": first.double() + x.double(),
        "b": total.double() @ b.T,
    }
    found_by_hand = {"a": first, "the model": total, "b": result}
    own = {name: found_by_hand[name].double() - exact[name] for name in exact}
    added = {"a": own["a"] @ b.T, "the model": own["the model"] @ b.T, "b": own["b"]}
    found = compared(lambda: (copy.deepcopy(model), (x,)))
    assert found.exit_code == 0
    rows = {row[0]: row[1:] for row in found.rows}
    assert rows.keys() == own.keys()
    for name, (calls, error, least, ratio, part) in rows.items():
        assert calls == 1
        expected = relative_error(found_by_hand[name], exact[name])
        assert error == pytest.approx(expected, rel=1e-9)
        expected = relative_error(exact[name].bfloat16(), exact[name])
        assert least == pytest.approx(expected, rel=1e-9)
        assert ratio == pytest.approx(error / least, rel=1e-9)
        share = ((added[name] * off).sum() / off.square().sum()).item()
        assert part == pytest.approx(share, rel=1e-9)


def test_calls_of_one_module_are_one_part():
    linear = nn.Linear(8, 8, bias=False)
    model = nn.Sequential(linear, linear).bfloat16()
    x = torch.randn(6, 8, dtype=torch.bfloat16)
    errors = []
    for given in (x, linear(x)):
        exact = given.double() @ linear.weight.double().T
        errors.append(relative_error(linear(given), exact))
    found = compared(lambda: (copy.deepcopy(model), (x,)))
    [[_, calls, error, _, _, share]] = found.rows
    assert calls == 2
    assert error == pytest.approx(math.hypot(*errors) / 2**0.5, rel=1e-9)
    assert share == pytest.approx(1, rel=1e-9)


class Masked(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.softmax = nn.Softmax(-1)

    def forward(self, x):
        scores = super().forward(x)
        least = torch.finfo(scores.dtype).min
        return self.softmax(scores + torch.full((4, 4), least).triu(1).to(scores))


def test_the_least_number_of_a_dtype_is_no_error_of_a_mask():
    found = compared(lambda: (Masked(), (torch.eye(4),)), dtype=torch.float16)
    assert len(found.rows) == 2
    assert all(row[2] < 2**-10 for row in found.rows)


def test_a_norm_that_rounds_twice_is_seen_beside_its_partner():
    """Ours rounds before it multiplies; torch's rounds once."""
    x = torch.randn(64, WIDTH, dtype=torch.bfloat16)

    def build(norm):
        norm.weight.data.copy_(torch.linspace(1, 2, WIDTH))
        return norm.bfloat16(), (x,)

    builds = (lambda: build(nn.RMSNorm(WIDTH, eps=1e-6)), lambda: build(Norm()))
    found = compared(*builds)
    (ours, _), (theirs, _) = (each() for each in builds)
    weight = ours.weight.double()
    exact = nn.functional.rms_norm(x.double(), (WIDTH,), weight, 1e-6)
    off, partners = (relative_error(norm(x), exact) for norm in (ours, theirs))
    line = f"the result is off by {off:.1e}, theirs by {partners:.1e}; "
    require(found, f"SAME FUNCTION; in bfloat16, {line}", 0)
    [row] = found.rows
    assert row[4] == pytest.approx(1, abs=0.01)
    assert row[6] > 1.2
    assert f"at most {row[4] / row[6]:.2f} times its partner's error" in found.line


def test_compiled_modules_are_compared_with_eager_ones():
    def build():
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(64, WIDTH, dtype=torch.bfloat16, generator=generator)
        model = Norm().bfloat16()
        model.weight.data.copy_(torch.linspace(1, 2, WIDTH))
        return model, (x,)

    found = compared(build, compiled=True)
    [row] = found.rows  # compiled, the norm rounds once
    assert row[4] < row[6]


# --- What is refused ----------------------------------------------------------------------


class Random(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.rand(1, device=x.device)


class Routed(nn.Linear):
    def forward(self, x):
        return x.softmax(-1).topk(2).values


class WithoutGradients(nn.Linear):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


class Cache:
    def __init__(self):
        self.keys = []


def shorter():
    model, _ = plain()
    return model, (TOKENS[:1],)


ONLY = nn.Linear(4, 4)


REFUSED = {
    "random": (lambda: (Random(4, 4), (torch.ones(2, 4),)), None, "random numbers"),
    "cache": (lambda: (nn.Linear(4, 4), (Cache(),)), None, "got Cache"),
    "no inputs": (lambda: Plain(), None, "a model and its inputs"),
    "other inputs": (shorter, plain, r"\[1, 16\].*\[2, 16\]"),
    "other sizes": (
        lambda: (nn.Linear(4, 4), (torch.ones(2, 4),)),
        lambda: (nn.Linear(4, 5), (torch.ones(2, 4),)),
        r"same size, got \[2, 4\] and \[2, 5\]",
    ),
    "one model twice": (lambda: (ONLY, (torch.ones(2, 4),)), None, "new weights"),
    "no_grad": (
        lambda: (WithoutGradients(4, 4), (torch.ones(2, 4),)),
        None,
        "differentiable",
    ),
    "ties": (lambda: (Routed(4, 4), (torch.ones(2, 4),)), None, "equal scores"),
}


@pytest.mark.parametrize("title", REFUSED)
def test_what_is_refused_is_named(title):
    ours, theirs, message = REFUSED[title]
    with pytest.raises(ValueError, match=message):
        compared(ours, theirs)


# --- The command --------------------------------------------------------------------------

BUILDERS = """
import torch
from torch import nn

def build(bias=0.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[0].bias.data += bias
    return model, (torch.ones(2, 4),)

def other():
    return build(0.5)

def wrong(bias=0.0):
    model, inputs = build(bias)
    model[1] = nn.Sigmoid()
    return model, inputs

def wrong_and_other():
    return wrong(0.5)

def no_inputs():
    return build()[0]

class Lowering(nn.Linear):
    def forward(self, x):
        if x.dtype == torch.float64:
            raise NotImplementedError("no kernel for Double")
        return super().forward(x)

def lowering():
    return Lowering(4, 4), (torch.ones(2, 4),)
"""


@pytest.fixture
def on_path(tmp_path, monkeypatch):
    (tmp_path / "builders_of_diverge.py").write_text(BUILDERS)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("on_path")
@pytest.mark.parametrize(
    ("ours", "exit_code", "printed"),
    [
        ("build", 0, "SAME FUNCTION"),
        ("other", 1, "OTHER WEIGHTS in 1 module"),
        ("wrong", 1, "MISTAKE in forward, in the model"),
        ("wrong_and_other", 1, "OTHER WEIGHTS in the model (the model), and perhaps"),
        ("no_inputs", 2, "a model and its inputs"),
        ("missing", 2, "has no missing"),
        ("lowering", 2, "its eager form"),
    ],
)
def test_the_exit_code(ours, exit_code, printed, capsys):
    names = ["--ours", f"builders_of_diverge:{ours}"]
    names += ["--theirs", "builders_of_diverge:build", "--device", "cpu"]
    found: Any
    try:
        found = main(names)
    except SystemExit as ended:
        found = ended.code
    output = capsys.readouterr()
    assert printed in output.out + output.err
    assert found == exit_code


def test_json_has_the_answer(on_path, capsys):
    file = on_path / "answer.json"
    main(
        ["--ours", "builders_of_diverge:build", "--json", str(file), "--device", "cpu"]
    )
    figures = json.loads(file.read_text())
    assert capsys.readouterr().out.startswith(figures["line"] + "\n")
    assert figures["exit_code"] == 0
    assert {row[0] for row in figures["rows"]} == {"0*", "1"}


def test_the_page_shows_what_its_commands_print(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers", reason="requires the extra examples")
    page = Path(__file__).parents[2] / "docs" / "diverge.md"
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("hf", "my_port"):
        text = next(block for block in blocks(page) if block.startswith(f"# {name}.py"))
        (tmp_path / f"{name}.py").write_text(text)
    for options, exit_code in (
        ("--ours my_port:build --theirs hf:build", 1),
        ("--ours hf:build --dtype bfloat16", 0),
    ):
        command, _, shown = block_with(page, options).partition("\n")
        assert main([*options.split(), "--device", "cpu"]) == exit_code
        require_shown(shown, capsys.readouterr().out, command)
    port = tmp_path / "my_port.py"
    right = port.read_text().replace(".repeat(1, 4, 1, 1)", ".repeat_interleave(4, 1)")
    (tmp_path / "my_right_port.py").write_text(right)
    assert not main(["--ours=my_right_port:build", "--theirs=hf:build", "--device=cpu"])
