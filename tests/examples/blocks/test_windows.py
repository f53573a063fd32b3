"""Windows, in all layers or in some."""

import pytest
import torch
from their_models import WINDOW_THEN_FULL, our_model, require_same_model, their_model
from windows import WindowAttention, widen


def test_equals_mistral():
    theirs = their_model("mistral", sliding_window=8)
    ours = our_model(attention=WindowAttention, window=8)
    require_same_model(ours, theirs)


def test_equals_ministral():
    theirs = their_model("ministral", 2, sliding_window=8, layer_types=WINDOW_THEN_FULL)
    ours = our_model(2, attention=WindowAttention, window=8)
    widen(ours, every=2)
    require_same_model(ours, theirs)


def test_every_second_layer_of_four_attends_to_all_tokens():
    model = our_model(4, attention=WindowAttention, window=8)
    widen(model, every=2)
    assert [block.attn.window for block in model.layers] == [8, None, 8, None]


def test_a_window_of_one_token_yields_its_value():
    attention = WindowAttention(64, 4, window=1)
    x = torch.randn(2, 9, 64)
    torch.testing.assert_close(attention(x), attention.output_proj(attention.v_proj(x)))


def test_a_window_counts_back_from_the_last_key():
    attention = WindowAttention(64, 4, window=3)
    q, k, v = attention.project(torch.randn(2, 9, 64), None)
    last = attention.attend(q[..., -2:, :], k, v, None)
    torch.testing.assert_close(last, attention.attend(q, k, v, None)[..., -2:, :])


def test_a_window_has_at_least_one_token():
    with pytest.raises(ValueError, match="window must be at least 1, or None, got 0"):
        WindowAttention(64, 4, window=0)


def test_a_padding_mask_without_the_axis_of_queries_raises():
    attention = WindowAttention(64, 4, window=3)
    x = torch.randn(9, 9, 64)  # as many sequences as tokens
    padding_mask = torch.ones(9, 9, dtype=torch.bool)
    with pytest.raises(ValueError, match="mask must be"):
        attention(x, mask=padding_mask)
