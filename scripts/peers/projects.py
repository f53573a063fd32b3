"""The layers of other projects, with the weights of a Block. Each builder imports its own, and all are optional.

A builder configures a layer, names the weights of the Block that each parameter of the layer consists of, and makes the
project's own tables of cosines and sines, in the dtype that its models use.
"""

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from einops import rearrange
from lab.sizes import Size
from torch import Tensor, nn

from tinyblock import Block

from .candidates import (
    OWN,
    Candidate,
    Layer,
    Peer,
    Unavailable,
    import_as,
    weights_of,
)

LLAMA = "transformers.models.llama.modeling_llama"
QWEN3 = "transformers.models.qwen3.modeling_qwen3"


def in_halves(weights: Mapping[str, Tensor], d_head: int) -> dict[str, Tensor]:
    """Return weights for a layer that rotates x[k] with x[k + d_head/2], as those of Hugging Face and litgpt do.

    The Block rotates (x0, x1), (x2, x3), ... The rows of q and k, and the gains of their norms, are reordered in the
    same way within each head. This changes no score, because a score is a sum over them.
    """
    order = "(heads half pair) ... -> (heads pair half) ..."
    reordered = dict(weights)
    for name in ("q", "k", "q_norm", "k_norm"):
        if name in weights:
            reordered[name] = rearrange(weights[name], order, half=d_head // 2, pair=2)
    return reordered


def _load(module: Any, weights: Mapping[str, Tensor], names: Mapping[str, str]) -> Any:
    """Move a module to the device and dtype of the weights, load them, and return the module.

    `names` maps each parameter of the module to the weights that it consists of, one below the other: "q k v".
    """
    module = module.to(device=weights["q"].device, dtype=weights["q"].dtype)
    state = {}
    for parameter, parts in names.items():
        state[parameter] = torch.cat([weights[part] for part in parts.split()])
    module.load_state_dict(state)
    return module


def _reject_qk_norm(size: Size, layer: str) -> None:
    if size.qk_norm:
        raise Unavailable(f"{layer} has no such q/k norm")


def _hugging_face_config(modeling: Any, family: str, size: Size) -> Any:
    config_class = getattr(modeling, f"{family}Config")
    return config_class(
        hidden_size=size.d_model,
        intermediate_size=size.d_ff,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        head_dim=size.d_head,
        rope_theta=size.theta,
        rms_norm_eps=size.eps,
        attn_implementation="sdpa",
    )


def _hugging_face_names(size: Size) -> dict[str, str]:
    names = {
        "self_attn.q_proj.weight": "q",
        "self_attn.k_proj.weight": "k",
        "self_attn.v_proj.weight": "v",
        "self_attn.o_proj.weight": "o",
        "input_layernorm.weight": "ln1",
        "post_attention_layernorm.weight": "ln2",
        "mlp.gate_proj.weight": "w1",
        "mlp.up_proj.weight": "w3",
        "mlp.down_proj.weight": "w2",
    }
    if size.qk_norm:
        names["self_attn.q_norm.weight"] = "q_norm"
        names["self_attn.k_norm.weight"] = "k_norm"
    return names


def hugging_face_layer(
    block: Block, size: Size, patched: ModuleType | None = None
) -> Candidate:
    """Return the decoder layer of transformers' Llama, or of its Qwen3 for a q/k norm.

    `patched` is a changed copy of the module of that family.
    """
    family, name = ("Qwen3", QWEN3) if size.qk_norm else ("Llama", LLAMA)
    modeling: Any = patched or import_module(name)
    config = _hugging_face_config(modeling, family, size)
    weights = in_halves(weights_of(block), size.d_head)
    layer = getattr(modeling, f"{family}DecoderLayer")(config, layer_idx=0)
    layer = _load(layer, weights, _hugging_face_names(size))
    device = weights["q"].device
    rope = getattr(modeling, f"{family}RotaryEmbedding")(config).to(device)
    tables = rope(weights["q"], torch.arange(size.seq_len, device=device)[None])
    attention = partial(layer.self_attn, attention_mask=None)
    return Candidate.of(
        layer, layer.input_layernorm, layer.mlp, attention, position_embeddings=tables
    )


def _build_liger(block: Block, size: Size) -> Candidate:
    """Patch a private copy of the Llama module: Liger's own patch would also change the plain peer."""
    _reject_qk_norm(size, "the Llama layer that Liger-Kernel patches here")
    # In the package of the original, because it imports from there.
    source = Path(str(import_module(LLAMA).__file__))
    patched: Any = import_as(f"{LLAMA}_of_liger", source)
    liger = "liger_kernel.transformers"
    patched.LlamaRMSNorm = import_module(f"{liger}.rms_norm").LigerRMSNorm
    patched.LlamaMLP = import_module(f"{liger}.swiglu").LigerSwiGLUMLP
    patched.apply_rotary_pos_emb = import_module(f"{liger}.rope").liger_rotary_pos_emb
    return hugging_face_layer(block, size, patched)


def _build_litgpt(block: Block, size: Size) -> Candidate:
    litgpt = import_module("litgpt.model")
    config = litgpt.Config(
        n_head=size.num_heads,
        n_query_groups=size.num_kv_heads,
        head_size=size.d_head,
        n_embd=size.d_model,
        intermediate_size=size.d_ff,
        block_size=size.seq_len,
        norm_class_name="RMSNorm",
        norm_eps=size.eps,
        norm_qk=size.qk_norm,
        mlp_class_name="LLaMAMLP",
        bias=False,
        parallel_residual=False,
        rotary_percentage=1.0,
    )
    names = {
        "attn.qkv.weight": "q k v",
        "attn.proj.weight": "o",
        "norm_1.weight": "ln1",
        "norm_2.weight": "ln2",
        "mlp.fc_1.weight": "w1",
        "mlp.fc_2.weight": "w3",
        "mlp.proj.weight": "w2",
    }
    if size.qk_norm:
        names["attn.norm_q.weight"] = "q_norm"
        names["attn.norm_k.weight"] = "k_norm"
    # litgpt rotates the first half of a head with the second, not consecutive pairs.
    weights = in_halves(weights_of(block), size.d_head)
    layer = _load(litgpt.Block(config, block_idx=0), weights, names)
    device = weights["q"].device
    dtype = weights["q"].dtype
    cos, sin = litgpt.build_rope_cache(
        size.seq_len, size.d_head, device=device, base=size.theta
    )
    cos = cos[None].to(dtype)
    sin = sin[None].to(dtype)
    return Candidate.of(layer, layer.norm_1, layer.mlp, layer.attn, cos=cos, sin=sin)


def _in_groups(weights: Mapping[str, Tensor], size: Size) -> dict[str, Tensor]:
    """Return weights whose query heads are reordered for x-transformers.

    There, neighboring query heads have different key heads; in the Block they share one.
    """
    heads = {"kv_heads": size.num_kv_heads, "d_head": size.d_head}
    rows = "(kv_heads group d_head) d_model -> (group kv_heads d_head) d_model"
    columns = "d_model (kv_heads group d_head) -> d_model (group kv_heads d_head)"
    reordered = dict(weights)
    reordered["q"] = rearrange(weights["q"], rows, **heads)
    reordered["o"] = rearrange(weights["o"], columns, **heads)
    return reordered


def _build_x_transformers(block: Block, size: Size) -> Candidate:
    """Configure x-transformers' Decoder as one such layer; its RMSNorm has no eps, and its gate loses its bias."""
    _reject_qk_norm(size, "x-transformers' Decoder")
    decoder = import_module("x_transformers").Decoder(
        dim=size.d_model,
        depth=1,
        heads=size.num_heads,
        attn_kv_heads=size.num_kv_heads,
        attn_dim_head=size.d_head,
        attn_flash=True,
        use_rmsnorm=True,
        norm_add_unit_offset=False,
        pre_norm_has_final_norm=False,
        # x-transformers multiplies this by d_model, and rounds down.
        ff_mult=(size.d_ff + 0.5) / size.d_model,
        ff_glu=True,
        ff_swish=True,
        ff_no_bias=True,
        verbose=False,
    )
    # Layer 0 is attention and layer 1 the feed-forward layer; each has its norms (0) and its function (1).
    decoder.layers[1][1].ff[0].proj.bias = None  # ff_no_bias leaves it
    names = {
        "layers.0.1.to_q.weight": "q",
        "layers.0.1.to_k.weight": "k",
        "layers.0.1.to_v.weight": "v",
        "layers.0.1.to_out.weight": "o",
        "layers.0.0.0.g": "ln1",
        "layers.1.0.0.g": "ln2",
        "layers.1.1.ff.0.proj.weight": "w3 w1",
        "layers.1.1.ff.2.weight": "w2",
    }
    weights = _in_groups(weights_of(block), size)
    decoder = _load(decoder, weights, names)
    (norms, attention, _), (_, ffn, _) = decoder.layers
    rotation = _x_transformers_angles(size, weights["q"].device)
    return Candidate.of(decoder, norms[0], ffn, attention, rotary_pos_emb=rotation)


def _x_transformers_angles(size: Size, device: torch.device) -> Any:
    """Return the angles in float32: those of a module in half precision would round the positions."""
    module = import_module("x_transformers.x_transformers")
    with torch.device(device):
        embedding = module.RotaryEmbedding(size.d_head, base=size.theta)
        return embedding.forward_from_seq_len(size.seq_len)


def _build_torchtune(block: Block, size: Size) -> Candidate:
    """Take the layer of torchtune's Llama 3, whose head size is d_model / num_heads, as in all cases."""
    _reject_qk_norm(size, "torchtune's Llama 3")
    model = import_module("torchtune.models.llama3").llama3(
        vocab_size=1,
        num_layers=1,
        num_heads=size.num_heads,
        num_kv_heads=size.num_kv_heads,
        embed_dim=size.d_model,
        max_seq_len=size.seq_len,
        intermediate_dim=size.d_ff,
        rope_base=size.theta,
        norm_eps=size.eps,
    )
    names = {
        "attn.q_proj.weight": "q",
        "attn.k_proj.weight": "k",
        "attn.v_proj.weight": "v",
        "attn.output_proj.weight": "o",
        "mlp.w1.weight": "w1",
        "mlp.w2.weight": "w2",
        "mlp.w3.weight": "w3",
        "sa_norm.scale": "ln1",
        "mlp_norm.scale": "ln2",
    }
    layer = _load(model.layers[0], weights_of(block), names)
    with torch.device(next(block.parameters()).device):
        # _load has cast its table: compute it again in float32, as in torchtune's models.
        layer.attn.pos_embeddings.rope_init()

    def self_attention(x: Tensor) -> Tensor:
        # The first argument gives the queries, the second the keys and values.
        return layer.attn(x, x)

    return Candidate.of(layer, layer.sa_norm, layer.mlp, self_attention)


def build_torch(block: Block, size: Size) -> Candidate:
    """Take torch's own norm and attention; it has no gated feed-forward layer and no RoPE."""
    norm = nn.RMSNorm(size.d_model, size.eps)
    attention = nn.MultiheadAttention(
        size.d_model, size.num_heads, bias=False, batch_first=True
    )
    names = {"0.weight": "ln1", "1.in_proj_weight": "q k v", "1.out_proj.weight": "o"}
    layers = _load(nn.Sequential(norm, attention), weights_of(block), names)
    mask = nn.Transformer.generate_square_subsequent_mask(size.seq_len).to(norm.weight)

    def causal(x: Tensor) -> Any:
        return attention(x, x, x, need_weights=False, attn_mask=mask, is_causal=True)

    parts: dict[str, Layer] = {"RMSNorm": norm, "attention without RoPE": causal}
    return Candidate(norm, [*layers.parameters()], parts=parts)


PEERS: Mapping[str, Peer] = {
    **OWN,
    "transformers": Peer(
        hugging_face_layer, "Hugging Face decoder layer", "transformers"
    ),
    "liger": Peer(
        _build_liger, "Liger-Kernel's LlamaDecoderLayer", "liger-kernel", cuda_only=True
    ),
    "litgpt": Peer(_build_litgpt, "litgpt Block", "litgpt"),
    "torchtune": Peer(
        _build_torchtune, "torchtune TransformerSelfAttentionLayer", "torchtune"
    ),
    "x-transformers": Peer(
        _build_x_transformers, "x-transformers Decoder of depth 1", "x-transformers"
    ),
}
