"""The static cache of the examples yields the tokens of the growing one, from one compiled graph."""

import pytest
import static_cache
import torch
from language_model import Cache, LanguageModel
from static_cache import StaticLanguageModel


def build(**options):
    options = {"max_seq_len": 30, "num_kv_heads": 2, "dtype": torch.float64, **options}
    return LanguageModel(37, 1, 32, 4, **options)


@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"theta": None}])
@pytest.mark.parametrize("padding", [None, torch.tensor([0, 4, 2])])
@torch.no_grad()
def test_static_cache_equals_the_growing_cache(options, padding):
    growing = build(**options)
    static = StaticLanguageModel(growing, size=21, compile=False)
    prompt = torch.randint(37, (3, 9))
    text = growing.generate(prompt, 12, padding=padding)
    assert torch.equal(static.generate(prompt, 12, padding=padding), text)
    caches = Cache(padding), static.new_cache(prompt, 12, padding)
    for new in (prompt, *text[:, 9:].split(1, dim=-1)):
        expected = growing.next_logits(new, caches[0])
        logits = static.next_logits(new, caches[1])
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


def test_static_cache_generates_from_one_token_until_it_is_full():
    growing = build()
    static = StaticLanguageModel(growing, size=21, compile=False)
    token = torch.tensor([[5]])
    assert torch.equal(static.generate(token, 20), growing.generate(token, 20))


@pytest.mark.parametrize("assign", [False, True])
def test_tied_static_model_loads_a_state_dict_without_a_head(assign):
    static = StaticLanguageModel(build(tied=True), compile=False)
    source = build(tied=True)
    state = source.state_dict()
    del state["lm_head.weight"]
    static.load_state_dict(state, assign=assign)
    assert static.lm_head.weight is static.token_embeddings.weight
    tokens = torch.randint(37, (1, 5))
    assert torch.equal(static(tokens), source(tokens))


def test_static_cache_rejects_a_text_that_exceeds_it():
    static = StaticLanguageModel(build(), size=8, compile=False)
    with pytest.raises(ValueError, match=r"cache of size=8, got 5 \+ 4: pass size=9"):
        static.stream(torch.randint(37, (1, 5)), 4)


@pytest.mark.parametrize("size", [0, 31])
def test_static_cache_rejects_a_size_that_no_text_needs(size):
    with pytest.raises(ValueError, match=f"size must be 1 ... 30 .* got {size}"):
        StaticLanguageModel(build(), size=size)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_example_compiles_one_graph(capsys):
    static_cache.main()
    printed = capsys.readouterr().out
    assert printed.count("equal to the growing cache: True") == 3
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
