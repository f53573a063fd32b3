import json

import checkpoint_config
import pytest
from checkpoint_config import check_config, head_size, rope_parameters

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_type": "llama3",
}


def test_check_config_accepts_what_changes_nothing():
    check_config(LLAMA)
    check_config({**LLAMA, "attention_bias": False, "rope_scaling": None})
    check_config({**LLAMA, "rope_scaling": LLAMA3_SCALING, "use_cache": True})
    check_config({**LLAMA, "_attn_implementation_autoset": True})
    check_config({**LLAMA, "unsloth_version": "2025.3.1", "unsloth_fixed": True})
    check_config({**LLAMA, "layer_types": ["full_attention"] * 2})
    # Qwen's configs name a window, which use_sliding_window switches off.
    check_config({**QWEN2, "sliding_window": 32768, "use_sliding_window": False})


@pytest.mark.parametrize(
    "field",
    [
        {"model_type": "mistral"},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"sliding_window": 4096},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"partial_rotary_factor": 0.5},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        {"logits_scaling": 8.0},
        {"embedding_multiplier": 12.0},
        {"num_local_experts": 8},
        {"final_logit_softcapping": 30.0},
        {"quantization_config": {"bits": 4}},
    ],
    ids=str,
)
def test_check_config_names_the_field_that_is_not_accepted(field):
    [name] = field
    # The message about RoPE's parameters names the field inside.
    named = "rope_type|partial_rotary_factor" if name.startswith("rope_") else name
    with pytest.raises(ValueError, match=named) as raised:
        check_config({**LLAMA, **field})
    assert "\n" not in str(raised.value)


def test_check_config_rejects_the_window_of_qwen():
    with pytest.raises(ValueError, match=r"use_sliding_window in config\.json must be"):
        check_config({**QWEN2, "use_sliding_window": True, "sliding_window": 4096})


def test_check_config_names_missing_fields():
    config = {**LLAMA, "vocab_size": None}
    del config["rms_norm_eps"]
    with pytest.raises(ValueError, match="the fields rms_norm_eps, vocab_size"):
        check_config(config)


@pytest.mark.parametrize(
    "name", ["Mistral", "Gemma", "Granite", "Olmo", "Phi3", "Cohere"]
)
def test_check_config_rejects_other_architectures(name):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = getattr(transformers, f"{name}Config")()
    with pytest.raises(ValueError, match="model_type"):
        check_config(config.to_dict())


def test_rope_parameters_are_those_of_transformers_4_and_5():
    old = {**LLAMA, "rope_scaling": LLAMA3_SCALING}
    new = {**LLAMA, "rope_theta": None}
    new["rope_parameters"] = {"rope_theta": 100000.0, **LLAMA3_SCALING}
    assert rope_parameters(old) == rope_parameters(new)
    assert rope_parameters(old) == {"rope_theta": 100000.0, **LLAMA3_SCALING}
    default = {"rope_type": "default", "rope_theta": 10000.0}
    assert rope_parameters({**LLAMA, "rope_theta": None}) == default


def test_head_size_is_that_of_the_config_or_the_default_of_the_family():
    assert head_size(LLAMA) == 16
    assert head_size({**LLAMA, "head_dim": 24}) == 24
    assert head_size({**LLAMA, "model_type": "qwen3"}) == 128


def test_main_checks_a_folder(tmp_path, monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["checkpoint_config.py", *map(str, arguments)])
        return checkpoint_config.main(), capsys.readouterr()

    code, output = run(tmp_path)
    assert code == 2
    assert "config.json" in output.err
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert run(tmp_path)[0] == 0
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "mlp_bias": True}))
    code, output = run(tmp_path)
    assert code == 2
    assert output.err == (
        "checkpoint_config.py: error: mlp_bias in config.json must be false, got True\n"
    )
    code, output = run()
    assert code == 0
    assert "mlp_bias: false" in output.out
