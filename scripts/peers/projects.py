"""The layers of other projects, with the weights of a Block. Each builder imports its own, and all are optional.

A builder configures a layer, declares which weights of the Block each of its parameters has, and makes the project's
own tables of cosines and sines, in the dtype that its models use.
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

from .candidates import OWN, Candidate, Peer, import_as, weights_of

LLAMA = "transformers.models.llama.modeling_llama"


def in_halves(weights: dict[str, Tensor], d_head: int) -> dict[str, Tensor]:
    """Return weights for a layer that rotates x[k] with x[k + d_head/2], as those of Hugging Face and litgpt do.

    The Block rotates (x0, x1), (x2, x3), ... The rows of q and k are reordered alike within each head, which changes no
    score, because a score is a sum over them.
    """
    order = "(heads half pair) d_model -> (heads pair half) d_model"
    return weights | {
        name: rearrange(weights[name], order, half=d_head // 2, pair=2) for name in "qk"
    }


def _load(module: Any, weights: Mapping[str, Tensor], names: Mapping[str, str]) -> Any:
    """Move a module to the device and dtype of the weights, load them, and return the module.

    `names` maps each parameter of the module to the weights that it consists of, one below the other.
    """
    module = module.to(device=weights["q"].device, dtype=weights["q"].dtype)
    state = {
        name: torch.cat([weights[part] for part in parts.split()])
        for name, parts in names.items()
    }
    module.load_state_dict(state)
    return module


def hugging_face_layer(
    block: Block, size: Size, patched: ModuleType | None = None
) -> Candidate:
    """Return the decoder layer of transformers' Llama module, or of a patched copy of it."""
    modeling = patched or import_module(LLAMA)
    config = modeling.LlamaConfig(
        hidden_size=size.d_model,
        intermediate_size=size.d_ff,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        head_dim=size.d_head,
        rope_theta=size.theta,
        rms_norm_eps=size.eps,
        attn_implementation="sdpa",
    )
    names = {f"self_attn.{name}_proj.weight": name for name in "qkvo"}
    names |= {"input_layernorm.weight": "ln1", "post_attention_layernorm.weight": "ln2"}
    names |= {
        "mlp.gate_proj.weight": "w1",
        "mlp.up_proj.weight": "w3",
        "mlp.down_proj.weight": "w2",
    }
    weights = in_halves(weights_of(block), size.d_head)
    layer = _load(modeling.LlamaDecoderLayer(config, layer_idx=0), weights, names)
    positions = torch.arange(size.seq_len, device=weights["q"].device)
    tables = modeling.LlamaRotaryEmbedding(config).to(positions.device)(
        weights["q"], positions[None]
    )
    attention = partial(layer.self_attn, attention_mask=None)
    return Candidate.of(
        layer, layer.input_layernorm, layer.mlp, attention, position_embeddings=tables
    )


def _build_liger(block: Block, size: Size) -> Candidate:
    """Patch a private copy of the Llama module: Liger's own patch would also change the plain peer."""
    patched = import_as(
        f"{LLAMA}_of_liger", Path(str(import_module(LLAMA).__file__))
    )  # in the package it imports from
    vars(patched).update(
        LlamaRMSNorm=import_module("liger_kernel.transformers.rms_norm").LigerRMSNorm,
        LlamaMLP=import_module("liger_kernel.transformers.swiglu").LigerSwiGLUMLP,
        apply_rotary_pos_emb=import_module(
            "liger_kernel.transformers.rope"
        ).liger_rotary_pos_emb,
    )
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
    }
    names |= {"mlp.fc_1.weight": "w1", "mlp.fc_2.weight": "w3", "mlp.proj.weight": "w2"}
    weights = in_halves(weights_of(block), size.d_head)
    layer = _load(litgpt.Block(config, block_idx=0), weights, names)
    tables = litgpt.build_rope_cache(
        size.seq_len, size.d_head, device=weights["q"].device, base=size.theta
    )
    cos, sin = (table[None].to(weights["q"].dtype) for table in tables)
    return Candidate.of(layer, layer.norm_1, layer.mlp, layer.attn, cos=cos, sin=sin)


def _build_x_transformers(block: Block, size: Size) -> Candidate:
    """Configure x-transformers' Decoder to one such layer; its RMSNorm has no eps, and the bias of its gate is removed.

    Consecutive heads of a query share no key head there, so the heads of q and o are reordered.
    """
    weights, heads = (
        weights_of(block),
        {"kv_heads": size.num_kv_heads, "d_head": size.d_head},
    )
    weights |= {
        "q": rearrange(
            weights["q"],
            "(kv_heads group d_head) d_model -> (group kv_heads d_head) d_model",
            **heads,
        ),
        "o": rearrange(
            weights["o"],
            "d_model (kv_heads group d_head) -> d_model (group kv_heads d_head)",
            **heads,
        ),
    }
    names = {f"layers.0.1.to_{name}.weight": name for name in "qkv"} | {
        "layers.0.1.to_out.weight": "o"
    }
    names |= {"layers.0.0.0.g": "ln1", "layers.1.0.0.g": "ln2"}
    names |= {"layers.1.1.ff.0.proj.weight": "w3 w1", "layers.1.1.ff.2.weight": "w2"}
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
        ff_mult=(size.d_ff + 0.5)
        / size.d_model,  # which x-transformers multiplies and rounds down
        ff_glu=True,
        ff_swish=True,
        ff_no_bias=True,
        verbose=False,
    )
    decoder.layers[1][1].ff[0].proj.bias = None
    decoder = _load(decoder, weights, names)
    # Angles are an argument: its own, in half precision, would round positions.
    with torch.device(weights["q"].device):
        angles = import_module("x_transformers.x_transformers").RotaryEmbedding(
            size.d_head, base=size.theta
        )
        rotation = angles.forward_from_seq_len(size.seq_len)
    (norms, attention, _), (_, ffn, _) = decoder.layers
    return Candidate.of(decoder, norms[0], ffn, attention, rotary_pos_emb=rotation)


def _build_torchtune(block: Block, size: Size) -> Candidate:
    """Take the layer of torchtune's Llama 3, whose head size is d_model / num_heads, as in all cases."""
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
    names = {f"attn.{name}_proj.weight": name for name in "qkv"} | {
        "attn.output_proj.weight": "o"
    }
    names |= {f"mlp.{name}.weight": name for name in ("w1", "w2", "w3")}
    names |= {"sa_norm.scale": "ln1", "mlp_norm.scale": "ln2"}
    layer = _load(model.layers[0], weights_of(block), names)
    with torch.device(next(block.parameters()).device):
        layer.attn.pos_embeddings.rope_init()  # recompute its table in float32, as in torchtune's models
    return Candidate.of(layer, layer.sa_norm, layer.mlp, lambda x: layer.attn(x, x))


def build_torch(block: Block, size: Size) -> Candidate:
    """Take torch's own norm and attention; it has no gated feed-forward layer and no RoPE."""
    norm = nn.RMSNorm(size.d_model, size.eps)
    attention = nn.MultiheadAttention(
        size.d_model, size.num_heads, bias=False, batch_first=True
    )
    names = {"0.weight": "ln1", "1.in_proj_weight": "q k v", "1.out_proj.weight": "o"}
    layers = _load(nn.Sequential(norm, attention), weights_of(block), names)
    mask = nn.Transformer.generate_square_subsequent_mask(size.seq_len).to(norm.weight)
    causal = partial(attention, need_weights=False, attn_mask=mask, is_causal=True)
    parts: dict[str, Any] = {
        "RMSNorm": norm,
        "attention without RoPE": lambda x: causal(x, x, x),
    }
    return Candidate(norm, [*layers.parameters()], parts=parts)


PEERS: Mapping[str, Peer] = {
    **OWN,
    "transformers": Peer(
        hugging_face_layer, "Hugging Face LlamaDecoderLayer", "transformers"
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
