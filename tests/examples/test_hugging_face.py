"""Checkpoints that transformers has saved: the same logits, or one ValueError."""

import random
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from saved_checkpoints import (
    LLAMA3,
    YARN,
    assert_equal,
    safetensors,
    save,
    transformers,
)
from scaled_rope import YarnRope

llama = pytest.importorskip(
    "transformers.models.llama.modeling_llama", reason="requires the extra examples"
)
hugging_face = pytest.importorskip("hugging_face", reason="requires the extra examples")

LINEAR = {"rope_type": "linear", "rope_theta": 50.0, "factor": 4.0}
BETAS = {"beta_fast": 2.0, "beta_slow": 0.5, "attention_factor": 1.5}
LONG = {
    **YARN,
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
}
# 1 and 2.74 turns are pairs 6.4 and 5.9. In whole pairs, 7 and 5, pair 6 is slower.
SLOW = {
    **YARN,
    "rope_theta": 1e7,
    "original_max_position_embeddings": 2_500_000,
    "beta_fast": 2.74,
    "truncate": False,
}
# It scales the scores of the last position, 127, and of no other.
LATE = {**YARN, "original_max_position_embeddings": 127, "llama_4_scaling_beta": 0.1}

ACCEPTED = {
    "llama": ("llama", {"rope_parameters": LLAMA3}),
    "qwen2 whose window is not used": (
        "qwen2",
        {"use_sliding_window": False, "sliding_window": 8, "rope_parameters": LINEAR},
    ),
    "qwen3 with a head size": (
        "qwen3",
        {"head_dim": 32, "rope_parameters": {**YARN, **BETAS}},
    ),
    "one head per key, tied": (
        "qwen3",
        {"num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "another name, in float64": (
        "mistral",
        {"sliding_window": None, "dtype": torch.float64},
    ),
    "many positions, in bfloat16": (
        "llama",
        {"max_position_embeddings": 2**17, "dtype": torch.bfloat16},
    ),
    "many positions, in float64": (
        "llama",
        {"max_position_embeddings": 2**17, "dtype": torch.float64},
    ),
}
OTHER_LOGITS = r"logits differ by \de[+-]0\d of their norm"
REJECTED = {
    "attention to later tokens": ("llama", {"is_causal": False}, OTHER_LOGITS),
    "scale of scores": ("granite", {"attention_multiplier": 0.249}, OTHER_LOGITS),
    "scores by position": ("ministral3", {"rope_parameters": LATE}, OTHER_LOGITS),
    "the frequency of one slow pair": (
        "llama",
        {"max_position_embeddings": 2**17, "rope_parameters": SLOW},
        "frequencies of RoPE must be .* one differs by",
    ),
    "half of each head": (
        "llama",
        {"rope_parameters": {**LINEAR, "partial_rotary_factor": 0.5}},
        "must turn all 8 pairs of a head, got 4",
    ),
    "longrope": ("llama", {"rope_parameters": LONG}, "type default, .*got longrope"),
    "biases": ("llama", {"attention_bias": True}, r"output_proj\.bias"),
    "a window": ("mistral", {"sliding_window": 100}, "a window of 100"),
    "windows in some layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1},
        "must be full, got .*sliding_attention",
    ),
    "dropout": ("llama", {"attention_dropout": 1e-3}, OTHER_LOGITS + " .* in training"),
    "another structure": ("gpt2", {}, "built like Llama, got GPT2LMHeadModel"),
}


@pytest.mark.parametrize(("kind", "options"), ACCEPTED.values(), ids=ACCEPTED)
def test_a_checkpoint_has_the_logits_of_transformers(kind, options, tmp_path, capsys):
    theirs = save(kind, tmp_path, **options)
    random_state = torch.get_rng_state()
    ours = hugging_face.load(tmp_path)
    assert torch.equal(torch.get_rng_state(), random_state)  # no weight was drawn
    assert ours.tied == bool(options.get("tie_word_embeddings"))
    assert {weight.dtype for weight in ours.parameters()} == {theirs.dtype}
    assert_equal(ours, theirs)
    hugging_face.main(tmp_path)
    printed = capsys.readouterr().out
    assert float(printed.rpartition(": ")[2]) < hugging_face.TOLERANCE


@pytest.mark.parametrize(
    ("kind", "options", "message"), REJECTED.values(), ids=REJECTED
)
def test_a_model_that_computes_anything_else_raises(kind, options, message, tmp_path):
    save(kind, tmp_path, **options)
    with pytest.raises(ValueError, match=message):
        hugging_face.load(tmp_path)


def test_weights_of_zero_hide_no_other_function(tmp_path):
    """With zeros in the last matrix of each branch, the activation shows in no logit."""
    theirs = save("llama", tmp_path, shards="1GB", hidden_act="gelu")
    for layer in theirs.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    theirs.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=OTHER_LOGITS + " with random weights"):
        hugging_face.load(tmp_path)


def test_logits_may_all_be_zero(tmp_path):
    """The only position has the padding token, whose row of the embedding is zero."""
    theirs = save("llama", tmp_path, shards="1GB", max_position_embeddings=1)
    theirs.model.embed_tokens.weight.data[0] = 0
    theirs.save_pretrained(tmp_path)
    ours = hugging_face.load(tmp_path)
    assert torch.equal(ours.lm_head.weight, theirs.lm_head.weight)


def test_random_scaled_frequencies_are_those_of_transformers():
    """Some have no pair between the kept and the divided, or none that is kept."""
    draw = random.Random(0)
    for _ in range(100):
        given: Any = {
            "rope_type": draw.choice(["linear", "llama3", "yarn"]),
            "rope_theta": draw.choice([2.0, 50.0, 5e5]),
            "factor": draw.choice([0.5, 1.0, 4.0, 16.0]),
            "original_max_position_embeddings": draw.choice([6, 32, 2330]),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        }
        config = transformers.LlamaConfig(head_dim=16, rope_parameters=given)
        rotary = llama.LlamaRotaryEmbedding(config)
        model = SimpleNamespace(rotary_emb=rotary)
        rope = hugging_face.build_rope(SimpleNamespace(config=config, model=model), 16)
        found = rope.frequencies().float()
        torch.testing.assert_close(found, rotary.inv_freq, rtol=1e-5, atol=0)
        if given["rope_type"] == "yarn":
            default = YarnRope(2.0, 16, 1, factor=given["factor"], original=6)
            assert default.attention_factor == pytest.approx(rotary.attention_scaling)


# --- Files --------------------------------------------------------------------------------


def test_other_weights_than_those_of_the_config_raise(tmp_path):
    save("llama", tmp_path, shards="1GB")
    path = tmp_path / "model.safetensors"
    weights = safetensors.load_file(path)
    up = "model.layers.1.mlp.up_proj.weight"
    bias = "model.layers.1.mlp.up_proj.bias"
    wrong = {
        "missing_keys": {name: weights[name] for name in weights if name != up},
        "unexpected_keys": {**weights, bias: torch.ones(96)},
        "mismatched_keys": {**weights, up: torch.ones(95, 64)},
    }
    for problem, state in wrong.items():
        safetensors.save_file(state, path, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=f"{problem}.*up_proj"):
            hugging_face.load(tmp_path)


def test_a_folder_that_is_not_one_whole_checkpoint_raises(tmp_path):
    save("llama", tmp_path, shards="1GB")
    save("llama", tmp_path / "new")
    for path in (tmp_path / "new").iterdir():
        shutil.move(path, tmp_path / path.name)
    with pytest.raises(ValueError, match="remove the older ones"):
        hugging_face.load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    min(tmp_path.glob("model-*.safetensors")).unlink()
    with pytest.raises(ValueError, match=r"cannot load .*00001-of"):
        hugging_face.load(tmp_path)
    for path in tmp_path.glob("model*.safetensors*"):
        path.unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"cannot load .*model\.safetensors"):
        hugging_face.load(tmp_path)


def test_an_adapter_beside_the_model_raises(tmp_path):
    save("llama", tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"adapter_config\.json: merge the adapter"):
        hugging_face.load(tmp_path)


def test_a_model_has_the_widest_dtype_of_its_files(tmp_path):
    save("llama", tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        state = safetensors.load_file(path)
        for name in state:
            if "norm" not in name:
                state[name] = state[name].bfloat16()
        safetensors.save_file(state, path, metadata={"format": "pt"})
    ours = hugging_face.load(tmp_path)
    assert {weight.dtype for weight in ours.parameters()} == {torch.float32}
    read = transformers.AutoModelForCausalLM.from_pretrained
    assert_equal(ours, read(tmp_path, dtype=torch.float32))
