"""Generation: what a cache yields equals what each whole text alone yields."""

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
CACHES = {"growing": Cache, "static": partial(StaticCache, 16)}
every_cache = pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)


def build(num_layers=2, **options):
    options = {"max_seq_len": 30, "dtype": torch.float64, **options}
    return LanguageModel(37, num_layers, 32, 4, **options)


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
@every_cache
@torch.no_grad()
def test_a_cache_yields_the_logits_of_each_text_alone(options, make):
    """After a prompt, single tokens, and several; in any batch, and after padding."""
    model = build(**options)
    for batch, starts in (((), [0]), ((3,), [0, 4, 2]), ((2, 2), [0, 0, 0, 0])):
        texts = torch.randint(37, (*batch, 13))
        cache = make(padding=torch.tensor(starts)) if any(starts) else make()
        for end in (5, 6, 7, 13):
            unseen = cache.unseen(texts[..., :end])
            logits = model(unseen, cache).view(len(starts), 37)
            for row, start in enumerate(starts):
                alone = texts.view(-1, 13)[row, start:end]
                expected = model(alone)[-1]
                torch.testing.assert_close(logits[row], expected, rtol=0, atol=1e-10)


@every_cache
def test_two_turns_continue_a_text_by_the_likeliest_tokens(make):
    """They end at the last position, and fill the room. Padding needs no position."""
    model = build(max_seq_len=14)
    texts = torch.randint(37, (2, 5))
    padding = torch.tensor([2, 2])
    cache = make(padding=padding)
    for question, count in ((0, 4), (3, 5)):
        texts = torch.cat((texts, torch.randint(37, (2, question))), dim=-1)
        expected = texts
        for _ in range(count):
            likeliest = model(expected[:, 2:])[:, -1:].argmax(-1)
            expected = torch.cat((expected, likeliest), dim=-1)
        texts = model.generate(texts, count, cache=cache)
        assert torch.equal(texts, expected)
    for k, v in cache.layers:  # nothing is kept for a backward pass
        assert not k.requires_grad
        assert not v.requires_grad
    message = "14 positions, .* a prompt of 15 tokens and 1 new"
    with pytest.raises(ValueError, match=message):
        model.generate(texts, 1, cache=Cache(padding))
    with pytest.raises(ValueError, match=message):
        model.generate(texts[:, 2:], 1)


OTHER_TEXT = "must be the whole text: the 3 tokens"
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("new tokens must be at least 1, got 0", {"count": 0}),
    ("top_k must be at least 1", {"top_k": 0, "temperature": 1.0}),
    ("top_k must come with a temperature", {"top_k": 3}),
    ("temperature must be at least 0", {"temperature": -0.5}),
    ("must be at least 0 and finite", {"temperature": math.inf}),
    ("prompt must have a token", {"tokens": torch.ones(1, 0, dtype=torch.long)}),
    (r"new one, 6, got StaticCache\(5\)", {"cache": StaticCache(5)}),
    (OTHER_TEXT, {"tokens": torch.tensor([[1, 2, 3]])}),  # with no new token
    (OTHER_TEXT, {"tokens": torch.tensor([[0, 0, 0, 4]])}),
    (OTHER_TEXT, {"tokens": torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4]])}),
]


@pytest.mark.parametrize(("message", "options"), WRONG)
def test_generate_rejects_a_wrong_argument_and_another_text_than_the_cache_has(
    message, options
):
    model = build()
    tokens = torch.tensor([[1, 2, 3]])
    cache = Cache()
    model(tokens, cache)
    tokens.zero_()  # the cache does not change with the tokens of its caller
    right = {"tokens": torch.tensor([[1, 2, 3, 4]]), "count": 3, "cache": cache}
    with pytest.raises(ValueError, match=message):
        model.generate(**{**right, **options})


def test_an_empty_prompt_is_not_padded():
    with pytest.raises(ValueError, match=r"a token, got prompts of \[2, 0\]"):
        pad_left([[1, 2], []])


@every_cache
def test_a_cache_belongs_to_one_model_whose_last_call_has_not_failed(make):
    cache = make()
    token = torch.tensor([[1]])
    model = build()
    model(token, cache)
    with pytest.raises(ValueError, match="must belong to one model"):
        build()(token, cache)

    def fail(*_):
        raise KeyboardInterrupt

    model.transformer.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model(token, cache)
    with pytest.raises(ValueError, match="last call has not failed"):
        model(token, cache)


@every_cache
def test_the_prompt_and_each_step_may_have_their_own_context(make):
    model = build(dtype=torch.float32)
    tokens = torch.randint(37, (2, 9))
    expected = model(tokens)[:, -1]
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    contexts: Any = (torch.enable_grad, torch.inference_mode, autocast)
    for of_prompt, of_step in product(contexts, repeat=2):
        cache = make()
        with of_prompt():
            model(tokens[:, :7], cache)
        for token in (tokens[:, 7:8], tokens[:, 8:]):
            with of_step():
                found = model(token, cache)[:, 0]
        assert (found - expected).norm() < 0.05 * expected.norm()


class Counting(LanguageModel):
    def forward(self, tokens, cache=None):
        return torch.nn.functional.one_hot((tokens + 1) % 37, 37).double()


def test_stopped_rows_stay_stopped_and_generation_ends_with_the_last():
    model = Counting(37, 1, 8, 1, max_seq_len=30)
    texts = model.generate(torch.tensor([[8], [9], [6]]), 20, stop=10)
    assert texts.tolist() == [[8, 9, 10, 10, 10], [9, 10, 10, 10, 10], [6, 7, 8, 9, 10]]


@pytest.mark.parametrize("temperature", [5e-324, 0.5, 2.0], ids=str)
@pytest.mark.parametrize("top_k", [None, 50, 3], ids="top_k {}".format)
def test_tokens_are_drawn_in_proportion(temperature, top_k):
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    drawn = choose(logits.expand(20_000, -1), temperature, top_k)
    below = logits[0].double() - 2
    if top_k == 3:
        below[3] = -math.inf
    expected = 20_000 * (below / temperature).softmax(-1)
    found = drawn.bincount(minlength=4).double()
    torch.testing.assert_close(found, expected, rtol=0, atol=400)


def test_of_equal_logits_only_top_k_are_drawn():
    tokens = choose(torch.zeros(1000, 5), 1.0, top_k=2)
    assert len(tokens.unique()) == 2


# --- A compiled step ----------------------------------------------------------------------

its_own_warning = pytest.mark.filterwarnings(
    "ignore:.*script_method:DeprecationWarning"  # of torch's own imports
)


@its_own_warning
def test_one_graph_runs_each_step_of_one_token(counting):
    """Growing caches, and prompts, also of a second turn, stay eager."""
    model = build(num_layers=1, attention=CachedWindow, window=4, num_kv_heads=2)
    tokens = torch.randint(37, (2, 9))
    expected = model.generate(tokens, 9)
    compile_step(model, backend=counting)
    model.generate(tokens, 9)
    assert counting.runs == 0
    assert torch.equal(model.generate(tokens, 9, cache=StaticCache(20)), expected)
    model.generate(tokens[:, :1], 12, cache=StaticCache(20))
    cache = StaticCache(20)
    for turn in tokens.split((4, 5), dim=-1):
        model(turn, cache)
    assert (counting.graphs, counting.runs) == (1, 8 + 11)


@its_own_warning
@torch.no_grad()
def test_each_compiled_model_and_its_copy_run_their_own_weights(counting):
    """By default, torch compiles the code of a class for 8 models at most; here for 1."""
    tokens = torch.randint(37, (1, 3))
    model, deeper = build(num_layers=1), build()
    for each in (model, deeper):
        compile_step(each, backend=counting, recompile_limit=1)
    copied: Any = AveragedModel(model).module  # a deep copy
    for weight in model.parameters():
        weight.data.normal_(std=0.1)
    for number, each in enumerate((model, copied, deeper), start=1):
        cache = StaticCache(9)
        each(tokens[:, :2], cache)
        found = each(tokens[:, 2:], cache)
        torch.testing.assert_close(found, each(tokens)[:, 2:])
        assert counting.runs == number


# --- Weights ------------------------------------------------------------------------------


def test_a_tied_model_is_one_whose_embedding_and_head_are_equal():
    tied = build(tied=True)
    untied = build()
    matrix = tied.token_embeddings.weight
    untied.load_state_dict({**tied.state_dict(), "lm_head.weight": matrix})
    tokens = torch.randint(37, (2, 5))
    assert torch.equal(tied(tokens), untied(tokens))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_each_weight_is_drawn_again_and_a_tied_embedding_is_as_small_as_a_head(tied):
    """By a walk over its modules, as FSDP2's documentation shows."""
    model: Any = LanguageModel(1000, 1, 64, 4, max_seq_len=30, tied=tied, device="meta")
    model.to_empty(device="cpu")
    for weight in model.parameters():
        weight.data.fill_(math.nan)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for name, weight in model.named_parameters():
        assert weight.isfinite().all(), name
    sigma = math.sqrt(2 / 1064) if tied else 1.0
    embedding = model.token_embeddings.weight / sigma
    assert embedding.std().item() == pytest.approx(0.987, rel=0.01)  # cut at 3
    assert 2.9 < embedding.max() <= 3.001
    assert 2.9 < -embedding.min() <= 3.001


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_adapters_are_merged_into_all_layers_but_a_tied_embedding_takes_none(tied):
    """It would be adapted, and the head only after a merge."""
    peft = pytest.importorskip("peft", reason="requires the extra examples")
    tokens = torch.randint(37, (2, 9))
    config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    adapted: Any = peft.get_peft_model(build(tied=tied), config)
    is_head_adapted = any("lm_head.lora_A" in name for name in adapted.state_dict())
    assert is_head_adapted != tied
    expected = adapted(tokens)
    torch.testing.assert_close(adapted.merge_and_unload()(tokens), expected)
    if tied:
        config = peft.LoraConfig(target_modules=["token_embeddings"])
        adapted = peft.get_peft_model(build(tied=tied), config)
        with pytest.raises(ValueError, match="do not adapt it in a tied model"):
            adapted(tokens)
