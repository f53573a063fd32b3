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
from lab.kernels import Kernels
from lab.sizes import Size
from peers import candidates, cases, measuring, projects
from torch.func import functional_call

import tinyblock

CPU = torch.device("cpu")
CASES = {case.name: case.shrunk() for case in cases.all_cases(CPU, ())}
TRAIN = CASES["train-f32-768"]
SHARED = dataclasses.replace(
    TRAIN, size=dataclasses.replace(TRAIN.size, num_kv_heads=2)
)
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
    """Return a comparison with peers, or those of these names."""
    named = {peer: projects.PEERS.get(peer, peer) for peer in peers}
    return measuring.Comparison(named, CPU, rounds=2, seed=0, quick=True, **settings)


def rows_of(*peers, case=TRAIN, **settings):
    return comparison(*peers, **settings).measure(case)["rows"]


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
    assert [
        hasattr(type(each).forward, "__typechecked__") for each in (block, unchecked)
    ] == [True, False]
    assert [p.data_ptr() for p in unchecked.parameters()] == [
        p.data_ptr() for p in block.parameters()
    ]
    assert not jaxtyping.config.jaxtyping_disable


@pytest.mark.parametrize(
    "case",
    [TRAIN, SHARED, CASES["train-bf16-768"], CASES["one-token-f32"]],
    ids=lambda c: c.name,
)
@pytest.mark.parametrize(
    ("peers", "allowed"),
    [
        (("limit", "operations", "control", "unchecked"), 0.05),
        pytest.param(("transformers",), 1, marks=needs_transformers, id="transformers"),
    ],
)
def test_peers_compute_what_the_block_computes(peers, allowed, case):
    for row in rows_of(*peers, case=case):
        assert row["status"] == "measured", row
        assert ("errors" in row) == (row["peer"] != "limit")
        assert all(
            error <= allowed * measuring.tolerance(case.dtype)
            for error in row.get("errors", {}).values()
        ), row
        (samples,) = row["processes"]
        assert len(samples["tinyblock"]) == len(samples["peer"]) == 2


@pytest.mark.parametrize(
    ("peer", "status", "reason"),
    [
        *(
            (perturbed(f"{name}.weight"), "disagrees", "outputs by ")
            for name in ("attn.q_proj", "ffn.w2", "ln2")
        ),
        (
            peer_of(lambda block, x: block(x) * torch.nan),
            "disagrees",
            "outputs by nan, gradients by nan: above 2e-05",
        ),
        (
            peer_of(lambda block, x: 2 * block(x) - block(x).detach()),
            "disagrees",
            "gradients by 1: above 2e-05",
        ),
        (
            peer_of(lambda block, x: x.view(7)),
            "failed",
            "RuntimeError: shape '[7]' is invalid",
        ),
        (
            peer_of(lambda block, x: x, "no-peer"),
            "skipped",
            "ImportError: not installed: pip install no-peer",
        ),
        (
            peer_of(lambda block, x: import_module("nothing"), "torch"),
            "skipped",
            "ModuleNotFoundError: No module named",
        ),
        (projects.PEERS["liger"], "skipped", "ImportError: liger-kernel needs CUDA"),
    ],
)
def test_peer_that_cannot_be_compared_is_a_row_and_the_rest_goes_on(
    peer, status, reason
):
    row, control = rows_of(peer, "control")
    assert row["status"] == status
    assert row["reason"].startswith(reason)
    assert "processes" not in row
    assert control["status"] == "measured"


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
    assert row["errors"] == {"outputs": 0, "gradients": 0}
    assert rows_of(peer)[0]["reason"] == "AssertionError"


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
    assert [row["status"] for row in rows_of("transformers", broken)] == [
        "measured",
        "disagrees",
    ]


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
    case = dataclasses.replace(TRAIN, size=Size(1, 4, 8, 1, 1, 8, 8))
    _, x = block_and_x(case)
    weight = torch.nn.Parameter(torch.eye(8))
    square = candidates.Candidate(
        lambda x: (x @ weight) * x * x, [weight]
    )  # keeps x, x @ weight, (x @ weight) * x
    assert (
        measuring.contestant_of(square, x, case, seed=0).counts["saved_bytes"]
        == 3 * x.nbytes
    )


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
    assert [
        name
        for name, own in references.items()
        if any(reference() is not None for reference in own)
    ] == []


def test_flops_are_those_of_the_pass_that_is_measured():
    train, forward = (
        dataclasses.replace(TRAIN, work=work).facts()["flops"]
        for work in ("train", "forward")
    )
    assert train == {kind: 3 * flops for kind, flops in forward.items()}
    assert train["causal"] < train["dense"]


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
    for expected in (["measured", "missing"], ["missing", "missing"]):
        rows = rows_of(peer_of(late), "control", deadline=deadline)
        assert [row["status"] for row in rows] == expected
    assert rows[0]["reason"] == "no time was left"


def test_kernels_are_counted_for_the_block_and_each_measured_peer():
    def count(run, device, seconds):
        norms = operations_of(run).get("aten::rms_norm", 0)
        return Kernels(norms, 1e-3, 0.5, True)

    compared = comparison("control", "limit", "copy", count=count)
    result = compared.measure(TRAIN)
    compared.count_kernels(TRAIN, result)
    assert [counted.get("kernels") for counted in (result, *result["rows"])] == [
        2,
        2,
        0,
        None,
    ]


def test_rows_have_the_targets_of_the_case_and_no_peer_that_inductor_has_no_code_for():
    case = dataclasses.replace(
        TRAIN, how="compiled", targets={"others": 1.5, "control": 2.0}
    )
    rows = rows_of(
        "copy", "operations", "control", "transformers", case=case, deadline=0
    )
    assert [(row["peer"], row["target"]) for row in rows] == [
        ("copy", None),
        ("control", 2.0),
        ("transformers", 1.5),
    ]


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
    assert rows_of("copy")[0]["status"] == "skipped"
