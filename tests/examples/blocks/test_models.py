"""Each row of docs/models.md equals the models that it names: results and gradients."""

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from experts import MixtureOfExperts
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
from their_models import (
    CONFIG,
    EXPERTS,
    LATENT_NAMES,
    TWO_ROPES,
    WINDOW_THEN_FULL,
    Halves,
    import_transformers,
    our_model,
    require_same_layer,
    require_same_model,
    split_experts,
    their_model,
)
from torch import nn
from windows import WindowAttention, widen

from tinyblock import RotaryPositionalEmbedding, Transformer

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "models.md"
# What the page's lines use, and the line for each model of transformers.
NAMES: dict[str, Any] = {}
exec(block_with(PAGE, "class GeGLU"), NAMES)
ROWS = re.findall(r"\| `(model = .*|for .*)` \| `(\w+)`", PAGE.read_text())
LINES = {model: line for line, model in ROWS}


def built_by_page(model, layers=1):
    """Return what a line of the page builds, in the sizes of these tests."""
    names = {
        **NAMES,
        "build": partial(our_model, layers),
        "model": our_model(layers),
    }
    exec(LINES[model], names)
    return names["model"]


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
    require_same_model(built_by_page("gemma"), their_model("gemma"), centered="norm")


def test_equals_deepseek_v4():
    """Its experts and its other feed-forward layers have the same clamps."""
    v4 = import_transformers().models.deepseek_v4
    config = v4.DeepseekV4Config(
        hidden_size=64, moe_intermediate_size=96, swiglu_limit=0.5
    )
    theirs = v4.modeling_deepseek_v4.DeepseekV4MLP(config)
    ours = built_by_page("deepseek_v4").layers[0].ffn
    ours.limit = 0.5
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    require_same_layer(ours, theirs, names)


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
    angles = theirs.rotary_emb(torch.zeros(1), positions)
    window = torch.ones(24, 24).tril().triu(-7)  # 1 for 8 keys: its own, and 7 before
    mask = window.log()  # 0, or -inf: their layer adds it to scores
    ours = SinkWindow(64, 4, num_kv_heads=2, rope=Halves(1e4, 16, 128), window=8)
    require_same_layer(ours, layer, run_theirs=lambda x: layer(x, angles, mask)[0])


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
    require_same_model(ours, theirs, {"g_proj": "gate_proj"})


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
DEEPSEEK_NAMES = {
    **LATENT_NAMES,
    "indexer.wq_b": "indexer.q_proj",
    "indexer.wk": "indexer.k_proj",
}


def yarn_rope(kind=YarnRope, **options):
    return kind(1e4, 8, 128, factor=40.0, original=16, **options)


class YarnHalves(YarnRope, Halves):  # type: ignore[misc]
    pass


def our_latent_model(attention, rope, ffn=DEEPSEEK_EXPERTS):
    options: dict[str, Any] = {"attention": attention, "rope": rope, "ffn": ffn}
    return Transformer(1, 64, 4, 96, max_seq_len=128, eps=1e-6, **options)


def test_equals_deepseek_v2():
    theirs = their_model("deepseek_v2", topk_method="greedy", **DEEPSEEK)
    experts = partial(DEEPSEEK_EXPERTS, is_softmax=True, is_normalized=False)
    rope = RotaryPositionalEmbedding(1e4, 8, 128)
    ours = our_latent_model(LATENT_ATTENTION, rope, experts)
    require_same_model(ours, theirs, LATENT_NAMES, split_experts)


def test_equals_deepseek_v3():
    """Its scores are multiplied by the square of 0.1 * mscale * ln(40) + 1."""
    yarn = {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}
    theirs = their_model("deepseek_v3", rope_parameters=yarn, **DEEPSEEK)
    rope = yarn_rope(mscale=0.1 * 0.707 * math.log(40) + 1)
    ours = our_latent_model(LATENT_ATTENTION, rope)
    require_same_model(ours, theirs, LATENT_NAMES, split_experts)


def test_equals_deepseek_v32():
    """Its indexer pairs other components, and its scores are not multiplied."""
    yarn = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
    theirs = their_model("deepseek_v32", rope_parameters=yarn, **DEEPSEEK)
    ours = our_latent_model(SPARSE_ATTENTION, yarn_rope())
    ours.layers[0].attn.indexer.rope = yarn_rope(YarnHalves)
    require_same_model(ours, theirs, DEEPSEEK_NAMES, split_experts)


# --- The gated delta rule -----------------------------------------------------------------

LINEAR_SIZES = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
OUR_SIZES: dict[str, Any] = {"d_head": 16, "d_key": 8, "num_key_heads": 2}
DELTA_NAMES = {
    "linear_attn": "attn",
    "conv1d": "conv",
    "dt_bias": "decay.bias",
    "A_log": "decay.log_speed",
}


def split_qwen3_next(state):
    """Its projections join the rows of several of ours, for each head."""
    name = "layers.1.attn.q_proj.weight"
    split = "(heads part d) x -> part (heads d) x"
    state[name], state["layers.1.attn.gate_proj.weight"] = rearrange(
        state[name], split, part=2, d=16
    )
    name = "layers.0.attn."
    for joined, parts, rows in (
        (
            "in_proj_qkvz",
            ("q_proj", "k_proj", "v_proj", "gate_proj"),
            [8, 8, 32, 32],
        ),
        ("in_proj_ba", ("rate_proj", "decay.proj"), [2, 2]),
    ):
        weight = state.pop(f"{name}{joined}.weight").unflatten(0, (2, -1))
        for part, own in zip(parts, weight.split(rows, 1), strict=True):
            state[f"{name}{part}.weight"] = own.flatten(0, 1)


def test_equals_qwen3_next():
    theirs = their_model(
        "qwen3_next",
        2,
        num_experts=0,
        rope_parameters={**CONFIG["rope_parameters"], "partial_rotary_factor": 0.5},
        layer_types=["linear_attention", "full_attention"],
        **LINEAR_SIZES,
    )
    ours = our_model(
        2,
        rope=PartialRope(Halves(1e4, 8, 128)),
        attention=GatedAttention,
        qk_norm=True,
    )
    ours.layers[0].attn = GatedDeltaNet(64, 4, **OUR_SIZES)
    require_same_model(
        ours,
        theirs,
        {**DELTA_NAMES, "out_proj": "output_proj"},
        split_qwen3_next,
        centered=r"layernorm|[qk]_norm|^norm",
        is_padded=False,
    )


def test_equals_olmo_hybrid():
    """Compare layers with the delta rule: the others have norms of their own."""
    theirs = their_model(
        "olmo_hybrid",
        2,
        layer_types=["linear_attention", "full_attention"],
        **LINEAR_SIZES,
    )
    theirs.layers = theirs.layers[:1]
    ours = our_model()
    ours.layers[0].attn = GatedDeltaNet(64, 4, max_rate=2.0, eps=1e-5, **OUR_SIZES)
    names = {
        **DELTA_NAMES,
        "a_proj": "decay.proj",
        "b_proj": "rate_proj",
        "g_proj": "gate_proj",
        "o_norm": "norm",
    }
    require_same_model(ours, theirs, names, is_padded=False)


# --- Experts and blocks -------------------------------------------------------------------


def test_equals_mixtral():
    options = {**EXPERTS, "num_experts_per_tok": 2}  # the default of ours
    theirs = their_model("mixtral", sliding_window=None, **options)
    experts = partial(MixtureOfExperts, is_softmax=True, has_shared_expert=False)
    require_same_model(our_model(ffn=experts), theirs, convert=split_experts)


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
    require_same_model(ours, theirs, names, centered="norm")


def test_equals_cohere():
    theirs = their_model("cohere", layer_norm_eps=1e-6)
    norm = partial(nn.LayerNorm, bias=False)
    rope = RotaryPositionalEmbedding(1e4, 16, 128)
    ours = our_model(block=ParallelBlock, norm=norm, rope=rope)
    require_same_model(ours, theirs)
