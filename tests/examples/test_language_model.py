"""Generation: what a cache yields equals what the full sequence yields."""

import contextlib
import math
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from language_model import Cache, CachedAttention, LanguageModel, choose, pad_left
from static_cache import StaticCache, compile_step
from torch.optim.swa_utils import AveragedModel
from windows import WindowAttention


class CachedWindow(CachedAttention, WindowAttention):
    pass


MODELS = {
    "shared key heads and q/k norm": {"num_kv_heads": 2, "qk_norm": True},
    "no positions": {"theta": None},
    "a window": {"attention": CachedWindow, "window": 4, "num_kv_heads": 2},
}
CACHES = {"growing": Cache, "static": lambda padding=None: StaticCache(25, padding)}
every_model = pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
every_cache = pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)


def build(num_layers=2, **options):
    options = {"max_seq_len": 30, "dtype": torch.float64, **options}
    return LanguageModel(37, num_layers, 32, 4, **options)


@every_model
@every_cache
@torch.no_grad()
def test_a_cache_yields_what_each_text_alone_yields(options, make):
    """After a prompt, single tokens, and several; without padding, and with it."""
    model = build(**options)
    prompts, padding = pad_left([[3, 1, 4, 1, 5], [9], [2, 6, 5]])
    texts = torch.cat((prompts, torch.randint(37, (3, 8))), dim=-1)
    for cache, starts in ((make(), [0, 0, 0]), (make(padding), padding)):
        for part in texts.split([5, 1, 1, 6], dim=-1):
            logits = model(part, cache)[:, 0]
            for row, start in enumerate(starts):
                alone = model(texts[row, start : cache.length])[-1]
                torch.testing.assert_close(logits[row], alone, rtol=0, atol=1e-10)


@every_cache
@torch.no_grad()
def test_a_text_may_have_any_batch_axes(make):
    model = build()
    for batch in ((), (2,), (2, 3)):
        tokens = torch.randint(37, (*batch, 6))
        cache = make()
        model(tokens[..., :5], cache)
        found = model(cache.unseen(tokens), cache)
        expected = model(tokens)[..., 5:, :]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@every_cache
def test_a_later_turn_continues_the_whole_text(make):
    model = build()
    prompts, padding = pad_left([[3, 1, 4, 1, 5], [9]])
    cache = make(padding)
    answered = model.generate(prompts, 4, cache=cache)
    text = torch.cat((answered, torch.randint(37, (2, 3))), dim=-1)
    expected = model.generate(text, 5, cache=make(padding))
    assert torch.equal(model.generate(text, 5, cache=cache), expected)
    for k, v in cache.layers:  # nothing is kept for a backward pass
        assert not k.requires_grad
        assert not v.requires_grad


OTHER_TEXTS = {
    "no new token": [[1, 2, 3]],
    "only the new tokens": [[7, 8, 9, 10]],
    "another start": [[0, 0, 0, 4]],
    "another batch": [[1, 2, 3, 4], [1, 2, 3, 4]],
}


@pytest.mark.parametrize("text", OTHER_TEXTS.values(), ids=OTHER_TEXTS)
def test_a_text_that_does_not_continue_the_cache_raises(text):
    cache = Cache()
    model = build()
    tokens = torch.tensor([[1, 2, 3]])
    model(tokens, cache)
    tokens.zero_()  # the cache does not change with the tokens of its caller
    with pytest.raises(ValueError, match="must be the whole text: the 3 tokens"):
        model.generate(torch.tensor(text), 1, cache=cache)


def test_a_static_cache_has_room_for_all_tokens_but_the_last_new_one():
    model = build()
    tokens = torch.randint(37, (2, 7))
    cache = StaticCache(11)
    text = model.generate(tokens, 5, cache=cache)
    assert torch.equal(text, model.generate(tokens, 5))
    with pytest.raises(ValueError, match=r"12, got StaticCache\(11\)"):
        model(text[:, -1:], cache)
    with pytest.raises(ValueError, match=r"11, got StaticCache\(10\)"):
        model.stream(tokens, 5, cache=StaticCache(10))  # before it yields a token


def test_generation_ends_at_the_last_position():
    """The last new token needs none, and padding needs none, either."""
    model = build(max_seq_len=5)
    tokens = torch.tensor([[0, 0, 1, 2, 3], [0, 0, 0, 4, 5]])
    padding = torch.tensor([2, 3])
    text = model.generate(tokens, 3, cache=Cache(padding))
    assert torch.equal(text[:1, 2:], model.generate(tokens[:1, 2:], 3))
    message = "5 positions, .* a prompt of 3 tokens and 4 new"
    with pytest.raises(ValueError, match=message):
        model.generate(tokens, 4, cache=Cache(padding))
    with pytest.raises(ValueError, match=message):
        model.generate(tokens[:1, 2:], 4)


WRONG: dict[str, dict[str, Any]] = {
    "new tokens must be at least 1, got 0": {"count": 0},
    "top_k must be at least 1": {"top_k": 0, "temperature": 1.0},
    "top_k must come with a temperature": {"top_k": 3},
    "temperature must be at least 0": {"temperature": -0.5},
    "temperature must be at least 0 and finite, got inf": {"temperature": math.inf},
    "temperature must be at least 0 and finite, got nan": {"temperature": math.nan},
    "prompt must have a token": {"tokens": torch.ones(1, 0, dtype=torch.long)},
    r"got tokens of shape \(0, 3\)": {"tokens": torch.ones(0, 3, dtype=torch.long)},
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_argument_of_generate_raises(message):
    options = {"tokens": torch.tensor([[1]]), "count": 3, **WRONG[message]}
    with pytest.raises(ValueError, match=message):
        build().generate(**options)


def test_an_empty_prompt_is_not_padded():
    for prompts, lengths in (([], r"\[\]"), ([[1, 2], []], r"\[2, 0\]")):
        with pytest.raises(ValueError, match=f"a token, got prompts of {lengths}"):
            pad_left(prompts)


@every_cache
def test_a_cache_belongs_to_one_model_whose_last_call_has_not_failed(make):
    cache = make()
    tokens = torch.randint(37, (1, 6))
    model = build()
    model(tokens, cache)
    with pytest.raises(ValueError, match="must belong to one model"):
        build()(tokens[:, :1], cache)

    def fail(*_):
        raise KeyboardInterrupt

    handle = model.transformer.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model(tokens[:, :1], cache)
    handle.remove()
    with pytest.raises(ValueError, match="last call has not failed"):
        model(tokens[:, :1], cache)


CONTEXTS: dict[str, Any] = {
    "none": contextlib.nullcontext,
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
}


@every_cache
def test_the_prompt_and_each_step_may_have_their_own_context(make):
    model = LanguageModel(37, 2, 32, 4, max_seq_len=30, num_kv_heads=2)
    tokens = torch.randint(37, (2, 9))
    expected = model(tokens)[:, -1]
    for of_prompt, of_step in product(CONTEXTS, repeat=2):
        cache = make()
        with CONTEXTS[of_prompt]():
            model(tokens[:, :7], cache)
        for step in (7, 8):
            with CONTEXTS[of_step]():
                found = model(tokens[:, step : step + 1], cache)[:, 0]
        error = (found - expected).norm() / expected.norm()
        allowed = 0.05 if "autocast" in (of_prompt, of_step) else 1e-5
        assert error < allowed, f"prompt under {of_prompt}, step under {of_step}"


class Counting(LanguageModel):
    def forward(self, tokens, cache=None):
        return torch.nn.functional.one_hot((tokens + 1) % 37, 37).double()


def test_stopped_rows_stay_stopped_and_generation_ends_with_the_last():
    model = Counting(37, 1, 8, 1, max_seq_len=30)
    texts = model.generate(torch.tensor([[3], [9], [6]]), 20, stop=10)
    assert texts[:, :4].tolist() == [[3, 4, 5, 6], [9, 10, 10, 10], [6, 7, 8, 9]]
    assert texts.shape == (3, 8)


@pytest.mark.parametrize(
    "temperature", [5e-324, 1e-30, 0.5, 2.0], ids="temperature {}".format
)
def test_tokens_are_drawn_in_proportion(temperature):
    """The last one is not among the 3 most likely."""
    logits = torch.tensor([[0.0, 2.0, 1.0, -9.0]])
    drawn = choose(logits.expand(20_000, -1), temperature, top_k=3)
    shares = drawn.bincount(minlength=4) / len(drawn)
    below = logits[0, :3].double() - 2
    expected = (below / temperature).softmax(-1).float()
    torch.testing.assert_close(shares[:3], expected, rtol=0, atol=0.02)
    assert shares[3] == 0


@pytest.mark.parametrize(("top_k", "drawn"), [(2, 2), (50, 5), (None, 5)])
def test_as_many_of_equal_logits_are_drawn_as_top_k_says(top_k, drawn):
    tokens = choose(torch.zeros(1, 5).expand(1000, -1), 1.0, top_k)
    assert tokens.shape == (1000,)
    assert len(tokens.unique()) == drawn


# --- A compiled step ----------------------------------------------------------------------

its_own_warning = pytest.mark.filterwarnings(
    "ignore:.*script_method:DeprecationWarning"  # of torch's own imports
)


@its_own_warning
def test_one_graph_runs_each_step_of_one_token(counting):
    model = build(num_layers=1, attention=CachedWindow, window=4, num_kv_heads=2)
    tokens = torch.randint(37, (2, 9))
    expected = model.generate(tokens, 9)
    compile_step(model, backend=counting)
    model.generate(tokens, 9)  # with a growing cache, whose shapes change
    assert counting.runs == 0
    model.generate(tokens[:, :1], 12, cache=StaticCache(20))
    assert (counting.graphs, counting.runs) == (1, 11)
    text = model.generate(tokens, 9, cache=StaticCache(20))
    assert (counting.graphs, counting.runs) == (1, 19)
    assert torch.equal(text, expected)
    cache = StaticCache(20)
    for turn in tokens.split((4, 5), dim=-1):  # a second prompt stays eager, too
        model(turn, cache)
    assert (counting.graphs, counting.runs) == (1, 19)


@its_own_warning
@torch.no_grad()
def test_each_compiled_model_and_its_copy_run_their_own_weights(counting):
    """By default, torch compiles the code of a class for 8 models at most; here for 1."""
    tokens = torch.randint(37, (1, 3))
    model = LanguageModel(37, 1, 8, 2, max_seq_len=9)
    compile_step(model, backend=counting, recompile_limit=1)
    copied: Any = AveragedModel(model).module  # a deep copy
    model.reset_parameters()
    for number, each in enumerate((model, copied), start=1):
        cache = StaticCache(9)
        each(tokens[:, :2], cache)
        found = each(tokens[:, 2:], cache)
        torch.testing.assert_close(found, each(tokens)[:, 2:])
        assert counting.runs == number


# --- Weights ------------------------------------------------------------------------------


def test_a_tied_model_has_one_matrix_for_embedding_and_head():
    model = build(tied=True, device="meta").to_empty(device="cpu")
    for module in model.modules():  # as FSDP2's documentation shows
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert "lm_head.weight" not in model.state_dict()
    untied = build()
    weights = dict(model.state_dict())
    weights["lm_head.weight"] = weights["token_embeddings.weight"]
    untied.load_state_dict(weights)
    tokens = torch.randint(37, (2, 5))
    assert torch.equal(model(tokens), untied(tokens))

    for each in (model, untied):
        each(tokens).square().mean().backward()
    both = untied.token_embeddings.weight.grad + untied.lm_head.weight.grad
    torch.testing.assert_close(model.token_embeddings.weight.grad, both)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_first_logits_are_as_small_as_the_head_makes_them(tied):
    """Hidden states have norm 8, the root of d_model; weights have variance 2 / 1064."""
    model = LanguageModel(1000, 1, 64, 4, max_seq_len=30, tied=tied)
    expected = 8 * math.sqrt(2 / 1064)
    for _ in range(2):
        found = model(torch.randint(1000, (8, 9))).std().item()
        assert found == pytest.approx(expected, rel=0.2)
        for weight in model.parameters():
            weight.data.fill_(math.nan)
        model.reset_parameters()
    scale = 1 if not tied else math.sqrt(2 / 1064)
    embedding = model.token_embeddings.weight / scale
    assert embedding.std().item() == pytest.approx(1, rel=0.05)
    assert 2.9 < embedding.max() <= 3.001
    assert 2.9 < -embedding.min() <= 3.001


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_adapters_of_all_layers_are_merged_into_their_own_weights(tied):
    peft = pytest.importorskip("peft", reason="requires the extra examples")
    model = build(tied=tied)
    tokens = torch.randint(37, (2, 9))
    config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    is_head_adapted = any("lm_head.lora_A" in name for name in adapted.state_dict())
    assert is_head_adapted != tied
    expected = adapted(tokens)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(tokens), expected)


def test_a_tied_embedding_takes_no_adapter():
    """The embedding would be adapted, and the head only after a merge."""
    peft = pytest.importorskip("peft", reason="requires the extra examples")
    config = peft.LoraConfig(target_modules=["token_embeddings"])
    adapted = peft.get_peft_model(build(tied=True), config)
    with pytest.raises(ValueError, match="do not adapt it in a tied model"):
        adapted(torch.tensor([[1]]))
