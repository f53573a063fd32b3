"""The papers' formulas in float64 NumPy, with loops and complex numbers: as unlike the layers as can be."""

import math

import numpy as np
import torch
from torch import Tensor

EPS = 1e-5


def array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().to(torch.float64).numpy()


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float = EPS) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2)))


def rope(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """Multiply consecutive pairs, as complex numbers, by exp(i angle)."""
    d_k = x.shape[-1]
    frequencies = np.array([theta ** (-2 * k / d_k) for k in range(d_k // 2)])
    rotated = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * positions[..., None] * frequencies)
    return np.stack((rotated.real, rotated.imag), axis=-1).reshape(x.shape)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Attend with one softmax per query; a query without any key yields zeros."""
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    for index in np.ndindex(*q.shape[:-1]):
        *batch, query = index
        allowed = mask[(*batch, query)]
        if allowed.any():
            scores = k[tuple(batch)][allowed] @ q[index] / math.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max())
            out[index] = weights / weights.sum() @ v[tuple(batch)][allowed]
    return out


def self_attention(
    x: np.ndarray,
    state: dict[str, np.ndarray],
    num_heads: int,
    num_kv_heads: int | None = None,
    theta: float | None = None,
    positions: np.ndarray | None = None,
    mask: np.ndarray | None = None,
) -> np.ndarray:
    """Compute causal self-attention of x (batch, seq, d_model) from the state dict of the layer, one head at a time."""
    num_kv_heads = num_kv_heads or num_heads
    batch, seq, _ = x.shape
    positions = np.broadcast_to(np.arange(seq) if positions is None else positions, (batch, seq))
    allowed = np.broadcast_to(np.tril(np.ones((seq, seq), bool)), (batch, seq, seq))
    allowed = allowed if mask is None else allowed & mask
    d_head = state["q_proj.weight"].shape[0] // num_heads
    heads = []
    for head in range(num_heads):
        shared = head // (num_heads // num_kv_heads)
        q = x @ state["q_proj.weight"][head * d_head : (head + 1) * d_head].T
        k = x @ state["k_proj.weight"][shared * d_head : (shared + 1) * d_head].T
        v = x @ state["v_proj.weight"][shared * d_head : (shared + 1) * d_head].T
        if "q_norm.weight" in state:
            q, k = rms_norm(q, state["q_norm.weight"]), rms_norm(k, state["k_norm.weight"])
        if theta is not None:
            q, k = rope(q, positions, theta), rope(k, positions, theta)
        heads.append(attention(q, k, v, allowed))
    return np.concatenate(heads, axis=-1) @ state["output_proj.weight"].T


def feed_forward(x: np.ndarray, state: dict[str, np.ndarray]) -> np.ndarray:
    """Compute SwiGLU where there is a w3, and the GELU layer of CS336 2024 where there is none."""
    hidden = x @ state["w1.weight"].T
    hidden = silu(hidden) * (x @ state["w3.weight"].T) if "w3.weight" in state else gelu(hidden)
    return hidden @ state["w2.weight"].T


def below(state: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def block(x: np.ndarray, state: dict[str, np.ndarray], num_heads: int, **attention_options: object) -> np.ndarray:
    normed = rms_norm(x, state["ln1.weight"])
    x = x + self_attention(normed, below(state, "attn."), num_heads, **attention_options)
    return x + feed_forward(rms_norm(x, state["ln2.weight"]), below(state, "ffn."))


def transformer(x: np.ndarray, state: dict[str, np.ndarray], num_heads: int, **options: object) -> np.ndarray:
    for layer in range(1 + max(int(key.split(".")[1]) for key in state if key.startswith("layers."))):
        x = block(x, below(state, f"layers.{layer}."), num_heads, **options)
    return rms_norm(x, state["ln_final.weight"])


def ulps(actual: Tensor, exact: np.ndarray) -> np.ndarray:
    """Return the error of `actual` in units of the last place of its dtype, at the exact value."""
    info = torch.finfo(actual.dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(exact), info.smallest_normal)))
    return np.abs(array(actual) - exact) / (2.0**exponent * info.eps)


def worst(actual: Tensor, exact: np.ndarray) -> float:
    """Return the largest error relative to the largest magnitude."""
    return float(np.abs(array(actual) - exact).max() / np.abs(exact).max())
