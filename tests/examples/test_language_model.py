"""The language model of the examples: what it generates equals what the full sequence yields."""

import copy
import math
import re
from typing import Any

import language_model
import pytest
import torch
from language_model import Cache, CachedAttention, LanguageModel, pad_left

from tinyblock import Transformer


def add_positions(x, token_positions):
    """Depends on absolute positions, which rotations do not."""
    if token_positions is None:
        token_positions = torch.arange(x.shape[-2])
    return x + token_positions.sin()[..., None]


MODELS = {
    "plain": {},
    "shared key heads and q/k norm": {"num_kv_heads": 2, "qk_norm": True},
    "one key head and another head size": {"num_kv_heads": 1, "d_head": 6},
    "no positions": {"theta": None},
    "absolute positions": {"rope": add_positions},
    "tied": {"tied": True},
}
every_model = pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)


def build(**options):
    return LanguageModel(
        37, 2, 32, 4, max_seq_len=30, **{"dtype": torch.float64, **options}
    )


def prompts(*shape):
    return torch.randint(37, shape)


@every_model
@torch.no_grad()
def test_generate_equals_the_full_sequence(options):
    model = build(**options)
    text = model.generate(prompts(3, 7), 12)
    full = model(text)
    assert torch.equal(full[:, 6:-1].argmax(-1), text[:, 7:])
    cache = Cache()
    logits = [model.next_logits(text[:, :7], cache)]
    for position in range(7, 19):
        logits.append(model.next_logits(text[:, position : position + 1], cache))
    torch.testing.assert_close(
        torch.stack(logits, dim=1), full[:, 6:], rtol=0, atol=1e-10
    )


@every_model
@torch.no_grad()
def test_padded_prompts_equal_each_prompt_alone(options):
    model = build(**options)
    each = [torch.tensor(prompt) for prompt in ([3, 1, 4, 1, 5], [9], [2, 6, 5])]
    tokens, padding = pad_left(each)
    assert tokens.tolist() == [[3, 1, 4, 1, 5], [0, 0, 0, 0, 9], [0, 0, 2, 6, 5]]
    assert padding.tolist() == [0, 4, 2]
    together = model.generate(tokens, 9, padding=padding)
    for row, prompt, pads in zip(together, each, padding, strict=True):
        alone = model.generate(prompt[None], 9)
        assert torch.equal(row[pads:], alone[0])
    cache = Cache(padding)
    alone = Cache()
    for new, new_alone in ((tokens, tokens[2:, 2:]), (tokens[:, :1], tokens[2:, :1])):
        logits = model.next_logits(new, cache)[2:]
        expected = model.next_logits(new_alone, alone)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


def test_generate_in_bfloat16_follows_float64():
    exact = build(num_kv_heads=2)
    rounded = copy.deepcopy(exact).bfloat16()
    tokens = prompts(2, 9)
    cache = Cache(torch.tensor([0, 3]))
    with torch.no_grad():
        rounded.next_logits(tokens[:, :8], cache)
        logits = rounded.next_logits(tokens[:, 8:], cache)
        expected = [exact(tokens[:1])[0, -1], exact(tokens[1:, 3:])[0, -1]]
    error = (logits.double() - torch.stack(expected)).norm() / torch.stack(
        expected
    ).norm()
    assert (
        error < 8 * torch.finfo(torch.bfloat16).eps
    )  # a dozen roundings in two layers


def test_generate_computes_each_token_once_and_the_head_the_last_only():
    model = build()
    seen = {"transformer": [], "head": [], "gradients": []}
    model.transformer.register_forward_pre_hook(
        lambda _, args: seen["transformer"].append(args[0].shape[-2])
    )
    model.lm_head.register_forward_pre_hook(
        lambda _, args: seen["head"].append(tuple(args[0].shape))
    )
    model.lm_head.register_forward_hook(
        lambda _, args, logits: seen["gradients"].append(logits.requires_grad)
    )
    model.generate(prompts(2, 9), 4)
    gradients = seen.pop("gradients")
    assert gradients == [False] * 4
    assert seen == {"transformer": [9, 1, 1, 1], "head": [(2, 32)] * 4}


def test_stream_yields_the_tokens_of_generate_and_leaves_nothing_in_the_model():
    model = build()
    tokens = prompts(2, 5)
    expected = model.generate(tokens, 6)[:, 5:]
    logits = model(tokens)
    other = (tokens + 1) % 37
    expected_other = model.generate(other, 6)[:, 5:]
    pairs = zip(model.stream(tokens, 6), model.stream(other, 6), strict=True)
    for step, (token, other_token) in enumerate(pairs):
        assert torch.equal(token, expected[:, step])
        assert torch.equal(other_token, expected_other[:, step])
        assert torch.equal(model(tokens), logits)


def test_interrupted_generation_leaves_no_cache():
    model = build()
    tokens = prompts(2, 5)
    logits = model(tokens)
    text = model.generate(tokens, 6)
    calls = []

    def interrupt(*_):
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt

    handle = model.transformer.layers[1].ffn.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.generate(tokens, 6)
    handle.remove()
    assert torch.equal(model(tokens), logits)
    assert torch.equal(model.generate(tokens, 6), text)


def test_generate_fills_max_seq_len_and_rejects_more_before_it_starts():
    model = build()
    assert model.generate(prompts(1, 10), 20).shape == (1, 30)
    model.token_embeddings.register_forward_pre_hook(
        lambda *_: pytest.fail("the model was called")
    )
    with pytest.raises(
        ValueError, match=r"max_seq_len=30, got 10 \+ 21: .* at most 20 tokens$"
    ):
        model.stream(prompts(1, 10), 21)


class Counting(LanguageModel):
    """After the token n comes n + 1."""

    def next_logits(self, tokens, cache):
        following = (tokens[:, -1] + 1) % 37
        return torch.nn.functional.one_hot(following, 37).double()


def test_stopped_rows_stay_stopped_and_generation_ends_with_the_last():
    model = Counting(37, 1, 8, 1, max_seq_len=30)
    tokens = torch.tensor([[3], [9], [6]])
    assert model.generate(tokens, 5, stop=8).tolist() == [
        [3, 4, 5, 6, 7, 8],
        [9, 10, 11, 12, 13, 14],
        [6, 7, 8, 8, 8, 8],
    ]
    assert model.generate(tokens, 20, stop=10).tolist() == [
        [3, 4, 5, 6, 7, 8, 9, 10],
        [9, 10, 10, 10, 10, 10, 10, 10],
        [6, 7, 8, 9, 10, 10, 10, 10],
    ]


REJECTED = {
    "negative temperature": ({"temperature": -0.5}, "temperature must .* got -0.5"),
    "NaN": ({"temperature": math.nan}, "temperature must .* got nan"),
    "infinite temperature": ({"temperature": math.inf}, "temperature must .* got inf"),
    "top_k of 0": ({"top_k": 0}, "top_k must be at least 1, .* got 0"),
    "no new token": ({"count": 0}, "count must be at least 1, got 0"),
    "one axis": ({"tokens": prompts(5)}, r"\(batch, seq\), .* got \(5,\)"),
    "token of another vocabulary": (
        {"tokens": torch.tensor([[3, 37]])},
        "tokens must be 0 ... 36, got 3 ... 37",
    ),
    "negative token": ({"tokens": torch.tensor([[-1, 3]])}, "got -1 ... 3"),
    "empty prompt": ({"tokens": prompts(2, 0)}, r"got \(2, 0\)"),
    "padding of another batch": (
        {"padding": torch.tensor([0])},
        r"padding must have shape \(2,\), .* got \(1,\)",
    ),
    "all padding": (
        {"padding": torch.tensor([0, 5])},
        r"padding must be 0 ... 4, .* got \[0, 5\]",
    ),
    "negative padding": ({"padding": torch.tensor([0, -1])}, r"got \[0, -1\]"),
}


@pytest.mark.parametrize(("arguments", "message"), REJECTED.values(), ids=REJECTED)
def test_generate_rejects(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        build().generate(**{"tokens": prompts(2, 5), "count": 3, **arguments})
    assert "\n" not in str(error.value)


def test_generate_rejects_attention_without_a_cache():
    from tinyblock import CausalMultiHeadSelfAttention

    model = build(attention=CausalMultiHeadSelfAttention)
    with pytest.raises(ValueError, match="got CausalMultiHeadSelfAttention"):
        model.generate(prompts(1, 5), 3)


def test_cached_attention_outside_of_a_language_model_requires_the_number_of_its_layer():
    model = Transformer(2, 32, 4, max_seq_len=30, attention=CachedAttention)
    x = torch.randn(1, 5, 32)
    assert model(x).shape == x.shape
    with pytest.raises(ValueError, match=r"index must be .* got None: "):
        model(x, mask=Cache())
    layers: Any = model.layers
    for index, block in enumerate(layers):
        block.attn.index = index
    torch.testing.assert_close(model(x, mask=Cache()), model(x))


def test_cache_rejects_a_second_prompt():
    model = build()
    cache = Cache()
    model.next_logits(prompts(1, 5), cache)
    with pytest.raises(ValueError, match="got 2 tokens after 5"):
        model.next_logits(prompts(1, 2), cache)
    assert cache.length == 5


@pytest.mark.parametrize("each", [[], [[1], []]])
def test_pad_left_rejects_empty_prompts(each):
    with pytest.raises(ValueError, match="at least one token"):
        pad_left(each)


@pytest.mark.parametrize("top_k", [None, 1, 4, 100])
def test_drawn_tokens_have_the_probabilities_of_the_softmax(top_k):
    model = build()
    prompt = prompts(1, 5)
    with torch.no_grad():
        logits = model(prompt)[0, -1] / 0.7
    likeliest = logits.argsort(descending=True)[:top_k]
    expected = torch.zeros(37, dtype=torch.float64)
    expected[likeliest] = logits[likeliest].exp() / logits[likeliest].exp().sum()
    drawn = model.generate(prompt.expand(4000, 5), 1, temperature=0.7, top_k=top_k)
    frequencies = torch.bincount(drawn[:, 5], minlength=37) / 4000
    # Four standard errors, for each of 37 tokens.
    tolerance = 4 * (expected * (1 - expected) / 4000).sqrt()
    assert ((frequencies - expected).abs() <= tolerance + 1e-3).all()


def test_drawn_texts_repeat_with_the_seed_and_a_tiny_temperature_is_greedy():
    model = build()
    tokens = prompts(2, 5)
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(model.generate(tokens, 20, temperature=2.0))
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])
    with torch.no_grad():
        model.lm_head.weight *= 1000  # so that a logit over the temperature overflows
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        greedy = model.generate(tokens, 20)
        assert torch.equal(model.generate(tokens, 20, temperature=5e-324), greedy)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_load_into_a_model_on_meta(tied):
    source = build(tied=tied)
    tokens = prompts(2, 5)
    model = build(tied=tied, device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    model.load_state_dict(copy.deepcopy(source.state_dict()), assign=True)
    assert torch.equal(model(tokens), source(tokens))
    assert (model.lm_head.weight is model.token_embeddings.weight) == tied
    assert model.lm_head.weight is not source.lm_head.weight


@pytest.mark.parametrize("assign", [False, True])
def test_tied_model_loads_without_a_head_and_an_untied_one_does_not(assign):
    source = build(tied=True)
    tokens = prompts(2, 5)
    state = source.state_dict()
    del state["lm_head.weight"]
    model = build(tied=True)
    model.load_state_dict(state, assign=assign)
    assert torch.equal(model(tokens), source(tokens))
    assert "lm_head.weight" not in state
    with pytest.raises(RuntimeError, match=r"Missing key.*lm_head\.weight"):
        build().load_state_dict(state, assign=assign)


def test_tied_model_stays_tied_and_rejects_another_head():
    model = build(tied=True)
    model.load_state_dict(build(tied=True).state_dict())
    assert copy.deepcopy(model).lm_head.weight is not model.lm_head.weight
    for tied in (model, copy.deepcopy(model)):
        assert tied.lm_head.weight is tied.token_embeddings.weight
    materialized = build(tied=True, device="meta").to_empty(device="cpu")
    materialized.reset_parameters()
    assert materialized.lm_head.weight is materialized.token_embeddings.weight
    assert materialized(prompts(1, 3)).isfinite().all()
    with pytest.raises(ValueError, match="tied=False"):
        model.load_state_dict(build().state_dict())


def test_example_counts_and_compares(capsys):
    language_model.main()
    printed = capsys.readouterr().out
    assert re.match(r"loss after 60 steps of training: 0\.\d+\n", printed)
    assert "counted: 45 46 47 48 49 0 1 2" in printed
    assert "counted: 20 21 22" in printed
    assert "equal texts: True" in printed
