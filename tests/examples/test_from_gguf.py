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
    save,
    transformers,
    write_gguf,
)

from_gguf = pytest.importorskip("from_gguf", reason="requires the extra examples")

# Options of transformers, and fields to add or to leave out.
ACCEPTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fields of the tokenizer and of the file": (
        {},
        {"general.type": "model", "tokenizer.ggml.add_bos_token": True},
    ),
    "tied, with a head size": ({"tie_word_embeddings": True, "head_dim": 32}, {}),
    "no more fields than a file needs": (
        {"num_key_value_heads": 4, "rope_parameters": {"rope_theta": 1e4}},
        {
            "llama.attention.head_count_kv": None,
            "llama.attention.key_length": None,
            "llama.attention.value_length": None,
            "llama.rope.dimension_count": None,
            "llama.rope.freq_base": None,
            "llama.vocab_size": None,
        },
    ),
    "the positions of Llama 3.1": ({"rope_parameters": LLAMA3}, {}),
}


@pytest.mark.parametrize(("options", "fields"), ACCEPTED.values(), ids=ACCEPTED)
def test_a_written_file_has_the_logits_of_transformers(
    options, fields, tmp_path, capsys
):
    theirs = save("llama", tmp_path, **options)
    path = write_gguf(tmp_path / "model.gguf", theirs, fields)
    random_state = torch.get_rng_state()
    ours = from_gguf.load(path)
    assert torch.equal(torch.get_rng_state(), random_state)  # no weight was drawn
    assert ours.tied == theirs.config.tie_word_embeddings
    assert_equal(ours, theirs)
    from_gguf.main(path)
    assert capsys.readouterr().out == f"{ours}\n"


# Changes of a right file, as write_gguf takes them, and a part of the error.
REJECTED: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"architecture": "llama4"}, "must be llama, got llama4"),
    "an adapter": ({"fields": {"general.type": "adapter"}}, "must be model"),
    "an unknown field that is 0": (
        {"fields": {"llama.expert_count": 0}},
        r"but has {'llama\.expert_count': ",
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
    path = write_gguf(tmp_path / "model.gguf", save("llama", tmp_path), **changes)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        from_gguf.load(path)


@needs_story
def test_smollm2_has_the_logits_of_transformers(monkeypatch):
    # Otherwise the file is read three times, and gguf's names of weights are listed for
    # each module, which takes seconds. Both readers must get the path as a string.
    for name in ("GGUFReader", "get_tensor_name_map"):
        monkeypatch.setattr(gguf, name, cache(getattr(gguf, name)))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        SMOLLM2.parent, gguf_file=SMOLLM2.name, dtype=torch.float32
    )
    assert_equal(from_gguf.load(str(SMOLLM2)), theirs, seq=9)  # of 135 M parameters
