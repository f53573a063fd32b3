"""Each peer computes what the Block computes, with weights of its own, or is not timed."""

import argparse
import dataclasses
import importlib
import multiprocessing
import re
import sys
import weakref
from concurrent.futures import Future
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import compare_peers
import pytest
import torch
from compare_peers import Case, Reference, Result, Size
from peers import own, projects
from processes import SERVER
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

import tinyblock
from tinyblock import Block, RotaryPositionalEmbedding

SIZE = Size(2, 5, d_model=32, num_heads=4, d_ff=48, num_kv_heads=2)
ONE = dataclasses.replace(SIZE, batch_size=1, seq_len=1)
TRAINING = Case("tiny", SIZE, torch.float32, train=True, mode="eager")
ONE_TOKEN = "forward-bf16-tiny-token-eager"
CPU = torch.device("cpu")
PEERS = own.OWN | projects.installed(projects.PROJECTS, CPU)

# Other projects warn when they are imported, and in their layers.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch):
    monkeypatch.setattr(compare_peers, "SAMPLE_SECONDS", 0)


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs the command, and returns its exit code and output."""

    def run(options):
        monkeypatch.setattr(sys, "argv", ["compare_peers.py", *options.split()])
        return compare_peers.main(), capsys.readouterr().out

    return run


@pytest.mark.parametrize("name", PEERS)
def test_peer_computes_what_the_block_computes_with_its_own_weights(name):
    block, _ = own.make_block(SIZE, torch.float32, CPU)
    assert block.ln1.weight.std() > 0.05
    mine = {weight.data_ptr() for weight in block.parameters()}
    theirs = PEERS[name](block).parameters
    assert mine.isdisjoint(weight.data_ptr() for weight in theirs)
    for dtype in compare_peers.DTYPES.values():
        case = dataclasses.replace(TRAINING, dtype=dtype)
        Reference(case, CPU).compare(PEERS[name], rounds=1)


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("dtype", compare_peers.DTYPES.values(), ids=str)
def test_peer_has_weights_in_the_dtype_of_the_case(name, dtype):
    block, _ = own.make_block(SIZE, dtype, CPU)
    assert {weight.dtype for weight in PEERS[name](block).parameters} == {dtype}


@pytest.mark.parametrize("name", PEERS)
def test_peer_takes_sizes_eps_and_theta_of_the_block(name):
    """None is a default. The norm of x-transformers has no eps."""
    eps = 1e-12 if name == "x-transformers" else 0.1
    rope = RotaryPositionalEmbedding(100.0, 16, max_seq_len=5)
    block: Any = Block(32, 4, 48, rope=rope, num_kv_heads=2, d_head=16, eps=eps)
    block.ln1.weight.data += 0.1
    x = torch.randn(2, 5, 32)
    result = PEERS[name](block).layers["Block"](x)
    result = result[0] if isinstance(result, tuple) else result
    assert own.relative_error(result, block(x)) < 1e-5


def test_block_and_input_differ_by_seed_and_have_the_asked_eps_and_dtype():
    arguments = SIZE, torch.bfloat16, CPU
    (block, x), (other, other_x) = (own.make_block(*arguments, i, 0.5) for i in (1, 2))
    assert (x.shape, x.dtype) == (SIZE.shape, torch.bfloat16)
    assert {weight.dtype for weight in block.parameters()} == {torch.bfloat16}
    assert (block.ln1.eps, block.ln2.eps) == (0.5, 0.5)
    assert not x.equal(other_x)
    for name, weight in other.named_parameters():
        assert not weight.equal(block.get_parameter(name)), name


def changed(gain=1.0, slope=0.0):
    """Return a peer whose outputs and gradients differ from the Block's."""

    def make(block):
        peer = own.control(block)
        layer = peer.layers["Block"]
        peer.layers["Block"] = lambda x: gain * layer(x) + slope * (x - x.detach())
        return peer

    return make


@pytest.mark.parametrize(
    ("gain", "slope", "message"),
    [
        (1 + 1e-4, 0, r"outputs must be within 2e-05 .* error of 1\.0e-04"),
        (torch.nan, 0, r"outputs must be within .* error of nan"),
        (1, 1e-3, r"gradients must be within .* error of \d\.\de-04"),
    ],
)
def test_peer_that_disagrees_is_not_timed(gain, slope, message):
    with pytest.raises(RuntimeError, match=message):
        Reference(TRAINING, CPU).compare(changed(gain, slope), rounds=1)


def test_bfloat16_peer_may_differ_by_roundings_and_no_more():
    case = dataclasses.replace(TRAINING, dtype=torch.bfloat16, train=False)
    reference = Reference(case, CPU)
    reference.compare(changed(gain=1 + 1 / 128), rounds=1)  # one unit in the last place
    with pytest.raises(RuntimeError, match="outputs must be within"):
        reference.compare(changed(gain=1.05), rounds=1)


def test_against_is_another_checkout_and_may_fail(run, tmp_path, monkeypatch):
    monkeypatch.setattr(compare_peers, "SIZES", {"tiny": SIZE})
    source = tmp_path / "tinyblock" / "__init__.py"
    source.parent.mkdir()
    source.write_text("from tinyblock import *\nBlock = None\n")
    options = "--cases forward-f32-tiny-eager --peers control --rounds 1"
    code, output = run(f"{options} --against {tmp_path}")
    assert code == 1, output
    assert "against failed: TypeError(" in output


def forbid_comparing(monkeypatch):
    def compare(*_):
        pytest.fail("peers were compared")

    monkeypatch.setattr(compare_peers, "compare_all", compare)
    monkeypatch.setattr(compare_peers, "compare_in_processes", compare)


def test_against_a_folder_that_is_no_checkout_is_an_error(
    run, tmp_path, capsys, monkeypatch
):
    forbid_comparing(monkeypatch)
    with pytest.raises(SystemExit):
        run(f"--against {tmp_path}")
    assert (
        "--against must be a checkout of tinyblock, "
        f"but has no {tmp_path / 'tinyblock' / '__init__.py'}"
    ) in capsys.readouterr().err


def test_an_installed_project_is_a_peer():
    pytest.importorskip("transformers", reason="requires the extra examples")
    assert "transformers" in PEERS


def test_kernels_of_liger_are_norm_feed_forward_and_rope(monkeypatch):
    """Here they are layers of transformers, and a RoPE that does not rotate."""
    pytest.importorskip("transformers", reason="requires the extra examples")
    llama: Any = importlib.import_module(projects.LLAMA)
    rope = Mock(side_effect=lambda q, k, cos, sin: (q, k))
    kernels: dict[str, dict[str, Any]] = {
        "rms_norm": {"LigerRMSNorm": type("Norm", (llama.LlamaRMSNorm,), {})},
        "swiglu": {"LigerSwiGLUMLP": type("MLP", (llama.LlamaMLP,), {})},
        "rope": {"liger_rotary_pos_emb": rope},
    }
    for file, names in kernels.items():
        module = SimpleNamespace(**names)
        monkeypatch.setitem(sys.modules, f"liger_kernel.transformers.{file}", module)
    block, x = own.make_block(SIZE, torch.float32, CPU)
    layers: Any = projects.liger(block).layers
    layers["attention"](x)
    kinds = [type(layers[name]).__name__ for name in ("RMSNorm", "SwiGLU")]
    assert kinds == ["Norm", "MLP"]
    rope.assert_called_once()


def test_a_project_that_cannot_run_here_is_left_out_with_its_reason(capsys):
    """The package typing-extensions has the module typing_extensions."""
    names = ["no-such-project", "liger-kernel", "typing-extensions"]
    assert projects.installed(dict.fromkeys(names, 1), CPU) == {names[2]: 1}
    projects.print_left_out(names, CPU)
    assert capsys.readouterr().err.splitlines() == [
        "no-such-project is left out: it is not installed",
        "liger-kernel is left out: it requires CUDA",
    ]
    installed = metadata.version("typing-extensions")
    assert projects.versions(names[::2]) == f"typing-extensions {installed}"
    assert projects.versions(names[:2]) == "no other project is installed"


def test_the_output_begins_with_machine_versions_and_command(run, monkeypatch):
    monkeypatch.setattr(compare_peers, "compare_all", lambda case, options: {})
    monkeypatch.setattr(compare_peers, "environment", lambda device: f"on {device}")
    monkeypatch.setattr(compare_peers, "versions", lambda names: ", ".join(names))
    left_out = Mock()
    monkeypatch.setattr(compare_peers, "print_left_out", left_out)
    _, output = run("--cases train-f32-768-eager --peers control")
    left_out.assert_called_once_with(projects.PROJECTS, CPU)
    machine, _, versions = output.splitlines()[:3]
    assert machine == "# on cpu"
    assert versions == (
        "transformers, liger-kernel, litgpt, x-transformers; "
        "`compare_peers.py --cases train-f32-768-eager --peers control`"
    )


def test_option_device_is_where_the_block_is(run, monkeypatch):
    devices = []

    def build(size, dtype, device):
        devices.append(device.type)
        return make_block(size, dtype, CPU)

    make_block = own.make_block
    monkeypatch.setattr(compare_peers, "SIZES", {"tiny": SIZE})
    monkeypatch.setattr(compare_peers, "make_block", build)
    run("--device meta --cases forward-f32-tiny-eager --peers control --rounds 1")
    assert devices == ["meta"]


def test_each_case_has_a_row(run, monkeypatch):
    monkeypatch.setattr(compare_peers, "SIZES", {"tiny": SIZE})
    _, output = run("--peers control --rounds 1")
    rows = re.findall(r"^\| (\S+): control ", output, re.MULTILINE)
    assert rows == [
        f"{work}-{dtype}-tiny-eager"
        for dtype in ("f32", "bf16")
        for work in ("train", "forward")
    ]


class InThisProcess:
    """Run in this process what a pool of processes would run."""

    def __init__(self, max_workers, context, initializer):
        assert max_workers == 1
        assert context.get_start_method() == "spawn"
        initializer()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def submit(self, function, *args):
        future = Future()
        future.set_result(function(*args))
        return future


def test_one_token_is_the_median_of_processes(run, monkeypatch):
    """Each process has other medians, and the peer `unchecked` fails in one of them."""
    milliseconds = [(6, 4), (9, 1), (3, 3), (8, 2), (5, 4)]

    def compare(case, options):
        block, peer = milliseconds.pop(0)
        result = Result(
            block_seconds=[block / 1e3, 9.0, 0.0],
            peer_seconds=[peer / 1e3, 9.0, 0.0],
            errors={"outputs": 1e-7, "gradients": 2e-6},
            block_kept=3 * 2**20,
            peer_kept=0,
        )
        return {
            "control": result,
            "unchecked": "ValueError()" if block == 3 else result,
        }

    monkeypatch.setattr(compare_peers, "ProcessPoolExecutor", InThisProcess)
    monkeypatch.setattr(compare_peers, "compare_all", compare)
    code, output = run(f"--cases {ONE_TOKEN} --peers control,unchecked")
    assert code == 1, output
    text = " ".join(output.split())
    assert "| Block's time / peer's | control | unchecked |" in text
    assert f"| {ONE_TOKEN} | 1.50 (1.00-9.00) | failed |" in text
    assert (
        "| Block ms | peer ms | differ by | Block keeps MiB | peer keeps MiB |" in text
    )
    assert f"| {ONE_TOKEN}: control | 6.00 | 3.00 | 1e-07, 2e-06 | 3.0 | |" in text
    assert f"{ONE_TOKEN}: unchecked failed: ValueError()" in text


def test_one_token_is_compared_in_a_new_process(run, monkeypatch):
    """Here it is a fork of the tests' server: a new Python takes seconds to import torch."""
    in_this_process = AssertionError("compared in the process of the test")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: SERVER)
    monkeypatch.setattr(compare_peers, "PROCESSES", 1)
    monkeypatch.setattr(Reference, "compare", Mock(side_effect=in_this_process))
    case = "forward-f32-tiny-token-eager"
    code, output = run(f"--cases {case} --peers control --rounds 1")
    assert code == 0, output
    assert f"{case}: control " in output


def test_every_process_computes_on_one_thread(run, monkeypatch):
    threads = []

    def compare(case, options):
        threads.append(torch.get_num_threads())
        torch.set_num_threads(2)  # the next process must set its own number
        return {}

    monkeypatch.setattr(compare_peers, "ProcessPoolExecutor", InThisProcess)
    monkeypatch.setattr(compare_peers, "compare_all", compare)
    torch.set_num_threads(2)
    try:
        run(f"--cases train-f32-768-eager,{ONE_TOKEN} --peers control")
    finally:
        torch.set_num_threads(1)
    assert threads == [1] * (1 + compare_peers.PROCESSES)


def test_rounds_are_the_samples_of_block_and_peer():
    result = Reference(TRAINING, CPU).compare(own.control, rounds=3)
    assert (len(result.block_seconds), len(result.peer_seconds)) == (3, 3)


def test_result_has_the_errors_of_outputs_and_gradients():
    errors = Reference(TRAINING, CPU).compare(changed(1 + 1e-5), rounds=1).errors
    assert errors == pytest.approx({"outputs": 1e-5, "gradients": 1e-5}, rel=0.1)


def test_all_peers_are_compared_unless_some_are_chosen(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["compare_peers.py"])
    options, _ = compare_peers.parse()
    assert compare_peers.chosen_peers(options).keys() == PEERS.keys()


def test_option_rounds_reaches_the_comparison(run, monkeypatch):
    rounds = []

    def compare(reference, make_peer, count):
        rounds.append(count)
        raise ValueError

    monkeypatch.setattr(compare_peers, "SIZES", {"tiny": SIZE})
    monkeypatch.setattr(Reference, "compare", compare)
    run("--cases forward-f32-tiny-eager --peers control --rounds 4")
    assert rounds == [4]


def test_reading_sums_all_weights_of_a_block_for_one_token_only(monkeypatch):
    """A bfloat16 pair is read as one float32, so half as many numbers are summed."""
    runs = []

    def sampler(run, least_seconds):
        runs.append(run)
        return iter([len(runs)] * 9).__next__

    monkeypatch.setattr(compare_peers, "wall_sampler", sampler)
    case = compare_peers.all_cases(CPU)[ONE_TOKEN]
    options = argparse.Namespace(device=CPU, rounds=2)
    monkeypatch.setattr(compare_peers, "chosen_peers", lambda options: {})
    found = compare_peers.compare_all(case, options)
    assert found["reading"].block_seconds == [1, 1]
    assert found["reading"].peer_seconds == [2, 2]
    weights = 4 * 64 * 64 + 3 * 64 * 192 + 2 * 64
    assert runs[1].__self__.shape == (weights // 2,)
    assert runs[1]().dtype == torch.float32

    assert compare_peers.compare_all(TRAINING, options) == {}


def test_only_cases_of_one_token_have_a_column_for_reading(run, monkeypatch):
    monkeypatch.setattr(compare_peers, "ProcessPoolExecutor", InThisProcess)
    monkeypatch.setattr(compare_peers, "SIZES", {"tiny": SIZE, "token": ONE})
    _, output = run("--cases forward-f32-*-eager --peers control --rounds 1")
    lines = output.splitlines()[4:]
    assert len(lines) >= 4, output
    header, _, several, one = lines[:4]
    assert header.split()[-2] == "reading"
    assert several.split()[-2:] == ["|", "|"]
    assert re.fullmatch(r"\(.+-.+\)", one.split()[-2])

    _, output = run("--cases forward-f32-tiny-eager --peers control --rounds 1")
    assert "reading" not in output


def test_a_name_says_what_a_case_is():
    cases = compare_peers.all_cases(CPU)
    assert cases[ONE_TOKEN].dtype == torch.bfloat16
    trained = {name.split("-")[2] for name, case in cases.items() if case.train}
    assert trained == {"768"}


def test_sizes_and_modes_are_those_of_the_docstring():
    def described(device):
        return {
            name.split("-", 2)[2]: (*case.size.shape, case.mode)
            for name, case in compare_peers.all_cases(torch.device(device)).items()
        }

    shapes = {"768": (4, 512, 768), "token": (1, 1, 768), "tiny-token": (1, 1, 64)}
    expected = {
        f"{name}-{mode}": (*shape, mode)
        for name, shape in shapes.items()
        for mode in ("eager", "compiled", "frozen")
    }
    assert described("cpu") == expected
    shapes["llama-8b"] = (4, 2048, 4096)
    shapes["llama-8b-long"] = (1, 8192, 4096)
    shapes["llama-8b-token"] = (1, 1, 4096)
    expected = {
        f"{name}-{mode}": (*shape, mode)
        for name, shape in shapes.items()
        for mode in ("eager", "compiled", "frozen", "graphs")
    }
    assert described("cuda") == expected


def test_the_mode_graphs_replays_cuda_graphs_of_static_inputs(monkeypatch):
    layer, static, run = Mock(), Mock(), Mock()
    compile = Mock(return_value=run.compiled)
    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", run.begin)
    monkeypatch.setattr(torch._dynamo, "mark_static_address", static)
    x, weight = torch.ones(2, 3)
    replay = compare_peers.in_mode("graphs", layer, [x, weight])
    assert [call.args for call in static.call_args_list] == [(x,), (weight,)]
    compile.assert_called_once_with(layer, dynamic=False, mode="reduce-overhead")
    assert replay(x) is run.compiled.return_value
    assert [name for name, _, _ in run.mock_calls] == ["begin", "compiled"]
    run.compiled.assert_called_once_with(x)
    layer.assert_not_called()


def test_operations_are_compared_in_eager_mode_only(monkeypatch):
    options = argparse.Namespace(device=CPU, rounds=1, peers="operations", against=None)
    case = dataclasses.replace(TRAINING, train=False)
    assert compare_peers.compare_all(case, options).keys() == {"operations"}
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    case = dataclasses.replace(case, mode="compiled")
    assert compare_peers.compare_all(case, options) == {}


@pytest.mark.parametrize("train", [True, False])
def test_what_is_timed_are_outputs_or_gradients(train, monkeypatch):
    """The peer is the Block, whose samples take 1 s, and keeps less: they take 2 s."""
    runs = []
    monkeypatch.setattr(compare_peers, "SAMPLE_SECONDS", 0.125)

    def sampler(run, least_seconds):
        assert least_seconds == 0.125
        runs.append(run)
        return iter([len(runs)]).__next__

    def frugal(block):
        peer = own.control(block)
        layer = peer.layers["Block"]
        peer.layers["Block"] = lambda x: checkpoint(layer, x, use_reentrant=False)
        return peer

    monkeypatch.setattr(compare_peers, "wall_sampler", sampler)
    case = dataclasses.replace(TRAINING, train=train)
    result = Reference(case, CPU).compare(frugal, rounds=1)
    assert (result.block_seconds, result.peer_seconds) == ([1], [2])
    assert (result.peer_kept < result.block_kept) == train
    block, x = own.make_block(SIZE, torch.float32, CPU)
    expected: Any = (block(x.requires_grad_()),)
    if train:
        torch.manual_seed(1)
        leaves = [x, *block.parameters()]
        expected = torch.autograd.grad(expected, leaves, torch.randn_like(x))
    for timed in runs:
        forward = Mock(return_value=None)
        with register_module_forward_hook(forward), torch.set_grad_enabled(train):
            torch.testing.assert_close(timed(), expected)
        assert forward.called


def test_forward_is_timed_without_gradients(monkeypatch):
    recorded = []

    def sampler(run, least_seconds):
        def sample():
            recorded.append(run()[0].requires_grad)
            return 1.0

        return sample

    monkeypatch.setattr(compare_peers, "wall_sampler", sampler)
    case = dataclasses.replace(TRAINING, train=False)
    Reference(case, CPU).compare(own.control, rounds=2)
    assert recorded == [False] * 4


@torch._dynamo.config.patch(recompile_limit=1)
def test_in_each_compiled_case_compiled_code_is_timed(monkeypatch):
    """Also beyond torch's limit, after which it calls the eager layer."""
    graphs = []

    def backend(graph, example_inputs):
        def run(*inputs):
            graphs.append(graph)
            return graph(*inputs)

        return run

    def compile(layer, **options):
        return compile_by_torch(layer, backend=backend, **options)

    def sampler(run, least_seconds):
        def sample():
            graphs.clear()
            run()
            assert graphs, "an eager layer is timed"
            return 1.0

        return sample

    compile_by_torch = torch.compile
    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(compare_peers, "wall_sampler", sampler)
    for train in (True, False):
        case = dataclasses.replace(TRAINING, train=train, mode="compiled")
        Reference(case, CPU).compare(changed(), rounds=1)


def test_unchecked_block_checks_nothing():
    block, x = own.make_block(SIZE, torch.float32, CPU)
    wrong = x[..., :-1]
    with pytest.raises(TypeError):
        block(wrong)
    with pytest.raises(RuntimeError):
        own.unchecked(block).layers["Block"](wrong)


def test_what_is_imported_after_the_unchecked_block_is_checked():
    block, x = own.make_block(SIZE, torch.float32, CPU)
    own.unchecked(block)
    again = own.import_as("tinyblock_again", Path(tinyblock.__file__))
    with pytest.raises(TypeError):
        own.of_package(again, block).layers["Block"](x[..., :-1])


def test_pattern_without_a_match_lists_the_names(run, capsys, monkeypatch):
    forbid_comparing(monkeypatch)
    with pytest.raises(SystemExit):
        run("--peers control,contro")
    assert "'contro' matches none of: control, unchecked" in capsys.readouterr().err


def test_kept_bytes_count_each_storage_once_and_no_weight():
    x, weight = torch.ones(2, 3, requires_grad=True)

    def forward():
        scaled = x * weight  # keeps x and weight, which have one storage
        return (scaled * scaled,)  # keeps one product, twice

    assert compare_peers.count_kept_bytes(forward, [weight])[1] == 12
    assert compare_peers.count_kept_bytes(forward, [])[1] == 36  # with x and weight


def test_kept_bytes_are_counted_after_the_call_that_compiles():
    def make(block):
        peer = own.control(block)
        layer = peer.layers["Block"]
        calls = []

        def first_call_keeps_more(x):
            calls.append(x)
            return layer(x) if len(calls) > 1 else layer(layer(x))

        peer.layers["Block"] = first_call_keeps_more
        return peer

    result = Reference(TRAINING, CPU).compare(make, rounds=1)
    assert result.peer_kept == result.block_kept > 0


def test_results_are_no_buffers_that_the_next_replay_of_a_graph_overwrites():
    buffer = torch.zeros(3)
    peer = own.Peer([], {"Block": lambda x: buffer.add_(1)})
    case = dataclasses.replace(TRAINING, train=False)
    found = compare_peers.prepare(peer, torch.ones(3), case).results["outputs"]
    before = found.clone()
    buffer.add_(1)
    assert found.equal(before)


def test_counting_kept_bytes_keeps_no_output_alive():
    x = torch.ones(3, requires_grad=True)
    outputs, _ = compare_peers.count_kept_bytes(lambda: (x.exp(),), [])
    output = weakref.ref(outputs[0])  # autograd keeps it for backward
    del outputs
    assert output() is None
