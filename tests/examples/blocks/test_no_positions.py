"""No positions in some layers."""

from no_positions import drop_positions
from their_models import our_model, require_same_model, their_model


def test_equals_smollm3():
    theirs = their_model("smollm3", 8)
    ours = our_model(8)
    drop_positions(ours)  # every 4th layer
    require_same_model(ours, theirs)
