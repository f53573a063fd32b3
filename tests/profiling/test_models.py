"""Models of all kinds run, or end with their own error."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lab.timing import HOST
from pages import block_with
from profiling.report import report
from profiling.runs import EAGER_PARTS, Batch, batch_of
from torch import Tensor, nn

LAYER = nn.Linear(4, 4)
ONCE = 2 * 10 * 4 * 4  # FLOPs of the layer in forward


@dataclass(slots=True)
class Found:
    count: int
    chosen: Tensor
    hidden: Tensor


class Plain:
    def __init__(self, hidden):
        self.hidden = hidden
        self.parent = self


def scripted():
    with pytest.warns((DeprecationWarning, FutureWarning), match="jit"):
        return torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


RESULTS = {
    "a tensor": LAYER,
    "a tuple": lambda x: (LAYER(x), x),
    "a dict": lambda x: {"hidden": LAYER(x)},
    "a dataclass with slots": lambda x: Found(3, x.argmax(-1), LAYER(x)),
    "an object": lambda x: Plain(LAYER(x)),
    "a detached tensor first": lambda x: (x.detach(), LAYER(x)),
    "a scalar": lambda x: LAYER(x).sum(),
    "of a lazy module": nn.Sequential(nn.LazyLinear(4)),
}


def test_result_may_be_any_object_with_a_tensor(profile_of):
    for name, model in RESULTS.items():
        for mode, passes in (("forward", 1), ("train", 3)):
            found = profile_of(model, mode).whole.flops
            assert found == {"float32": passes * ONCE}, (name, mode)
    assert profile_of(scripted(), "forward").whole.flops == {"float32": ONCE}


def fail(x):
    raise ValueError("my own")


BAD = {
    "must return a tensor, or several, got str": lambda x: "text",
    "in mode train, got none; use --mode forward": lambda x: x.detach(),
    "^my own\n": fail,
}


def test_errors_of_models_are_shown_as_they_are(profile_of):
    for message, function in BAD.items():
        with pytest.raises(ValueError, match=message) as failed:
            profile_of(function)
    assert "(batch, seq, d_model) = (2, 5, 4)" in failed.value.__notes__[0]
    with pytest.raises(ValueError, match="my own") as failed:
        profile_of(fail, inputs=(torch.ones(2),))
    assert "with the inputs that its builder returned" in failed.value.__notes__[0]


class Shifts(nn.Module):
    """Changes its input, and notes what it gets."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.ones(4))
        self.seen = []

    def forward(self, x):
        self.seen.append(x.detach().clone())
        x += self.shift
        return x * x


def test_each_run_gets_the_same_input_and_the_same_weights(profile_of):
    model = Shifts()
    profile_of(model, "step")
    assert len(model.seen) > 10
    torch.testing.assert_close(model.seen, [model.seen[0]] * len(model.seen))
    assert torch.equal(model.shift, torch.ones(4))


def test_adamw_is_fused_unless_weights_are_complex(profile_of):
    for dtype, name in ((torch.float32, "_fused_adamw_"), (torch.cfloat, "addcdiv_")):
        inputs = (torch.ones(2, 4, dtype=dtype),)
        layer: Any = nn.Linear(4, 4, dtype=dtype)
        # A frozen weight of integers changes nothing.
        layer.frozen = nn.Parameter(torch.ones(8, dtype=torch.int8), False)
        model = nn.Sequential(layer, nn.Flatten(0))
        rows = {row.name: row for row in profile_of(model, "step", inputs).rows}
        assert rows["AdamW"].operation(name).calls > 0


def compiled_in_place():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].compile(backend="eager")
    return model


def compiled_function():
    function = torch.compile(torch.relu, backend="eager")
    function(torch.ones(2, 5, 4))  # compiled before it is measured
    return lambda x: function(LAYER(x))


@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_model_that_compiles_parts_of_itself_says_so(profile_of):
    note = f"The model compiles some of its parts. {EAGER_PARTS}"
    for build in (compiled_in_place, compiled_function):
        measured = profile_of(build(), by=HOST)
        assert note in measured.notes, build
        assert measured.whole.flops == {"float32": 3 * ONCE}, build
        # The parts are not what the total consists of.
        assert "Most time lost" not in report(measured), build
        assert measured.whole.forward_s is measured.whole.of_roofline is None, build
    assert note not in profile_of(LAYER).notes


class Disabled(nn.Linear):
    forward = torch.compiler.disable(nn.Linear.forward)


class Recurrent(nn.Module):
    """Calls a recurrent layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(4, 4)

    def forward(self, x):
        return self.layer(x)[0].sin()


class Sparse(nn.Linear):
    """Multiplies a layer's result by a sparse matrix."""

    def __init__(self):
        super().__init__(4, 4)
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return torch.eye(5).to_sparse() @ self.layer(x)[0]


# Whether torch.compile changes what a part of a model does.
COMPILES = {
    "a layer": (nn.Linear(4, 4), "Linear", True),
    "recurrent": (nn.LSTM(4, 4), "LSTM", False),
    "what calls a recurrent layer": (Recurrent(), "sums", False),
    "disabled": (Disabled(4, 4), "Disabled", False),
    "with a sparse matrix": (Sparse(), "sums", False),
    "beside a sparse matrix": (Sparse(), "layer", True),
}


def test_parts_that_torch_does_not_compile_are_known(profile_of):
    for name, (model, part, compiles) in COMPILES.items():
        rows = {row.name: row for row in profile_of(model).rows}
        assert rows[part].compiles == compiles, name
    measured = profile_of(nn.RNN(4, 4), by=HOST, compiles=True)
    assert "graphs: 0, breaks: Attempted to wrap RNN" in measured.notes[1]
    assert " eager, " in measured.title
    assert measured.whole.of_roofline is not None, "the total is that of its parts"


class Learns(nn.Module):
    """Steps an optimizer of its own."""

    def __init__(self, make):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.optimizer = make([self.weight])

    def forward(self, x):
        self.weight.grad = torch.ones(4)
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
        rows = profile_of(Learns(make), "forward").rows
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
    model, inputs = program["build"]()
    measured = profile_of(model, "step", inputs)
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
    "2 x 4, 2 x 3 x 5 x 5": ((IDS, IMAGE), 8, "token"),
    "image 2 x 3 x 5 x 5, ids 2 x 4": (
        {"image": IMAGE, "ids": IDS, "scale": 2.0},
        2,
        "sample",
    ),
}


def test_inputs_are_those_of_the_builder(profile_of):
    for sizes, (inputs, count, unit) in INPUTS.items():
        measured = profile_of(Scores(), "train", inputs)
        assert measured.batch == Batch(sizes, count, unit)
        assert measured.title.startswith(f"a model: {sizes}; ")
        # 8 tokens meet 3 x 2 channels, in forward and for the gradient of the tokens.
        assert measured.whole.flops == {"float32": 2 * 2 * 8 * 3 * 2}
        assert torch.equal(IMAGE, torch.ones(2, 3, 5, 5)), "each run gets a copy"
    for inputs in ((), (torch.tensor(1.0),)):
        assert batch_of(inputs).count == 1
