"""Manifold-constrained hyper-connections (mHC): several residual streams in place of one.

    branch input:  sum over streams s of  read[s] * x[s]
    new stream t:  sum over streams s of  mix[s, t] * x[s]  +  write[t] * branch

    python examples/blocks/hyper_connections.py

This command prints the sums of the rows and columns of a `mix`.

Each token computes read, write and mix from all of its streams. `mix` is doubly
stochastic: positive, and all rows and columns sum to 1. So a deep stack mixes the
streams, but neither amplifies nor loses them.
Source: Xie et al., "mHC" (arXiv 2512.24880), after Zhu et al., "Hyper-Connections" (arXiv
2409.19606); here as in DeepSeek-V4.
To copy this file, import Block and Transformer from your copies of block.py and
transformer.py.
"""

from typing import Any

import torch
import torch.nn.functional as F
from einops import einsum, rearrange, repeat
from jaxtyping import Float, Integer
from torch import Tensor, nn

from tinyblock import Block, Transformer


class StreamWeights(nn.Module):
    """Weights of the streams for each token, from its normalized streams.

    `counts` says how many weights each group has. The groups are returned as tensors of
    shape (..., seq, count), in float32 or wider.
    """

    def __init__(
        self, d_model: int, counts: list[int], streams: int, device: Any = None
    ) -> None:
        super().__init__()
        self.d_model = d_model
        self.counts = counts
        width = streams * d_model
        self.weight = nn.Parameter(torch.empty(sum(counts), width, device=device))
        self.bias = nn.Parameter(torch.empty(sum(counts), device=device))
        self.scale = nn.Parameter(torch.empty(len(counts), device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)
        nn.init.ones_(self.scale)

    def forward(
        self, x: Float[Tensor, "stream *batch seq {self.d_model}"]
    ) -> list[Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        all_streams = rearrange(wide, "stream ... d_model -> ... (stream d_model)")
        normalized = F.rms_norm(all_streams, all_streams.shape[-1:], eps=1e-6)
        with torch.autocast(x.device.type, enabled=False):
            raw = F.linear(normalized, self.weight.to(wide.dtype))
        groups = raw.split(self.counts, dim=-1)
        biases = self.bias.split(self.counts)
        return [
            scale * group + bias
            for scale, group, bias in zip(self.scale, groups, biases, strict=True)
        ]


def read_streams(
    x: Float[Tensor, "stream *batch seq d_model"],
    logits: Float[Tensor, "*batch seq stream"],
) -> Float[Tensor, "*batch seq d_model"]:
    """Return the sum of the streams, weighted with sigmoid(logits)."""
    weights = (logits.sigmoid() + 1e-6).to(x.dtype)
    return einsum(weights, x, "... stream, stream ... d_model -> ... d_model")


def doubly_stochastic(
    logits: Float[Tensor, "*batch old new"], steps: int = 20
) -> Float[Tensor, "*batch old new"]:
    """Return positive matrices whose rows and columns sum to 1.

    Rows and columns are divided by their sums in turn (Sinkhorn and Knopp, 1967).
    """
    matrix = logits.softmax(-1) + 1e-6
    matrix = matrix / (matrix.sum(-2, keepdim=True) + 1e-6)
    for _ in range(steps - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + 1e-6)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + 1e-6)
    return matrix


class HyperBlock(Block):
    """A Block whose branches read all streams, and write to all of them.

    It takes keywords only: called as other blocks are, it would take the first axis of x
    for the streams. HyperTransformer calls it.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int | None = None,
        *,
        streams: int,
        **options: Any,
    ) -> None:
        super().__init__(d_model, num_heads, d_ff, **options)
        self.streams = streams
        counts = [streams, streams, streams**2]  # read, write, mix
        device = options.get("device")
        self.attn_streams = StreamWeights(d_model, counts, streams, device)
        self.ffn_streams = StreamWeights(d_model, counts, streams, device)

    def forward(  # type: ignore[override]
        self,
        *,
        x: Float[Tensor, "{self.streams} *batch seq {self.d_model}"],
        token_positions: Integer[Tensor, "*#batch seq"] | None,
        mask: Any,
    ) -> Float[Tensor, "{self.streams} *batch seq {self.d_model}"]:
        read, write, mix = self.attn_streams(x)
        normalized = self.ln1(read_streams(x, read))
        attended = self.attn(normalized, token_positions, mask)
        x = self.combine(x, attended, write, mix)
        read, write, mix = self.ffn_streams(x)
        normalized = self.ln2(read_streams(x, read))
        return self.combine(x, self.ffn(normalized), write, mix)

    def combine(
        self,
        x: Float[Tensor, "{self.streams} *batch seq {self.d_model}"],
        branch: Float[Tensor, "*batch seq {self.d_model}"],
        write: Float[Tensor, "*batch seq {self.streams}"],
        mix: Float[Tensor, "*batch seq {self.streams**2}"],
    ) -> Float[Tensor, "{self.streams} *batch seq {self.d_model}"]:
        """Return the mixed streams, with the branch written to each of them."""
        matrix = rearrange(mix, "... (old new) -> ... old new", old=self.streams)
        matrix = doubly_stochastic(matrix).to(x.dtype)
        kept = einsum(matrix, x, "... old new, old ... d_model -> new ... d_model")
        amount = 2 * write.sigmoid().to(x.dtype)
        return kept + einsum(amount, branch, "... new, ... d -> new ... d")


class HyperTransformer(Transformer):
    """A Transformer that copies x to all streams, and reads one result from them."""

    def __init__(
        self,
        num_layers: int,
        d_model: int,
        num_heads: int,
        d_ff: int | None = None,
        *,
        streams: int = 4,
        **options: Any,
    ) -> None:
        super().__init__(
            num_layers,
            d_model,
            num_heads,
            d_ff,
            block=HyperBlock,
            streams=streams,
            **options,
        )
        self.streams = streams
        device = options.get("device")
        self.final_streams = StreamWeights(d_model, [streams], streams, device)

    def forward(
        self,
        x: Float[Tensor, "*batch seq {self.d_model}"],
        token_positions: Integer[Tensor, "*#batch seq"] | None = None,
        mask: Any = None,
    ) -> Float[Tensor, "*batch seq {self.d_model}"]:
        x = repeat(x, "... -> stream ...", stream=self.streams)
        for layer in self.layers:
            x = layer(x=x, token_positions=token_positions, mask=mask)
        (read,) = self.final_streams(x)
        return self.ln_final(read_streams(x, read))


def main() -> None:
    torch.manual_seed(0)
    mix = doubly_stochastic(torch.randn(4, 4))
    print("rows:   ", *(f"{total:.4f}" for total in mix.sum(1).tolist()))
    print("columns:", *(f"{total:.4f}" for total in mix.sum(0).tolist()))
    model = HyperTransformer(4, 64, 4, max_seq_len=20)
    count = sum(p.numel() for p in model.parameters())
    plain = Transformer(4, 64, 4, max_seq_len=20)
    plain_count = sum(p.numel() for p in plain.parameters())
    print(f"parameters: {count}, of which {count - plain_count} weigh streams")


if __name__ == "__main__":
    main()
