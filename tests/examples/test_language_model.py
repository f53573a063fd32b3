"""Generation: what a cache yields equals what the full sequence yields."""

from functools import partial

import pytest
import torch
from language_model import Cache, CachedAttention, LanguageModel, choose, pad_left
from static_cache import StaticCache, compile_step
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


def build(**options):
    options = {"max_seq_len": 30, "dtype": torch.float64, **options}
    return LanguageModel(37, 2, 32, 4, **options)


@every_model
@every_cache
@torch.no_grad()
def test_a_cache_yields_what_the_full_sequence_yields(options, make):
    model = build(**options)
    cache = make()
    tokens = torch.randint(37, (3, 19))
    expected = model(tokens)
    for part in tokens.split([7, 4, 1, 1, 6], dim=-1):
        logits = model(part, cache)[:, 0]
        last = expected[:, cache.length - 1]
        torch.testing.assert_close(logits, last, rtol=0, atol=1e-10)


@every_model
@every_cache
def test_padded_prompts_continue_like_each_prompt_alone(options, make):
    model = build(**options)
    prompts = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]
    tokens, padding = pad_left(prompts)
    together = model.generate(tokens, 9, cache=make(padding))
    for row, prompt, pads in zip(together, prompts, padding, strict=True):
        assert torch.equal(row[pads:], model.generate(torch.tensor([prompt]), 9)[0])


@every_cache
@pytest.mark.parametrize("is_autocast", [False, True])
def test_a_cache_takes_its_dtype_from_the_keys(make, is_autocast):
    model = build(dtype=torch.float32 if is_autocast else torch.bfloat16)
    cache = make()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        for part in torch.randint(37, (2, 9)).split(8, dim=-1):
            model(part, cache)
    assert {k.dtype for k, _ in cache.layers.values()} == {torch.bfloat16}


class Counting(LanguageModel):
    def forward(self, tokens, cache=None):
        return torch.nn.functional.one_hot((tokens + 1) % 37, 37).double()


def test_stopped_rows_stay_stopped_and_generation_ends_with_the_last():
    model = Counting(37, 1, 8, 1, max_seq_len=30)
    texts = model.generate(torch.tensor([[3], [9], [6]]), 20, stop=10)
    assert texts[:, :4].tolist() == [[3, 4, 5, 6], [9, 10, 10, 10], [6, 7, 8, 9]]
    assert texts.shape == (3, 8)


@pytest.mark.parametrize("temperature", [1e-30, 0.5, 2.0])
def test_tokens_are_drawn_in_proportion(temperature):
    logits = torch.tensor([[2.0, 1.0, 0.0, -9.0]])
    drawn = choose(logits.expand(20_000, -1), temperature, top_k=3)
    shares = drawn.bincount(minlength=4) / len(drawn)
    expected = (logits[0, :3].double() / temperature).softmax(-1).float()
    torch.testing.assert_close(shares[:3], expected, rtol=0, atol=0.02)
    assert shares[3] == 0


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's own
def test_the_step_of_one_token_compiles_once(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = build(attention=CachedWindow, window=4, num_kv_heads=2)
    tokens = torch.randint(37, (2, 9))
    expected = model.generate(tokens, 9)
    compile_step(model)
    with torch._dynamo.config.patch(error_on_recompile=True):
        model.generate(tokens[:, :1], 12, cache=StaticCache(20))
        text = model.generate(tokens, 9, cache=StaticCache(20))
    assert torch.equal(text, expected)


def test_tied_weights_are_one_parameter_after_any_reset():
    model = build(tied=True, device="meta").to_empty(device="cpu")
    model.reset_parameters()
    assert model.lm_head.weight is model.token_embeddings.weight
