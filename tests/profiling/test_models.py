"""Models of all kinds run, or end with their own error."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lab.timing import HOST
from pages import block_with
from profiling.report import report
from profiling.runs import EAGER_PARTS, Batch
from torch import Tensor, nn
from tqdm import TMonitor, tqdm

LAYER = nn.Linear(4, 4)
PASS = 2 * 10 * 4 * 4  # FLOPs of the layer in a pass


@dataclass(slots=True)
class Found:
    count: int
    chosen: Tensor
    hidden: Tensor


def test_backward_starts_at_the_first_tensor_in_an_object_that_has_a_gradient(
    profile_of,
):
    def model(x):
        result = SimpleNamespace(input=x.detach())
        result.itself = result
        result.found = Found(3, x.argmax(-1), LAYER(x))
        result.later = x.sin()
        return result

    assert profile_of(model).whole.flops == {"float32": 3 * PASS}


class CallsItself(nn.Module):
    """Applies a layer to each sequence, by itself, and then to all of them."""

    def __init__(self):
        super().__init__()
        self.layer = LAYER

    def forward(self, x):
        if len(x) > 1:
            x = torch.cat([self(one) for one in x.split(1)])
        return self.layer(x)


def test_a_model_that_calls_itself_is_measured_to_its_end(profile_of):
    for mode, passes in ("forward", 1), ("train", 3):
        measured = profile_of(CallsItself(), mode)
        assert measured.whole.flops == {"float32": passes * 2 * PASS}, mode
        own, layer, rest = measured.rows
        assert (layer.calls, own.calls) == (2 + 1, 1 + 2)
        later = sum(each.backward_calls for each in own.operations)
        assert (later > 0) == (mode == "train")
        # Under this clock, each operation takes a second, and nothing else does.
        assert rest.total_s == 0, mode


def test_layers_that_a_run_leaves_out_have_rows_and_runs_that_differ_are_named(
    profile_of,
):
    model: Any = nn.ModuleDict({"even": nn.Linear(4, 4), "odd": nn.Linear(4, 4)})
    model["late"] = nn.Linear(4, 4)
    # Two runs prepare, three are recorded, and the others are timed.
    names = chain(["even", "odd"] * 2, ["even"], cycle(["late"]))
    model.forward = lambda x: model[next(names)](x)
    measured = profile_of(model, "forward", paces=(1, 1))
    rows = {row.name: row for row in measured.rows}
    [note] = [each for each in measured.notes if each.startswith("Runs differ in")]
    for name in ("even", "odd", "late"):
        assert name in note
        assert rows[name].is_bound, name
        assert rows[name].kept_bytes is None, name
    assert rows["late"].total_s > 0


def add_in_threads(layer, x):
    """Call a layer, and a function without a module in a Python thread."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(torch.mm, x[0], x[0].T).result() @ layer(x)


def add_in_daemons(layer, x):
    """Call a layer, and a function without a module in a thread that is a daemon."""
    with ThreadPool(1) as threads:
        return layer(x) + threads.apply(torch.mean, [x])


def call_in_threads(layer, x):
    """Call a layer in a thread that was there before."""
    return POOL.submit(layer, x).result()


POOL = ThreadPoolExecutor(1)
POOL.submit(torch.ones, 1).result()


def test_a_model_whose_python_threads_work_is_one_part_with_bounds(profile_of):
    for forward in (add_in_threads, add_in_daemons, call_in_threads):
        model: Any = nn.Sequential(LAYER)
        model.forward = partial(forward, LAYER)
        measured = profile_of(model)
        for row in measured.rows[:-1]:
            assert row.name in ("Sequential", "outside of the model"), forward
            assert row.unseen == ("what runs in Python threads",), forward
            assert row.limit == "threads", forward
            assert row.kept_bytes is None, forward
        assert measured.whole.is_bound, forward


def show_progress(x):
    TMonitor(tqdm, 10).exit()  # which the first bar starts
    return LAYER(x)


def test_the_thread_of_progress_bars_does_not_work_in_a_model(profile_of):
    assert not profile_of(show_progress).whole.is_bound


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_flops_of_nested_tensors_are_unknown(profile_of):
    sequences = [torch.ones(3, 4), torch.ones(2, 4)]
    model = nn.ModuleDict({"layer": LAYER, "relu": nn.ReLU()})
    model.forward = lambda x: torch.nested.to_padded_tensor(
        model["relu"](LAYER(x)), 0.0
    )
    for layout in (torch.strided, torch.jagged):
        inputs = (torch.nested.nested_tensor(sequences, layout=layout),)
        measured = profile_of(model, "forward", inputs)
        assert measured.whole.is_bound, layout
        # Each of 5 tokens has 16 bytes.
        rows = {row.name: row for row in measured.rows}
        assert rows["relu"].moved_bytes == 2 * 5 * 16, layout


def fail(x):
    raise ValueError("my own")


BAD = {
    "must return a tensor, or several, got str": lambda x: "text",
    "in mode train, got none; use --mode forward": lambda x: x.detach(),
    "my own\n.* one tensor of shape .* = \\(2, 5, 4\\)": fail,
}


def test_models_that_fail_end_with_an_error_of_their_own(profile_of):
    for message, function in BAD.items():
        with pytest.raises(ValueError, match=message):
            profile_of(function)


def test_complex_weights_take_four_products_and_an_optimizer_that_is_not_fused(
    profile_of,
):
    layer = nn.Linear(4, 3, dtype=torch.cfloat)
    inputs = (torch.ones(2, 4, dtype=torch.cfloat),)
    measured = profile_of(layer, "step", inputs)
    assert measured.batch == Batch("2 x 4", 2, "sample")  # not integers, so no tokens
    # Four products of real numbers each. The input has no gradient.
    assert measured.whole.flops == {"float32": 2 * 4 * 2 * 2 * 4 * 3}
    [step] = [row for row in measured.rows if row.is_optimizer]
    assert "addcdiv_" in {each.name for each in step.operations}


def compiled_in_place():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].compile(backend="eager")
    model(torch.ones(2, 5, 4, requires_grad=True))  # compiled before it is measured
    return model


def compiled_function():
    function = torch.compile(torch.relu, backend="eager")
    return lambda x: function(LAYER(x))


@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_model_that_compiles_parts_of_itself_says_so(profile_of):
    note = f"The model compiles some of its parts. {EAGER_PARTS}"
    for build in (compiled_in_place, compiled_function):
        measured = profile_of(build(), by=HOST)
        assert note in measured.notes, build
        assert measured.whole.flops == {"float32": 3 * PASS}, build
        # The parts are not what the total consists of.
        assert "Most time lost" not in report(measured), build
        assert measured.whole.forward_s is measured.whole.of_roofline is None, build


def test_model_of_which_torch_compiles_nothing_is_measured_as_eager(profile_of):
    measured = profile_of(nn.RNN(4, 4), by=HOST, compiles=True)
    assert "graphs: 0, breaks: Attempted to wrap RNN" in measured.notes[1]
    assert " eager, " in measured.title
    assert measured.whole.of_roofline is not None, "the total is that of its parts"


def test_an_optimizer_of_a_model_is_a_part(profile_of):
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    optimizer = torch.optim.RMSprop([weight])

    def learn(x):
        optimizer.step()
        return x * weight.detach()

    step, model, _ = profile_of(learn, "forward").rows
    assert (step.name, step.is_optimizer) == ("RMSprop", True)
    # What runs after a step is the model's.
    assert "mul" in {each.name for each in model.operations}


def test_embeddings_may_be_sparse_unless_something_needs_dense_gradients(profile_of):
    model: Any = nn.ModuleDict({name: nn.Embedding(9, 4) for name in ("free", "tied")})
    model["head"] = nn.Linear(4, 9, bias=False)
    model["head"].weight = model["tied"].weight
    model.forward = lambda ids: model["free"](ids) + model["tied"](ids)
    inputs = (torch.ones(2, 3, dtype=torch.int64),)
    # AdamW takes no sparse gradients.
    for mode, names in ("train", ["free"]), ("step", []):
        rows = profile_of(model, mode, inputs).rows
        assert [row.name for row in rows if row.may_be_sparse] == names, mode
    model["free"].sparse = True  # already
    rows = profile_of(model, "train", inputs).rows
    assert not any(row.may_be_sparse for row in rows)


PAGE = Path(__file__).parents[2] / "docs" / "profile.md"


def test_model_of_the_page_is_split_into_its_layers(profile_of):
    pytest.importorskip("transformers", reason="requires the extra examples")
    program: dict[str, Any] = {"__name__": "my_training"}
    # Fewer words and tokens are faster.
    source = block_with(PAGE, "LlamaForCausalLM").replace("32000", "1000")
    exec(source.replace("(4, 256)", "(4, 16)"), program)
    model, inputs = program["build"]()
    measured = profile_of(model, "step", inputs)
    assert (measured.batch.count, measured.batch.unit) == (64, "token")
    rows = {row.name: row for row in measured.rows}
    assert {"model.embed_tokens", "model.layers.*.self_attn", "AdamW"} <= set(rows)
    # In each of three passes: 2 FLOPs, 64 tokens, a matrix of d_model x vocabulary.
    assert rows["lm_head"].flops == {"float32": 3 * 2 * 64 * 256 * 1000}
    assert "_log_softmax" in {each.name for each in rows["LlamaForCausalLM"].operations}
