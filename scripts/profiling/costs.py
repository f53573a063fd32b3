"""What each part of the block must compute and move at least: FLOPs and bytes, from the sizes alone.

Conventions:
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

from dataclasses import astuple, dataclass

from .presets import Size


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


def part_costs(size: Size, element_size: int) -> dict[str, tuple[Cost, Cost]]:
    """Return the forward and backward cost of each part of one block, by name; element_size in bytes."""
    tokens, d_model, d_ff = size.tokens, size.d_model, size.d_ff
    query_width, key_width = size.num_heads * size.d_head, size.num_kv_heads * size.d_head
    x, q, k = tokens * d_model, tokens * query_width, tokens * key_width
    table = size.seq_len * size.d_head * 4  # cosines and sines of half the head size, in float32

    def part(
        inputs: int, weights: int, outputs: int, matmul: int = 0, elementwise: int = 0, dense: int | None = None
    ) -> tuple[Cost, Cost]:
        dense = matmul if dense is None else dense
        moved, moved_back = inputs + weights + outputs, outputs + 2 * (inputs + weights)
        return (
            Cost(matmul, dense, elementwise, moved * element_size),
            Cost(2 * matmul, 2 * dense, 2 * elementwise, moved_back * element_size),
        )

    def linear(d_in: int, d_out: int) -> tuple[Cost, Cost]:
        return part(tokens * d_in, d_in * d_out, tokens * d_out, matmul=2 * tokens * d_in * d_out)

    def norm(elements: int, gains: int) -> tuple[Cost, Cost]:
        return part(elements, gains, elements, elementwise=4 * elements)  # square, sum, scale, gain

    causal_scores = size.batch_size * size.num_heads * size.seq_len * (size.seq_len + 1) // 2
    all_scores = size.batch_size * size.num_heads * size.seq_len**2
    rope = Cost(elementwise_flops=3 * (q + k), bytes=2 * (q + k) * element_size + table)  # 6 for a pair
    adds = Cost(elementwise_flops=2 * x, bytes=2 * 3 * x * element_size)
    costs = {
        "ln1": norm(x, d_model),
        "q/k/v projections": linear(d_model, query_width + 2 * key_width),
        "q/k norm": norm(q + k, 2 * size.d_head),
        "rope": (rope, rope),  # backward turns the gradients back, and needs no input for it
        "attention": part(
            q + 2 * k,
            0,
            q,
            matmul=4 * size.d_head * causal_scores,
            dense=4 * size.d_head * all_scores,
            elementwise=5 * causal_scores,  # scale, subtract the maximum, exponential, sum, divide
        ),
        "output projection": linear(query_width, d_model),
        "residual adds": (adds, adds),  # backward adds the two gradients where a branch left
        "ln2": norm(x, d_model),
        "ffn": part(
            x,
            3 * d_model * d_ff,
            x,
            matmul=3 * 2 * tokens * d_model * d_ff,
            elementwise=5 * tokens * d_ff,  # negate, exponential, add, divide, and the product with the value
        ),
    }
    if not size.qk_norm:
        del costs["q/k norm"]
    if size.num_layers is not None:
        costs["final norm"] = norm(x, d_model)
    return costs


def adamw_cost(parameters: int, element_size: int) -> Cost:
    """Return the cost of one AdamW step: reads weight, gradient and two moments, writes all but the gradient."""
    # Decay 1, first moment 3, second moment 4, denominator 3, update 3.
    return Cost(elementwise_flops=14 * parameters, bytes=7 * parameters * element_size)
