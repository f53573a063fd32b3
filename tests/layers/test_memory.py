"""The most memory that a forward pass allocates is what its largest step needs."""

from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tinyblock import Block, CausalMultiHeadSelfAttention, RotaryPositionalEmbedding

D_MODEL, D_FF, HEADS = 256, 704, 2
X = torch.randn(1, 64, D_MODEL)
ROPE = RotaryPositionalEmbedding(1e4, D_MODEL // HEADS, 64)
KEEP = torch.arange(64) < 60


def peak_of(run, *args, **options):
    """Return the most bytes that a call has allocated at a time, its result included."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.no_grad():
        run(*args, **options)
        with torch.profiler.profile(
            activities=activities, profile_memory=True
        ) as session:
            run(*args, **options)
    profiler: Any = session.profiler
    events = profiler.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in changes))


@pytest.mark.parametrize("mask", [None, KEEP[None]], ids=["causal", "padding"])
def test_a_block_needs_the_memory_of_its_feed_forward_layer(mask):
    """At the product: y = x + attention, norm(y), the gate, the value and the product."""
    block = Block(D_MODEL, HEADS, D_FF, rope=ROPE)
    hidden = X.nbytes // D_MODEL * D_FF
    needed = 2 * X.nbytes + 3 * hidden
    assert needed <= peak_of(block, X, mask=mask) <= 1.01 * needed


def test_attention_needs_the_memory_of_torchs_attention():
    """And the memory of q, k and v, which are gone in the last projection."""
    layer = CausalMultiHeadSelfAttention(D_MODEL, HEADS, rope=ROPE)
    q = torch.randn(1, HEADS, 64, D_MODEL // HEADS)
    attend = F.scaled_dot_product_attention
    needed = 3 * X.nbytes + peak_of(attend, q, q, q, is_causal=True)
    assert needed <= peak_of(layer, X) <= 1.01 * needed
