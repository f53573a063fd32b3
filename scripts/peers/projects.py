"""The layers of other projects, with the weights of a Block. Each builder imports its own, and all are optional.

The Block rotates consecutive pairs, (x0, x1), (x2, x3), ...; Hugging Face, Liger and litgpt pair x[k] with
x[k + d_head/2]. Attention is the same if the rows of q and k are permuted alike within each head, because a score is
a sum over them. Each project makes its own tables of cosines and sines, in the dtype that its models use.
"""

from collections.abc import Callable, Mapping
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

from . import candidates
from .candidates import Candidate, Peer, import_as, weights_of

_LLAMA = "transformers.models.llama.modeling_llama"


def _build_hugging_face(block: Block, size: Size) -> Candidate:
    return hugging_face_layer(import_module(_LLAMA), block, size)


def _build_liger(block: Block, size: Size) -> Candidate:
    """Patch a private copy of the Llama module: Liger's own patch would also change the plain peer."""
    patched = import_private_copy(_LLAMA)
    vars(patched).update(
        LlamaRMSNorm=import_module("liger_kernel.transformers.rms_norm").LigerRMSNorm,
        LlamaMLP=import_module("liger_kernel.transformers.swiglu").LigerSwiGLUMLP,
        apply_rotary_pos_emb=import_module("liger_kernel.transformers.rope").liger_rotary_pos_emb,
    )
    return hugging_face_layer(patched, block, size)


def import_private_copy(name: str) -> ModuleType:
    """Import a module a second time, so that a patch does not change the first."""
    return import_as(f"{name}_private_copy", Path(str(import_module(name).__file__)))


def hugging_face_layer(modeling: ModuleType, block: Block, size: Size) -> Candidate:
    """Return the decoder layer of transformers' Llama module, or of a patched copy of it."""
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
    names = {"ffn.w1": "mlp.gate_proj", "ffn.w2": "mlp.down_proj", "ffn.w3": "mlp.up_proj", "ln1": "input_layernorm"}
    names |= {"ln2": "post_attention_layernorm", "attn.output_proj": "self_attn.o_proj", "attn": "self_attn"}
    state = _renamed(block, names)
    for name in ("self_attn.q_proj.weight", "self_attn.k_proj.weight"):
        state[name] = split_halves(state[name], size.d_head)
    layer = _load(lambda: modeling.LlamaDecoderLayer(config, layer_idx=0), state)
    x = next(block.parameters())
    tables = modeling.LlamaRotaryEmbedding(config).to(x.device)(x, torch.arange(size.seq_len, device=x.device)[None])
    attention = partial(layer.self_attn, position_embeddings=tables, attention_mask=None)
    parts = {"norm": layer.input_layernorm, "ffn": layer.mlp, "attention": attention}
    return Candidate.of(layer, parts, position_embeddings=tables)


def _build_litgpt(block: Block, size: Size) -> Candidate:
    litgpt, weights = import_module("litgpt.model"), weights_of(block)
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
    q, k = (split_halves(weights[name], size.d_head) for name in "qk")
    layer = _load(
        lambda: litgpt.Block(config, block_idx=0),
        {
            "attn.qkv.weight": torch.cat((q, k, weights["v"])),
            "attn.proj.weight": weights["o"],
            "mlp.fc_1.weight": weights["w1"],
            "mlp.fc_2.weight": weights["w3"],
            "mlp.proj.weight": weights["w2"],
            "norm_1.weight": weights["ln1"],
            "norm_2.weight": weights["ln2"],
        },
    )
    tables = litgpt.build_rope_cache(size.seq_len, size.d_head, device=q.device, base=size.theta)
    cos, sin = (table[None].to(q.dtype) for table in tables)
    parts = {"norm": layer.norm_1, "ffn": layer.mlp, "attention": partial(layer.attn, cos=cos, sin=sin)}
    return Candidate.of(layer, parts, cos=cos, sin=sin)


def _build_x_transformers(block: Block, size: Size) -> Candidate:
    """Configure x-transformers' Decoder to one such layer; its RMSNorm has no eps, and the bias of its gate is removed.

    Its query head h reads key head h % kv_heads, and ours h // group, so the heads of q and o are reordered.
    """
    weights, heads = weights_of(block), {"kv_heads": size.num_kv_heads, "d_head": size.d_head}
    q = rearrange(weights["q"], "(kv_heads group d_head) d_model -> (group kv_heads d_head) d_model", **heads)
    o = rearrange(weights["o"], "d_model (kv_heads group d_head) -> d_model (group kv_heads d_head)", **heads)

    def make() -> nn.Module:
        layers = import_module("x_transformers").Decoder(
            dim=size.d_model,
            depth=1,
            heads=size.num_heads,
            attn_kv_heads=size.num_kv_heads,
            attn_dim_head=size.d_head,
            attn_flash=True,
            use_rmsnorm=True,
            norm_add_unit_offset=False,
            pre_norm_has_final_norm=False,
            rotary_pos_emb=True,
            rotary_emb_dim=size.d_head,
            ff_mult=(size.d_ff + 0.5) / size.d_model,  # which x-transformers multiplies and rounds down
            ff_glu=True,
            ff_swish=True,
            ff_no_bias=True,
            verbose=False,
        )
        layers.rotary_pos_emb = None  # angles are an argument: its own, in half precision, would round positions
        layers.layers[1][1].ff[0].proj.bias = None
        return layers

    layers = _load(
        make,
        {
            "layers.0.0.0.g": weights["ln1"],
            "layers.0.1.to_q.weight": q,
            "layers.0.1.to_k.weight": weights["k"],
            "layers.0.1.to_v.weight": weights["v"],
            "layers.0.1.to_out.weight": o,
            "layers.1.0.0.g": weights["ln2"],
            "layers.1.1.ff.0.proj.weight": torch.cat((weights["w3"], weights["w1"])),
            "layers.1.1.ff.2.weight": weights["w2"],
        },
    )
    with torch.device(q.device):
        angles = import_module("x_transformers.x_transformers").RotaryEmbedding(size.d_head, base=size.theta)
        rotation = angles.forward_from_seq_len(size.seq_len)
    (norms, attention, _), (_, ffn, _) = layers.layers
    parts = {"norm": norms[0], "ffn": ffn, "attention": partial(attention, rotary_pos_emb=rotation)}
    return Candidate.of(layers, parts, rotary_pos_emb=rotation)


def _build_torchtune(block: Block, size: Size) -> Candidate:
    """Take the layer of torchtune's Llama 3, whose head size is d_model / num_heads, as in all cases."""

    def make() -> nn.Module:
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
        return model.layers[0]

    layer = _load(make, _renamed(block, {"ffn": "mlp", "ln1.weight": "sa_norm.scale", "ln2.weight": "mlp_norm.scale"}))
    with torch.device(next(block.parameters()).device):
        layer.attn.pos_embeddings.rope_init()  # recompute its table in float32, as in torchtune's models
    parts = {"norm": layer.sa_norm, "ffn": layer.mlp, "attention": lambda x: layer.attn(x, x)}
    return Candidate.of(layer, parts)


PEERS: Mapping[str, Peer] = {
    "limit": Peer(candidates.build_limit, "limit: the matrix products and SDPA", agrees=False),
    "copy": Peer(candidates.build_copy, "copy: as many bytes as the weights have", agrees=False),
    # Inductor generates no code for its complex product.
    "operations": Peer(
        candidates.build_operations, "operations: the Block's, without modules or checks", eager_only=True
    ),
    "control": Peer(candidates.build_control, "control: a second copy of the Block", takes_positions=True),
    "unchecked": Peer(candidates.build_unchecked, "unchecked: the Block without checks", takes_positions=True),
    "transformers": Peer(_build_hugging_face, "Hugging Face LlamaDecoderLayer", "transformers"),
    "liger": Peer(_build_liger, "Liger-Kernel's LlamaDecoderLayer", "liger-kernel", cuda_only=True),
    "litgpt": Peer(_build_litgpt, "litgpt Block", "litgpt"),
    "torchtune": Peer(_build_torchtune, "torchtune TransformerSelfAttentionLayer", "torchtune"),
    "x-transformers": Peer(_build_x_transformers, "x-transformers Decoder of depth 1", "x-transformers"),
}


def _renamed(block: Block, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the parameters of a Block, with the first matching prefix of each name replaced."""
    state: dict[str, Tensor] = {}
    for name, parameter in block.named_parameters():
        old = next((old for old in names if name.startswith(old)), "")
        state[names.get(old, "") + name.removeprefix(old)] = parameter
    return state


def _load(make: Callable[[], nn.Module], state: dict[str, Tensor]) -> Any:
    """Make a module on the device and in the dtype of the weights in `state`, and load all of them into it."""
    like = next(iter(state.values()))
    with torch.device(like.device):
        module = make().to(like.dtype)
    module.load_state_dict(state, strict=True)
    return module


def split_halves(weight: Tensor, d_head: int) -> Tensor:
    """Reorder the rows of each head, (x0, x1), (x2, x3), ... to x0, x2, ..., x1, x3, ..."""
    return rearrange(weight, "(heads half pair) d_model -> (heads pair half) d_model", half=d_head // 2, pair=2)
