"""The gated delta rule: a memory of fixed size in place of all keys and values.

    for each token:  memory = decay * memory
                     memory = memory + rate * k (v - memory^T k)
                     out = memory^T q

    python examples/blocks/delta_rule.py

This command writes values at one key, and prints what is read there after each token.

An update moves what the memory returns at k towards v, and `decay` forgets.
Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464), equation
10. kimi_delta_attention.py and gated_delta_net.py build layers from it.
To copy this file, change nothing.
"""

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor


def delta_rule(
    q: Float[Tensor, "*batch seq d_k"],
    k: Float[Tensor, "*batch seq d_k"],
    v: Float[Tensor, "*batch seq d_v"],
    decay: Float[Tensor, "*batch seq #d_k"],
    rate: Float[Tensor, "*batch seq 1"],
) -> Float[Tensor, "*batch seq d_v"]:
    """Read q from the memory of the tokens so far, each token in turn.

    `decay` is for each component of a key, or one for all. Computes in float32 or wider,
    and returns the dtype of `q`. One step per token is readable, not fast: `chunk_kda`
    and `chunk_gated_delta_rule` of flash-linear-attention are.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        *batch, seq, d_k = k.shape
        memory = torch.zeros(*batch, d_k, v.shape[-1], dtype=wide, device=q.device)
        outs = []
        for token in range(seq):
            q_t = q[..., token, :].to(wide)
            k_t = k[..., token, :].to(wide)
            v_t = v[..., token, :].to(wide)
            decay_t = decay[..., token, :, None].to(wide)
            rate_t = rate[..., token, :].to(wide)
            memory = decay_t * memory
            error = v_t - read(memory, k_t)
            update = einsum(k_t, rate_t * error, "... d_k, ... d_v -> ... d_k d_v")
            memory = memory + update
            outs.append(read(memory, q_t))
        return torch.stack(outs, dim=-2).to(q.dtype)


def read(
    memory: Float[Tensor, "*batch d_k d_v"], key: Float[Tensor, "*batch d_k"]
) -> Float[Tensor, "*batch d_v"]:
    """Return memory^T key: what the memory holds at a key."""
    return einsum(memory, key, "... d_k d_v, ... d_k -> ... d_v")


def unit(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """Return vectors of length 1, so that an update does not overshoot."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))  # squares may overflow
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def main() -> None:
    key = torch.tensor([[0.0, 1.0]]).expand(4, 2)
    values = torch.tensor([[1.0], [1.0], [5.0], [5.0]])
    ones = torch.ones(4, 1)
    for rate in (1.0, 0.5):
        read = delta_rule(key, key, values, decay=ones, rate=rate * ones)
        print(f"rate {rate}: writes 1 1 5 5, reads", *read.flatten().tolist())


if __name__ == "__main__":
    main()
