"""GGUF files, small ones and the file of `make story`: the logits of transformers."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from saved_checkpoints import (
    LLAMA3,
    SMOLLM2,
    assert_equal,
    gguf,
    needs_story,
    save_llama,
    transformers,
    write_gguf,
)

from_gguf = pytest.importorskip("from_gguf", reason="requires the extra examples")

# Options of transformers, and the fields of the same model.
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
    "as many key heads as heads, and sizes that are not stated twice": (
        {"num_key_value_heads": 4},
        {
            "llama.attention.head_count_kv": None,
            "llama.rope.dimension_count": None,
            "llama.vocab_size": None,
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
    theirs = save_llama(tmp_path, **options)
    path = write_gguf(tmp_path / "model.gguf", theirs, fields)
    random_state = torch.get_rng_state()
    ours = from_gguf.load(path)
    assert torch.equal(torch.get_rng_state(), random_state)  # no weight was drawn
    assert ours.tied == theirs.config.tie_word_embeddings
    assert_equal(ours, theirs)


def test_a_file_of_llama_3_1_has_its_positions(tmp_path):
    theirs = save_llama(tmp_path, rope_parameters=LLAMA3)
    theta = LLAMA3["rope_theta"]
    plain = theta ** (-torch.arange(0, 16, 2).double() / 16)
    factors = (plain / theirs.model.rotary_emb.inv_freq.double()).float().numpy()
    assert factors.max() > 3.9
    path = write_gguf(
        tmp_path / "model.gguf",
        theirs,
        fields={"llama.rope.freq_base": theta},
        weights={"rope_freqs.weight": factors},
    )
    assert_equal(from_gguf.load(path), theirs)


# Changes of a right file, as write_gguf takes them, and a part of the error.
REJECTED: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"architecture": "llama4"}, "must be llama, got llama4"),
    "an adapter": ({"fields": {"general.type": "adapter"}}, "must be model"),
    "no causal mask": (
        {"fields": {"llama.attention.causal": False}},
        r"but has {'llama\.attention\.causal': ",
    ),
    "an unknown field that is 0": (
        {"fields": {"llama.expert_count": 0}},
        r"but has {'llama\.expert_count': ",
    ),
    "a part of a split file": (
        {"fields": {"split.no": 0}},
        r"but has {'split\.no': ",
    ),
    "a size per layer": (
        {"fields": {"llama.attention.head_count_kv": [2, 2]}},
        "same sizes, got .*head_count_kv",
    ),
    "no width": (
        {"fields": {"llama.embedding_length": None}},
        r"must have 'llama\.embedding_length'",
    ),
    "half of a head rotated": (
        {"fields": {"llama.rope.dimension_count": 8}},
        "dimension_count must be 16, got 8",
    ),
    "wider values": (
        {"fields": {"llama.attention.value_length": 32}},
        "value_length must be 16, got 32",
    ),
    "no embedding": (
        {"weights": {"token_embd.weight": None}},
        r"must have 'token_embeddings\.weight'",
    ),
    "a weight missing": (
        {"weights": {"blk.1.ffn_up.weight": None}},
        r"Missing .*layers\.1\.ffn\.w3\.weight",
    ),
    "a bias": (
        {"weights": {"blk.0.attn_output.bias": np.zeros(64, "f4")}},
        r"Unexpected .*output_proj\.bias",
    ),
    "too few factors": (
        {"weights": {"rope_freqs.weight": np.ones(5, "f4")}},
        "one for each of 8 pairs, got 5",
    ),
    "whole numbers": (
        {"weights": {"output_norm.weight": np.ones(64, "i1")}},
        r"support the type of output_norm\.weight, got I8",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REJECTED.values(), ids=REJECTED)
def test_a_file_that_is_not_a_plain_llama_raises(changes, message, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", save_llama(tmp_path), **changes)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        from_gguf.load(path)


def test_a_file_that_is_not_gguf_raises(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"something else" * 9)
    with pytest.raises(ValueError, match="GGUF"):
        from_gguf.load(tmp_path / "model.gguf")


def test_the_command_prints_the_layers(tmp_path, capsys):
    from_gguf.main(write_gguf(tmp_path / "model.gguf", save_llama(tmp_path)))
    assert "(token_embeddings): Embedding(257, 64)" in capsys.readouterr().out


def test_all_tokens_that_end_a_text_are_found(tmp_path):
    stops = {
        "tokenizer.ggml.eos_token_id": 7,
        "tokenizer.ggml.eot_token_id": 9,
        "tokenizer.ggml.eom_token_id": 11,
    }
    theirs = save_llama(tmp_path)
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
