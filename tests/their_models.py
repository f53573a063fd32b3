"""Compare blocks with the models of transformers: the result, and all gradients.

The models are tiny and have random weights. transformers computes norms and angles in
float32, so all runs in float32.
"""

import re
from typing import Any

import pytest
import torch
from einops import rearrange
from torch import nn

from tinyblock import RotaryPositionalEmbedding, Transformer

SEQ = 24
TOLERANCE = 2**8 * torch.finfo(torch.float32).eps  # sums may lose 8 of 24 bits

CONFIG: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
# For models whose layers with windows and without have different positions.
TWO_ROPES = {
    "sliding_attention": CONFIG["rope_parameters"],
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
}
WINDOW_THEN_FULL = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 96,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
}
# Most of transformers' names of layers, and ours.
COMMON_NAMES = {
    "input_layernorm": "ln1",
    "post_attention_layernorm": "ln2",
    "self_attn": "attn",
    "o_proj": "output_proj",
    "mlp.gate_proj": "ffn.w1",
    "mlp.up_proj": "ffn.w3",
    "mlp.down_proj": "ffn.w2",
}

# DeepSeek's names, to pass to require_same_model.
LATENT_NAMES = {
    "q_a_proj": "q_down.0",
    "q_a_layernorm": "q_down.1",
    "q_b_proj": "q_up",
    "kv_a_proj_with_mqa": "kv_down",
    "kv_a_layernorm": "kv_norm",
    "kv_b_proj": "kv_up",
}


class Halves(RotaryPositionalEmbedding):
    """Rotate x[k] with x[k + d_k/2], as most models in transformers do."""

    def forward(self, x, token_positions=None):
        pairs = rearrange(x, "... (pair half) -> ... (half pair)", pair=2)
        rotated = super().forward(pairs, token_positions)
        return rearrange(rotated, "... (half pair) -> ... (pair half)", pair=2)


def import_transformers():
    """Return the package. A test without it is skipped."""
    return pytest.importorskip(
        "transformers", minversion="5.24", reason="requires the extra examples"
    )


def their_model(model_type, layers=1, **options):
    """Build a model of transformers."""
    transformers = import_transformers()
    options = {"num_hidden_layers": layers, **CONFIG, **options}
    config = transformers.AutoConfig.for_model(model_type, **options)
    model = transformers.AutoModel.from_config(config, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        is_gain = "norm" in name
        # Gains are around 1. Around 0, all scores of attention would be nearly equal.
        nn.init.normal_(parameter, mean=float(is_gain), std=0.1)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # of a router
            nn.init.normal_(buffer, std=0.5)
    del model.embed_tokens  # because ours starts from vectors, too
    return model.eval()


def our_model(layers=1, **options):
    options = {"num_kv_heads": 2, "rope": Halves(1e4, 16, 128), "eps": 1e-6, **options}
    return Transformer(layers, 64, 4, 96, max_seq_len=128, **options)


def require_same_model(
    ours,
    theirs,
    names=None,
    convert=None,
    *,
    centered=None,
    is_padded=True,
):
    """Compare whole models, with gaps between positions, and some padding.

    `names` says how to rename weights, and `convert` splits or joins some. The gains
    whose names match `centered` are stored as their distance from 1.
    """
    positions = 2 * torch.arange(SEQ).expand(2, SEQ)
    keep = torch.ones(2, SEQ, dtype=torch.long)
    mask = None
    if is_padded:
        keep = (torch.arange(2 * SEQ).view(2, SEQ) % 5 != 3).long()
        mask = keep.bool()[:, None]

    def run_theirs(x):
        return theirs(
            inputs_embeds=x,
            position_ids=positions,
            attention_mask=keep,
            use_cache=False,
        ).last_hidden_state

    def run_ours(x):
        return ours(x, positions, mask)

    names = {**COMMON_NAMES, **(names or {})}
    load(ours, theirs, names, convert, centered)
    compare(run_ours, run_theirs, ours, theirs, names, convert)


def require_same_layer(ours, theirs, names=None, run_theirs=None):
    """Compare single layers that are called with x."""
    names = {**COMMON_NAMES, **(names or {})}
    load(ours, theirs, names)
    compare(ours, run_theirs or theirs, ours, theirs, names)


def split_experts(state):
    """Give routers and experts our names. transformers joins the weights of experts."""
    parts = {"gate_proj.weight": "w1", "up_proj.weight": "w3", "down_proj.weight": "w2"}
    for name in list(state):
        block, _, rest = name.partition(".mlp.")
        ffn = f"{block}.ffn"
        if rest == "gate.weight":
            weight = state.pop(name)
            state[f"{ffn}.router.weight"] = weight
            state.setdefault(f"{ffn}.router.bias", weight.new_zeros(len(weight)))
        elif rest == "gate.e_score_correction_bias":
            state[f"{ffn}.router.bias"] = state.pop(name)
        elif rest.startswith("shared_expert"):
            part = parts[rest.partition(".")[2]]
            state[f"{ffn}.shared.{part}.weight"] = state.pop(name)
        elif rest.startswith("experts."):
            for number, weight in enumerate(state.pop(name)):
                expert = f"{ffn}.experts.{number}"
                if rest == "experts.down_proj":
                    state[f"{expert}.w2.weight"] = weight
                else:
                    w1, w3 = weight.chunk(2)
                    state[f"{expert}.w1.weight"] = w1
                    state[f"{expert}.w3.weight"] = w3


def renamed(tensors, names, convert):
    """Return the tensors of transformers with our names."""
    longest_first = sorted(names, key=len, reverse=True)
    any_part = "|".join(re.escape(part) for part in longest_first)
    ours = {}
    for name, tensor in tensors.items():
        name = re.sub(any_part, lambda match: names[match.group()], name)
        ours["ln_final.weight" if name == "norm.weight" else name] = tensor
    if convert is not None:
        convert(ours)
    return ours


def load(ours, theirs, names, convert=None, centered=None):
    """Give our model their weights."""
    state = {}
    for name, tensor in theirs.state_dict().items():
        is_centered = centered is not None and re.search(centered, name)
        state[name] = 1 + tensor if is_centered else tensor
    ours.load_state_dict(renamed(state, names, convert))


def compare(run_ours, run_theirs, ours, theirs, names, convert=None):
    """Require equal results, and equal gradients of x and of each parameter."""
    x = torch.randn(2, SEQ, 64)
    of_result = torch.randn(2, SEQ, 64)
    our_x = x.clone().requires_grad_()
    their_x = x.clone().requires_grad_()
    our_result = run_ours(our_x)
    their_result = run_theirs(their_x)
    require_close("result", our_result, their_result)
    our_result.backward(of_result)
    their_result.backward(of_result)
    require_close("gradient of x", our_x.grad, their_x.grad)
    expected = renamed(gradients(theirs), names, convert)
    for name, gradient in gradients(ours).items():
        require_close(f"gradient of {name}", gradient, expected[name])


def gradients(model):
    """Return the gradient of each parameter, which may be unused."""
    return {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in model.named_parameters()
    }


def require_close(what, actual, expected):
    error = (actual - expected).norm()
    size = expected.norm()
    assert error <= TOLERANCE * size, f"{what} is off by {error / size:.1e}"
