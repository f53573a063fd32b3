"""GGUF files, small ones and the file of `make story`: the logits of transformers."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from processes import run
from saved_checkpoints import (
    LLAMA3,
    SMOLLM2,
    assert_equal,
    needs_story,
    save,
    transformers,
)

gguf = pytest.importorskip("gguf", reason="requires the extra examples")
from_gguf = pytest.importorskip("from_gguf", reason="requires the extra examples")

FIELDS: dict[str, Any] = {
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "llama.rope.dimension_count": 16,
    "llama.rope.freq_base": 5e5,
    "llama.vocab_size": 257,
}


def write_gguf(path, theirs, fields=None, weights=None, architecture="llama"):
    """Write a model of transformers as llama.cpp does.

    `fields` and `weights` are added to those of the model, or removed if they are None.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in (FIELDS | (fields or {})).items():
        if value is not None:
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    heads = {
        "attn_q": theirs.config.num_attention_heads,
        "attn_k": theirs.config.num_key_value_heads,
    }
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    of_model = {
        names.get_name(name, try_suffixes=(".weight",)): weight.detach().numpy()
        for name, weight in theirs.state_dict().items()
    }
    if theirs.config.tie_word_embeddings:
        del of_model["output.weight"]
    for name, weight in (of_model | (weights or {})).items():
        if weight is None:
            continue
        layer = name.split(".")[-2]
        if layer in heads:  # as in convert_hf_to_gguf.py
            halves = weight.reshape(heads[layer], 2, -1, weight.shape[1])
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def small_llama(folder, **options):
    options.setdefault("rope_parameters", {"rope_theta": 5e5})
    return save("llama", folder, **options)


ACCEPTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "untied": ({}, {}),
    "tied": ({"tie_word_embeddings": True}, {}),
    "a head size": (
        {"head_dim": 32},
        {
            "llama.attention.key_length": 32,
            "llama.attention.value_length": 32,
            "llama.rope.dimension_count": 32,
        },
    ),
    "sizes that are not stated twice": (
        {},
        {"llama.rope.dimension_count": None, "llama.vocab_size": None},
    ),
    "as many key heads as heads": (
        {"num_key_value_heads": 2, "num_attention_heads": 2},
        {
            "llama.attention.head_count": 2,
            "llama.attention.head_count_kv": None,
            "llama.rope.dimension_count": 32,
        },
    ),
    "theta of Llama 1": (
        {"rope_parameters": {"rope_theta": 1e4}},
        {"llama.rope.freq_base": None},
    ),
    "fields of the tokenizer and of the file": (
        {},
        {"general.type": "model", "tokenizer.ggml.add_bos_token": True},
    ),
}


@pytest.mark.parametrize(("options", "fields"), ACCEPTED.values(), ids=ACCEPTED)
def test_a_written_file_has_the_logits_of_transformers(options, fields, tmp_path):
    theirs = small_llama(tmp_path, **options)
    ours = from_gguf.load(write_gguf(tmp_path / "model.gguf", theirs, fields))
    assert ours.tied == theirs.config.tie_word_embeddings
    assert_equal(ours, theirs)


def test_a_file_of_llama_3_1_has_its_positions(tmp_path):
    theirs = small_llama(tmp_path, rope_parameters=dict(LLAMA3))
    theta = LLAMA3["rope_theta"]
    plain = theta ** (-torch.arange(0, 16, 2).double() / 16)
    factors = (plain / theirs.model.rotary_emb.inv_freq.double()).float().numpy()
    assert factors.max() > 3.9
    path = write_gguf(
        tmp_path / "model.gguf",
        theirs,
        {"llama.rope.freq_base": theta},
        {"rope_freqs.weight": factors},
    )
    assert_equal(from_gguf.load(path), theirs)


UNKNOWN_FIELDS = {
    "llama.attention.causal": False,
    "llama.attention.scale": 0.25,
    "llama.attention.sliding_window": 0,
    "llama.expert_count": 0,
    "llama.expert_used_count": 0,
    "llama.logit_scale": 1.0,
    "llama.rope.scaling.type": "none",
    "llama.rope.scaling.factor": 1.0,
    "llama.use_parallel_residual": False,
    "adapter.type": "lora",
    "split.count": 0,
    "split.no": 0,
}


@pytest.mark.parametrize("name", UNKNOWN_FIELDS)
def test_a_field_that_is_not_listed_raises_also_if_it_is_false_or_0(name, tmp_path):
    fields = {name: UNKNOWN_FIELDS[name]}
    path = write_gguf(tmp_path / "model.gguf", small_llama(tmp_path), fields)
    with pytest.raises(ValueError, match=f"but has {{'{name}': "):
        from_gguf.load(path)


REJECTED: dict[str, tuple[str, dict[str, Any]]] = {
    "another architecture": ("must be llama, got qwen2", {"architecture": "qwen2"}),
    "a later architecture": ("must be llama, got llama4", {"architecture": "llama4"}),
    "an adapter": ("must be model", {"fields": {"general.type": "adapter"}}),
    "a size per layer": (
        "same sizes, got .*head_count_kv",
        {"fields": {"llama.attention.head_count_kv": [2, 2]}},
    ),
    "no width": (
        r"must have 'llama\.embedding_length'",
        {"fields": {"llama.embedding_length": None}},
    ),
    "half of a head rotated": (
        "dimension_count must be 16, got 8",
        {"fields": {"llama.rope.dimension_count": 8}},
    ),
    "wider values": (
        "value_length must be 16, got 32",
        {"fields": {"llama.attention.value_length": 32}},
    ),
    "no embedding": (
        r"must have 'token_embeddings\.weight'",
        {"weights": {"token_embd.weight": None}},
    ),
    "a weight missing": (
        r"Missing .*layers\.1\.ffn\.w3\.weight",
        {"weights": {"blk.1.ffn_up.weight": None}},
    ),
    "a bias": (
        r"Unexpected .*output_proj\.bias",
        {"weights": {"blk.0.attn_output.bias": np.zeros(64, "f4")}},
    ),
    "a narrow weight": (
        r"size mismatch .*ffn\.w1",
        {"weights": {"blk.0.ffn_gate.weight": np.zeros((95, 64), "f4")}},
    ),
    "too few factors": (
        "one for each of 8 pairs, got 5",
        {"weights": {"rope_freqs.weight": np.ones(5, "f4")}},
    ),
    "whole numbers": (
        r"support the type of output_norm\.weight, got I8",
        {"weights": {"output_norm.weight": np.ones(64, "i1")}},
    ),
}


@pytest.mark.parametrize(("message", "changes"), REJECTED.values(), ids=REJECTED)
def test_a_file_that_is_not_a_plain_llama_raises(message, changes, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", small_llama(tmp_path), **changes)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        from_gguf.load(path)


def test_a_file_that_is_not_gguf_raises(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"something else" * 9)
    with pytest.raises(ValueError, match="GGUF"):
        from_gguf.load(tmp_path / "model.gguf")


def test_the_command_prints_the_layers(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", small_llama(tmp_path))
    failed, printed = run(from_gguf.__file__, path, processes=1)
    assert not failed, printed
    assert "(token_embeddings): Embedding(257, 64)" in printed


def test_all_tokens_that_end_a_text_are_found(tmp_path):
    stops = {
        "tokenizer.ggml.eos_token_id": 7,
        "tokenizer.ggml.eot_token_id": 9,
        "tokenizer.ggml.eom_token_id": 11,
    }
    theirs = small_llama(tmp_path)
    for fields, expected in ((stops, {7, 9, 11}), ({}, set())):
        path = write_gguf(tmp_path / "model.gguf", theirs, fields)
        assert from_gguf.stop_tokens(path) == expected


@needs_story
def test_smollm2_has_the_logits_of_transformers(monkeypatch):
    # transformers reads the file twice. To parse its 49,152 tokens takes seconds.
    monkeypatch.setattr(gguf, "GGUFReader", cache(gguf.GGUFReader))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        SMOLLM2.parent, gguf_file=SMOLLM2.name, dtype=torch.float32
    )
    assert_equal(from_gguf.load(SMOLLM2), theirs)
