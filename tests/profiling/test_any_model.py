"""Models of all kinds run, or end with their own error."""

from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from profiling.measure import EAGER_PARTS
from profiling.report import report
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.testing._internal.two_tensor import TwoTensor

SHAPE = (2, 6, 8)
TOKENS = 12
ONCE = 2 * TOKENS * 8 * 8  # FLOPs of a projection in forward


class Projects(nn.Module):
    """A projection, and a function of x and its result."""

    def __init__(self, function):
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.function = function

    def forward(self, x):
        return self.function(x, self.project(x))


@dataclass
class Found:
    count: int
    chosen: Tensor
    hidden: Tensor


@dataclass(slots=True)
class Slots:
    hidden: Tensor


class Plain:
    def __init__(self, hidden):
        self.hidden = hidden
        self.parent = self


RESULTS = {
    "a tensor": lambda x, y: y,
    "a tuple": lambda x, y: (y, x),
    "a dict": lambda x, y: {"hidden": y},
    "a dataclass": lambda x, y: Found(3, y.argmax(-1), y),
    "a dataclass with slots": lambda x, y: Slots(y),
    "a namespace": lambda x, y: SimpleNamespace(hidden=[y]),
    "an object": lambda x, y: Plain(y),
    "an integer first": lambda x, y: (y.argmax(-1), y),
    "a detached tensor first": lambda x, y: (y.detach(), y),
    "a scalar": lambda x, y: y.sum(),
}


@pytest.mark.parametrize("name", RESULTS)
def test_result_may_be_any_object_with_a_tensor(name, profile_of):
    for mode, passes in (("forward", 1), ("train", 3), ("step", 3)):
        measured = profile_of(Projects(RESULTS[name]), SHAPE, mode)
        assert measured.whole.flops == {"float32": passes * ONCE}, mode


def test_result_must_have_a_tensor(profile_of):
    with pytest.raises(ValueError, match="must return a tensor, or several, got str"):
        profile_of(Projects(lambda x, y: "text"), SHAPE)


def test_result_must_have_a_gradient_in_training(profile_of):
    model = Projects(lambda x, y: y.detach())
    assert profile_of(model, SHAPE, "forward").whole.flops
    with pytest.raises(ValueError, match="in mode train, got none; use --mode forward"):
        profile_of(model, SHAPE)


def test_error_of_a_model_says_how_it_was_called(profile_of):
    def fail(x, y):
        raise ValueError("my own")

    with pytest.raises(ValueError, match="my own") as failed:
        profile_of(Projects(fail), SHAPE)
    assert str(failed.value) == "my own"
    [note] = failed.value.__notes__
    assert "one tensor of shape (batch, seq, d_model) = (2, 6, 8)" in note


def test_error_of_a_builder_stays_as_it_is(profile_of):
    def build(device, dtype):
        return nn.Linear(8, 8).wieght

    with pytest.raises(AttributeError) as failed:
        profile_of(build, SHAPE)
    assert not hasattr(failed.value, "__notes__")


def test_part_that_fails_ends_where_the_model_goes_on(profile_of):
    class Fails(nn.Module):
        def forward(self, x):
            raise NotImplementedError

    class Falls(Projects):
        def __init__(self, function):
            super().__init__(function)
            self.fails = Fails()

        def forward(self, x):
            with suppress(NotImplementedError):
                return self.fails(x)
            return x @ self.project.weight

    measured = profile_of(Falls(None), SHAPE, "forward")
    flops = {row.name: row.flops for row in measured.rows}
    assert flops["sums"] == {"float32": ONCE}


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.ones(8))

    def forward(self, x):
        x += self.positions
        return x * x


@pytest.mark.parametrize("mode", ["forward", "train"])
def test_model_may_change_its_input(mode, profile_of):
    seen = []

    class Seeing(InPlace):
        def forward(self, x):
            seen.append(x.detach().clone())
            return super().forward(x)

    measured = profile_of(Seeing(), SHAPE, mode)
    torch.testing.assert_close(seen, [seen[0]] * len(seen), rtol=0, atol=0)
    # The copy of the input is no part of the model.
    assert [row.name for row in measured.rows] == ["sums", "rest"]


def test_steps_leave_the_weights_as_they_are(profile_of):
    model = nn.Linear(8, 8)
    weight = model.weight.detach().clone()
    profile_of(model, SHAPE, "step")
    assert torch.equal(model.weight, weight)


def test_sparse_gradients_have_the_bytes_of_their_values(profile_of):
    class Embeds(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(100, 8, sparse=True)

        def forward(self, x):
            return x + self.embed(torch.arange(6))

    # 6 rows of 8 numbers, and their indices.
    assert profile_of(Embeds(), SHAPE).memory.gradient_bytes == 6 * 8 * 4 + 6 * 8


def test_int8_weights_of_torchao_have_their_bytes(profile_of):
    quantization = pytest.importorskip(
        "torchao.quantization", reason="requires the extra examples"
    )
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU())
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    measured = profile_of(model, SHAPE, "forward")
    assert measured.whole.flops == {"float32": ONCE}
    # A byte for each number, and a scale and a zero for each row.
    assert 64 < measured.memory.parameter_bytes <= 64 + 8 * (4 + 8)


def test_operations_inside_of_a_wrapper_are_counted(profile_of):
    model = nn.Linear(8, 8, bias=False)
    model.weight = nn.Parameter(TwoTensor(torch.ones(8, 8), torch.ones(8, 8)))
    measured = profile_of(model, SHAPE, "forward")
    assert measured.whole.flops == {"float32": 2 * ONCE}
    assert measured.memory.parameter_bytes == 2 * 64 * 4


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_tensor_is_held_with_its_indices(profile_of):
    places = (torch.arange(7), torch.arange(6))
    matrix = torch.sparse_csr_tensor(*places, torch.ones(6), check_invariants=True)
    model = Projects(lambda x, y: matrix @ y[0])
    measured = profile_of(model, SHAPE, "forward")
    assert measured.memory.other_tensor_bytes == 6 * 4 + 6 * 8 + 7 * 8
    assert measured.memory.buffer_bytes == 0


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_unknown(profile_of):
    def attend(x, y):
        heads = y.unflatten(-1, (2, 4)).transpose(1, 2)
        return flex_attention(heads, heads, heads)

    whole = profile_of(Projects(attend), SHAPE, "forward").whole
    assert whole.unknown == ["higher_order.flex_attention"]


def test_gradient_inside_of_forward_hides_only_what_is_kept(profile_of):
    def learn(x, y):
        def loss(weight):
            return (x.detach() @ weight).square().sum()

        return y @ torch.func.grad(loss)(torch.eye(8))

    measured = profile_of(Projects(learn), SHAPE)
    assert measured.whole.kept_bytes is None
    reason = "Kept bytes are unknown, because torch.func.grad hides them."
    assert measured.notes[0] == reason
    assert "kept for backward unknown" in " ".join(report(measured).split())
    # Without x, the inner product has one gradient; the outer one needs only that of y.
    assert measured.whole.flops == {"float32": (3 + 2 + 2) * ONCE}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_padded_batch_of_a_fused_encoder_is_unknown(profile_of):
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.encode = nn.TransformerEncoder(layer, 1)

        def forward(self, x):
            padding = torch.arange(6) > torch.tensor([[3], [5]])
            return self.encode(x, src_key_padding_mask=padding)

    whole = profile_of(Padded(), SHAPE, "forward").whole
    assert whole.unknown == ["aten._transformer_encoder_layer_fwd"]


def test_lazy_and_shared_modules_run(profile_of):
    shared = nn.LazyLinear(8)
    measured = profile_of(nn.Sequential(shared, nn.ReLU(), shared), SHAPE)
    assert measured.whole.flops == {"float32": 6 * ONCE}
    assert measured.memory.parameter_bytes == 4 * (64 + 8)
    [row] = [row for row in measured.rows if row.parameters]
    assert (row.modules, row.calls) == (1, 2)


def test_scripted_model_is_one_part(profile_of):
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
    @torch.compile(backend="aot_eager")
    def function(x, y):
        return F.relu(y)

    function(torch.ones(SHAPE), torch.ones(SHAPE))  # compiled before it is measured
    return Projects(function)


@pytest.mark.filterwarnings(
    "ignore:Using `torch.compile.module.` when there are global"
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    "build", [compiled_in_place, compiled_child, compiled_function]
)
def test_model_that_is_partly_compiled_is_measured_eagerly_and_says_so(
    build, profile_of
):
    measured = profile_of(lambda *_: build(), SHAPE)
    torch._dynamo.reset()
    assert f"The model compiles some of its parts. {EAGER_PARTS}" in measured.notes
    assert measured.whole.flops == {"float32": 3 * ONCE}
    text = report(measured)
    # The parts are not what the total consists of.
    assert "Most time lost" not in text
    assert "tokens/s, unknown part of the roofline" in " ".join(text.split())
    assert "Overhead" not in text
    assert measured.whole.forward_s is measured.whole.of_roofline is None


def test_eager_model_has_no_such_note(profile_of):
    assert EAGER_PARTS not in "".join(profile_of(nn.Linear(8, 8), SHAPE).notes)
