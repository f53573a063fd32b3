"""Configs of transformers: the same logits, or one ValueError."""

from typing import Any

import pytest
from saved_checkpoints import LLAMA3, YARN, assert_equal, change_json, save

hugging_face = pytest.importorskip("hugging_face", reason="requires the extra examples")

ACCEPTED = {
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "llama 3.1's positions": ("llama", {"rope_parameters": LLAMA3}),
    "yarn": ("qwen3", {"rope_parameters": YARN}),
    "yarn beyond the last pair": (
        "llama",
        {"rope_parameters": {**YARN, "rope_theta": 2.0}},
    ),
    "yarn without a pair between": (
        "llama",
        {"rope_parameters": {**YARN, "original_max_position_embeddings": 6}},
    ),
    "yarn's betas": (
        "llama",
        {"rope_parameters": {**YARN, "beta_fast": 2.0, "beta_slow": 0.5}},
    ),
    "yarn's mscale": ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.5}}),
}
REJECTED: dict[str, Any] = {
    "model_type": ("mistral", {}),
    "attention_multiplier": ("granite", {"attention_multiplier": 0.1}),
    "attention_bias": ("llama", {"attention_bias": True}),
    "hidden_act": ("llama", {"hidden_act": "gelu"}),
    "sliding_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 8}),
    "linear": ("llama", {"rope_parameters": {**YARN, "rope_type": "linear"}}),
    "truncate": ("qwen3", {"rope_parameters": {**YARN, "truncate": False}}),
}


@pytest.mark.parametrize(("kind", "options"), ACCEPTED.values(), ids=ACCEPTED)
def test_a_checkpoint_has_the_logits_of_transformers(kind, options, tmp_path):
    theirs = save(kind, tmp_path, **options)
    ours = hugging_face.load(tmp_path)
    assert ours.tied == bool(options.get("tie_word_embeddings"))
    assert_equal(ours, theirs)


def test_a_head_in_the_file_is_used_even_if_the_config_says_tied(tmp_path):
    theirs = save("llama", tmp_path)

    def tie(config):
        config["tie_word_embeddings"] = True

    change_json(tmp_path / "config.json", tie)
    assert_equal(hugging_face.load(tmp_path), theirs)


@pytest.mark.parametrize("name", REJECTED)
def test_a_config_that_is_not_understood_raises(name, tmp_path):
    kind, options = REJECTED[name]
    save(kind, tmp_path, **options)
    with pytest.raises(ValueError, match=f"must .*(but has|got) .*{name}"):
        hugging_face.load(tmp_path)


PLAIN = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
}


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_act": "silu"},
        {"is_llama_config": True},
        {"partial_rotary_factor": 1.0},
        {"attention_bias": False},
        {"layer_types": ["full_attention", "full_attention"]},
        {"layer_types": None},
        {"head_dim": None},
        {"rope_scaling": {"rope_type": "default", "factor": None}},
        {"sliding_window": None},
        {"sliding_window": 8, "use_sliding_window": False},
    ],
    ids=str,
)
def test_a_field_that_changes_nothing_is_accepted(fields):
    hugging_face.build({**PLAIN, **fields}, tied=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_act", "relu2"),
        ("partial_rotary_factor", 0.5),
        ("mlp_bias", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("sliding_window", 8),
        ("a_field_of_tomorrow", 1),
    ],
)
def test_a_field_that_changes_the_model_is_named(name, value):
    with pytest.raises(ValueError, match=f"but has {{'{name}': "):
        hugging_face.build({**PLAIN, name: value}, tied=False)


@pytest.mark.parametrize(
    "name", ["model_type", "hidden_size", "rms_norm_eps", "max_position_embeddings"]
)
def test_a_config_that_lacks_a_field_raises(name, tmp_path):
    save("llama", tmp_path)

    def remove(config):
        del config[name]

    change_json(tmp_path / "config.json", remove)
    with pytest.raises(ValueError, match=f"must have the fields .*{name}"):
        hugging_face.load(tmp_path)


# --- Configs as older releases of transformers wrote them ---------------------------------


def as_written_by_release_4(config):
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    config["_attn_implementation_autoset"] = True


def as_written_before_rope_type(config):
    as_written_by_release_4(config)
    if config["rope_scaling"]:
        config["rope_scaling"]["type"] = config["rope_scaling"].pop("rope_type")


@pytest.mark.parametrize(
    "rope",
    [{"rope_type": "default", "rope_theta": 5e5}, LLAMA3, YARN],
    ids=["plain", "llama3", "yarn"],
)
@pytest.mark.parametrize(
    "change", [as_written_by_release_4, as_written_before_rope_type]
)
def test_an_old_config_has_the_logits_of_transformers(change, rope, tmp_path):
    theirs = save("llama", tmp_path, rope_parameters=dict(rope))
    change_json(tmp_path / "config.json", change)
    assert_equal(hugging_face.load(tmp_path), theirs)


def test_without_a_theta_it_is_that_of_llama_1(tmp_path):
    theirs = save("llama", tmp_path, rope_parameters={"rope_theta": 10000.0})
    change_json(tmp_path / "config.json", lambda config: config.pop("rope_parameters"))
    assert_equal(hugging_face.load(tmp_path), theirs)


def test_without_a_length_of_training_it_is_the_length_of_the_model(tmp_path):
    rope = {**YARN, "original_max_position_embeddings": 128}
    theirs = save("llama", tmp_path, rope_parameters=rope)

    def remove(config):
        del config["rope_parameters"]["original_max_position_embeddings"]

    change_json(tmp_path / "config.json", remove)
    assert_equal(hugging_face.load(tmp_path), theirs)


@pytest.mark.parametrize("name", ["factor", "low_freq_factor", "high_freq_factor"])
def test_a_rope_that_lacks_a_field_raises(name, tmp_path):
    save("llama", tmp_path, rope_parameters=LLAMA3)

    def remove(config):
        del config["rope_parameters"][name]

    change_json(tmp_path / "config.json", remove)
    with pytest.raises(ValueError, match=f"llama3 must have .*{name}"):
        hugging_face.load(tmp_path)
