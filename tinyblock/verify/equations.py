"""The equations as students write them: one step a line, and all heads at once.

`search.py` reads the text of these functions, changes it in one place, and compares the
numbers. A test compares each of them with the formula of its page. A size of 1 in a mask
stands for all sequences, queries or keys. Some are written in two ways, because a change
of one line of the one may take several lines of the other.
"""

import functools

import torch
from einops import rearrange, repeat
from torch.nn import functional as F


def rms_norm(x, weight, eps):
    rms = (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return x / rms * weight


def swiglu(x, w1, w2, w3):
    hidden = F.silu(x @ w1.T) * (x @ w3.T)
    return hidden @ w2.T


def swiglu_with_sigmoid(x, w1, w2, w3):
    gate = x @ w1.T
    up = x @ w3.T
    hidden = gate * torch.sigmoid(gate) * up
    return hidden @ w2.T


def rope(x, positions, theta, d_k):
    k = torch.arange(d_k // 2)
    frequencies = theta ** (-2 * k / d_k)
    angles = positions[..., None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    x1, x2 = rearrange(x, "... (pair two) -> two ... pair", two=2)
    y1 = x1 * cos - x2 * sin
    y2 = x1 * sin + x2 * cos
    return rearrange([y1, y2], "two ... pair -> ... (pair two)")


def rope_with_a_wide_table(x, positions, theta, d_k):
    k = torch.arange(d_k // 2)
    frequencies = theta ** (-2 * k / d_k)
    angles = positions[..., None] * frequencies
    angles = repeat(angles, "... pair -> ... (pair two)", two=2)
    x1, x2 = rearrange(x, "... (pair two) -> two ... pair", two=2)
    turned = rearrange([-x2, x1], "two ... pair -> ... (pair two)")
    return x * angles.cos() + turned * angles.sin()


def attend(q, k, v, mask, d_k):
    scores = q @ k.mT / d_k**0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    weights = scores.softmax(dim=-1)
    return weights @ v


def attend_with_exponentials(q, k, v, mask, d_k):
    scores = q @ k.mT / d_k**0.5
    weights = scores.exp()
    if mask is not None:
        weights = weights.masked_fill(~mask, 0)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights @ v


def self_attention(
    x,
    wq,
    wk,
    wv,
    wo,
    d_model,
    num_heads,
    group,
    d_k,
    mask,
    positions,
    theta,
    q_norm,
    k_norm,
):
    seq = x.shape[-2]
    q = x @ wq.T
    k = x @ wk.T
    v = x @ wv.T
    q = rearrange(q, "... seq (heads d_k) -> ... heads seq d_k", d_k=d_k)
    k = rearrange(k, "... seq (heads d_k) -> ... heads seq d_k", d_k=d_k)
    v = rearrange(v, "... seq (heads d_k) -> ... heads seq d_k", d_k=d_k)
    if group > 1:
        k = repeat(k, "... heads seq d_k -> ... (heads group) seq d_k", group=group)
        v = repeat(v, "... heads seq d_k -> ... (heads group) seq d_k", group=group)
    if q_norm:
        q = q_norm(q)
        k = k_norm(k)
    if theta:
        positions = positions[..., None, :]
        q = rope(q, positions, theta, d_k)
        k = rope(k, positions, theta, d_k)
    shown = torch.ones(seq, seq, dtype=torch.bool).tril(diagonal=0)
    if mask is not None:
        shown = shown & mask[..., None, :, :]
    heads = attend(q, k, v, shown, d_k)
    out = rearrange(heads, "... heads seq d_k -> ... seq (heads d_k)")
    return out @ wo.T


def block(x, norm1, attention, norm2, ffn, attention_without_rope):
    y = x + attention(norm1(x))
    return y + ffn(norm2(y))


# Each has the arguments of its page's formula, and calls one of the functions above.


def of_rms_norm(x, weights, d_model, eps):
    return rms_norm(x, weights["weight"], eps)


def of_swiglu(x, weights, d_model, d_ff):
    return swiglu(x, *(weights[f"w{number}.weight"] for number in (1, 2, 3)))


def of_rope(x, weights, token_positions=None, *, theta, d_k, max_seq_len):
    return rope(x, positions_of(x, token_positions), theta, d_k)


def positions_of(x, token_positions):
    return torch.arange(x.shape[-2]) if token_positions is None else token_positions


def of_function(q, k, v, mask=None):
    return attend(q, k, v, mask, q.shape[-1])


def of_attention(
    x,
    weights,
    token_positions=None,
    mask=None,
    *,
    d_model,
    num_heads,
    num_kv_heads=None,
    d_head=None,
    rope=None,
    qk_norm=False,
    eps=1e-5,
):
    norms = {
        name: functools.partial(rms_norm, weight=weights[f"{name}.weight"], eps=eps)
        if qk_norm
        else None
        for name in ("q_norm", "k_norm")
    }
    return self_attention(
        x,
        wq=weights["q_proj.weight"],
        wk=weights["k_proj.weight"],
        wv=weights["v_proj.weight"],
        wo=weights["output_proj.weight"],
        d_model=d_model,
        num_heads=num_heads,
        group=num_heads // (num_kv_heads or num_heads),
        d_k=d_head or d_model // num_heads,
        mask=mask,
        positions=positions_of(x, token_positions),
        theta=rope and rope.theta,
        **norms,
    )


def of_block(
    x,
    weights,
    token_positions=None,
    mask=None,
    *,
    d_model,
    d_ff,
    rope=None,
    eps=1e-5,
    **heads,
):
    def part(name):
        prefix = f"{name}."
        return {
            key.removeprefix(prefix): weight
            for key, weight in weights.items()
            if key.startswith(prefix)
        }

    attention = functools.partial(
        of_attention,
        weights=part("attn"),
        token_positions=token_positions,
        mask=mask,
        d_model=d_model,
        eps=eps,
        **heads,
    )
    return block(
        x,
        norm1=functools.partial(rms_norm, weight=weights["ln1.weight"], eps=eps),
        attention=functools.partial(attention, rope=rope),
        norm2=functools.partial(rms_norm, weight=weights["ln2.weight"], eps=eps),
        ffn=lambda x: of_swiglu(x, part("ffn"), d_model, d_ff),
        attention_without_rope=attention,
    )
