"""A real model, SmolLM2-135M-Instruct, through both loaders. `make story` downloads it; without it these tests skip."""

import pytest
import torch

pytest.importorskip("gguf", reason="needs gguf")
pytest.importorskip("transformers", reason="needs transformers")
import from_gguf
import hugging_face
import story
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

PATH = story.cached()
# The first warnings come from transformers' imports.
pytestmark = [
    pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning"),
    pytest.mark.skipif(not PATH.exists(), reason="run `make story` for the model"),
]
PROMPT = "The lighthouse keeper opened the door, and"


@pytest.fixture(scope="module")
def theirs():
    """Return transformers' model, with the weights that transformers reads from the GGUF file."""
    loaded = AutoModelForCausalLM.from_pretrained(
        PATH.parent,
        gguf_file=PATH.name,
        dtype=torch.float32,
        attn_implementation="sdpa",
    )
    # Some releases mark a model from a GGUF file as quantized, and do not save it.
    fields = loaded.config.to_dict()
    fields.pop("quantization_config", None)
    return LlamaForCausalLM.from_pretrained(
        None, config=LlamaConfig(**fields), state_dict=loaded.state_dict()
    )


@pytest.fixture(scope="module")
def ours():
    return from_gguf.load(PATH)


@pytest.fixture(scope="module")
def folder(theirs, tmp_path_factory):
    """Return the model as a checkpoint, which transformers writes."""
    path = tmp_path_factory.mktemp("smollm2")
    theirs.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokens():
    tokenizer = AutoTokenizer.from_pretrained(PATH.parent, gguf_file=PATH.name)
    return tokenizer(PROMPT, return_tensors="pt")["input_ids"]


@torch.no_grad()
@pytest.mark.parametrize("halves", [False, True], ids=["pairs", "halves"])
def test_logits_equal_those_of_transformers(halves, theirs, ours, folder, tokens):
    expected = theirs(tokens).logits
    allowed = 1e-5 * expected.norm()
    assert (ours(tokens) - expected).norm() < allowed
    loaded = hugging_face.load(folder, halves=halves)
    assert (loaded(tokens) - expected).norm() < allowed


def test_greedy_text_equals_that_of_transformers(theirs, ours, tokens):
    expected = theirs.generate(
        tokens, max_new_tokens=40, min_new_tokens=40, do_sample=False
    )
    assert torch.equal(ours.generate(tokens, 40), expected)


@torch.no_grad()
def test_both_loaders_give_the_same_bits(ours, folder, tmp_path, tokens):
    loaded = hugging_face.load(folder)
    weights = loaded.state_dict()
    expected = ours.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert torch.equal(loaded(tokens), ours(tokens))
    hugging_face.save(ours, tmp_path)
    saved = hugging_face.read_weights(tmp_path)
    original = hugging_face.read_weights(folder)
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[name], original[name]) for name in saved)
