import json
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="needs transformers")
import hugging_face
import transformers
from hugging_face import load, read_weights, save
from language_model import CachedAttention, LanguageModel

from tinyblock import RotaryPositionalEmbedding

pytestmark = pytest.mark.filterwarnings(
    "default::DeprecationWarning", "default::FutureWarning"
)  # of transformers' imports

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 6.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 5.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 4},
    "Llama with shared key heads": {"rope_theta": 300.0},
    "Llama tied": {"tie_word_embeddings": True},
    "Llama scaled": {"rope_theta": 500.0, "rope_scaling": LLAMA3_SCALING},
    "Qwen2": {"rope_theta": 1000.0},
    "Qwen3": {"head_dim": 24},
}


def write(case, folder, **options):
    """Write a random checkpoint, and return transformers' model."""
    name = case.split()[0]
    sizes = {
        "vocab_size": 99,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.15,  # logits of about 1
    }
    if name == "Llama":
        sizes["head_dim"] = 16
    config = getattr(transformers, f"{name}Config")(**{**sizes, **CASES[case]})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for gains_or_biases in model.parameters():
        if gains_or_biases.ndim == 1:
            nn.init.uniform_(gains_or_biases, 0.5, 1.5)
    model.save_pretrained(folder, **options)
    return model


@torch.no_grad()
@pytest.mark.parametrize("halves", [False, True], ids=["pairs", "halves"])
@pytest.mark.parametrize("case", CASES)
def test_load_gives_the_logits_of_transformers_and_saves_every_value(
    case, halves, tmp_path
):
    theirs = write(case, tmp_path / "theirs", max_shard_size="100KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    ours = load(tmp_path / "theirs", halves=halves)
    tokens = torch.randint(99, (2, 60))
    expected = theirs(tokens).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=2e-5)

    save(ours, tmp_path / "ours", eos_token_id=7)
    saved, original = (read_weights(tmp_path / name) for name in ("ours", "theirs"))
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[name], original[name]) for name in saved)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(again) is type(theirs)
    assert torch.equal(again(tokens).logits, expected)
    assert again.config.eos_token_id == 7


def test_load_keeps_the_dtype_and_the_tie(tmp_path):
    write("Llama tied", tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    ours = load(tmp_path)
    assert {weight.dtype for weight in ours.parameters()} == {torch.bfloat16}
    assert ours.lm_head.weight is ours.token_embeddings.weight
    assert ours.transformer.rope.cos_sin.dtype == torch.float32


def test_load_rejects_a_config_that_loads_and_is_wrong(tmp_path):
    write("Llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["hidden_act"] = "gelu"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="hidden_act"):
        load(tmp_path)


def test_load_names_a_weight_that_is_missing_or_too_large(tmp_path):
    write("Llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 98}))
    with pytest.raises(ValueError, match=r"shape \(98, 64\), got \(99, 64\)"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "num_hidden_layers": 3})
    )
    with pytest.raises(
        ValueError, match=r"must have the weights .*layers.2.* and 8 more"
    ):
        load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"must contain model\.safetensors"):
        load(tmp_path)


def test_save_rejects_a_model_that_no_config_describes(tmp_path):
    write("Llama", tmp_path)
    model = load(tmp_path)
    model.transformer.layers[0].ffn = nn.Identity()
    with pytest.raises(ValueError, match=r"layers\.0\.ffn, which is Identity"):
        save(model, tmp_path / "saved")


def change_eps_of_a_norm(model):
    model.transformer.layers[1].ln2.eps = 0.5


def change_heads_of_a_layer(model):
    model.transformer.layers[1].attn = CachedAttention(
        64, 2, num_kv_heads=2, d_head=16, rope=model.transformer.rope
    )


def change_rope_of_a_layer(model):
    rope = RotaryPositionalEmbedding(theta=7.0, d_k=16, max_seq_len=64)
    model.transformer.layers[1].attn.rope = rope


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_eps_of_a_norm, r"layers\.1\.ln2 must have eps=1e-05, .* got 0\.5"),
        (change_heads_of_a_layer, r"layer 1 must have num_attention_heads=4.* got 2"),
        (change_rope_of_a_layer, r"layer 1 must have the rope of the Transformer"),
    ],
)
def test_save_rejects_layers_that_differ(change, message, tmp_path):
    model = LanguageModel(
        99, 2, 64, 4, max_seq_len=64, num_kv_heads=2, attention=CachedAttention
    )
    save(model, tmp_path)
    change(model)
    with pytest.raises(ValueError, match=message):
        save(model, tmp_path)


@pytest.mark.parametrize("options", [{"theta": None}, {"rope": lambda x, positions: x}])
def test_save_rejects_a_model_without_a_known_rope(options, tmp_path):
    model = LanguageModel(99, 2, 64, 4, max_seq_len=64, **options)
    with pytest.raises(
        ValueError, match=r"rope must be a .*Embedding, got (None|func)"
    ):
        save(model, tmp_path)


def test_main_compares_random_checkpoints(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["hugging_face.py"])
    assert hugging_face.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert all(line.endswith("restores every value") for line in lines)


def test_main_reports_a_folder_without_checkpoint(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["hugging_face.py", str(tmp_path)])
    assert hugging_face.main() == 2
    assert "must be a checkpoint" in capsys.readouterr().err
