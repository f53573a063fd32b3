"""The recipes of docs/recipes.md, run as they stand."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

RECIPES = dict(
    re.findall(
        r"^## (.*?)\n.*?^```python\n(.*?)^```",
        (Path(__file__).parents[1] / "docs" / "recipes.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
)


pytestmark = [
    pytest.mark.filterwarnings(
        "default::DeprecationWarning", "default::FutureWarning"
    ),  # of transformers' imports
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]


def run(recipe):
    names = {}
    exec(RECIPES[recipe], names)
    return names


def sequence(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_recipe_of_generation_equals_the_full_sequence():
    model, tokens = (
        (made := run("Generation with cached keys and values"))["model"].double(),
        made["tokens"],
    )
    full = model(tokens)
    model.clear_cache()
    steps = [model(tokens[:, :8], torch.arange(8))]  # the prompt, then token by token
    steps += [
        model(tokens[:, i : i + 1], torch.tensor([i]))
        for i in range(8, tokens.shape[1])
    ]
    torch.testing.assert_close(torch.cat(steps, dim=1), full, rtol=0, atol=1e-10)
    prompt = tokens[:, :8]
    assert torch.equal(model.generate(prompt, 20), tokens)
    drawn = model.generate(prompt[:1].expand(2000, 8), 1, temperature=0.5)[:, 8]
    frequencies = torch.nn.functional.one_hot(drawn, 99).double().mean(0)
    probabilities = (full[0, 7] / 0.5).softmax(-1)
    assert (
        frequencies - probabilities
    ).abs().max() < 0.05  # over four standard errors of 2,000 draws


@pytest.mark.parametrize(
    "kind", ["Llama", "Llama with shared key heads", "Qwen2", "Qwen3"]
)
def test_recipe_of_hugging_face_gives_its_logits_and_its_weights_back(kind):
    transformers = pytest.importorskip("transformers")
    made = run("Llama and Qwen weights from Hugging Face, and back")
    of_qwen = {
        "Qwen2": {"attention": made["AttentionWithBiases"]},
        "Qwen3": {"qk_norm": True},
    }
    name, options = kind.split()[0], of_qwen.get(kind, {})
    head = {} if kind == "Qwen2" else {"head_dim": 24 if kind == "Qwen3" else 16}
    config = getattr(transformers, f"{name}Config")(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4 if kind == "Llama" else 2,
        **head,
        initializer_range=0.15,  # logits of about 1
    )
    theirs = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for gains in theirs.parameters():
        if gains.ndim == 1:
            nn.init.uniform_(gains, 0.5, 1.5)
    ours = made["LanguageModel"](config, **options)
    d_head = head.get("head_dim", 16)
    ours.load_state_dict(made["from_hugging_face"](theirs.state_dict(), d_head))
    tokens = torch.randint(0, 99, (2, 17))
    expected = theirs(tokens).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=2e-5)
    back = made["to_hugging_face"](ours.state_dict(), d_head)
    assert back.keys() == theirs.state_dict().keys()
    assert all(
        torch.equal(back[key], weight) for key, weight in theirs.state_dict().items()
    )
