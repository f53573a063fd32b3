"""Checkpoints of transformers: the same logits and texts, or one ValueError."""

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
from_gguf = pytest.importorskip("from_gguf")
generate = pytest.importorskip("generate")
hugging_face = pytest.importorskip("hugging_face")

# `make story` downloads the file. .ci/run does so first, and fails if a test is skipped.
MODEL = Path.home() / ".cache/tinyblock/SmolLM2-135M-Instruct.Q4_1.gguf"

YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e5,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LLAMA3 = {
    **YARN,
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
ACCEPTED = {
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "llama 3.1's positions": ("llama", {"rope_parameters": LLAMA3}),
    "yarn": ("qwen3", {"rope_parameters": YARN}),
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


def save(kind, folder, **options):
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=257,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        **options,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder, max_shard_size="100KB")
    return model.eval()


def greedy(theirs, prompt, count):
    return theirs.generate(
        prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False
    )


@torch.no_grad()
def assert_equal(ours, theirs):
    tokens = torch.randint(257, (2, 100))
    expected = theirs(tokens).logits
    assert (ours(tokens) - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize(("kind", "options"), ACCEPTED.values(), ids=ACCEPTED)
def test_a_checkpoint_has_the_logits_of_transformers(kind, options, tmp_path):
    theirs = save(kind, tmp_path, **options)
    ours = hugging_face.load(tmp_path)
    assert ours.tied == bool(options.get("tie_word_embeddings"))
    assert_equal(ours, theirs)


def test_a_head_in_the_file_is_used_even_if_the_config_says_tied(tmp_path):
    theirs = save("llama", tmp_path)
    theirs.config.tie_word_embeddings = True
    theirs.config.save_pretrained(tmp_path)
    assert_equal(hugging_face.load(tmp_path), theirs)


@pytest.mark.parametrize("name", REJECTED)
def test_a_config_that_is_not_understood_raises(name, tmp_path):
    kind, options = REJECTED[name]
    save(kind, tmp_path, **options)
    with pytest.raises(ValueError, match=name):
        hugging_face.load(tmp_path)


def save_tokenizer(folder):
    """Save a tokenizer whose tokens are single bytes: parts of characters."""
    letters = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "<end>"]
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    path = str(folder / "tokenizer.json")
    tokenizers.ByteLevelBPETokenizer(vocabulary, merges=[]).save(path)
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_file=path,
        eos_token="<end>",
        chat_template="Q: {{ messages[0].content }}",
    )
    wrapped.save_pretrained(folder)
    return wrapped


def test_generate_prints_the_text_of_transformers_until_it_stops(tmp_path, capsys):
    theirs = save("llama", tmp_path)
    tokenizer = save_tokenizer(tmp_path)
    prompt = tokenizer("Q: naïve 🙂", return_tensors="pt")["input_ids"]
    tokens = greedy(theirs, prompt, 20)[0].tolist()
    stop = tokens[-5]
    theirs.generation_config.eos_token_id = [stop]
    theirs.generation_config.save_pretrained(tmp_path)
    generate.main([str(tmp_path), "naïve 🙂", "--chat", "--tokens", "20"])

    new = tokens[prompt.shape[1] :]
    text = tokenizer.decode(new[: new.index(stop)], skip_special_tokens=True)
    assert capsys.readouterr().out == text.rstrip("\ufffd") + "\n"


def test_generate_reports_a_model_that_it_does_not_find(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        generate.main([str(tmp_path / "missing.gguf"), "text"])
    assert "missing.gguf" in capsys.readouterr().err


@pytest.mark.skipif(
    not MODEL.exists(),
    reason="`make story` downloads the model",
)
def test_a_gguf_file_has_the_text_of_transformers():
    source = {"pretrained_model_name_or_path": MODEL.parent, "gguf_file": MODEL.name}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    text = "The lighthouse keeper opened the door, and"
    prompt = tokenizer(text, return_tensors="pt")["input_ids"]
    ours = from_gguf.load(MODEL)
    assert torch.equal(ours.generate(prompt, 24), greedy(theirs, prompt, 24))
