"""RoPE on a part of each head."""

from partial_rope import PartialRope
from their_models import (
    HALF_ROTATES,
    Halves,
    our_model,
    require_same_model,
    their_model,
)


def split_projections(state):
    """Phi-3 and GLM-4 fuse projections that read the same x."""
    for name in list(state):
        if "qkv_proj" in name:
            rows = state.pop(name).split([64, 32, 32])
            for part, weight in zip("qkv", rows, strict=True):
                state[name.replace("qkv_proj", f"{part}_proj")] = weight
        elif "mlp.gate_up_proj" in name:
            rows = state.pop(name).chunk(2)
            for part, weight in zip(("w1", "w3"), rows, strict=True):
                state[name.replace("mlp.gate_up_proj", f"ffn.{part}")] = weight


def test_equals_phi3():
    theirs = their_model("phi3", rope_parameters=HALF_ROTATES)
    ours = our_model(rope=PartialRope(Halves(1e4, 8, 128)))
    require_same_model(ours, theirs, convert=split_projections)
