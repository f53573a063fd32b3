"""The size of a block or a stack: how to build it, its parameters, and the cost of its parts."""

from dataclasses import dataclass, replace
from typing import Any

import torch

import tinyblock
from tinyblock import Block, Transformer

from .costs import (
    Cost,
    PartCost,
    adamw_cost,
    attention_cost,
    embedding_cost,
    linear_cost,
    loss_cost,
    norm_cost,
    residual_sums_cost,
    rope_cost,
    swiglu_cost,
)
from .records import require_at_least

# The passes of each mode in which a model runs.
PASSES = {
    "forward": ("forward",),
    "train": ("forward", "backward"),
    "step": ("forward", "backward", "optimizer"),
}
# What a model has once; it has every other part in each block.
_ONCE = ("final norm", "embedding", "head", "loss")


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

    def __post_init__(self) -> None:
        require_at_least(
            1,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            d_model=self.d_model,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            d_head=self.d_head,
            d_ff=self.d_ff,
            num_layers=self.num_layers,
        )

    @property
    def tokens(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def layers(self) -> int:
        return 1 if self.num_layers is None else self.num_layers

    @property
    def query_width(self) -> int:
        return self.num_heads * self.d_head

    @property
    def key_width(self) -> int:
        return self.num_kv_heads * self.d_head

    @property
    def block_gains(self) -> int:
        """Return the number of gains of one block's norms."""
        gains = 2 * self.d_model
        if self.qk_norm:
            gains += 2 * self.d_head
        return gains

    @property
    def block_matrices(self) -> int:
        """Return the number of elements of one block's weight matrices."""
        attention = 2 * self.d_model * (self.query_width + self.key_width)
        feed_forward = 3 * self.d_model * self.d_ff
        return attention + feed_forward

    @property
    def gains(self) -> int:
        """Return the number of gains of all norms."""
        final_norm = 0 if self.num_layers is None else self.d_model
        return self.layers * self.block_gains + final_norm

    @property
    def parameters(self) -> int:
        embedding_and_head = 2 * self.vocab * self.d_model
        return self.layers * self.block_matrices + self.gains + embedding_and_head

    def smallest(self) -> "Size":
        """Return the same block with next to no arithmetic; the fused attention kernels need widths of 8 or more."""
        return replace(self, batch_size=1, seq_len=1, d_model=8, d_ff=8)

    def build(
        self, device: torch.device | str, dtype: torch.dtype, package: Any = tinyblock
    ) -> Block | Transformer:
        """Build the block or the stack, of this or another tinyblock; raise a ValueError if a layer rejects it.

        A block is the only layer of a stack, which gives it its RoPE.
        """
        stack = package.Transformer(
            self.layers,
            self.d_model,
            self.num_heads,
            self.d_ff,
            num_kv_heads=self.num_kv_heads,
            d_head=self.d_head,
            qk_norm=self.qk_norm,
            theta=self.theta,
            eps=self.eps,
            max_seq_len=self.seq_len,
            device=device,
            dtype=dtype,
        )
        if self.num_layers is None:
            block: Block = stack.layers[0]
            return block
        return stack

    def part_costs(self, element_size: int) -> dict[str, PartCost]:
        """Return the cost of each part of one block, and of what the model has once, by the name of the part."""
        tokens, d_model = self.tokens, self.d_model
        x = tokens * d_model
        queries_and_keys = tokens * (self.query_width + self.key_width)
        norm = norm_cost(elements=x, gains=d_model, element_size=element_size)
        costs: dict[str, PartCost] = {}
        costs["ln1"] = norm
        costs["q/k/v projections"] = linear_cost(
            tokens=tokens,
            d_in=d_model,
            d_out=self.query_width + 2 * self.key_width,
            element_size=element_size,
        )
        if self.qk_norm:
            costs["q/k norm"] = norm_cost(
                elements=queries_and_keys,
                gains=2 * self.d_head,
                element_size=element_size,
            )
        costs["rope"] = rope_cost(
            elements=queries_and_keys,
            # Cosines and sines, each for half of the head size, in float32.
            table_bytes=self.seq_len * self.d_head * 4,
            element_size=element_size,
        )
        costs["attention"] = attention_cost(
            tokens=tokens,
            seq_len=self.seq_len,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            d_head=self.d_head,
            element_size=element_size,
        )
        costs["output projection"] = linear_cost(
            tokens=tokens,
            d_in=self.query_width,
            d_out=d_model,
            element_size=element_size,
        )
        costs["residual sums"] = residual_sums_cost(
            elements=x, element_size=element_size
        )
        costs["ln2"] = norm
        costs["ffn"] = swiglu_cost(
            tokens=tokens, d_model=d_model, d_ff=self.d_ff, element_size=element_size
        )
        if self.num_layers is not None:
            costs["final norm"] = norm
        if self.vocab:
            costs["embedding"] = embedding_cost(
                tokens=tokens,
                vocab=self.vocab,
                d_model=d_model,
                element_size=element_size,
            )
            costs["head"] = linear_cost(
                tokens=tokens,
                d_in=d_model,
                d_out=self.vocab,
                element_size=element_size,
            )
            costs["loss"] = loss_cost(
                tokens=tokens, vocab=self.vocab, element_size=element_size
            )
        return costs

    def count(self, part: str) -> int:
        """Return how many times the model has a part."""
        return 1 if part in _ONCE else self.layers

    def pass_cost(self, name: str, element_size: int = 1) -> Cost:
        """Return the cost of the model in one pass: "forward", "backward" or "optimizer"."""
        if name == "optimizer":
            return adamw_cost(self.parameters, element_size)
        total = Cost()
        for part, costs in self.part_costs(element_size).items():
            total += costs[name] * self.count(part)
        return total

    def costs(self, mode: str, element_size: int = 1) -> Cost:
        """Return the cost of the model in all passes of a mode."""
        total = Cost()
        for name in PASSES[mode]:
            total += self.pass_cost(name, element_size)
        return total
