"""Models whose blocks need no file of blocks/."""

import pytest
from their_models import our_model, require_same_model, their_model

hugging_face = pytest.importorskip("hugging_face", reason="requires the extra examples")


def test_equals_llama():
    require_same_model(our_model(), their_model("llama"))


def test_equals_qwen2():
    theirs = their_model("qwen2")
    require_same_model(our_model(attention=hugging_face.AttentionWithBiases), theirs)


def test_equals_qwen3():
    theirs = their_model("qwen3")
    require_same_model(our_model(qk_norm=True), theirs)
