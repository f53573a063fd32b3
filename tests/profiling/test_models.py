"""Models of all kinds run, or end with their own error."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lab.timing import HOST
from pages import block_with
from profiling.report import report
from profiling.runs import EAGER_PARTS
from torch import Tensor, nn

SHAPE = (2, 6, 8)
ONCE = 2 * 12 * 8 * 8  # FLOPs of a projection of 12 tokens in forward


class Projects(nn.Module):
    """A projection, and a function of x and its result."""

    def __init__(self, function):
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.function = function

    def forward(self, x):
        return self.function(x, self.project(x))


@dataclass(slots=True)
class Found:
    count: int
    chosen: Tensor
    hidden: Tensor


class Plain:
    def __init__(self, hidden):
        self.hidden = hidden
        self.parent = self


RESULTS = {
    "a tensor": lambda x, y: y,
    "a tuple": lambda x, y: (y, x),
    "a dict": lambda x, y: {"hidden": y},
    "a dataclass with slots": lambda x, y: Found(3, y.argmax(-1), y),
    "an object": lambda x, y: Plain(y),
    "a detached tensor first": lambda x, y: (y.detach(), y),
    "a scalar": lambda x, y: y.sum(),
}


def test_result_may_be_any_object_with_a_tensor(profile_of):
    for name, function in RESULTS.items():
        for mode, passes in (("forward", 1), ("train", 3)):
            measured = profile_of(Projects(function), SHAPE, mode)
            assert measured.whole.flops == {"float32": passes * ONCE}, (name, mode)


def fail(x, y):
    raise ValueError("my own")


BAD = {
    "must return a tensor, or several, got str": (lambda x, y: "text", ValueError),
    "in mode train, got none; use --mode forward": (
        lambda x, y: y.detach(),
        ValueError,
    ),
    "^my own\n": (fail, ValueError),
}


def test_errors_of_models_are_shown_as_they_are(profile_of):
    for message, (function, kind) in BAD.items():
        with pytest.raises(kind, match=message) as failed:
            profile_of(Projects(function), SHAPE)
    [note] = failed.value.__notes__
    assert "one tensor of shape (batch, seq, d_model) = (2, 6, 8)" in note
    with pytest.raises(AttributeError) as typo:
        profile_of(lambda device, dtype: nn.Linear(8, 8).wieght, SHAPE)
    assert not hasattr(typo.value, "__notes__")


WEIGHT = nn.Parameter(torch.ones(8, 8, dtype=torch.complex64))


class Shifts(nn.Module):
    """Changes its input, and notes what it gets."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.ones(8))
        self.seen = []

    def forward(self, x):
        self.seen.append(x.detach().clone())
        x += self.shift
        return x * x


def test_each_run_gets_the_same_input_and_the_same_weights(profile_of):
    for mode in ("forward", "step"):
        model = Shifts()
        profile_of(model, SHAPE, mode)
        assert len(model.seen) > 10, mode
        torch.testing.assert_close(model.seen, [model.seen[0]] * len(model.seen))
        assert torch.equal(model.shift, torch.ones(8)), mode


def test_adamw_is_fused_unless_weights_are_complex(profile_of):
    model: Any = nn.Linear(8, 8, bias=False)
    model.frozen = nn.Parameter(torch.ones(8, dtype=torch.int8), requires_grad=False)
    for weight, name in ((model.weight, "_fused_adamw_"), (WEIGHT, "addcdiv_")):
        model.weight = weight
        model.forward = lambda x, weight=weight: (x.to(weight.dtype) @ weight).real
        [row] = [
            row for row in profile_of(model, SHAPE, "step").rows if row.name == "AdamW"
        ]
        assert row.operation(name).calls == 1


def test_forward_measures_eval_mode_and_others_the_model_as_built(profile_of):
    for mode, training, expected in (
        ("forward", True, "eval"),
        ("train", True, "training"),
        ("step", False, "eval"),
    ):
        title = profile_of(nn.Linear(8, 8).train(training), SHAPE, mode).title
        assert (
            title
            == f"a model: 2 x 6 tokens, d_model 8; float32, {mode}, eager, {expected} mode"
        )


def test_lazy_shared_and_scripted_modules_run(profile_of):
    shared = nn.LazyLinear(8)
    measured = profile_of(nn.Sequential(shared, nn.ReLU(), shared), SHAPE)
    assert measured.whole.flops == {"float32": 6 * ONCE}
    [row] = [row for row in measured.rows if row.parameters]
    assert (row.modules, row.calls, row.parameters) == (1, 2, 64 + 8)
    with pytest.warns((DeprecationWarning, FutureWarning), match="jit"):
        model = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    assert profile_of(model, SHAPE, "forward").whole.flops == {"float32": ONCE}


def compiled_in_place():
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].compile(backend="aot_eager")
    return model


def compiled_child():
    child: Any = torch.compile(nn.Linear(8, 8), backend="aot_eager")
    return nn.Sequential(child)


def compiled_function():
    function = torch.compile(lambda x, y: F.relu(y), backend="aot_eager")
    function(torch.ones(SHAPE), torch.ones(SHAPE))  # compiled before it is measured
    return Projects(function)


@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_model_that_compiles_parts_of_itself_says_so(profile_of):
    note = f"The model compiles some of its parts. {EAGER_PARTS}"
    for build in (compiled_in_place, compiled_child, compiled_function):
        measured = profile_of(lambda *_, build=build: build(), SHAPE, clock=HOST)
        torch._dynamo.reset()
        assert note in measured.notes, build
        assert measured.whole.flops == {"float32": 3 * ONCE}, build
        # The parts are not what the total consists of.
        assert "Most time lost" not in report(measured), build
        assert measured.whole.forward_s is measured.whole.of_roofline is None, build
    assert note not in profile_of(nn.Linear(8, 8), SHAPE).notes


class Disabled(nn.Linear):
    forward = torch.compiler.disable(nn.Linear.forward)


class Recurrent(nn.Module):
    """Calls a recurrent layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(8, 8)

    def forward(self, x):
        return self.layer(x)[0].sin()


def sparse(x, y):
    return torch.eye(6).to_sparse() @ y[0]


# Whether torch.compile changes what a part of a model does.
COMPILES = {
    "a layer": (nn.Linear(8, 8), "Linear", True),
    "recurrent": (nn.LSTM(8, 8), "LSTM", False),
    "what calls a recurrent layer": (Recurrent(), "sums", False),
    "disabled": (Disabled(8, 8), "Disabled", False),
    "with a sparse matrix": (Projects(sparse), "sums", False),
    "beside a sparse matrix": (Projects(sparse), "project", True),
}


def test_parts_that_torch_does_not_compile_are_known(profile_of):
    for name, (model, part, compiles) in COMPILES.items():
        rows = {row.name: row for row in profile_of(model, SHAPE).rows}
        assert rows[part].compiles == compiles, name
    measured = profile_of(nn.RNN(8, 8), SHAPE, clock=HOST, compile=True)
    assert "graphs: 0, breaks: Attempted to wrap RNN" in measured.notes[1]
    assert " eager, " in measured.title
    assert measured.whole.of_roofline is not None, "the total is that of its parts"


class Learns(nn.Module):
    """Steps an optimizer of its own."""

    def __init__(self, make):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.optimizer = make([self.weight])

    def forward(self, x):
        self.weight.grad = torch.ones(8)
        self.optimizer.step()
        return x * self.weight.detach()


# Optimizers, and whether torch has a fused form that they do not use.
OPTIMIZERS = {
    "Adam": (lambda weights: torch.optim.Adam(weights, foreach=True), True),
    "SGD": (lambda weights: torch.optim.SGD(weights, foreach=False), True),
    "AdamW": (lambda weights: torch.optim.AdamW(weights, fused=True), False),
    "RMSprop": (torch.optim.RMSprop, False),
}


def test_optimizers_of_a_model_are_parts_that_may_be_fused(profile_of):
    for name, (make, may_be_fused) in OPTIMIZERS.items():
        rows = profile_of(Learns(make), SHAPE, "forward").rows
        [row] = [row for row in rows if row.is_optimizer]
        assert (row.name, row.may_be_fused) == (name, may_be_fused)
        # What runs after the step is the model's.
        [model] = [row for row in rows if row.name == "Learns"]
        assert model.operation("mul").calls == 1, name


PAGE = Path(__file__).parents[2] / "docs" / "profile.md"


def test_model_of_the_page_is_split_into_its_layers(profile_of):
    pytest.importorskip("transformers", reason="requires the extra examples")
    program: dict[str, Any] = {"__name__": "my_training"}
    # A smaller vocabulary is faster.
    exec(block_with(PAGE, "LlamaForCausalLM").replace("32000", "1000"), program)
    measured = profile_of(lambda *_: program["build"](), SHAPE, "step")
    assert measured.title.startswith("a model: input_ids 4 x 256, labels 4 x 256; ")
    rows = {row.name: row for row in measured.rows}
    assert "model.layers.*.self_attn" in rows
    # In each of three passes: 2 FLOPs, 1024 tokens, a matrix of d_model x vocabulary.
    assert rows["lm_head"].flops == {"float32": 3 * 2 * 1024 * 256 * 1000}
    assert rows["model.embed_tokens"].parameters == 256 * 1000
    assert rows["sums"].operation("_log_softmax").calls == 1


class Scores(nn.Module):
    """Multiplies rows of a table by an image's channels, which it changes."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 3)

    def forward(self, ids, image, scale=1.0):
        image += 1
        return scale * self.embed(ids) @ image.mean((-1, -2)).T


IDS, IMAGE = torch.arange(8).view(2, 4), torch.ones(2, 3, 5, 5)
# A model's inputs, their description, and how many tokens or samples they are.
INPUTS = {
    "by place": ((IDS, IMAGE), "2 x 4, 2 x 3 x 5 x 5", 8, "token"),
    "by keyword": (
        {"image": IMAGE, "ids": IDS, "scale": 2.0},
        "image 2 x 3 x 5 x 5, ids 2 x 4",
        2,
        "sample",
    ),
}


def test_inputs_are_those_of_the_builder(profile_of):
    for name, (inputs, description, count, unit) in INPUTS.items():
        measured = profile_of(lambda *_, inputs=inputs: (Scores(), inputs), SHAPE)
        assert measured.title.startswith(f"a model: {description}; "), name
        assert (measured.samples, measured.sample) == (count, unit), name
        # 8 tokens meet 3 x 2 channels, in forward and for the gradient of the tokens.
        assert measured.whole.flops == {"float32": 2 * 2 * 8 * 3 * 2}, name
        assert torch.equal(IMAGE, torch.ones(2, 3, 5, 5)), "each run gets a copy"
    with pytest.raises(TypeError) as failed:
        profile_of(lambda *_: (Scores(), (IDS,)), SHAPE)
    assert "with the inputs that its builder returned" in failed.value.__notes__[0]
