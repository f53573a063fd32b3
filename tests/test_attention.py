import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F

from tinyblock import CausalMultiHeadSelfAttention, RotaryPositionalEmbedding, apply_rope, rms_norm
from tinyblock import scaled_dot_product_attention as attention

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
VARIANTS = {
    "plain": {},
    "grouped": {"num_kv_heads": 2},
    "one key head": {"num_kv_heads": 1},
    "wide heads": {"d_head": 10},
    "normed": {"qk_norm": True, "num_kv_heads": 2},
}


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def layer(variant="plain", *, theta=100.0, dtype=torch.float64, max_seq_len=16):
    torch.manual_seed(0)
    options = VARIANTS[variant]
    d_head = options.get("d_head", 6)
    rope = None if theta is None else RotaryPositionalEmbedding(theta, d_head, max_seq_len)
    module = CausalMultiHeadSelfAttention(24, 4, rope=rope, dtype=dtype, **options)
    for norm in (module.q_norm, module.k_norm):
        if norm is not None:
            torch.nn.init.uniform_(norm.weight, 0.5, 2)
    return module


def state_of(module):
    return {key: reference.array(value) for key, value in module.state_dict().items()}


def test_scaled_dot_product_attention_follows_the_formula():
    q, k, v = randn(2, 3, 5, 8), randn(2, 3, 7, 8, seed=1), randn(2, 3, 7, 4, seed=2)
    mask = torch.rand(2, 3, 5, 7, generator=torch.Generator().manual_seed(3)) < 0.5
    mask[0, 1, 2] = False  # a query that may attend to nothing
    for allowed in (None, mask):
        full = np.ones((2, 3, 5, 7), bool) if allowed is None else allowed.numpy()
        exact = reference.attention(*map(reference.array, (q, k, v)), full)
        np.testing.assert_allclose(reference.array(attention(q, k, v, allowed)), exact, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("dtype", FLOATS)
def test_scaled_dot_product_attention_matches_torch_and_its_gradients(dtype):
    ours = [randn(2, 3, 6, 8, seed=seed, dtype=dtype).requires_grad_() for seed in range(3)]
    theirs = [tensor.detach().clone().requires_grad_() for tensor in ours]
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    mask[3] = False
    out, expected = attention(*ours, mask), F.scaled_dot_product_attention(*theirs, attn_mask=mask)
    upstream = randn(2, 3, 6, 8, seed=4, dtype=dtype)
    out.backward(upstream)
    expected.backward(upstream)
    tolerance = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scaled_dot_product_attention_rounds_once(dtype):
    q, k, v = (randn(2, 3, 9, 8, seed=seed, dtype=dtype) for seed in range(3))
    exact = reference.attention(*map(reference.array, (q, k, v)), np.ones((2, 3, 9, 9), bool))
    error = np.abs(reference.array(attention(q, k, v)) - exact)
    assert (error <= 0.501 * 2.0 ** np.floor(np.log2(np.abs(exact))) * torch.finfo(dtype).eps + 1e-6).all()


def test_scaled_dot_product_attention_does_not_hide_nan():
    q, k, v = (randn(3, 4, seed=seed) for seed in range(3))
    q[1, 0] = torch.nan
    mask = torch.ones(3, 3, dtype=torch.bool).tril()
    for out in (attention(q, k, v, mask), F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]):
        assert out.isnan().all(-1).tolist() == [False, True, False]


def test_scaled_dot_product_attention_gradcheck():
    q, k, v = (randn(2, 3, 4, seed=seed).requires_grad_() for seed in range(3))
    mask = torch.tensor([[True, False, False], [False, False, False], [True, True, True]])
    assert torch.autograd.gradcheck(attention, (q, k, v))
    assert torch.autograd.gradcheck(lambda *qkv: attention(*qkv, mask), (q, k, v))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("theta", [None, 100.0])
def test_self_attention_follows_the_formula(variant, theta):
    module, x = layer(variant, theta=theta), randn(2, 7, 24)
    options = {"num_kv_heads": VARIANTS[variant].get("num_kv_heads"), "theta": theta}
    exact = reference.self_attention(reference.array(x), state_of(module), 4, **options)
    assert reference.worst(module(x), exact) <= 1e-12
    assert reference.worst(module.float()(x.float()), exact) <= 1e-6


def test_self_attention_with_positions_and_mask_follows_the_formula():
    module, x = layer("grouped"), randn(2, 7, 24)
    positions = torch.randint(0, 16, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.rand(2, 7, 7, generator=torch.Generator().manual_seed(2)) < 0.7
    mask[1, 3] = False
    options = {"num_kv_heads": 2, "theta": 100.0, "positions": positions.numpy(), "mask": mask.numpy()}
    exact = reference.self_attention(reference.array(x), state_of(module), 4, **options)
    assert reference.worst(module(x, positions, mask), exact) <= 1e-12
    assert reference.worst(module.float()(x.float(), positions, mask), exact) <= 1e-6


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_self_attention_matches_equations_and_their_gradients(dtype, variant):
    module = layer(variant, dtype=dtype)
    weights = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    x = randn(2, 7, 24, dtype=dtype)
    for_engine, for_equation = x.clone().requires_grad_(), x.clone().requires_grad_()

    def heads(name):
        return (for_equation @ weights[f"{name}_proj.weight"].T).unflatten(-1, (-1, module.d_head)).transpose(1, 2)

    q, k, v = heads("q"), heads("k"), heads("v")
    if variant == "normed":
        q, k = rms_norm(q, weights["q_norm.weight"]), rms_norm(k, weights["k_norm.weight"])
    exponents = torch.arange(0, module.d_head, 2, dtype=torch.float64) / module.d_head
    angles = torch.arange(7)[:, None] * 100.0**-exponents
    q, k = apply_rope(q, angles), apply_rope(k, angles)
    k, v = (t.repeat_interleave(4 // module.num_kv_heads, dim=1) for t in (k, v))
    out = attention(q, k, v, torch.ones(7, 7, dtype=torch.bool).tril())
    equation = out.transpose(1, 2).flatten(2) @ weights["output_proj.weight"].T

    engine = module(for_engine)
    upstream = randn(2, 7, 24, seed=5, dtype=dtype)
    engine.backward(upstream)
    equation.backward(upstream)
    tolerance = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(engine, equation, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(for_engine.grad, for_equation.grad, rtol=tolerance, atol=4 * tolerance)
    for name, weight in weights.items():
        scale = weight.grad.abs().max().item()
        torch.testing.assert_close(module.get_parameter(name).grad, weight.grad, rtol=0, atol=tolerance * max(1, scale))


@pytest.mark.parametrize("variant", VARIANTS)
def test_self_attention_gradcheck(variant):
    assert torch.autograd.gradcheck(layer(variant), (randn(1, 3, 24).requires_grad_(),))


@pytest.mark.parametrize("variant", VARIANTS)
def test_self_attention_of_a_prefix_is_the_prefix(variant):
    module, x = layer(variant), randn(2, 9, 24)
    out = module(x)
    changed = x.clone()
    changed[:, 5:] = randn(2, 4, 24, seed=7)
    torch.testing.assert_close(module(changed)[:, :5], out[:, :5], rtol=0, atol=1e-13)
    torch.testing.assert_close(module(x[:, :5]), out[:, :5], rtol=0, atol=1e-13)
    assert not torch.allclose(module(changed)[:, 5:], out[:, 5:])


def test_self_attention_depends_on_relative_positions_only():
    module, x = layer("grouped", max_seq_len=200), randn(2, 7, 24)
    torch.testing.assert_close(module(x, torch.arange(7) + 150), module(x), rtol=0, atol=1e-12)
    assert not torch.allclose(module(x, torch.arange(7) * 2), module(x))


@pytest.mark.parametrize("batch", [(), (0,), (1,), (2, 3), (2, 0)])
@pytest.mark.parametrize("seq", [1, 5])
def test_self_attention_takes_any_leading_axes(batch, seq):
    module, x = layer("grouped"), randn(*batch, seq, 24)
    out = module(x)
    assert out.shape == x.shape
    flat = module(x.reshape(-1, seq, 24)).reshape(x.shape)
    torch.testing.assert_close(out, flat, rtol=0, atol=1e-13)
    positions = torch.arange(seq).expand(*batch, seq)
    mask = torch.ones(*batch, seq, seq, dtype=torch.bool)
    torch.testing.assert_close(module(x, positions, mask), out, rtol=0, atol=1e-13)
    torch.testing.assert_close(module(x, None, mask[..., :1, :]), out, rtol=0, atol=1e-13)


def test_self_attention_mask_of_padding_hides_keys():
    module, x = layer("plain"), randn(2, 6, 24)
    keep = torch.ones(2, 1, 6, dtype=torch.bool)
    keep[0, 0, :2] = False
    other = x.clone()
    other[0, :2] = randn(2, 24, seed=8)
    torch.testing.assert_close(module(x, None, keep)[:, 2:], module(other, None, keep)[:, 2:], rtol=0, atol=1e-13)
    assert torch.equal(module(x, None, keep)[0, :2], torch.zeros(2, 24, dtype=torch.float64))


def test_self_attention_mask_cannot_lift_causality():
    module, x = layer("plain"), randn(2, 6, 24)
    torch.testing.assert_close(module(x, None, torch.ones(6, 6, dtype=torch.bool)), module(x), rtol=0, atol=1e-13)


@pytest.mark.skipif(torch.__version__ < "2.9", reason="older CPU flash kernels cannot share key heads")
def test_self_attention_uses_no_kernel_that_materializes_the_scores():
    module, x = layer("grouped", dtype=torch.float32), randn(2, 3, 6, 24, dtype=torch.float32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        module(x)
        module(x[0, 0])
    kernels = {event.name for event in profile.events() if "scaled_dot_product" in event.name}
    assert kernels == {"aten::scaled_dot_product_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"}


def test_self_attention_leaves_inputs_alone():
    module, x, positions = layer("normed"), randn(2, 6, 24), torch.arange(6)
    mask = torch.ones(6, 6, dtype=torch.bool)
    before = x.clone()
    module(x, positions, mask)
    assert torch.equal(x, before)
    assert torch.equal(positions, torch.arange(6))
    assert mask.all()


@pytest.mark.parametrize(
    ("sizes", "options", "named"),
    [
        ((24, 5), {}, "d_model=24.*num_heads=5"),
        ((24, 4), {"num_kv_heads": 3}, "num_heads=4.*num_kv_heads=3"),
        ((24, 0), {}, "'num_heads': 0"),
        ((0, 4), {}, "'d_model': 0"),
        ((24, -4), {}, "'num_heads': -4"),
        ((24, 4), {"num_kv_heads": 0}, "'num_kv_heads': 0"),
        ((24, 4), {"d_head": 0}, "'d_head': 0"),
        ((24, 4), {"eps": 0.0}, "eps.*0.0"),
        ((24, 4), {"eps": float("nan")}, "eps.*nan"),
        ((24, 4), {"rope": RotaryPositionalEmbedding(10.0, 4, 8)}, "d_k=4.*6"),
        ((24, 4), {"rope": RotaryPositionalEmbedding(10.0, 6, 8), "d_head": 8}, "d_k=6.*8"),
    ],
)
def test_self_attention_rejects_bad_hyperparameters(sizes, options, named):
    with pytest.raises(ValueError, match=named):
        CausalMultiHeadSelfAttention(*sizes, **options)


def test_self_attention_with_its_own_head_size_need_not_divide_d_model():
    module = CausalMultiHeadSelfAttention(24, 5, d_head=4)
    assert module.q_proj.weight.shape == (20, 24)
    assert module(torch.randn(3, 24)).shape == (3, 24)


def test_self_attention_rejects_positions_that_it_cannot_apply():
    with pytest.raises(ValueError, match="no rope"):
        layer(theta=None)(randn(1, 3, 24), torch.arange(3))


def test_self_attention_reset_parameters_after_meta():
    torch.manual_seed(0)
    module = CausalMultiHeadSelfAttention(96, 4, num_kv_heads=2, qk_norm=True, device="meta").to_empty(device="cpu")
    module.reset_parameters()
    for name in ("q_proj", "k_proj", "v_proj", "output_proj"):
        weight = module.get_submodule(name).weight.detach()
        std = (2 / sum(weight.shape)) ** 0.5
        assert 2.5 * std < weight.abs().max() <= 3 * std
        assert weight.std().item() == pytest.approx(0.98658 * std, rel=0.05)
    assert torch.equal(module.q_norm.weight, torch.ones(24))
    assert torch.equal(module.k_norm.weight, torch.ones(24))
