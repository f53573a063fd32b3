"""The newest blocks compute what their models in transformers compute.

The models are tiny and have random weights. transformers computes norms and angles in
float32, so all runs in float32.
"""

from functools import partial
from typing import Any

import newest_blocks as new
import pytest
import torch
from einops import rearrange
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask

from tinyblock import FeedForward, RotaryPositionalEmbedding, Transformer

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "max_position_embeddings": 128,
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "layer_norm_eps": 1e-6,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
HALF_OF_A_HEAD = {**SIZES["rope_parameters"], "partial_rotary_factor": 0.5}
NAMES = {
    "input_layernorm": "ln1",
    "post_attention_layernorm": "ln2",
    "self_attn": "attn",
    "o_proj": "output_proj",
    "mlp.gate_proj": "ffn.w1",
    "mlp.up_proj": "ffn.w3",
    "mlp.down_proj": "ffn.w2",
}
SANDWICH = {
    "post_attention_layernorm": "post_ln1",
    "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "post_ln2",
}


class Halves(RotaryPositionalEmbedding):
    """Rotate x[k] with x[k + d_k/2], as most models in transformers do."""

    def forward(self, x, token_positions=None):
        pairs = rearrange(x, "... (pair half) -> ... (half pair)", pair=2)
        rotated = super().forward(pairs, token_positions)
        return rearrange(rotated, "... (half pair) -> ... (pair half)", pair=2)


class Backwards(Halves):
    """Rotate in the other direction, as nanochat does."""

    def frequencies(self):
        return -super().frequencies()


ROPE = Halves(10000.0, 16, 128)
PARTIAL_ROPE = new.PartialRope(Halves(10000.0, 8, 128))


class NearAttention(new.WindowAttention):
    window = 8


def their_model(kind, layers=1, **options):
    config = transformers.AutoConfig.for_model(
        kind, num_hidden_layers=layers, **SIZES | options
    )
    model = transformers.AutoModel.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    del model.embed_tokens
    return model.eval()


def our_model(layers=1, **options):
    options = {"num_kv_heads": 2, "rope": ROPE, "eps": 1e-6, **options}
    return Transformer(layers, 64, 4, 96, max_seq_len=128, **options)


def renamed(model, names, gain=0.0):
    """Return a state dict of transformers with our names. Gemma's gains are 1 + w."""
    ours = {}
    for name, weight in model.state_dict().items():
        if "norm" in name:
            weight = weight + gain
        if name == "norm.weight":
            name = "ln_final.weight"
        for their_part, our_part in {**NAMES, **names}.items():
            name = name.replace(their_part, our_part)
        ours[name] = weight
    return ours


def compare(ours, theirs):
    """Require equal results and, if torch computes them, gradients of x."""
    x = torch.randn(2, 24, 64, requires_grad=True)
    results = [ours(x), theirs(x)]
    pairs = {"result": results}
    if torch.is_grad_enabled():
        of_result = torch.randn(2, 24, 64)
        pairs["gradient"] = [
            torch.autograd.grad(result, x, of_result)[0] for result in results
        ]
    for what, (actual, expected) in pairs.items():
        error = (actual - expected).norm() / expected.norm()
        assert error < 2e-6, f"relative error of the {what}: {error:.1e}"


def require_same(ours, theirs, state, mask=None):
    """Load the weights, and compare the models, with gaps in positions and keys."""
    ours.load_state_dict(state)
    positions = 2 * torch.arange(24).expand(2, 24)
    keep = torch.ones(2, 24, dtype=torch.long)
    if mask is None:
        keep = (torch.arange(48).view(2, 24) % 5 != 3).long()
        mask = keep.bool()[:, None]

    def call_theirs(x):
        return theirs(
            inputs_embeds=x,
            position_ids=positions,
            attention_mask=keep,
            use_cache=False,
        ).last_hidden_state

    compare(lambda x: ours(x, positions, mask), call_theirs)


def require_same_attention(ours, theirs, names, window=24, **options):
    """Compare the attention of their first layer."""
    layer = theirs.layers[0].self_attn
    ours.load_state_dict(renamed(layer, names))
    angles = theirs.rotary_emb(torch.zeros(1), torch.arange(24)[None], **options)
    mask = torch.ones(24, 24).tril().triu(1 - window).log()
    compare(ours, lambda x: layer(x, angles, mask)[0])


def test_gemma_3():
    theirs = their_model(
        "gemma3_text",
        2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=8,
        rope_parameters=None,
    )
    ours = our_model(
        2,
        block=new.SandwichBlock,
        ffn=new.GeGLU,
        attention=NearAttention,
        qk_norm=True,
    )
    new.widen(ours, Halves(1e6, 16, 128), every=2)
    state = renamed(theirs, SANDWICH, gain=1.0)
    require_same(ours, theirs, state)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()  # FlexAttention has no gradient on a CPU
def test_gemma_2_with_a_cap_that_bounds_scores():
    theirs = their_model(
        "gemma2",
        layer_types=["sliding_attention"],
        sliding_window=8,
    )
    theirs.layers[0].self_attn.q_proj.weight *= 20
    ours = our_model(
        block=new.SandwichBlock,
        ffn=new.GeGLU,
        attention=new.SoftCappedAttention,
    )
    rule = new.visible(torch.zeros(2, 24), window=8)
    mask = create_block_mask(rule, 2, None, 24, 24, "cpu")
    state = renamed(theirs, SANDWICH, gain=1.0)
    require_same(ours, theirs, state, mask)


def test_olmo_2():
    theirs = their_model("olmo2")
    ours = our_model(block=new.ReorderedNormBlock, attention=new.JointNormAttention)
    names = {
        "post_attention_layernorm": "ln1",
        "post_feedforward_layernorm": "ln2",
        "q_proj": "q_proj.0",
        "k_proj": "k_proj.0",
        "q_norm": "q_proj.1",
        "k_norm": "k_proj.1",
    }
    require_same(ours, theirs, renamed(theirs, names))


def test_smollm_3():
    theirs = their_model("smollm3", 8)
    ours = our_model(8)
    new.drop_positions(ours)
    require_same(ours, theirs, renamed(theirs, {}))


def test_command_r():
    theirs = their_model("cohere")
    ours = our_model(
        rope=RotaryPositionalEmbedding(10000.0, 16, 128),
        block=new.ParallelBlock,
        norm=partial(nn.LayerNorm, bias=False),
    )
    require_same(ours, theirs, renamed(theirs, {}))


def test_phi_3_splits_its_fused_projections():
    theirs = their_model("phi3", rope_parameters=HALF_OF_A_HEAD)
    ours = our_model(rope=PARTIAL_ROPE)
    state = renamed(theirs, {})
    qkv = state.pop("layers.0.attn.qkv_proj.weight").split([64, 32, 32])
    for name, rows in zip("qkv", qkv, strict=True):
        state[f"layers.0.attn.{name}_proj.weight"] = rows
    w1, w3 = state.pop("layers.0.mlp.gate_up_proj.weight").chunk(2)
    state["layers.0.ffn.w1.weight"], state["layers.0.ffn.w3.weight"] = w1, w3
    require_same(ours, theirs, state)


def test_nanochat():
    theirs = their_model("nanochat")
    ours = our_model(
        rope=Backwards(10000.0, 16, 128),
        norm=new.norm_without_gain,
        ffn=partial(FeedForward, activation=new.relu_squared),
        qk_norm=True,
    )
    for block in ours.layers:
        block.attn.q_norm = block.attn.k_norm = new.norm_without_gain(16, 1e-6)
    # nanochat also normalizes the embeddings.
    norm = new.norm_without_gain(64, 1e-6)
    ours.register_forward_pre_hook(lambda _, x: (norm(x[0]), *x[1:]))
    require_same(
        ours,
        theirs,
        renamed(theirs, {"mlp.fc1": "ffn.w1", "mlp.fc2": "ffn.w2"}),
    )


def test_qwen_3_next():
    theirs = their_model(
        "qwen3_next",
        layer_types=["full_attention"],
        num_experts=0,
        rope_parameters=HALF_OF_A_HEAD,
    )
    ours = our_model(
        rope=PARTIAL_ROPE,
        attention=new.GatedAttention,
        qk_norm=True,
    )
    state = renamed(theirs, {}, gain=1.0)
    name = "layers.0.attn.q_proj.weight"
    split = "(heads part d) x -> part (heads d) x"
    q_and_gate = rearrange(state[name], split, part=2, d=16)
    state[name], state["layers.0.attn.gate.weight"] = q_and_gate
    require_same(ours, theirs, state)


def test_gpt_oss_attention_with_a_window():
    class Attention(NearAttention, new.SinkAttention):
        pass

    ours = Attention(64, 4, num_kv_heads=2, rope=ROPE)
    require_same_attention(ours, their_model("gpt_oss"), {}, window=8)
    ours.reset_parameters()
    assert not ours.sinks.any()


SPARSE = partial(new.SparseAttention, top_k=5, index_heads=6, index_d_head=16)


@pytest.mark.parametrize(
    ("kind", "attention"),
    [("deepseek_v3", new.LatentAttention), ("deepseek_v32", SPARSE)],
)
def test_deepseek(kind, attention):
    theirs = their_model(
        kind,
        moe_intermediate_size=96,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=0,
        q_lora_rank=40,
        kv_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        num_attention_heads=5,  # need not divide d_model, as d_head is another
        num_key_value_heads=5,
        head_dim=8,
        index_n_heads=6,
        index_head_dim=16,
        index_topk=5,
    )
    nn.init.normal_(theirs.layers[0].mlp.gate.e_score_correction_bias, std=0.5)
    ours = Transformer(
        1,
        64,
        5,
        96,
        max_seq_len=128,
        eps=1e-6,
        rope=RotaryPositionalEmbedding(10000.0, 8, 128),
        attention=partial(attention, d_head=16, q_rank=40, kv_rank=24),
        ffn=partial(new.MixtureOfExperts, num_experts=8, top_k=3, scale=2.5),
    )
    ours.layers[0].attn.index_rope = PARTIAL_ROPE
    names = {
        "q_a_proj": "q_proj.0",
        "q_a_layernorm": "q_proj.1",
        "q_b_proj": "q_proj.2",
        "kv_a_proj_with_mqa": "kv_down",
        "kv_a_layernorm": "kv_up.0",
        "kv_b_proj": "kv_up.1",
        "indexer.wq_b": "index.q",
        "indexer.wk": "index.k",
        "indexer.k_norm": "index.norm",
        "indexer.weights_proj": "index.weights",
        "mlp.gate.weight": "ffn.router.weight",
        "mlp.gate.e_score_correction_bias": "ffn.router.bias",
        "mlp.shared_experts.gate_proj": "ffn.shared.w1",
        "mlp.shared_experts.up_proj": "ffn.shared.w3",
        "mlp.shared_experts.down_proj": "ffn.shared.w2",
    }
    require_same(ours, theirs, with_experts(renamed(theirs, names), theirs))


def with_experts(state, theirs):
    """Split the joined weights of experts."""
    experts = theirs.layers[0].mlp.experts
    for expert in range(8):
        name = f"layers.0.ffn.experts.{expert}"
        w1, w3 = experts.gate_up_proj[expert].chunk(2)
        state[f"{name}.w1.weight"] = w1
        state[f"{name}.w3.weight"] = w3
        state[f"{name}.w2.weight"] = experts.down_proj[expert]
    return {name: weight for name, weight in state.items() if "mlp" not in name}


def test_qwen_3_with_experts():
    theirs = their_model(
        "qwen3_moe",
        moe_intermediate_size=96,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
    )
    experts = partial(new.MixtureOfExperts, top_k=3, softmax=True, shared=False)
    ours = our_model(qk_norm=True, ffn=experts)
    state = renamed(theirs, {"mlp.gate.weight": "ffn.router.weight"})
    state["layers.0.ffn.router.bias"] = torch.zeros(8)
    require_same(ours, theirs, with_experts(state, theirs))


def test_lfm_3_gate_per_head():
    theirs = their_model(
        "lfm3",
        layer_types=["full_attention"],
        norm_eps=1e-6,
        use_attention_gate=True,
        rope_parameters={"full_attention": SIZES["rope_parameters"]},
    )
    ours = new.GatedAttention(
        64,
        4,
        gate_per_head=True,
        num_kv_heads=2,
        rope=ROPE,
        qk_norm=True,
        eps=1e-6,
    )
    names = {"g_proj": "gate"}
    require_same_attention(ours, theirs, names, layer_type="full_attention")


def test_kimi_linear_delta_attention():
    theirs = their_model(
        "kimi_linear",
        layer_types=["linear_attention"],
        mlp_layer_types=["dense"],
        linear_head_dim=16,
        linear_num_heads=4,
        rms_norm_eps=1e-5,
    )
    layer = theirs.layers[0].self_attn
    ours = new.DeltaAttention(64, 4, d_head=16)
    names = {
        "conv1d": "conv",
        "forget_gate.f_a_proj": "speed_proj.0",
        "forget_gate.f_b_proj": "speed_proj.1",
        "forget_gate.dt_bias": "speed_proj.1.bias",
        "forget_gate.A_log": "log_decay",
        "b_proj": "rate_proj",
        "g_a_proj": "gate_proj.0",
        "g_rate_proj": "gate_proj.1",
        "o_norm": "norm",
    }
    state = renamed(layer, names)
    qkv = [state.pop(f"{name}_proj.weight") for name in "qkv"]
    state["qkv_proj.weight"] = torch.cat(qkv)
    state["log_decay"] = state["log_decay"].view(4, 1, 1)
    ours.load_state_dict(state)
    compare(ours, layer)


def test_delta_rule_of_qwen_3_5():
    qwen = transformers.models.qwen3_5.modeling_qwen3_5
    q, k, v = torch.randn(3, 2, 7, 4, 16)
    decay, rate = torch.rand(2, 2, 7, 4)
    expected, _ = qwen.torch_recurrent_gated_delta_rule(
        q, k, v, g=decay.log(), beta=rate, initial_state=None, output_final_state=False
    )
    tensors = (q / 4, k, v, decay[..., None], rate[..., None])
    actual = new.delta_rule(*(tensor.transpose(1, 2) for tensor in tensors))
    torch.testing.assert_close(actual.transpose(1, 2), expected)


def test_deepseek_v4_hyper_connections():
    """Their layers call our attention and feed-forward: only the streams are compared."""
    theirs = their_model("deepseek_v4", 3)
    ours = our_model(3, block=new.HyperBlock)
    new.open_and_close(ours)
    for layer, block in zip(theirs.layers, ours.layers, strict=True):
        layer.self_attn.forward = partial(attend, block.attn)
        layer.mlp.forward = partial(feed_forward, block.ffn)
    names = {
        "attn_hc": "attn_streams",
        "ffn_hc": "ffn_streams",
        "hc_head.hc_": "layers.2.close.",
        ".fn": ".proj.weight",
        ".base": ".proj.bias",
        ".scale": ".scales",
    }
    state = renamed(theirs, names)
    own = ours.state_dict()
    require_same(ours, theirs, {name: state.get(name, own[name]) for name in own})


def attend(attention, x, position_ids, attention_mask, **_):
    return attention(x, position_ids, attention_mask[:, 0] == 0), None


def feed_forward(ffn, x, **_):
    return ffn(x)


PARTS = (
    "Kimi Linear's delta rule",
    "LFM3's gate per head",
    "DeepSeek-V3.2's sparse attention",
    "DeepSeek-V4's hyper-connections",
)


@pytest.mark.parametrize("part", PARTS)
def test_newest_parts_compile_to_one_graph(part):
    model = new.build_models()[part]
    x = torch.randn(2, 5, 64)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), model(x))


def test_visible_is_a_window_within_a_document():
    rule = new.visible(torch.tensor([[0] * 4 + [1] * 6]), window=3)
    token = torch.arange(10)
    mask = rule(torch.tensor(0), torch.tensor(0), token[:, None], token)
    within = torch.block_diag(torch.ones(4, 4), torch.ones(6, 6))
    assert torch.equal(mask, within.tril().triu(-2) > 0)


def test_flex_attention_requires_a_block_mask():
    with pytest.raises(ValueError, match="BlockMask"):
        new.FlexAttention(64, 4)(torch.randn(2, 24, 64))


def test_main_names_each_model(capsys):
    new.main()
    assert capsys.readouterr().out.count("parameters") == 17
