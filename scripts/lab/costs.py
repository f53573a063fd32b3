"""What each part of a block must compute and move at least.

Conventions:
- A multiply-add is two FLOPs. Matrix products are counted exactly. Elementwise work is counted too, one FLOP for each
  arithmetic operation, exponential and root, because it places the parts without products on the roofline; MFU leaves
  it out.
- Causal attention needs the seq (seq + 1) / 2 scores on and below the diagonal; "dense" counts all seq^2, as many
  papers do.
- The backward pass of a product is two products; of elementwise work, it counts as twice the forward pass. A kernel
  that computes something again gets no credit for it.
- Bytes are the fewest possible: a part reads its inputs and weights once and writes its outputs once, and what lies
  between stays on the chip. Its backward pass reads the gradients of the outputs, the inputs and the weights, and
  writes the gradients of the inputs and of the weights.

Sizes are in elements, and `element_size` is the number of bytes of one element.
"""

from dataclasses import dataclass

from .records import require_at_least


@dataclass(frozen=True)
class Cost:
    """FLOPs of matrix products (causal, and with dense attention), FLOPs of elementwise work, and bytes moved."""

    matmul_flops: int = 0
    dense_matmul_flops: int = 0
    elementwise_flops: int = 0
    bytes: int = 0

    def __post_init__(self) -> None:
        require_at_least(0, **vars(self))

    @property
    def flops(self) -> int:
        return self.matmul_flops + self.elementwise_flops

    @property
    def intensity(self) -> float:
        """Return the arithmetic intensity, in FLOPs for each byte moved."""
        return self.flops / self.bytes

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.matmul_flops + other.matmul_flops,
            self.dense_matmul_flops + other.dense_matmul_flops,
            self.elementwise_flops + other.elementwise_flops,
            self.bytes + other.bytes,
        )

    def __mul__(self, count: int) -> "Cost":
        return Cost(
            count * self.matmul_flops,
            count * self.dense_matmul_flops,
            count * self.elementwise_flops,
            count * self.bytes,
        )


# The cost of a part in each of its passes, "forward" and "backward".
PartCost = dict[str, Cost]


def linear_cost(*, tokens: int, d_in: int, d_out: int, element_size: int) -> PartCost:
    """Return the cost of a product of each token with a weight of shape (d_out, d_in)."""
    return _both_passes(
        inputs=tokens * d_in,
        weights=d_in * d_out,
        outputs=tokens * d_out,
        element_size=element_size,
        matmul_flops=2 * tokens * d_in * d_out,
    )


def norm_cost(*, elements: int, gains: int, element_size: int) -> PartCost:
    """Return the cost of RMSNorm: square, sum, scale and multiply by the gain."""
    return _both_passes(
        inputs=elements,
        weights=gains,
        outputs=elements,
        element_size=element_size,
        elementwise_flops=4 * elements,
    )


def rope_cost(*, elements: int, table_bytes: int, element_size: int) -> PartCost:
    """Return the cost of rotating pairs of elements by the angles of a table.

    A pair takes 4 products and 2 sums. Backward rotates the gradients back, and does not read the inputs.
    """
    cost = Cost(
        elementwise_flops=3 * elements,
        bytes=2 * elements * element_size + table_bytes,
    )
    return {"forward": cost, "backward": cost}


def attention_cost(
    *,
    tokens: int,
    seq_len: int,
    num_heads: int,
    num_kv_heads: int,
    d_head: int,
    element_size: int,
) -> PartCost:
    """Return the cost of causal attention: scores, softmax, and the weighted sum of the values."""
    queries = tokens * num_heads * d_head
    keys = tokens * num_kv_heads * d_head
    # On average, a token attends to (seq_len + 1) / 2 tokens.
    causal_scores = num_heads * tokens * (seq_len + 1) // 2
    dense_scores = num_heads * tokens * seq_len
    # The product of a query and a key, and a value that is scaled and added.
    flops_of_score = 2 * d_head + 2 * d_head
    return _both_passes(
        inputs=queries + 2 * keys,
        weights=0,
        outputs=queries,
        element_size=element_size,
        matmul_flops=flops_of_score * causal_scores,
        dense_matmul_flops=flops_of_score * dense_scores,
        # Scale, subtract the maximum, exponential, sum, divide.
        elementwise_flops=5 * causal_scores,
    )


def residual_sums_cost(*, elements: int, element_size: int) -> PartCost:
    """Return the cost of both residual sums of a block.

    Backward adds the two gradients of a value that went into a branch, too.
    """
    cost = Cost(elementwise_flops=2 * elements, bytes=2 * 3 * elements * element_size)
    return {"forward": cost, "backward": cost}


def swiglu_cost(*, tokens: int, d_model: int, d_ff: int, element_size: int) -> PartCost:
    """Return the cost of SwiGLU, which has three weight matrices."""
    return _both_passes(
        inputs=tokens * d_model,
        weights=3 * d_model * d_ff,
        outputs=tokens * d_model,
        element_size=element_size,
        matmul_flops=3 * 2 * tokens * d_model * d_ff,
        # SiLU (negate, exponential, add, divide), and the product with the value.
        elementwise_flops=5 * tokens * d_ff,
    )


def embedding_cost(
    *, tokens: int, vocab: int, d_model: int, element_size: int
) -> PartCost:
    """Return the cost of looking tokens up; backward adds a row of the table's gradient for each token."""
    x = tokens * d_model
    table = vocab * d_model
    return {
        "forward": Cost(bytes=2 * x * element_size),
        "backward": Cost(elementwise_flops=x, bytes=(x + table) * element_size),
    }


def loss_cost(*, tokens: int, vocab: int, element_size: int) -> PartCost:
    """Return the cost of cross-entropy: maximum, subtract, exponential and sum."""
    logits = tokens * vocab
    return _both_passes(
        inputs=logits,
        weights=0,
        outputs=tokens,
        element_size=element_size,
        elementwise_flops=4 * logits,
    )


def adamw_cost(parameters: int, element_size: int) -> Cost:
    """Return the cost of one AdamW step: reads weight, gradient and two moments, and writes all but the gradient."""
    # Decay 1, first moment 3, second moment 4, denominator 3, update 3.
    return Cost(elementwise_flops=14 * parameters, bytes=7 * parameters * element_size)


def _both_passes(
    *,
    inputs: int,
    weights: int,
    outputs: int,
    element_size: int,
    matmul_flops: int = 0,
    dense_matmul_flops: int | None = None,
    elementwise_flops: int = 0,
) -> PartCost:
    """Return the cost of a part whose backward pass computes twice as much as its forward pass."""
    if dense_matmul_flops is None:
        dense_matmul_flops = matmul_flops
    forward = Cost(
        matmul_flops,
        dense_matmul_flops,
        elementwise_flops,
        bytes=element_size * (inputs + weights + outputs),
    )
    backward = Cost(
        2 * matmul_flops,
        2 * dense_matmul_flops,
        2 * elementwise_flops,
        # Reads the gradients of the outputs, the inputs and the weights; writes the gradients of inputs and weights.
        bytes=element_size * (outputs + 2 * (inputs + weights)),
    )
    return {"forward": forward, "backward": backward}
