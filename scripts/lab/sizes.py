"""The size of a block or a stack: its parameters, what each part must compute and move at least, and how to build it.

Conventions of the costs:
- A multiply-add is two FLOPs. Matrix products are counted exactly. Elementwise work is counted too, one FLOP for each
  arithmetic operation, exponential and root, because it places the parts without products on the roofline; MFU leaves
  it out.
- Causal attention needs the seq (seq + 1) / 2 scores on and below the diagonal; "dense" counts all seq^2, as many
  papers do.
- The backward pass of a product is two products; elementwise, it is counted as twice the forward pass. A kernel that
  computes something again is not credited for it.
- Bytes are the fewest possible: a part reads its inputs and weights once and writes its outputs once, and what lies
  between stays on the chip. Its backward pass reads the gradients of the outputs, the inputs and the weights, and
  writes the gradients of the inputs and of the weights.
"""

from dataclasses import astuple, dataclass, replace
from typing import Any

import torch

import tinyblock
from tinyblock import Block, Transformer

PASSES = {
    "forward": ("forward",),
    "train": ("forward", "backward"),
    "step": ("forward", "backward", "optimizer"),
}


@dataclass(frozen=True)
class Cost:
    """FLOPs of matrix products (causal, and with dense attention), FLOPs of elementwise work, and bytes moved."""

    matmul_flops: int = 0
    dense_matmul_flops: int = 0
    elementwise_flops: int = 0
    bytes: int = 0

    @property
    def flops(self) -> int:
        return self.matmul_flops + self.elementwise_flops

    @property
    def intensity(self) -> float:
        """Return the arithmetic intensity, in FLOPs for each byte moved."""
        return self.flops / self.bytes

    def __add__(self, more: "Cost") -> "Cost":
        return Cost(*(a + b for a, b in zip(astuple(self), astuple(more), strict=True)))

    def __mul__(self, count: int) -> "Cost":
        return Cost(*(count * figure for figure in astuple(self)))


@dataclass(frozen=True)
class Size:
    """Batch and sequence in sequences and tokens, the block's arguments, and the number of blocks.

    num_layers=None is a Block; a number is a Transformer of that many blocks with one RoPE and a final norm. A `vocab`
    adds the cost of an embedding, a head with weights of its own and the cross-entropy loss, which `build` leaves out.
    """

    batch_size: int
    seq_len: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    d_head: int
    d_ff: int
    qk_norm: bool = False
    theta: float = 10000.0
    eps: float = 1e-5
    num_layers: int | None = None
    vocab: int = 0

    @property
    def tokens(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def layers(self) -> int:
        return 1 if self.num_layers is None else self.num_layers

    @property
    def block_gains(self) -> int:
        return 2 * self.d_model + (2 * self.d_head if self.qk_norm else 0)

    @property
    def block_parameters(self) -> int:
        heads = self.num_heads + self.num_kv_heads
        return (
            2 * self.d_model * heads * self.d_head
            + 3 * self.d_model * self.d_ff
            + self.block_gains
        )

    @property
    def parameters(self) -> int:
        beside = (
            0 if self.num_layers is None else self.d_model
        ) + 2 * self.vocab * self.d_model
        return self.layers * self.block_parameters + beside

    def smallest(self) -> "Size":
        """Return the same block with next to no arithmetic; the fused attention kernels need widths of 8 or more."""
        return replace(self, batch_size=1, seq_len=1, d_model=8, d_ff=8)

    def build(
        self, device: torch.device | str, dtype: torch.dtype, package: Any = tinyblock
    ) -> Block | Transformer:
        """Build the block or the stack, of this or another tinyblock; raise a ValueError if a layer rejects it."""
        if self.batch_size < 1 or self.seq_len < 1:
            raise ValueError(
                f"batch_size and seq_len must be at least 1, got {self.batch_size} and {self.seq_len}"
            )
        widths = self.d_model, self.num_heads, self.d_ff
        options = {
            name: getattr(self, name)
            for name in ("num_kv_heads", "d_head", "qk_norm", "theta", "eps")
        }
        options |= {"max_seq_len": self.seq_len, "device": device, "dtype": dtype}
        stack: Any = package.Transformer(self.layers, *widths, **options)
        return stack.layers[0] if self.num_layers is None else stack

    def part_costs(self, element_size: int) -> dict[str, dict[str, Cost]]:
        """Return the cost of each part of one block and of what the model has once; the size of an element in bytes."""
        tokens, d_model, d_ff = self.tokens, self.d_model, self.d_ff
        query_width, key_width = (
            self.num_heads * self.d_head,
            self.num_kv_heads * self.d_head,
        )
        x, q, k = tokens * d_model, tokens * query_width, tokens * key_width
        table = (
            self.seq_len * self.d_head * 4
        )  # cosines and sines of half the head size, in float32

        def part(
            inputs: int,
            weights: int,
            outputs: int,
            matmul: int = 0,
            elementwise: int = 0,
            dense: int | None = None,
        ) -> dict[str, Cost]:
            dense = matmul if dense is None else dense
            moved, moved_back = (
                inputs + weights + outputs,
                outputs + 2 * (inputs + weights),
            )
            return {
                "forward": Cost(matmul, dense, elementwise, moved * element_size),
                "backward": Cost(
                    2 * matmul, 2 * dense, 2 * elementwise, moved_back * element_size
                ),
            }

        def linear(d_in: int, d_out: int) -> dict[str, Cost]:
            return part(
                tokens * d_in,
                d_in * d_out,
                tokens * d_out,
                matmul=2 * tokens * d_in * d_out,
            )

        def norm(elements: int, gains: int) -> dict[str, Cost]:
            return part(
                elements, gains, elements, elementwise=4 * elements
            )  # square, sum, scale, gain

        causal = self.num_heads * tokens * (self.seq_len + 1) // 2  # scores
        dense = 4 * self.d_head * self.num_heads * tokens * self.seq_len
        alike = PASSES["train"]  # forward and backward cost the same
        costs = {
            "ln1": norm(x, d_model),
            "q/k/v projections": linear(d_model, query_width + 2 * key_width),
            **({"q/k norm": norm(q + k, 2 * self.d_head)} if self.qk_norm else {}),
            # 6 FLOPs for a pair; backward turns the gradients back, and needs no input for it.
            "rope": dict.fromkeys(
                alike,
                Cost(
                    elementwise_flops=3 * (q + k),
                    bytes=2 * (q + k) * element_size + table,
                ),
            ),
            # Elementwise: scale, subtract the maximum, exponential, sum, divide.
            "attention": part(
                q + 2 * k,
                0,
                q,
                4 * self.d_head * causal,
                elementwise=5 * causal,
                dense=dense,
            ),
            "output projection": linear(query_width, d_model),
            # Backward adds the two gradients where a branch left.
            "residual adds": dict.fromkeys(
                alike, Cost(elementwise_flops=2 * x, bytes=2 * 3 * x * element_size)
            ),
            "ln2": norm(x, d_model),
            # Elementwise: negate, exponential, add, divide, and the product with the value.
            "ffn": part(
                x,
                3 * d_model * d_ff,
                x,
                3 * 2 * tokens * d_model * d_ff,
                elementwise=5 * tokens * d_ff,
            ),
        }
        if self.num_layers is not None:
            costs["final norm"] = norm(x, d_model)
        if self.vocab:
            table, logits = self.vocab * d_model, tokens * self.vocab
            into_table = Cost(
                elementwise_flops=x, bytes=(x + table) * element_size
            )  # adds a row for each token
            costs["embedding"] = {
                "forward": Cost(bytes=2 * x * element_size),
                "backward": into_table,
            }
            costs["head"] = linear(d_model, self.vocab)
            costs["loss"] = part(
                logits, 0, tokens, elementwise=4 * logits
            )  # maximum, subtract, exponential, sum
        return costs

    def count(self, part: str) -> int:
        """Return how many times the model has a part."""
        return 1 if part in ("final norm", "embedding", "head", "loss") else self.layers

    def costs(self, mode: str, element_size: int = 1) -> Cost:
        """Return the cost of the whole model in the passes of a mode, or in a single pass."""
        passes = PASSES.get(mode, (mode,))
        total = (
            adamw_cost(self.parameters, element_size)
            if "optimizer" in passes
            else Cost()
        )
        for name, costs in self.part_costs(element_size).items():
            total += sum(
                (costs[pass_] for pass_ in passes if pass_ in costs), Cost()
            ) * self.count(name)
        return total


def adamw_cost(parameters: int, element_size: int) -> Cost:
    """Return the cost of one AdamW step: reads weight, gradient and two moments, writes all but the gradient."""
    # Decay 1, first moment 3, second moment 4, denominator 3, update 3.
    return Cost(elementwise_flops=14 * parameters, bytes=7 * parameters * element_size)
