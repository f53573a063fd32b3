"""Checkpoints: small ones of transformers, written for a test, and that of `make story`."""

import json
from pathlib import Path

import pytest
import torch

safetensors = pytest.importorskip(
    "safetensors.torch", reason="requires the extra examples"
)
transformers = pytest.importorskip("transformers", reason="requires the extra examples")
tokenizers = pytest.importorskip("tokenizers", reason="requires the extra examples")

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


def shards_in(folder):
    """Return the files of a checkpoint whose weights are in several."""
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1, f"the weights must be in several files, got {shards}"
    return shards


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


def change_json(path, change):
    """Let `change` edit the content of a file."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def change_weights(path, change):
    """Let `change` edit the weights of a file."""
    state = safetensors.load_file(path)
    change(state)
    safetensors.save_file(state, path, metadata={"format": "pt"})


def save_tokenizer(folder):
    """Save a tokenizer whose tokens are single bytes: parts of characters."""
    letters = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "<end>"]
    vocabulary = {letter: number for number, letter in enumerate(letters)}
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
