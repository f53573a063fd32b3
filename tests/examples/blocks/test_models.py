"""Each row of docs/models.md equals the models that it names: results and gradients.

The models of transformers are tiny and have random weights. All runs in float64, also the
norms and angles that they compute in float32.
"""

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from einops import rearrange
from experts import MixtureOfExperts
from float64 import in_float64
from gated_delta_net import GatedDeltaNet
from indexer import SparseAttention
from latent_attention import LatentAttention
from output_gate import GatedAttention
from pages import block_with
from parallel_branches import ParallelBlock
from partial_rope import PartialRope
from sandwich_norm import SandwichBlock
from scaled_rope import YarnRope
from sinks import SinkAttention
from torch import nn
from windows import WindowAttention, widen

from tinyblock import RotaryPositionalEmbedding, Transformer

transformers = pytest.importorskip(
    "transformers", minversion="5.24", reason="requires the extra examples"
)

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "models.md"
# What the page's lines use, and the line for each model of transformers.
NAMES: dict[str, Any] = {}
exec(block_with(PAGE, "class GeGLU"), NAMES)
ROWS = re.findall(r"\| `(model = .*|for .*)` \| `(\w+)`", PAGE.read_text())
LINES = {model: line for line, model in ROWS}

SEQ = 24
TOLERANCE = 2.0**-40  # of float64's 53 bits, sums may lose 13

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
# Parts of transformers' names of weights, and ours.
OUR_NAMES = {
    "input_layernorm": "ln1",
    "post_attention_layernorm": "ln2",
    "self_attn": "attn",
    "o_proj": "output_proj",
    "mlp.gate_proj": "ffn.w1",
    "mlp.up_proj": "ffn.w3",
    "mlp.down_proj": "ffn.w2",
    "g_proj": "gate_proj",
    # Experts.
    "mlp.gate.weight": "ffn.router.weight",
    "mlp.gate.e_score_correction_bias": "ffn.router.bias",
    "mlp.shared_experts.gate_proj": "ffn.shared.w1",
    "mlp.shared_experts.up_proj": "ffn.shared.w3",
    "mlp.shared_experts.down_proj": "ffn.shared.w2",
    # Latent attention.
    "q_a_proj": "q_down.0",
    "q_a_layernorm": "q_down.1",
    "q_b_proj": "q_up",
    "kv_a_proj_with_mqa": "kv_down",
    "kv_a_layernorm": "kv_norm",
    "kv_b_proj": "kv_up",
    "indexer.wq_b": "indexer.q_proj",
    "indexer.wk": "indexer.k_proj",
    # The gated delta rule.
    "linear_attn": "attn",
    "conv1d": "conv",
    "dt_bias": "decay.bias",
    "A_log": "decay.log_speed",
    "a_proj": "decay.proj",
    "b_proj": "rate_proj",
    "o_norm": "norm",
}


class Halves(RotaryPositionalEmbedding):
    """Rotate x[k] with x[k + d_k/2], as most models in transformers do."""

    def forward(self, x, token_positions=None):
        pairs = rearrange(x, "... (pair half) -> ... (half pair)", pair=2)
        rotated = super().forward(pairs, token_positions)
        return rearrange(rotated, "... (half pair) -> ... (pair half)", pair=2)


def their_model(model_type, layers=1, **options):
    """Build a model of transformers."""
    options = {"num_hidden_layers": layers, **CONFIG, **options}
    config = transformers.AutoConfig.for_model(model_type, **options)
    with in_float64():
        model = transformers.AutoModel.from_config(
            config, attn_implementation="eager", experts_implementation="eager"
        )
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


def built_by_page(model, layers=1):
    """Return what a line of the page builds, in the sizes of these tests."""
    names = {
        **NAMES,
        "build": partial(our_model, layers),
        "model": our_model(layers),
    }
    exec(LINES[model], names)
    return names["model"]


def require_same_model(ours, theirs, names=None, *, is_padded=True, **options):
    """Compare whole models, with gaps between positions, and some padding."""
    positions = 2 * torch.arange(SEQ).expand(2, SEQ)
    keep = torch.arange(2 * SEQ).view(2, SEQ) % 5 != 3
    if not is_padded:
        keep[:] = True

    def run_ours(x):
        return ours(x, positions, keep[:, None] if is_padded else None)

    def run_theirs(x):
        return theirs(
            inputs_embeds=x,
            position_ids=positions,
            attention_mask=keep.long(),
            use_cache=False,
        ).last_hidden_state

    require_same(ours, theirs, run_ours, run_theirs, names, **options)


def require_same(
    ours, theirs, run_ours, run_theirs, names=None, centered=False, split=None
):
    """Give our model their weights, and compare results, and gradients of x and weights.

    `names` says how to rename weights, beside OUR_NAMES, and `split` splits some. If
    `centered`, their gains are stored as the distance from 1.
    """
    names = {**OUR_NAMES, **(names or {})}
    state = {
        name: 1 + tensor if centered and "norm" in name else tensor
        for name, tensor in theirs.state_dict().items()
    }
    ours.double().load_state_dict(renamed(state, names, split))
    with in_float64():
        expected = renamed(outcome(theirs, run_theirs), names, split)
    for name, found in outcome(ours, run_ours).items():
        size = expected[name].norm()
        error = (found - expected[name]).norm()
        assert error <= TOLERANCE * size, f"{name} is off by {error / size:.1e}"


def outcome(model, run):
    """Return the result for one x, and the gradients of x and of weights by their names."""
    generator = torch.Generator().manual_seed(0)
    x, of_result = torch.randn(2, 2, SEQ, 64, generator=generator, dtype=torch.float64)
    x.requires_grad_()
    result = run(x)
    result.backward(of_result)
    gradients = {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in model.named_parameters()
    }
    return {"result": result, "x": x.grad, **gradients}


def renamed(tensors, names, split):
    """Return the tensors of transformers with our names."""
    longest_first = sorted(names, key=len, reverse=True)
    any_part = "|".join(re.escape(part) for part in longest_first)
    ours = {}
    for name, tensor in tensors.items():
        name = re.sub(any_part, lambda match: names[match.group()], name)
        ours["ln_final.weight" if name == "norm.weight" else name] = tensor
    split_experts(ours)
    if split is not None:
        split(ours)
    return ours


def split_experts(state):
    """Split what transformers joins, and give a router without a bias one of zeros."""
    for name, weight in list(state.items()):
        block, _, joined = name.partition("mlp.experts.")
        if joined:
            del state[name]
            for number, own in enumerate(weight):
                parts = {"w2": own}
                if joined == "gate_up_proj":
                    w1, w3 = own.chunk(2)
                    parts = {"w1": w1, "w3": w3}
                for part, matrix in parts.items():
                    state[f"{block}ffn.experts.{number}.{part}.weight"] = matrix
        elif name.endswith("router.weight"):
            bias = name.replace("weight", "bias")
            state.setdefault(bias, torch.zeros(len(weight)))


def test_the_page_names_each_file_and_each_model_that_is_compared():
    rows = re.findall(r"^\| .* \|$", PAGE.read_text(), re.MULTILINE)
    cells = [row.strip("|").split("|") for row in rows]
    files = {name for row in cells for name in re.findall(r"^ `(\w+)` $", row[0])}
    assert files == {path.stem for path in (ROOT / "examples/blocks").glob("*.py")}
    models = {name for row in cells for name in re.findall(r"`(\w+)`", row[-1])}
    tests = {
        name.removeprefix("test_equals_") for name in globals() if "_equals_" in name
    }
    assert models == tests


# --- Changes of a few lines ---------------------------------------------------------------


def test_equals_arcee():
    names = {"mlp.up_proj": "ffn.w1", "mlp.down_proj": "ffn.w2"}
    require_same_model(built_by_page("arcee"), their_model("arcee"), names)


def test_equals_gemma():
    require_same_model(built_by_page("gemma"), their_model("gemma"), centered=True)


def test_equals_deepseek_v4():
    """Its experts and its other feed-forward layers have the same clamps."""
    v4 = transformers.models.deepseek_v4
    config = v4.DeepseekV4Config(
        hidden_size=64, moe_intermediate_size=96, swiglu_limit=0.5
    )
    with in_float64():
        theirs = v4.modeling_deepseek_v4.DeepseekV4MLP(config)
    ours = built_by_page("deepseek_v4").layers[0].ffn
    ours.limit = 0.5
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    require_same(ours, theirs, ours, theirs, names)


def test_equals_granite():
    theirs = their_model(
        "granite", 2, residual_multiplier=0.22, attention_multiplier=0.25
    )
    require_same_model(built_by_page("granite", 2), theirs)


def test_equals_exaone4():
    theirs = their_model(
        "exaone4", 2, sliding_window=None, layer_types=["full_attention"] * 2
    )
    names = {"post_attention_layernorm": "ln1", "post_feedforward_layernorm": "ln2"}
    require_same_model(built_by_page("exaone4", 2), theirs, names)


def test_equals_olmo():
    theirs = their_model("olmo", clip_qkv=None, rms_norm_eps=1e-5)
    ours = built_by_page("olmo")
    for norm in (ours.ln_final, ours.layers[0].ln1, ours.layers[0].ln2):
        norm.eps = 1e-5  # which OLMo has not as an option
    require_same_model(ours, theirs)


def test_equals_smollm3():
    require_same_model(built_by_page("smollm3", 4), their_model("smollm3", 4))


# --- Attention ----------------------------------------------------------------------------


class SinkWindow(WindowAttention, SinkAttention):
    pass


class GatedWindow(WindowAttention, GatedAttention):
    pass


def window_then_full(**options):
    """Build a layer with a window, and one without, which has another theta."""
    ours = our_model(2, window=8, qk_norm=True, **options)
    widen(ours, every=2, rope=Halves(1e6, 16, 128))
    return ours


def test_equals_mistral():
    theirs = their_model("mistral", sliding_window=8)
    require_same_model(our_model(attention=WindowAttention, window=8), theirs)


def test_equals_gpt_oss():
    """Compare attention: the experts of gpt-oss have biases, and are clamped."""
    theirs = their_model(
        "gpt_oss", sliding_window=8, layer_types=["sliding_attention"], **EXPERTS
    )
    layer = theirs.layers[0].self_attn
    positions = torch.arange(24)[None]
    with in_float64():
        angles = theirs.rotary_emb(torch.zeros(1), positions)
    window = torch.ones(24, 24).tril().triu(-7)  # 1 for 8 keys: its own, and 7 before
    mask = window.log()  # 0, or -inf: their layer adds it to scores
    ours = SinkWindow(64, 4, num_kv_heads=2, rope=Halves(1e4, 16, 128), window=8)
    require_same(ours, layer, ours, lambda x: layer(x, angles, mask)[0])


def test_equals_laguna():
    theirs = their_model(
        "laguna",
        2,
        **WINDOW_THEN_FULL,
        mlp_layer_types=["dense", "dense"],
        rope_parameters=TWO_ROPES,
    )
    gates = {"gate_per_head": True, "gate_activation": nn.functional.softplus}
    ours = window_then_full(attention=GatedWindow, **gates)
    require_same_model(ours, theirs)


def split_gate(state):
    """Each head has rows of its query, and then rows of its gate."""
    name = "layers.0.attn.q_proj.weight"
    rows = "(heads part d_head) d_model -> part (heads d_head) d_model"
    q, gate = rearrange(state[name], rows, part=2, d_head=16)
    state[name] = q
    state["layers.0.attn.gate_proj.weight"] = gate


def test_equals_qwen3_next():
    theirs = their_model(
        "qwen3_next",
        num_experts=0,
        rope_parameters={**CONFIG["rope_parameters"], "partial_rotary_factor": 0.5},
        layer_types=["full_attention"],
    )
    rope = PartialRope(Halves(1e4, 8, 128))
    ours = our_model(rope=rope, attention=GatedAttention, qk_norm=True)
    require_same_model(ours, theirs, centered=True, split=split_gate)


# --- Latent attention ---------------------------------------------------------------------

DEEPSEEK = {
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "first_k_dense_replace": 0,
    "mlp_layer_types": ["sparse"],
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "index_n_heads": 6,
    "index_head_dim": 16,
    "index_topk": 5,
    **EXPERTS,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "original_max_position_embeddings": 16,
}
LATENT_SIZES: dict[str, Any] = {"d_head": 16, "q_rank": 40, "kv_rank": 24}
LATENT_ATTENTION = partial(LatentAttention, **LATENT_SIZES)
SPARSE_ATTENTION = partial(
    SparseAttention, top_k=5, index_heads=6, index_d_head=16, **LATENT_SIZES
)
DEEPSEEK_EXPERTS = partial(MixtureOfExperts, top_k=3, scale=2.5)


# Fields that a config with YaRN may have, and what they mean here.
FACTOR = 0.1 * math.log(40) + 1
MSCALE = 0.1 * 0.707 * math.log(40) + 1
YARNS: list[tuple[dict[str, float], float | None, float]] = [
    ({}, None, 1.0),
    ({"attention_factor": 1.3}, 1.3, 1.0),
    ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0, MSCALE**2),
    ({"mscale": 1.0, "mscale_all_dim": 0.707}, FACTOR / MSCALE, MSCALE**2),
]


def yarn_rope(kind=YarnRope, **options):
    return kind(1e4, 8, 128, factor=40.0, original=16, **options)


class YarnHalves(YarnRope, Halves):
    pass


def our_latent_model(attention, rope, ffn=DEEPSEEK_EXPERTS):
    options: dict[str, Any] = {"attention": attention, "rope": rope, "ffn": ffn}
    return Transformer(1, 64, 4, 96, max_seq_len=128, eps=1e-6, **options)


def test_equals_deepseek_v2():
    theirs = their_model("deepseek_v2", topk_method="greedy", **DEEPSEEK)
    experts = partial(DEEPSEEK_EXPERTS, is_softmax=True, is_normalized=False)
    rope = RotaryPositionalEmbedding(1e4, 8, 128)
    ours = our_latent_model(LATENT_ATTENTION, rope, experts)
    require_same_model(ours, theirs)


def test_equals_deepseek_v3():
    for fields, factor, score_scale in YARNS:
        theirs = their_model("deepseek_v3", rope_parameters=YARN | fields, **DEEPSEEK)
        attention = partial(LATENT_ATTENTION, score_scale=score_scale)
        ours = our_latent_model(attention, yarn_rope(attention_factor=factor))
        require_same_model(ours, theirs)


def test_equals_deepseek_v32():
    """Its indexer pairs other components, and has no score_scale."""
    for fields, factor, score_scale in YARNS:
        theirs = their_model("deepseek_v32", rope_parameters=YARN | fields, **DEEPSEEK)
        attention = partial(SPARSE_ATTENTION, score_scale=score_scale)
        ours = our_latent_model(attention, yarn_rope(attention_factor=factor))
        halves = yarn_rope(YarnHalves, attention_factor=factor)
        ours.layers[0].attn.indexer.rope = halves
        require_same_model(ours, theirs)


# --- The gated delta rule -----------------------------------------------------------------


def test_equals_olmo_hybrid():
    """Compare layers with the delta rule: the others have norms of their own."""
    sizes: dict[str, Any] = {"d_head": 16, "d_key": 8, "num_key_heads": 2, "eps": 1e-5}
    for has_rates_up_to_2, layer in (
        (False, GatedDeltaNet(64, 4, **sizes)),
        (True, GatedDeltaNet(64, 4, max_rate=2.0, **sizes)),
    ):
        theirs = their_model(
            "olmo_hybrid",
            2,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=16,
            linear_allow_neg_eigval=has_rates_up_to_2,
        )
        theirs.layers = theirs.layers[:1]
        ours = our_model()
        ours.layers[0].attn = layer
        require_same_model(ours, theirs, is_padded=False)


# --- Experts and blocks -------------------------------------------------------------------


def test_equals_mixtral():
    options = {**EXPERTS, "num_experts_per_tok": 2}  # the default of ours
    theirs = their_model("mixtral", sliding_window=None, **options)
    experts = partial(MixtureOfExperts, is_softmax=True, has_shared_expert=False)
    require_same_model(our_model(ffn=experts), theirs)


def test_equals_gemma3_text():
    theirs = their_model(
        "gemma3_text",
        2,
        **WINDOW_THEN_FULL,
        query_pre_attn_scalar=16,
        rope_parameters=TWO_ROPES,
        hidden_activation="silu",
    )
    ours = window_then_full(attention=WindowAttention, block=SandwichBlock)
    names = {
        "post_attention_layernorm": "post_ln1",
        "pre_feedforward_layernorm": "ln2",
        "post_feedforward_layernorm": "post_ln2",
    }
    require_same_model(ours, theirs, names, centered=True)


def test_equals_cohere():
    theirs = their_model("cohere", layer_norm_eps=1e-6)
    norm = partial(nn.LayerNorm, bias=False)
    rope = RotaryPositionalEmbedding(1e4, 16, 128)
    ours = our_model(block=ParallelBlock, norm=norm, rope=rope)
    require_same_model(ours, theirs)
