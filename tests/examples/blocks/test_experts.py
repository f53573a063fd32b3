"""Mixtures of experts."""

from functools import partial

import pytest
import torch
from experts import MixtureOfExperts, Router
from joint_qk_norm import JointNormAttention
from no_positions import NoPositions
from partial_rope import PartialRope
from their_models import (
    EXPERTS,
    HALF_ROTATES,
    JOINT_NORM_NAMES,
    TWO_ROPES,
    WINDOW_THEN_FULL,
    Halves,
    our_model,
    require_same_model,
    split_experts,
    their_model,
)
from windows import WindowAttention, widen

SOFTMAX = partial(MixtureOfExperts, top_k=3, is_softmax=True, has_shared_expert=False)


def test_equals_qwen3_moe():
    theirs = their_model("qwen3_moe", **EXPERTS)
    ours = our_model(qk_norm=True, ffn=SOFTMAX)
    require_same_model(ours, theirs, convert=split_experts)


def test_equals_mixtral():
    theirs = their_model("mixtral", sliding_window=None, **EXPERTS)
    require_same_model(our_model(ffn=SOFTMAX), theirs, convert=split_experts)


def test_equals_minimax_m2():
    theirs = their_model("minimax_m2", rope_parameters=HALF_ROTATES, **EXPERTS)
    ours = our_model(
        attention=JointNormAttention,
        rope=PartialRope(Halves(1e4, 8, 128)),
        ffn=partial(MixtureOfExperts, top_k=3, has_shared_expert=False),
    )
    require_same_model(ours, theirs, JOINT_NORM_NAMES, split_experts)


def test_equals_hy_v3():
    theirs = their_model(
        "hy_v3",
        mlp_layer_types=["sparse"],
        num_shared_experts=1,
        router_scaling_factor=2.5,
        **EXPERTS,
    )
    ours = our_model(qk_norm=True, ffn=partial(MixtureOfExperts, top_k=3, scale=2.5))
    require_same_model(ours, theirs, convert=split_experts)


def test_equals_glm4_moe():
    theirs = their_model(
        "glm4_moe",
        use_qk_norm=True,
        rope_parameters=HALF_ROTATES,
        first_k_dense_replace=0,
        n_shared_experts=1,
        routed_scaling_factor=2.5,
        **EXPERTS,
    )
    ours = our_model(
        qk_norm=True,
        rope=PartialRope(Halves(1e4, 8, 128)),
        ffn=partial(MixtureOfExperts, top_k=3, scale=2.5),
    )
    require_same_model(ours, theirs, convert=split_experts)


def test_equals_mellum():
    theirs = their_model(
        "mellum",
        2,
        sliding_window=8,
        layer_types=WINDOW_THEN_FULL,
        mlp_layer_types=["sparse"] * 2,
        rope_parameters=TWO_ROPES,
        **EXPERTS,
    )
    ours = our_model(2, attention=WindowAttention, window=8, qk_norm=True, ffn=SOFTMAX)
    widen(ours, every=2, rope=Halves(1e6, 16, 128))
    require_same_model(ours, theirs, convert=split_experts)


def test_equals_exaone_moe():
    theirs = their_model(
        "exaone_moe",
        2,
        sliding_window=8,
        layer_types=WINDOW_THEN_FULL,
        mlp_layer_types=["sparse"] * 2,
        num_shared_experts=1,
        routed_scaling_factor=2.5,
        **EXPERTS,
    )
    ours = our_model(
        2,
        attention=WindowAttention,
        window=8,
        qk_norm=True,
        ffn=partial(MixtureOfExperts, top_k=3, scale=2.5),
    )
    widen(ours, every=2, rope=NoPositions())
    require_same_model(ours, theirs, convert=split_experts)


LOGITS: dict[str, tuple[bool, list[float]]] = {
    "sigmoid": (False, [0.5, -2.0, 1.0, 0.0]),
    "sigmoid, all but 0 in float32": (False, [-94.5, -97.0, -94.0, -95.0]),
    "sigmoid, 0 in float32": (False, [-299.5, -302.0, -299.0, -300.0]),
    "sigmoid, 1 in float32": (False, [20.5, 18.0, 21.0, 20.0]),
    "softmax": (True, [0.5, -2.0, 1.0, 0.0]),
    "softmax, 0 in float32 but for one": (True, [-112.0, -110.0, 0.0, -111.0]),
}


@pytest.mark.parametrize(("is_softmax", "logits"), LOGITS.values(), ids=LOGITS)
def test_choice_and_weights_are_exact_even_where_scores_are_equal_in_float32(
    is_softmax, logits
):
    router = Router(1, num_experts=4, top_k=3, is_softmax=is_softmax)
    router.weight.data = torch.tensor(logits)[:, None]
    weights, chosen = router(torch.ones(1, 1))
    exact = torch.tensor(logits, dtype=torch.float64)
    scores = exact.softmax(0) if is_softmax else exact.sigmoid()
    best = scores.topk(3).indices
    assert chosen[0].tolist() == best.tolist()
    expected = (scores[best] / scores[best].sum()).float()
    torch.testing.assert_close(weights[0], expected, rtol=1e-5, atol=0)


def test_gradients_are_finite_where_scores_underflow():
    layer = MixtureOfExperts(8, 16, num_experts=4)
    layer.router.weight.data = layer.router.weight.abs() * -1e4
    x = torch.rand(5, 8, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.isfinite().all()
    assert layer.router.weight.grad.isfinite().all()


def test_the_bias_selects_experts_but_does_not_change_weights():
    router = Router(1, num_experts=3, top_k=2)
    router.weight.data = torch.tensor([[1.0], [0.5], [0.0]])
    router.bias[2] = 1
    weights, chosen = router(torch.ones(1, 1))
    scores = torch.tensor([0.0, 1.0]).sigmoid()
    assert chosen.tolist() == [[2, 0]]
    torch.testing.assert_close(weights[0], scores / scores.sum())


def test_a_token_cannot_have_more_experts_than_there_are():
    with pytest.raises(ValueError, match=r"top_k must be 1 ... 4, got 5"):
        Router(8, num_experts=4, top_k=5)


def test_a_token_may_have_all_experts():
    router = Router(8, num_experts=4, top_k=4)
    weights, chosen = router(torch.randn(9, 8))
    assert chosen.sort(-1).values.tolist() == [[0, 1, 2, 3]] * 9
    torch.testing.assert_close(weights.sum(-1), torch.ones(9))


def test_the_bias_of_a_bfloat16_router_keeps_small_steps():
    """DeepSeek-V3 adjusts it by 0.001, which is lost where bfloat16 is added to 1."""
    router = Router(8, num_experts=4, top_k=2, dtype=torch.bfloat16)
    router.bias += 1
    router.bias += 0.001
    assert (router.bias > 1).all()


def test_autocast_does_not_lower_the_precision_of_the_router():
    router = Router(64, num_experts=8, top_k=3)
    x = torch.randn(9, 64)
    with torch.autocast("cpu", torch.bfloat16):
        weights, chosen = router(x)
    assert torch.equal(weights, router(x)[0])
    assert torch.equal(chosen, router(x)[1])
