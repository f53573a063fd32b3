"""Norms without gains, and the squared ReLU."""

from functools import partial

from norm_without_gain import layer_norm_without_gain, norm_without_gain
from squared_relu import squared_relu
from their_models import Halves, our_model, require_same_model, their_model

from tinyblock import FeedForward

SQUARED = partial(FeedForward, activation=squared_relu)


def test_equals_nanochat():
    theirs = their_model("nanochat")
    rope = Halves(1e4, 16, 128)
    rope.cos_sin[..., 1] *= -1  # nanochat rotates in the other direction
    ours = our_model(rope=rope, norm=norm_without_gain, ffn=SQUARED, qk_norm=True)
    for block in ours.layers:
        block.attn.q_norm = norm_without_gain(16, 1e-6)
        block.attn.k_norm = norm_without_gain(16, 1e-6)
    # nanochat also normalizes the embeddings.
    norm = norm_without_gain(64, 1e-6)
    ours.register_forward_pre_hook(lambda _, args: (norm(args[0]), *args[1:]))
    require_same_model(ours, theirs, {"mlp.fc1": "ffn.w1", "mlp.fc2": "ffn.w2"})


def test_equals_olmo():
    theirs = their_model("olmo", clip_qkv=None)
    ours = our_model(norm=layer_norm_without_gain, eps=1e-5)
    require_same_model(ours, theirs)


def test_equals_arcee():
    theirs = their_model("arcee")
    names = {"mlp.up_proj": "ffn.w1", "mlp.down_proj": "ffn.w2"}
    require_same_model(our_model(ffn=SQUARED), theirs, names)
