"""One layer of each other project, with the weights of a Block.

Each function imports its project, configures a layer like the Block, and maps each
parameter to the weights of the Block that it consists of. It also makes the project's
tables of cosines and sines, in the dtype that its models use. Models compute these
tables once for all layers, so they are not timed.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from .own import Peer, import_as, weights_of

LLAMA = "transformers.models.llama.modeling_llama"


def transformers(block: Any, modeling: ModuleType | None = None) -> Peer:
    """Take Hugging Face's LlamaDecoderLayer from its module, or from a changed copy."""
    llama: Any = modeling or import_module(LLAMA)
    config = llama.LlamaConfig(
        hidden_size=block.d_model,
        intermediate_size=block.ffn.d_ff,
        num_attention_heads=block.attn.num_heads,
        num_key_value_heads=block.attn.num_kv_heads,
        head_dim=block.attn.d_head,
        rope_theta=block.attn.rope.theta,
        rms_norm_eps=block.ln1.eps,
        attn_implementation="sdpa",
    )
    names = {
        "self_attn.q_proj.weight": ["q"],
        "self_attn.k_proj.weight": ["k"],
        "self_attn.v_proj.weight": ["v"],
        "self_attn.o_proj.weight": ["o"],
        "input_layernorm.weight": ["ln1"],
        "post_attention_layernorm.weight": ["ln2"],
        "mlp.gate_proj.weight": ["w1"],
        "mlp.up_proj.weight": ["w3"],
        "mlp.down_proj.weight": ["w2"],
    }
    weights = in_halves(block)
    layer = load(llama.LlamaDecoderLayer(config, layer_idx=0), weights, names)
    x = weights["q"]
    positions = torch.arange(block.attn.rope.max_seq_len, device=x.device)
    tables = llama.LlamaRotaryEmbedding(config).to(x.device)(x, positions[None])
    layers = {
        "RMSNorm": layer.input_layernorm,
        "SwiGLU": layer.mlp,
        "attention": lambda x: layer.self_attn(x, tables, attention_mask=None),
        "Block": lambda x: layer(x, position_embeddings=tables),
    }
    return Peer(list(layer.parameters()), layers)


def liger(block: Any) -> Peer:
    """Put Liger's kernels into a copy of Hugging Face's module, which is itself a peer."""
    source = Path(str(import_module(LLAMA).__file__))
    # In the package of the original, because it imports from there.
    patched: Any = import_as(f"{LLAMA}_with_liger", source)
    kernels = "liger_kernel.transformers"
    patched.LlamaRMSNorm = import_module(f"{kernels}.rms_norm").LigerRMSNorm
    patched.LlamaMLP = import_module(f"{kernels}.swiglu").LigerSwiGLUMLP
    patched.apply_rotary_pos_emb = import_module(f"{kernels}.rope").liger_rotary_pos_emb
    return transformers(block, patched)


def litgpt(block: Any) -> Peer:
    model: Any = import_module("litgpt.model")
    rope = block.attn.rope
    config = model.Config(
        n_head=block.attn.num_heads,
        n_query_groups=block.attn.num_kv_heads,
        head_size=block.attn.d_head,
        n_embd=block.d_model,
        intermediate_size=block.ffn.d_ff,
        block_size=rope.max_seq_len,
        norm_class_name="RMSNorm",
        norm_eps=block.ln1.eps,
        mlp_class_name="LLaMAMLP",
        bias=False,
        parallel_residual=False,
        rotary_percentage=1.0,
    )
    names = {
        "attn.qkv.weight": ["q", "k", "v"],
        "attn.proj.weight": ["o"],
        "norm_1.weight": ["ln1"],
        "norm_2.weight": ["ln2"],
        "mlp.fc_1.weight": ["w1"],
        "mlp.fc_2.weight": ["w3"],
        "mlp.proj.weight": ["w2"],
    }
    weights = in_halves(block)
    layer = load(model.Block(config, block_idx=0), weights, names)
    tables = model.build_rope_cache(rope.max_seq_len, rope.d_k, base=rope.theta)
    # Its models keep the table in their dtype.
    cos, sin = (table[None].to(weights["q"]) for table in tables)
    layers = {
        "RMSNorm": layer.norm_1,
        "SwiGLU": layer.mlp,
        "attention": lambda x: layer.attn(x, cos, sin),
        "Block": lambda x: layer(x, cos, sin),
    }
    return Peer(list(layer.parameters()), layers)


def x_transformers(block: Any) -> Peer:
    """Configure the project's Decoder as one layer. Its norm has no eps."""
    module = import_module("x_transformers.x_transformers")
    rope = block.attn.rope
    decoder = module.Decoder(
        dim=block.d_model,
        depth=1,
        heads=block.attn.num_heads,
        attn_kv_heads=block.attn.num_kv_heads,
        attn_dim_head=rope.d_k,
        attn_flash=True,
        use_rmsnorm=True,
        norm_add_unit_offset=False,
        pre_norm_has_final_norm=False,
        # x-transformers multiplies this by d_model, and rounds down.
        ff_mult=(block.ffn.d_ff + 0.5) / block.d_model,
        ff_glu=True,
        ff_swish=True,
        ff_no_bias=True,
        verbose=False,
    )
    # Layer 0 is attention and layer 1 feed-forward; each has norms (0) and a function (1).
    decoder.layers[1][1].ff[0].proj.bias = None  # ff_no_bias leaves it
    names = {
        "layers.0.1.to_q.weight": ["q"],
        "layers.0.1.to_k.weight": ["k"],
        "layers.0.1.to_v.weight": ["v"],
        "layers.0.1.to_out.weight": ["o"],
        "layers.0.0.0.g": ["ln1"],
        "layers.1.0.0.g": ["ln2"],
        "layers.1.1.ff.0.proj.weight": ["w3", "w1"],
        "layers.1.1.ff.2.weight": ["w2"],
    }
    weights = weights_of(block)
    # Neighboring query heads have different key heads; in the Block they share one.
    heads = {"kv_heads": block.attn.num_kv_heads, "d_head": rope.d_k}
    rows = "(kv_heads group d_head) d_model -> (group kv_heads d_head) d_model"
    columns = "d_model (kv_heads group d_head) -> d_model (group kv_heads d_head)"
    weights["q"] = rearrange(weights["q"], rows, **heads)
    weights["o"] = rearrange(weights["o"], columns, **heads)
    decoder = load(decoder, weights, names)
    # Outside of the module, which would round its frequencies to half precision.
    with weights["q"].device:
        embedding = module.RotaryEmbedding(rope.d_k, base=rope.theta)
        angles = embedding.forward_from_seq_len(rope.max_seq_len)
    (norms, attention, _), (_, ffn, _) = decoder.layers
    layers = {
        "RMSNorm": norms[0],
        "SwiGLU": ffn,
        "attention": lambda x: attention(x, rotary_pos_emb=angles),
        "Block": lambda x: decoder(x, rotary_pos_emb=angles),
    }
    return Peer(list(decoder.parameters()), layers)


def load(
    module: Any, weights: Mapping[str, Tensor], names: Mapping[str, list[str]]
) -> Any:
    """Load weights into a module, in their dtype and on their device.

    `names` maps each parameter of the module to the weights that it stacks by rows.
    """
    state = {}
    for parameter, parts in names.items():
        state[parameter] = torch.cat([weights[part] for part in parts])
    module = module.to(weights["q"])
    module.load_state_dict(state)
    return module


def in_halves(block: Any) -> dict[str, Tensor]:
    """Return weights for a layer that rotates x[k] with x[k + d_head/2].

    The Block rotates (x0, x1), (x2, x3), ... The rows of q and k are reordered in the
    same way within each head. Scores do not change, because they are sums over rows.
    """
    order = "(heads half pair) d_model -> (heads pair half) d_model"
    weights = weights_of(block)
    for name in ("q", "k"):
        half = block.attn.d_head // 2
        weights[name] = rearrange(weights[name], order, half=half, pair=2)
    return weights


# Keyed by package.
PROJECTS: dict[str, Callable[[Any], Peer]] = {
    "transformers": transformers,
    "liger-kernel": liger,
    "litgpt": litgpt,
    "x-transformers": x_transformers,
}


def installed(makers: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return what can run here."""
    return {
        project: make
        for project, make in makers.items()
        if not why_left_out(project, device)
    }


def print_left_out(projects: Iterable[str], device: torch.device) -> None:
    """Name the projects that cannot run here, on stderr."""
    for project in projects:
        reason = why_left_out(project, device)
        if reason:
            print(f"{project} is left out: {reason}", file=sys.stderr)


def why_left_out(project: str, device: torch.device) -> str:
    """Return why a project cannot run here, or "" if it can."""
    if project == "liger-kernel" and device.type != "cuda":
        return "it requires CUDA"
    return "" if is_installed(project) else "it is not installed"


def versions(projects: Iterable[str]) -> str:
    """Name the projects that are installed, with their versions."""
    listed = []
    for project in projects:
        if is_installed(project):
            listed.append(f"{project} {version(project)}")
    return ", ".join(listed) or "no other project is installed"


def is_installed(project: str) -> bool:
    return find_spec(project.replace("-", "_")) is not None
