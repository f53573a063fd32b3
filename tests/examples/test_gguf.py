"""GGUF files, small ones and the file of `make story`: the logits of transformers."""

import runpy
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from saved_checkpoints import LLAMA3, assert_equal, save, save_tokenizer, transformers

gguf = pytest.importorskip("gguf", reason="requires the extra examples")
from_gguf = pytest.importorskip("from_gguf", reason="requires the extra examples")
generate = pytest.importorskip("generate", reason="requires the extra examples")

# `make story` downloads the file. .ci/run does so first, and fails if a test is skipped.
MODEL = Path.home() / ".cache/tinyblock/SmolLM2-135M-Instruct.Q4_1.gguf"

GGUF_FIELDS: dict[str, Any] = {
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


def write_gguf(path, theirs, tensors=None, architecture="llama", **changes):
    """Write a model of transformers as llama.cpp does.

    `changes` of fields have underscores for dots. None removes a field.
    """
    writer = gguf.GGUFWriter(path, architecture)
    fields = GGUF_FIELDS | {
        name.replace("__", "."): value for name, value in changes.items()
    }
    for name, value in fields.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    weights = {
        names.get_name(name, try_suffixes=(".weight",)): weight.detach().numpy()
        for name, weight in theirs.state_dict().items()
    }
    if theirs.config.tie_word_embeddings:
        del weights["output.weight"]
    for name, weight in (weights | (tensors or {})).items():
        if weight is None:
            continue
        heads = {"attn_q": 4, "attn_k": 2}.get(name.split(".")[-2])
        if heads:  # as in convert_hf_to_gguf.py
            halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


DEFAULT = {"rope_type": "default", "rope_theta": 5e5}


def small_llama(folder, **options):
    options.setdefault("rope_parameters", DEFAULT)
    return save("llama", folder, **options)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_written_gguf_file_has_the_logits_of_transformers(tied, tmp_path):
    theirs = small_llama(tmp_path, tie_word_embeddings=tied)
    ours = from_gguf.load(write_gguf(tmp_path / "model.gguf", theirs))
    assert ours.tied == tied
    assert_equal(ours, theirs)


def test_a_gguf_file_may_state_the_head_size(tmp_path):
    theirs = small_llama(tmp_path, head_dim=32)
    sizes = {
        "llama__attention__key_length": 32,
        "llama__attention__value_length": 32,
        "llama__rope__dimension_count": 32,
    }
    path = write_gguf(tmp_path / "model.gguf", theirs, **sizes)
    assert_equal(from_gguf.load(path), theirs)


def test_a_gguf_file_of_llama_3_1_has_its_positions(tmp_path):
    theirs = small_llama(tmp_path, rope_parameters=dict(LLAMA3))
    theta = LLAMA3["rope_theta"]
    plain = theta ** (-torch.arange(0, 16, 2).double() / 16)
    factors = (plain / theirs.model.rotary_emb.inv_freq.double()).float().numpy()
    assert factors.max() > 3.9
    tensors = {"rope_freqs.weight": factors}
    path = write_gguf(
        tmp_path / "model.gguf", theirs, tensors, llama__rope__freq_base=theta
    )
    assert_equal(from_gguf.load(path), theirs)


NOT_LLAMA: dict[str, tuple[str, dict[str, Any]]] = {
    "another architecture": ("got qwen2", {"architecture": "qwen2"}),
    "a later architecture": ("got llama4", {"architecture": "llama4"}),
    "experts": ("expert_count", {"llama__expert_count": 8}),
    "a size per layer": ("head_count_kv", {"llama__attention__head_count_kv": [2, 2]}),
    "no width": ("hidden_size", {"llama__embedding_length": None}),
    "half of a head rotated": ("size, 16, got 8", {"llama__rope__dimension_count": 8}),
    "scaled positions": ("scaling", {"llama__rope__scaling__factor": 4.0}),
    "a weight missing": ("lack 1", {"tensors": {"blk.1.ffn_up.weight": None}}),
    "no embedding": ("lack 2", {"tensors": {"token_embd.weight": None}}),
    "a bias": (
        "have 1 others",
        {"tensors": {"blk.0.attn_output.bias": np.zeros(64, "f4")}},
    ),
    "too few factors": ("got 5", {"tensors": {"rope_freqs.weight": np.ones(5, "f4")}}),
}


@pytest.mark.parametrize("what", NOT_LLAMA)
def test_a_gguf_file_that_is_not_understood_raises(what, tmp_path):
    message, changes = NOT_LLAMA[what]
    path = write_gguf(tmp_path / "model.gguf", small_llama(tmp_path), **changes)
    with pytest.raises(ValueError, match=message):
        from_gguf.load(path)


def test_a_type_that_gguf_does_not_support_is_named(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "model.gguf", small_llama(tmp_path))
    monkeypatch.setattr(gguf, "dequantize", Mock(side_effect=NotImplementedError))
    with pytest.raises(ValueError, match=r"type of token_embd\.weight, got F32"):
        from_gguf.load(path)


def test_a_file_that_is_not_gguf_raises(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"something else" * 9)
    with pytest.raises(ValueError, match="GGUF"):
        from_gguf.load(tmp_path / "model.gguf")


def test_the_tokens_that_end_a_text_are_named_by_the_file_or_else_by_the_tokenizer(
    tmp_path, monkeypatch
):
    tokenizer = SimpleNamespace(eos_token_id=3)
    monkeypatch.setattr(generate, "gguf_tokenizer", lambda path: tokenizer)
    stops = {
        "tokenizer__ggml__eos_token_id": 7,
        "tokenizer__ggml__eot_token_id": 9,
        "tokenizer__ggml__eom_token_id": 11,
    }
    theirs = small_llama(tmp_path)
    for changes, expected in ((stops, {7, 9, 11}), ({}, {3})):
        path = write_gguf(tmp_path / "model.gguf", theirs, **changes)
        assert generate.load(str(path))[2] == expected


def test_a_relative_path_has_a_tokenizer(tmp_path, monkeypatch):
    def read(folder, gguf_file):
        return (Path(folder) / gguf_file).read_text()

    monkeypatch.setattr(generate.AutoTokenizer, "from_pretrained", read)
    monkeypatch.chdir(tmp_path)
    Path("model.gguf").write_text("the content of the file")
    assert generate.gguf_tokenizer(Path("model.gguf")) == "the content of the file"


needs_story = pytest.mark.skipif(
    not MODEL.exists(), reason="`make story` downloads the model"
)


def test_the_command_prints_the_layers(tmp_path, monkeypatch, capsys):
    path = write_gguf(tmp_path / "model.gguf", small_llama(tmp_path))
    monkeypatch.setattr(sys, "argv", ["from_gguf.py", str(path)])
    runpy.run_path(from_gguf.__file__, run_name="__main__")
    assert "(token_embeddings): Embedding(257, 64)" in capsys.readouterr().out


@needs_story
def test_a_gguf_file_has_the_logits_of_transformers(monkeypatch):
    # transformers reads the file twice. To parse its 49,152 tokens takes seconds.
    monkeypatch.setattr(gguf, "GGUFReader", cache(gguf.GGUFReader))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        MODEL.parent, gguf_file=MODEL.name, dtype=torch.float32
    )
    assert_equal(from_gguf.load(str(MODEL)), theirs)


@needs_story
def test_a_tokenizer_beside_a_gguf_file_is_not_read(tmp_path):
    save_tokenizer(tmp_path)
    (tmp_path / "model.gguf").symlink_to(MODEL)
    tokenizer = generate.gguf_tokenizer(tmp_path / "model.gguf")
    assert len(tokenizer) == 49152
