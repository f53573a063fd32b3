"""A Block beside its peers, at tiny sizes: they agree before they are timed, and each ends in a row of its own."""

import dataclasses
import gc
import shutil
import time
import weakref
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import jaxtyping
import pytest
import torch
from peers import candidates, cases, measuring, projects
from torch.func import functional_call

import tinyblock

CPU = torch.device("cpu")
CASES = {case.name: case.shrunk() for case in cases.all_cases(CPU, ())}
TRAIN = CASES["train-f32-768"]
SHARED_KEY_HEADS = dataclasses.replace(
    TRAIN, size=dataclasses.replace(TRAIN.size, num_kv_heads=2)
)
QK_NORM = dataclasses.replace(TRAIN, size=dataclasses.replace(TRAIN.size, qk_norm=True))
needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="no transformers"
)


def operations_of(run):
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        run()
    return {event.key: event.count for event in profile.key_averages()}


def block_and_x(case=TRAIN, seed=0):
    return measuring.make_block(case.size, case.dtype, CPU, seed)


def comparison(*peers, **settings):
    """Return a comparison with peers of these names, and with made-up peers."""
    named = {}
    for number, peer in enumerate(peers):
        if isinstance(peer, str):
            named[peer] = projects.PEERS[peer]
        else:
            named[f"made up {number}"] = peer
    return measuring.Comparison(named, CPU, rounds=2, seed=0, quick=True, **settings)


def rows_of(*peers, case=TRAIN, **settings):
    return comparison(*peers, **settings).measure(case).rows


def statuses_of(rows):
    return [row.status for row in rows]


def peer_of(function, package=None):
    """Return a peer whose call is `function` of the Block and of x."""
    build = candidates.Candidate
    return candidates.Peer(
        lambda block, _: build(partial(function, block), [*block.parameters()]),
        "made up",
        package,
    )


def perturbed(name):
    """Return the Block as a peer, with one weight that is 1% larger."""
    return peer_of(
        lambda block, x: functional_call(
            block, {name: 1.01 * block.get_parameter(name)}, (x,)
        )
    )


def test_unchecked_peer_is_the_block_without_its_checks():
    block, _ = block_and_x()
    unchecked = projects.PEERS["unchecked"].build(block, TRAIN.size).call
    assert hasattr(type(block).forward, "__typechecked__")
    assert not hasattr(type(unchecked).forward, "__typechecked__")
    pairs = zip(unchecked.parameters(), block.parameters(), strict=True)
    for weight, of_block in pairs:
        assert weight.data_ptr() == of_block.data_ptr()
    # The checks were off only while the peer was built.
    assert not jaxtyping.config.jaxtyping_disable


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(TRAIN, id="training"),
        pytest.param(SHARED_KEY_HEADS, id="shared key heads"),
        pytest.param(QK_NORM, id="q/k norm"),
        pytest.param(CASES["train-bf16-768"], id="bfloat16"),
        pytest.param(CASES["one-token-f32"], id="one token"),
    ],
)
@pytest.mark.parametrize(
    ("peers", "allowed"),
    [
        pytest.param(
            ("limit", "operations", "control", "unchecked"), 0.05, id="own parts"
        ),
        pytest.param(("transformers",), 1, marks=needs_transformers, id="transformers"),
    ],
)
def test_peers_compute_what_the_block_computes(peers, allowed, case):
    for row in rows_of(*peers, case=case):
        assert row.status == "measured", row.reason
        measured = row.measurement
        assert (measured.errors is None) == (row.peer == "limit")
        if measured.errors is not None:
            worst = max(measured.errors.values())
            assert worst <= allowed * measuring.tolerance(case.dtype)
        assert len(measured.block_seconds) == len(measured.peer_seconds) == 2


@pytest.mark.parametrize("name", ["litgpt", "torchtune", "x-transformers"])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(SHARED_KEY_HEADS, id="shared key heads"),
        pytest.param(QK_NORM, id="q/k norm"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of the projects' imports
def test_other_projects_compute_what_the_block_computes(name, case):
    (row,) = rows_of(name, case=case)
    if row.version is None:
        pytest.skip(f"needs {name}")
    if case is QK_NORM and name != "litgpt":
        assert row.status == "skipped"
        assert row.reason.endswith("has no such q/k norm")
    else:
        assert row.status == "measured", row.reason


def check_that_only_the_first_is_left_out(peer, status, reason):
    row, control = rows_of(peer, "control")
    assert (row.status, row.measurement) == (status, None)
    assert row.reason.startswith(reason)
    assert (control.status, control.reason) == ("measured", "")


@pytest.mark.parametrize("name", ["attn.q_proj", "ffn.w2", "ln2"])
def test_peer_with_another_weight_disagrees(name):
    peer = perturbed(f"{name}.weight")
    check_that_only_the_first_is_left_out(peer, "disagrees", "outputs differ by 0.0")


def test_peer_with_other_gradients_disagrees():
    peer = peer_of(lambda block, x: 2 * block(x) - block(x).detach())
    expected = "gradients differ by 1 (relative error), more than 2e-05"
    check_that_only_the_first_is_left_out(peer, "disagrees", expected)


def test_peer_whose_result_is_nan_disagrees():
    peer = peer_of(lambda block, x: block(x) * torch.nan)
    expected = "outputs differ by nan, gradients differ by nan"
    check_that_only_the_first_is_left_out(peer, "disagrees", expected)


def test_peer_that_raises_has_failed():
    peer = peer_of(lambda block, x: x.view(7))
    expected = "RuntimeError: shape '[7]' is invalid"
    check_that_only_the_first_is_left_out(peer, "failed", expected)


def test_peer_that_is_not_installed_is_skipped():
    peer = peer_of(lambda block, x: x, "no-peer")
    expected = "not installed: pip install no-peer"
    check_that_only_the_first_is_left_out(peer, "skipped", expected)


def test_peer_whose_import_fails_is_skipped():
    peer = peer_of(lambda block, x: import_module("nothing"), "torch")
    expected = "ModuleNotFoundError: No module named"
    check_that_only_the_first_is_left_out(peer, "skipped", expected)


def test_peer_that_needs_a_gpu_is_skipped_without_one():
    peer = projects.PEERS["liger"]
    check_that_only_the_first_is_left_out(peer, "skipped", "liger-kernel requires CUDA")


def test_block_that_raises_is_the_failure_of_the_case():
    case = dataclasses.replace(
        TRAIN, size=dataclasses.replace(TRAIN.size, num_kv_heads=3)
    )
    result = comparison("control").measure(case)
    assert result.failure.startswith("ValueError: num_heads=4 must be a multiple")
    assert result.rows == ()


REQUIRE_POSITIONS = """
forward_of_block = Block.forward


def forward(self, x, token_positions=None, mask=None):
    assert token_positions is not None
    return forward_of_block(self, x, token_positions, mask)


Block.forward = forward
"""


def test_block_of_a_checkout_runs_its_code_with_our_weights_and_positions(tmp_path):
    shutil.copytree(Path(tinyblock.__file__).parent, tmp_path / "tinyblock")
    with (tmp_path / "tinyblock" / "block.py").open("a") as file:
        file.write(REQUIRE_POSITIONS)
    peer = candidates.block_of(tmp_path)
    (row,) = rows_of(peer, case=TRAIN.with_positions())
    assert row.measurement.errors == {"outputs": 0, "gradients": 0}
    assert rows_of(peer)[0].reason == "AssertionError"


@needs_transformers
@pytest.mark.filterwarnings("default")  # transformers' own
def test_patching_a_private_copy_leaves_hugging_face_alone(monkeypatch):
    from transformers.models.llama import modeling_llama

    patched = candidates.import_as(
        f"{modeling_llama.__name__}_patched", Path(modeling_llama.__file__)
    )
    monkeypatch.setattr(
        patched, "apply_rotary_pos_emb", lambda q, k, cos, sin: (0 * q, k)
    )
    broken = candidates.Peer(
        lambda block, size: projects.hugging_face_layer(block, size, patched), "patched"
    )
    rows = rows_of("transformers", broken)
    assert statuses_of(rows) == ["measured", "disagrees"]


def test_limit_runs_the_products_of_the_block_and_nothing_else():
    block, x = block_and_x()
    limit = candidates.build_limit(block, TRAIN.size)
    with torch.no_grad():
        counts = operations_of(lambda: limit.call(x))
    assert counts["aten::linear"] == 7
    assert counts["aten::scaled_dot_product_attention"] == 1
    assert not {
        "aten::mul",
        "aten::add",
        "aten::silu",
        "aten::rms_norm",
        "aten::copy_",
    } & set(counts)


def test_saved_bytes_count_each_storage_once_and_no_weights():
    size = dataclasses.replace(TRAIN.size, batch_size=1, seq_len=4, d_model=8)
    case = dataclasses.replace(TRAIN, size=size)
    x = torch.randn(1, 4, 8)
    weight = torch.nn.Parameter(torch.eye(8))

    def square(x):
        return (x @ weight) * x * x  # keeps x, x @ weight, (x @ weight) * x

    candidate = candidates.Candidate(square, [weight])
    contestant = measuring.contestant_of(candidate, x, case, seed=0)
    assert contestant.needs.saved_bytes == 3 * x.nbytes


def test_contestant_frees_its_graph_and_parameters():
    references = {}
    for name in ("limit", "operations", "control"):
        block, x = block_and_x()
        candidate = projects.PEERS[name].build(block, TRAIN.size)
        contestant = measuring.contestant_of(candidate, x, TRAIN, seed=0)
        contestant.run()
        references[name] = [
            weakref.ref(parameter) for parameter in candidate.parameters
        ]
    del candidate, contestant, block
    gc.collect()
    alive = []
    for name, own in references.items():
        if any(reference() is not None for reference in own):
            alive.append(name)
    assert alive == []


def test_flops_are_those_of_the_pass_that_is_measured():
    train = measuring.new_result(TRAIN)
    forward = measuring.new_result(dataclasses.replace(TRAIN, work="forward"))
    assert train.causal_flops == 3 * forward.causal_flops
    assert train.dense_flops == 3 * forward.dense_flops
    assert train.causal_flops < train.dense_flops


def test_make_block_is_reproducible_and_leaves_the_global_seed_alone():
    state = torch.get_rng_state()
    block, x = block_and_x(seed=3)
    again, same_x = block_and_x(seed=3)
    assert block.get_parameter("ln1.weight").std() > 0.01
    assert all(
        map(torch.equal, [x, *block.parameters()], [same_x, *again.parameters()])
    )
    assert torch.equal(state, torch.get_rng_state())


def test_peers_after_the_deadline_are_missing():
    def late(block, x):
        time.sleep(max(0, deadline - time.monotonic()))
        return block(x)

    deadline = time.monotonic() + 0.5
    rows = rows_of(peer_of(late), "control", deadline=deadline)
    assert statuses_of(rows) == ["measured", "missing"]
    rows = rows_of(peer_of(late), "control", deadline=deadline)
    assert statuses_of(rows) == ["missing", "missing"]
    assert rows[0].reason == "no time was left"


def test_kernels_are_counted_for_the_block_and_each_measured_peer():
    def count(run, device):
        return operations_of(run).get("aten::rms_norm", 0)

    compared = comparison("control", "limit", "copy", count=count)
    result = compared.measure(TRAIN)
    compared.count_kernels(TRAIN, result)
    control, limit, copy = result.rows
    assert result.needs.kernels == 2
    assert control.measurement.needs.kernels == 2
    assert limit.measurement.needs.kernels == 0
    assert copy.measurement is None


def test_error_while_kernels_are_counted_is_noted_and_the_rest_goes_on():
    def count(run, device):
        if "aten::rms_norm" in operations_of(run):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 7

    compared = comparison("control", "limit", count=count)
    result = compared.measure(TRAIN)
    compared.count_kernels(TRAIN, result)
    control, limit = (row.measurement.needs for row in result.rows)
    assert (control.kernels, limit.kernels) == (None, 7)
    expected = "OutOfMemoryError: CUDA out of memory"
    assert result.needs.kernels_error == control.kernels_error == expected
    assert limit.kernels_error is None


def test_error_before_kernels_are_counted_is_noted(monkeypatch):
    compared = comparison("control")
    result = compared.measure(TRAIN)
    monkeypatch.setattr(measuring, "make_block", Mock(side_effect=MemoryError))
    compared.count_kernels(TRAIN, result)
    assert result.needs.kernels_error == "MemoryError"


def test_rows_have_the_targets_of_the_case_and_leave_out_operations_if_compiled():
    targets = {"others": 1.5, "control": 2.0}
    case = dataclasses.replace(TRAIN, how="compiled", targets=targets)
    peers = ("copy", "operations", "control", "transformers")
    rows = rows_of(*peers, case=case, deadline=0)
    targets_of_rows = {row.peer: row.target for row in rows}
    # Compiled, the bare operations are what the Block is. A copy is a bound, which has no target.
    assert targets_of_rows == {"copy": None, "control": 2.0, "transformers": 1.5}


def test_cuda_graphs_begin_a_step_with_every_call_and_copy_no_weights(monkeypatch):
    begin, compiler = Mock(), Mock(side_effect=lambda call, **options: call)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", begin)
    monkeypatch.setattr(torch, "compile", compiler)
    case = dataclasses.replace(CASES["one-token-f32"], how="graphs")
    block, x = block_and_x(case)
    call = Mock(side_effect=block)
    contestant = measuring.contestant_of(
        candidates.Candidate(call, [*block.parameters()]), x, case, seed=0
    )
    contestant.run()
    assert compiler.call_args.kwargs == {"dynamic": False, "mode": "reduce-overhead"}
    assert begin.call_count == call.call_count
    assert all(
        hasattr(each, "_dynamo_static_input_type")
        for each in (*call.call_args.args, *block.parameters())
    )


def test_copy_moves_as_many_bytes_as_the_weights_have():
    case = CASES["one-token-bf16"]
    block, x = block_and_x(case)
    copied = projects.PEERS["copy"].build(block, case.size).call(x)
    assert 2 * copied.nbytes == sum(weight.nbytes for weight in block.parameters())
    assert statuses_of(rows_of("copy")) == ["skipped"]
