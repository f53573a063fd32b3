"""Checkpoints and GGUF files: small ones, written for a test, and that of `make story`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from einops import rearrange

safetensors = pytest.importorskip(
    "safetensors.torch", reason="requires the extra examples"
)
transformers = pytest.importorskip("transformers", reason="requires the extra examples")
tokenizers = pytest.importorskip("tokenizers", reason="requires the extra examples")
gguf = pytest.importorskip("gguf", reason="requires the extra examples")

# `make story` downloads the file. .ci/run does so first, and fails if a test is skipped.
SMOLLM2 = Path.home() / ".cache/tinyblock/SmolLM2-135M-Instruct.Q4_1.gguf"
needs_story = pytest.mark.skipif(
    not SMOLLM2.exists(), reason="`make story` downloads the model"
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

SIZES = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
# The same sizes, as llama.cpp writes them.
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


def save(kind, folder, shards="100KB", dtype=torch.float32, **options):
    """Save a small model of transformers with random weights, and return it."""
    config = transformers.AutoConfig.for_model(kind, **(SIZES | options))
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        is_gain = "norm" in name  # around 1, so that scores differ
        torch.nn.init.normal_(parameter, mean=float(is_gain), std=0.1)
        parameter.data = parameter.to(dtype)  # not its frequencies
    model.save_pretrained(folder, max_shard_size=shards)
    return model.eval()


def save_llama(folder, **options):
    """Save a model that has GGUF_FIELDS."""
    return save("llama", folder, **{"rope_parameters": {"rope_theta": 5e5}, **options})


def write_gguf(path, model, fields=None, weights=None, architecture="llama"):
    """Write a model of transformers as llama.cpp does.

    `fields` and `weights` replace those of the model, or are left out if they are None.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in (GGUF_FIELDS | (fields or {})).items():
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


def gguf_weights(model):
    """Return weights with the names and the order of rows that llama.cpp gives them."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    weights = {}
    for name, weight in model.state_dict().items():
        heads = model.config.num_attention_heads
        if "k_proj" in name:
            heads = model.config.num_key_value_heads
        if "q_proj" in name or "k_proj" in name:  # as in convert_hf_to_gguf.py
            rows = "(heads pair half) d -> (heads half pair) d"
            weight = rearrange(weight, rows, heads=heads, pair=2)
        weights[names.get_name(name, try_suffixes=(".weight",))] = weight.numpy()
    if model.config.tie_word_embeddings:
        del weights["output.weight"]
    return weights


def greedy(theirs, prompt, count):
    return theirs.generate(
        prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False
    )


@torch.no_grad()
def assert_equal(ours, theirs):
    """Compare logits. transformers computes norms and angles in float32."""
    tokens = torch.randint(257, (2, 100))
    expected = theirs(tokens).logits
    error = float((ours(tokens) - expected).norm() / expected.norm())
    assert error < 2**7 * torch.finfo(torch.float32).eps, (
        f"logits differ by {error:.0e}"
    )


def change_weights(path, change):
    """Let `change` edit the weights of a file."""
    state = safetensors.load_file(path)
    change(state)
    safetensors.save_file(state, path, metadata={"format": "pt"})


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
