"""The Block and its layers, and layers of other projects, with the same weights.

Each function takes a Block and returns a Peer, which has its own copy of the weights:
a layer that shared them would find them in the cache. The tables of cosines and sines
are made once, in the dtype that the project's models use, as for all layers of a model.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from einops import rearrange
from lab.sizes import Size
from torch import Tensor

import tinyblock

LLAMA = "transformers.models.llama.modeling_llama"
Layer = Callable[[Tensor], Any]  # returns a tensor, or a tuple that begins with it


@dataclass(frozen=True)
class Peer:
    """The layers of a project, as functions of x: "Block", and those whose errors count."""

    parameters: list[Tensor]
    layers: dict[str, Layer]


MakePeer = Callable[[Any], Peer]  # from a Block


def first_of(result: Any) -> Tensor:
    """Return the tensor that a Layer returns alone or first."""
    return result[0] if isinstance(result, tuple) else result


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference in float64, divided by that of what is right."""
    expected = expected.detach().double()
    return float((actual.detach().double() - expected).norm() / expected.norm())


def make_block(
    size: Size, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[Any, Tensor]:
    """Return a Block whose norm weights are not all 1, and an input for it."""
    torch.manual_seed(seed)
    block: Any = size.build(device, torch.float32)
    for norm in (block.ln1, block.ln2):
        norm.weight.data += 0.1 * torch.randn(size.d_model, device=device)
    x = torch.randn(size.batch_size, size.seq_len, size.d_model, device=device)
    return block.to(dtype), x.to(dtype)


def of_package(package: Any, block: Any) -> Peer:
    """Build the Block of tinyblock, or of another version of it."""
    rope = block.attn.rope
    own = package.Block(
        block.d_model,
        block.attn.num_heads,
        block.ffn.d_ff,
        rope=package.RotaryPositionalEmbedding(rope.theta, rope.d_k, rope.max_seq_len),
        num_kv_heads=block.attn.num_kv_heads,
        d_head=block.attn.d_head,
        eps=block.ln1.eps,
    ).to(block.ln1.weight)
    own.load_state_dict(block.state_dict())
    layers = {
        "RMSNorm": own.ln1,
        "SwiGLU": own.ffn,
        "attention": own.attn,
        "Block": own,
    }
    return Peer(list(own.parameters()), layers)


def control(block: Any) -> Peer:
    """Copy the Block. The times of the two differ by noise alone."""
    return of_package(tinyblock, block)


def of_checkout(checkout: Path, block: Any) -> Peer:
    """Build the Block of another checkout of tinyblock."""
    source = checkout / "tinyblock" / "__init__.py"
    return of_package(import_as("tinyblock_against", source), block)


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
    weights = in_halves(block)
    layer = llama.LlamaDecoderLayer(config, layer_idx=0).to(block.ln1.weight)
    layer.load_state_dict(
        {
            "self_attn.q_proj.weight": weights["attn.q_proj.weight"],
            "self_attn.k_proj.weight": weights["attn.k_proj.weight"],
            "self_attn.v_proj.weight": weights["attn.v_proj.weight"],
            "self_attn.o_proj.weight": weights["attn.output_proj.weight"],
            "input_layernorm.weight": weights["ln1.weight"],
            "post_attention_layernorm.weight": weights["ln2.weight"],
            "mlp.gate_proj.weight": weights["ffn.w1.weight"],
            "mlp.up_proj.weight": weights["ffn.w3.weight"],
            "mlp.down_proj.weight": weights["ffn.w2.weight"],
        }
    )
    x = block.ln1.weight
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
    """Put Liger's kernels into a copy of Hugging Face's module, which is itself compared."""
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
    weights = in_halves(block)
    qkv = [weights[f"attn.{name}_proj.weight"] for name in ("q", "k", "v")]
    layer = model.Block(config, block_idx=0).to(block.ln1.weight)
    layer.load_state_dict(
        {
            "attn.qkv.weight": torch.cat(qkv),
            "attn.proj.weight": weights["attn.output_proj.weight"],
            "norm_1.weight": weights["ln1.weight"],
            "norm_2.weight": weights["ln2.weight"],
            "mlp.fc_1.weight": weights["ffn.w1.weight"],
            "mlp.fc_2.weight": weights["ffn.w3.weight"],
            "mlp.proj.weight": weights["ffn.w2.weight"],
        }
    )
    tables = model.build_rope_cache(rope.max_seq_len, rope.d_k, base=rope.theta)
    # Its models keep the tables in their dtype.
    cos, sin = (table[None].to(block.ln1.weight) for table in tables)
    return Peer(list(layer.parameters()), {"Block": lambda x: layer(x, cos, sin)})


def rope_of_transformers(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate (x0, x1), (x2, x3), ... of x by Hugging Face's function and table."""
    llama: Any = import_module(LLAMA)
    d_head = x.shape[-1]
    config = llama.LlamaConfig(
        hidden_size=d_head, num_attention_heads=1, head_dim=d_head, rope_theta=theta
    )
    tables = llama.LlamaRotaryEmbedding(config).to(x.device)(x, positions[None])
    halves = rearrange(x, "... (half pair) -> ... (pair half)", pair=2)
    rotated, _ = llama.apply_rotary_pos_emb(halves, halves, *tables)
    return rearrange(rotated, "... (pair half) -> ... (half pair)", pair=2)


def in_halves(block: Any) -> dict[str, Tensor]:
    """Return the weights for a layer that rotates x[k] with x[k + d_head/2].

    The Block rotates (x0, x1), (x2, x3), ... The rows of q and k are reordered in the
    same way within each head. Scores do not change, because they are sums over rows.
    """
    order = "(heads half pair) d_model -> (heads pair half) d_model"
    weights: dict[str, Tensor] = block.state_dict()
    for name in ("attn.q_proj.weight", "attn.k_proj.weight"):
        half = block.attn.d_head // 2
        weights[name] = rearrange(weights[name], order, half=half, pair=2)
    return weights


def import_as(name: str, source: Path) -> Any:
    """Import a file, or a package by its __init__.py, under another name."""
    if name not in sys.modules:
        spec: Any = importlib.util.spec_from_file_location(name, source)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


# By the name of the package.
PROJECTS: dict[str, MakePeer] = {
    "transformers": transformers,
    "liger-kernel": liger,
    "litgpt": litgpt,
}


def installed(device: torch.device) -> dict[str, MakePeer]:
    """Return the projects that can run here. Liger's kernels require CUDA."""
    return {
        project: make
        for project, make in PROJECTS.items()
        if find_spec(project.replace("-", "_"))
        and (project != "liger-kernel" or device.type == "cuda")
    }


def versions(projects: Iterable[str]) -> str:
    """Name the version of each project that is a package."""
    named = [f"{name} {version(name)}" for name in projects if name in PROJECTS]
    return ", ".join(named) or "no other project is installed"
