"""The cases: which there are on a device, their order, their targets, and what a preset and --quick make of them."""

import pytest
import torch
from lab.presets import PRESETS
from peers.cases import CUDA_PRESETS, all_cases

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def by_name(device, *presets, **options):
    return {case.name: case for case in all_cases(device, presets, **options)}


def test_names_of_cases_are_unique_and_shown_in_words():
    cases = all_cases(CPU, PRESETS)
    assert len({case.name for case in cases}) == len(cases)
    found = by_name(CPU, "llama-3.1-8b")
    assert found["train-compiled-f32-768"].summary() == (
        "training, 2,048 tokens of width 768, float32, compiled"
    )
    assert found["one-token-graphs-bf16-llama-3.1-8b"].description() == (
        "Forward without gradients, compiled, CUDA graphs, bfloat16, batch 1, sequence 1, "
        "d_model 4096, 32 heads, 8 key heads, d_ff 14336"
    )


def test_slowest_cases_come_first_on_a_gpu():
    names = [case.name for case in all_cases(CUDA, CUDA_PRESETS) if case.how == "eager"]
    assert names[0] == "train-bf16-llama-3.1-8b-1x8192"
    assert names[-1] == "one-token-tiny-f32"


def test_cases_that_cannot_fill_a_gpu_are_not_judged_there():
    on_gpu = by_name(CUDA, "llama-3.1-8b")
    assert by_name(CPU)["train-bf16-2048"].targets == {"others": 1.03, "limit": 1.04}
    assert on_gpu["train-bf16-2048"].targets == {}
    assert on_gpu["forward-bf16-768"].targets == {}
    assert on_gpu["train-bf16-llama-3.1-8b-4x2048"].targets["unchecked"] == 1.01


def test_preset_with_a_qk_norm_has_one_unless_it_is_left_out():
    name = "train-bf16-qwen3-8b-4x2048"
    case = by_name(CPU, "qwen3-8b")[name]
    assert case.size.qk_norm
    assert case.description().endswith("d_ff 12288, q/k norm")
    without = by_name(CPU, "qwen3-8b", "llama-3.2-1b", qk_norm=False)
    assert name not in without
    assert not without["train-bf16-qwen3-8b-without-qk-norm-4x2048"].size.qk_norm
    assert "train-bf16-llama-3.2-1b-4x2048" in without


@pytest.mark.parametrize("preset", PRESETS)
def test_shrunk_case_of_each_preset_can_be_built(preset):
    case = by_name(CPU, preset)[f"one-token-bf16-{preset}"]
    size = case.shrunk().size
    size.build("cpu", torch.float32)
    assert size.num_heads == 4
    assert size.qk_norm == case.size.qk_norm
    shares_key_heads = case.size.num_kv_heads < case.size.num_heads
    assert (size.num_kv_heads < 4) == shares_key_heads
