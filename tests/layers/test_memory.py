"""A layer allocates what its largest step needs, and keeps what its gradients need."""

from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tinyblock import Block, CausalMultiHeadSelfAttention, RotaryPositionalEmbedding

# Of torch 2.10.
pytestmark = pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
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
    """At the peak, five tensors stand side by side.

    y = x + attention and norm(y) have the width d_model, and the gate, the value and
    their product d_ff.
    """
    block = Block(D_MODEL, HEADS, D_FF, rope=ROPE)
    of_width_d_ff = X.nbytes // D_MODEL * D_FF
    needed = 2 * X.nbytes + 3 * of_width_d_ff
    assert needed <= peak_of(block, X, mask=mask) <= 1.01 * needed


def test_attention_needs_the_memory_of_torchs_attention():
    """Beside q, k and v, nothing else is held."""
    layer = CausalMultiHeadSelfAttention(D_MODEL, HEADS, rope=ROPE)
    q = torch.randn(1, HEADS, 64, D_MODEL // HEADS)
    attend = F.scaled_dot_product_attention
    needed = 3 * X.nbytes + peak_of(attend, q, q, q, is_causal=True)
    assert needed <= peak_of(layer, X) <= 1.01 * needed


def kept_by(run):
    """Return the bytes of the tensors that autograd keeps for backward, each once."""
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()  # while it lives, no other tensor gets the addresses
    assert out.requires_grad
    return sum(kept.values())


def test_with_a_mask_attention_keeps_the_mask_as_numbers_and_nothing_else_more():
    layer = CausalMultiHeadSelfAttention(D_MODEL, HEADS, rope=ROPE)
    mask_as_numbers = 4 * 64 * 64
    causal = kept_by(lambda: layer(X))
    masked = kept_by(lambda: layer(X, mask=KEEP[None]))
    assert masked == causal + mask_as_numbers
