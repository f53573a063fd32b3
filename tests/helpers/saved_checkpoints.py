"""Checkpoints and GGUF files: small ones, written for a test, and that of `make story`."""

from pathlib import Path

import pytest
import torch
from einops import rearrange
from float64 import in_float64

safetensors = pytest.importorskip(
    "safetensors.torch", reason="requires the extra examples"
)
transformers = pytest.importorskip("transformers", reason="requires the extra examples")
tokenizers = pytest.importorskip("tokenizers", reason="requires the extra examples")
gguf = pytest.importorskip("gguf", reason="requires the extra examples")

# .ci/run first runs `make story`.
SMOLLM2 = Path.home() / ".cache/tinyblock/SmolLM2-135M-Instruct.Q4_1.gguf"
needs_story = pytest.mark.skipif(
    not SMOLLM2.exists(), reason="requires the model that `make story` downloads"
)

YARN = {
    "rope_type": "yarn",
    "rope_theta": 50.0,  # so small that some pairs are interpolated
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LLAMA3 = {
    **YARN,
    "rope_type": "llama3",
    "low_freq_factor": 0.5,
    "high_freq_factor": 3.0,
}
# A letter for each byte, as GPT-2 writes them.
BYTES = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())

OPTIONS = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": None,
    "rope_parameters": {"rope_theta": 5e5},
}


def save(kind, folder, shards="100KB", dtype=torch.float32, **options):
    """Save a small model of transformers with random weights, and return it."""
    config = transformers.AutoConfig.for_model(kind, **(OPTIONS | options))
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        is_gain = "norm" in name  # around 1, so that scores differ
        torch.nn.init.normal_(parameter, mean=float(is_gain), std=0.1)
        parameter.data = parameter.to(dtype)  # not its frequencies
    model.save_pretrained(folder, max_shard_size=shards)
    return model.eval()


def write_gguf(path, model, fields=None, weights=None, architecture="llama"):
    """Write a model of transformers as llama.cpp does.

    `fields` and `weights` replace those of the model, or are left out if they are None.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in (gguf_fields(model.config) | (fields or {})).items():
        if value is not None:
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    for name, weight in (gguf_weights(model) | (weights or {})).items():
        if weight is not None:
            writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_fields(config):
    """Return the fields of a config, as llama.cpp names them."""
    return {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": config.rope_parameters["rope_theta"],
        "llama.vocab_size": config.vocab_size,
    }


def gguf_weights(model):
    """Return weights with the names and the order of rows that llama.cpp gives them."""
    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    weights = {}
    for name, weight in model.state_dict().items():
        for part, number in heads.items():
            if part in name:  # as in convert_hf_to_gguf.py
                rows = "(heads pair half) d -> (heads half pair) d"
                weight = rearrange(weight, rows, heads=number, pair=2)
        weights[names.get_name(name, try_suffixes=(".weight",))] = weight.numpy()
    if config.tie_word_embeddings:
        del weights["output.weight"]
    if config.rope_parameters["rope_type"] == "llama3":
        scaled = model.model.rotary_emb.inv_freq
        plain = config.rope_parameters["rope_theta"] ** (-torch.arange(8) / 8)
        weights["rope_freqs.weight"] = (plain / scaled).numpy()
    return weights


@torch.no_grad()
def assert_equal(ours, theirs, seq=100):
    """Compare logits in float64, which both models then have.

    A GGUF file has factors of frequencies in float32.
    """
    ours.double()
    theirs.double()
    tokens = torch.randint(257, (2, seq))
    own = ours.transformer.rope.frequencies()
    rotary = theirs.model.rotary_emb
    torch.testing.assert_close(rotary.inv_freq, own, rtol=2.0**-18, atol=0)
    rotary.inv_freq = own
    with in_float64():
        expected = theirs(tokens).logits
    error = (ours(tokens) - expected).norm() / expected.norm()
    assert error < 2.0**-40, f"logits differ by {error:.0e}"


def save_tokenizer(folder):
    """Save a tokenizer whose tokens are single bytes: parts of characters."""
    vocabulary = {letter: number for number, letter in enumerate([*BYTES, "<end>"])}
    path = str(folder / "tokenizer.json")
    tokenizers.ByteLevelBPETokenizer(vocabulary, merges=[]).save(path)
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_file=path,
        eos_token="<end>",
        chat_template="{{ messages[0].role }}: {{ messages[0].content }}"
        "{% if add_generation_prompt %} A:{% endif %}",
    )
    wrapped.save_pretrained(folder)
    return wrapped
