"""A Block beside its peers, at tiny sizes: they agree before they are timed, and each ends in a row of its own."""

import dataclasses
import gc
import importlib.util
import shutil
import time
import weakref
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from lab.sizes import Size
from peers import candidates, cases, measuring, projects
from torch.func import functional_call

import tinyblock

CPU = torch.device("cpu")
CASES = {case.name: case.shrunk() for case in cases.all_cases(CPU, ())}
TRAIN = CASES["train-f32-768"]
needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="no transformers")


def comparison(peers, **settings):
    return measuring.Comparison(peers, CPU, rounds=2, seed=0, quick=True, **settings)


def measure(case=TRAIN, **peers) -> dict[str, Any]:
    return comparison(peers).measure(case)


def with_shared_key_heads(case):
    return dataclasses.replace(case, size=dataclasses.replace(case.size, num_kv_heads=2))


def peer_of(function):
    """Return a peer whose call is `function` of the Block and of x."""

    def build(block, size):
        return candidates.Candidate(lambda x: function(block, x), list(block.parameters()))

    return candidates.Peer(build, "made up")


def perturbed(name):
    """Return the Block as a peer, with one weight that is 1% larger."""
    return peer_of(lambda block, x: functional_call(block, {name: 1.01 * block.get_parameter(name)}, (x,)))


def with_doubled_gradient(block, x):
    return block(x).detach() + 2 * (block(x) - block(x).detach())


def raise_two_lines(block, x):
    raise RuntimeError("out of memory\nsecond line")


def fail_to_import(block, size):
    raise ImportError("no module named x")


def test_unchecked_peer_is_the_block_without_its_checks():
    block, _ = measuring.make_block(TRAIN.size, torch.float32, CPU, seed=0)
    unchecked = projects.PEERS["unchecked"].build(block, TRAIN.size).call
    assert [hasattr(type(each).forward, "__typechecked__") for each in (block, unchecked)] == [True, False]
    assert [p.data_ptr() for p in unchecked.parameters()] == [p.data_ptr() for p in block.parameters()]
    assert not jaxtyping.config.jaxtyping_disable


@pytest.mark.parametrize("case", [TRAIN, with_shared_key_heads(TRAIN), CASES["one-token-f32"]], ids=lambda c: c.name)
def test_candidates_of_the_blocks_parts_compute_what_it_computes(case):
    names = ("limit", "operations", "control", "unchecked")
    for row in measure(case, **{name: projects.PEERS[name] for name in names})["rows"]:
        assert row["status"] == "measured", row
        assert ("errors" in row) == (row["peer"] != "limit")
        assert all(error < 1e-6 for error in row.get("errors", {}).values())
        (samples,) = row["processes"]
        assert len(samples["tinyblock"]) == len(samples["peer"]) == 2


@pytest.mark.parametrize(
    ("peer", "status", "reason"),
    [
        *((perturbed(f"{name}.weight"), "disagrees", "outputs by ") for name in ("attn.q_proj", "ffn.w2", "ln2")),
        (peer_of(lambda block, x: block(x) * torch.nan), "disagrees", "outputs by nan, gradients by nan: above 2e-05"),
        (peer_of(with_doubled_gradient), "disagrees", "gradients by 1: above 2e-05"),
        (peer_of(raise_two_lines), "failed", "RuntimeError: out of memory"),
        (
            candidates.Peer(fail_to_import, "absent", "no-peer"),
            "skipped",
            "ImportError: not installed: pip install no-peer",
        ),
        (candidates.Peer(fail_to_import, "broken", "torch"), "skipped", "ImportError: no module named x"),
        (projects.PEERS["liger"], "skipped", "ImportError: liger-kernel needs CUDA"),
    ],
)
def test_peer_that_cannot_be_compared_is_a_row_and_the_rest_goes_on(peer, status, reason):
    row, control = measure(peer=peer, control=projects.PEERS["control"])["rows"]
    assert row["status"] == status
    assert row["reason"].startswith(reason)
    assert "processes" not in row
    assert control["status"] == "measured"


def test_block_of_a_checkout_runs_its_code_with_our_weights_and_positions(tmp_path):
    shutil.copytree(Path(tinyblock.__file__).parent, tmp_path / "tinyblock")
    path, line = tmp_path / "tinyblock" / "block.py", "        x = x + _like(x, self.attn("
    before, found, after = path.read_text().partition(line)
    assert found
    path.write_text(
        f'{before}        if token_positions is None:\n            raise RuntimeError("none")\n{line}{after}'
    )
    peer = candidates.block_of(tmp_path)
    (row,) = measure(TRAIN.with_positions(), against=peer)["rows"]
    assert row["errors"] == {"outputs": 0, "gradients": 0}
    assert measure(against=peer)["rows"][0]["reason"] == "RuntimeError: none"


@pytest.mark.parametrize(
    "case", [with_shared_key_heads(TRAIN), CASES["train-bf16-768"], CASES["one-token-f32"]], ids=lambda case: case.name
)
@needs_transformers
def test_hugging_face_agrees(case):
    (row,) = measure(case, transformers=projects.PEERS["transformers"])["rows"]
    assert row["status"] == "measured", row["reason"]
    assert max(row["errors"].values()) <= measuring.tolerance(case.dtype)


@needs_transformers
@pytest.mark.filterwarnings("default")  # transformers' own
def test_patching_a_private_copy_leaves_hugging_face_alone(monkeypatch):
    from transformers.models.llama import modeling_llama

    patched = candidates.import_as(f"{modeling_llama.__name__}_patched", Path(modeling_llama.__file__))
    monkeypatch.setattr(patched, "apply_rotary_pos_emb", lambda q, k, cos, sin: (0 * q, k))
    broken = candidates.Peer(lambda *given: projects.hugging_face_layer(patched, *given), "patched")
    plain, patched_row = measure(transformers=projects.PEERS["transformers"], patched=broken)["rows"]
    assert (plain["status"], patched_row["status"]) == ("measured", "disagrees")


def test_limit_runs_the_products_of_the_block_and_nothing_else():
    block, x = measuring.make_block(TRAIN.size, torch.float32, CPU, seed=0)
    limit = candidates.build_limit(block, TRAIN.size)
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        limit.call(x)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["aten::linear"] == 7
    assert counts["aten::scaled_dot_product_attention"] == 1
    assert not {"aten::mul", "aten::add", "aten::silu", "aten::rms_norm", "aten::copy_"} & set(counts)


def test_saved_bytes_count_each_storage_once_and_no_weights():
    case = dataclasses.replace(TRAIN, size=Size(1, 4, 8, 1, 1, 8, 8))
    _, x = measuring.make_block(case.size, torch.float32, CPU, seed=0)
    weight = torch.nn.Parameter(torch.eye(8))
    square = candidates.Candidate(lambda x: (x @ weight) * x * x, [weight])  # keeps x, x @ weight, (x @ weight) * x
    assert measuring.contestant_of(square, x, case, seed=0).counts["saved_bytes"] == 3 * x.nbytes


def test_contestant_frees_its_graph_and_parameters():
    references = {}
    for name in ("limit", "operations", "control"):
        block, x = measuring.make_block(TRAIN.size, torch.float32, CPU, seed=0)
        candidate = projects.PEERS[name].build(block, TRAIN.size)
        contestant = measuring.contestant_of(candidate, x, TRAIN, seed=0)
        contestant.run()
        references[name] = [weakref.ref(parameter) for parameter in candidate.parameters]
    del candidate, contestant, block
    gc.collect()
    assert [name for name, own in references.items() if any(reference() is not None for reference in own)] == []


def test_flops_are_those_of_the_pass_that_is_measured():
    train, forward = measure()["flops"], measure(dataclasses.replace(TRAIN, work="forward"))["flops"]
    assert train == {kind: 3 * flops for kind, flops in forward.items()}
    assert train["causal"] < train["dense"]


def test_make_block_is_reproducible_and_leaves_the_global_seed_alone():
    state = torch.get_rng_state()
    block, x = measuring.make_block(TRAIN.size, torch.float32, CPU, seed=3)
    again, same_x = measuring.make_block(TRAIN.size, torch.float32, CPU, seed=3)
    assert block.get_parameter("ln1.weight").std() > 0.01
    assert torch.equal(x, same_x)
    assert all(torch.equal(a, b) for a, b in zip(block.parameters(), again.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())


def test_peers_after_the_deadline_are_missing():
    def late(block, x):
        time.sleep(max(0, deadline - time.monotonic()))
        return block(x)

    deadline = time.monotonic() + 0.5
    compared = comparison({"late": peer_of(late), "later": projects.PEERS["control"]}, deadline=deadline)
    for expected in (["measured", "missing"], ["missing", "missing"]):
        rows = compared.measure(TRAIN)["rows"]
        assert [row["status"] for row in rows] == expected
    assert rows[0]["reason"] == "no time was left"


def test_kernels_are_counted_for_the_block_and_each_measured_peer():
    def count(run, device, seconds):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            run()
        return {"count": sum(event.count for event in profile.key_averages() if event.key == "aten::rms_norm")}

    compared = comparison({name: projects.PEERS[name] for name in ("control", "limit", "copy")}, count=count)
    result = compared.measure(TRAIN)
    compared.count_kernels(TRAIN, result)
    assert [counted.get("kernels") for counted in (result, *result["rows"])] == [2, 2, 0, None]


def test_rows_have_the_targets_of_the_case_and_no_peer_that_inductor_has_no_code_for():
    peers = {name: projects.PEERS[name] for name in ("copy", "operations", "control", "transformers")}
    case = dataclasses.replace(TRAIN, how="compiled", targets={"others": 1.5, "control": 2.0})
    rows = comparison(peers, deadline=0).measure(case)["rows"]
    assert [(row["peer"], row["target"]) for row in rows] == [("copy", None), ("control", 2.0), ("transformers", 1.5)]


def test_cuda_graphs_begin_a_step_with_every_call_and_copy_no_weights(monkeypatch):
    begun: list[None] = []
    modes: list[Any] = []

    def compile_nothing(call, dynamic, mode):
        modes.append(mode)
        return call

    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(None))
    monkeypatch.setattr(torch, "compile", compile_nothing)
    case = dataclasses.replace(CASES["one-token-f32"], how="graphs")
    block, x = measuring.make_block(case.size, torch.float32, CPU, seed=0)
    inputs: list[torch.Tensor] = []
    candidate = candidates.Candidate(lambda x: inputs.append(x) or block(x), list(block.parameters()))
    contestant = measuring.contestant_of(candidate, x, case, seed=0)
    calls = len(begun)
    contestant.run()
    assert (modes, len(begun)) == (["reduce-overhead"], calls + 1)
    assert all(hasattr(tensor, "_dynamo_static_input_type") for tensor in (*inputs, *block.parameters()))


def test_copy_moves_as_many_bytes_as_the_weights_have():
    case = CASES["one-token-bf16"]
    block, x = measuring.make_block(case.size, case.dtype, CPU, seed=0)
    copied = projects.PEERS["copy"].build(block, case.size).call(x)
    assert 2 * copied.nbytes == sum(weight.nbytes for weight in block.parameters())
    assert measure(copy=projects.PEERS["copy"])["rows"][0]["status"] == "skipped"
