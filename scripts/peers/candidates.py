"""The layers that a Block is measured against, each given the weights of that Block.

A builder takes a Block and a sequence length, and returns a Candidate that computes the same function of `x`. What a
peer's own stack computes once for all of its layers, the tables of cosines and sines, is computed here, outside of any
timing. Peers are imported by their builders, so that none of them needs to be installed.

The Block rotates consecutive pairs, (x0, x1), (x2, x3), ...; Hugging Face, Liger and litgpt pair x[k] with
x[k + d_head/2]. That is the same attention once the rows of q and k are permuted alike within each head, because a
score is a sum over them.
"""

import copy
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

from tinyblock import Block

__all__ = ["PEERS", "Candidate", "Peer", "Unavailable", "build"]


class Unavailable(Exception):
    """A peer that is not installed, does not import, or needs another device. The text says which."""


@dataclass(frozen=True)
class Candidate:
    """What is timed: `call(x, **keywords)`, with the parameters that a training step differentiates."""

    call: Callable[..., Any]
    parameters: list[Tensor]
    keywords: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module, **keywords: Any) -> "Candidate":
        return cls(module, list(module.parameters()), keywords)

    def constants(self) -> list[Tensor]:
        """Return what exists before a call: parameters, buffers and tables."""
        buffers = list(self.call.buffers()) if isinstance(self.call, nn.Module) else []
        return [*self.parameters, *buffers, *_tensors(self.keywords.values())]


@dataclass(frozen=True)
class Peer:
    """Where a peer comes from. `agrees` is False where the outputs are of another kind, and not to be compared.

    One that takes positions is given those of the Block; the others rotate by the same, from tables made beforehand.
    """

    build: Callable[[Block, int], Candidate]
    title: str
    package: str | None = None
    cuda_only: bool = False
    agrees: bool = True
    takes_positions: bool = False

    def version(self) -> str | None:
        try:
            return importlib.metadata.version(self.package) if self.package else None
        except importlib.metadata.PackageNotFoundError:
            return None


def build(peer: Peer, block: Block, seq_len: int) -> Candidate:
    """Return a peer with the weights, dtype and device of `block`, or raise Unavailable."""
    if peer.cuda_only and not block.ln1.weight.is_cuda:
        raise Unavailable(f"{peer.package} needs CUDA")
    if peer.package and peer.version() is None:
        raise Unavailable(f"not installed: pip install {peer.package}")
    try:
        return peer.build(block, seq_len)
    except ImportError as error:
        raise Unavailable(f"{peer.package} does not import: {' '.join(str(error).split())}") from error


_LLAMA = "transformers.models.llama.modeling_llama"


# The limit ------------------------------------------------------------------------------------------------------------


def _build_limit(block: Block, seq_len: int) -> Candidate:
    """Chain the matrix products and the attention kernel that no such block can do without, and nothing else.

    Under autograd this counts the sums of the gradients too where q, k and v, and w1 and w3, meet.
    """
    attn, weights = block.attn, _weights(block)
    q_weight, k_weight, v_weight, o_weight = (weights[name] for name in "qkvo")
    gate_weight, down_weight, up_weight = weights["w1"], weights["w2"], weights["w3"]
    group, heads, kv_heads, d_head = attn.num_heads // attn.num_kv_heads, attn.num_heads, attn.num_kv_heads, attn.d_head

    def limit(x: Tensor) -> tuple[Tensor, Tensor]:
        q = F.linear(x, q_weight).unflatten(-1, (heads, d_head)).transpose(1, 2)
        k = F.linear(x, k_weight).unflatten(-1, (kv_heads, d_head)).transpose(1, 2)
        v = F.linear(x, v_weight).unflatten(-1, (kv_heads, d_head)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=seq_len > 1, enable_gqa=group > 1)
        x = F.linear(attended.transpose(1, 2).flatten(-2), o_weight)
        return F.linear(F.linear(x, gate_weight), down_weight), F.linear(x, up_weight)

    return Candidate(limit, [q_weight, k_weight, v_weight, o_weight, gate_weight, down_weight, up_weight])


def _build_operations(block: Block, seq_len: int) -> Candidate:
    """Chain the operations of a plain eager Block, without modules, checks, options or positions: what Python costs."""
    attn, weights = block.attn, _weights(block)
    norm_1, norm_2, width, d_head = block.ln1.weight, block.ln2.weight, (block.d_model,), attn.d_head
    gate_weight, down_weight, up_weight = weights["w1"], weights["w2"], weights["w3"]
    rotation = torch.view_as_complex(attn.rope.cos_sin)[:seq_len]

    def rotate(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)

    def operations(x: Tensor) -> Tensor:
        h = F.rms_norm(x, width, norm_1, block.ln1.eps)
        q, k, v = (F.linear(h, weights[name]).unflatten(-1, (-1, d_head)).transpose(1, 2) for name in "qkv")
        gqa = attn.num_kv_heads < attn.num_heads
        h = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=seq_len > 1, enable_gqa=gqa)
        x = x + F.linear(h.transpose(1, 2).flatten(-2), weights["o"])
        h = F.rms_norm(x, width, norm_2, block.ln2.eps)
        return x + F.linear(F.silu(F.linear(h, gate_weight)) * F.linear(h, up_weight), down_weight)

    return Candidate(operations, [*block.parameters()])


# The peers ------------------------------------------------------------------------------------------------------------


def _build_control(block: Block, seq_len: int) -> Candidate:
    return Candidate.of(copy.deepcopy(block))


def block_of(checkout: Path) -> Peer:
    """Return the Block of another version, with the very weights of the Block, so that only the code differs."""

    def build_other(block: Block, seq_len: int) -> Candidate:
        package = import_as("tinyblock_against", checkout / "tinyblock" / "__init__.py")
        attn, weights = block.attn, _weights(block)
        rope = package.RotaryPositionalEmbedding(_theta(block), attn.d_head, seq_len)
        layer = package.Block(
            block.d_model,
            attn.num_heads,
            weights["w1"].shape[0],
            rope=rope.to(weights["w1"].device),
            num_kv_heads=attn.num_kv_heads,
            d_head=attn.d_head,
            eps=_eps(block),
        )
        layer.load_state_dict(block.state_dict(), assign=True)
        return Candidate.of(layer)

    return Peer(build_other, f"the Block of {checkout}", takes_positions=True)


def _build_hugging_face(block: Block, seq_len: int) -> Candidate:
    return _hugging_face_layer(import_module(_LLAMA), block, seq_len)


def _build_liger(block: Block, seq_len: int) -> Candidate:
    """Give Liger's kernels to a private copy of the Llama module: Liger's own patch would reach the plain peer too."""
    patched = private_copy(_LLAMA)
    vars(patched).update(
        LlamaRMSNorm=import_module("liger_kernel.transformers.rms_norm").LigerRMSNorm,
        LlamaMLP=import_module("liger_kernel.transformers.swiglu").LigerSwiGLUMLP,
        apply_rotary_pos_emb=import_module("liger_kernel.transformers.rope").liger_rotary_pos_emb,
    )
    return _hugging_face_layer(patched, block, seq_len)


def _hugging_face_layer(modeling: ModuleType, block: Block, seq_len: int) -> Candidate:
    attn, weights = block.attn, _weights(block)
    config = modeling.LlamaConfig(
        hidden_size=block.d_model,
        intermediate_size=weights["w1"].shape[0],
        num_attention_heads=attn.num_heads,
        num_key_value_heads=attn.num_kv_heads,
        head_dim=attn.d_head,
        num_hidden_layers=1,
        rms_norm_eps=_eps(block),
        hidden_act="silu",
        attn_implementation="sdpa",
    )
    layer = _load(
        lambda: modeling.LlamaDecoderLayer(config, layer_idx=0),
        {
            "self_attn.q_proj.weight": _split_halves(weights["q"], attn.d_head),
            "self_attn.k_proj.weight": _split_halves(weights["k"], attn.d_head),
            "self_attn.v_proj.weight": weights["v"],
            "self_attn.o_proj.weight": weights["o"],
            "mlp.gate_proj.weight": weights["w1"],
            "mlp.down_proj.weight": weights["w2"],
            "mlp.up_proj.weight": weights["w3"],
            "input_layernorm.weight": weights["ln1"],
            "post_attention_layernorm.weight": weights["ln2"],
        },
    )
    return Candidate.of(layer, position_embeddings=_half_split_tables(block, seq_len))


def _build_litgpt(block: Block, seq_len: int) -> Candidate:
    litgpt = import_module("litgpt.model")
    attn, weights = block.attn, _weights(block)
    config = litgpt.Config(
        n_layer=1,
        n_head=attn.num_heads,
        n_query_groups=attn.num_kv_heads,
        head_size=attn.d_head,
        n_embd=block.d_model,
        intermediate_size=weights["w1"].shape[0],
        block_size=seq_len,
        vocab_size=1,
        norm_class_name="RMSNorm",
        norm_eps=_eps(block),
        mlp_class_name="LLaMAMLP",
        bias=False,
        parallel_residual=False,
        rotary_percentage=1.0,
    )
    q, k = _split_halves(weights["q"], attn.d_head), _split_halves(weights["k"], attn.d_head)
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
    cos, sin = _half_split_tables(block, seq_len)
    return Candidate.of(layer, cos=cos, sin=sin)


def _build_x_transformers(block: Block, seq_len: int) -> Candidate:
    """Configure x-transformers' Decoder to one such layer; its RMSNorm has no eps, and its gate a bias, removed here.

    Its query head h reads key head h % kv_heads, where ours reads h // group: the heads of q and of o are reordered.
    """
    attn, weights = block.attn, _weights(block)
    d_ff = weights["w1"].shape[0]
    heads = {"kv_heads": attn.num_kv_heads, "d_head": attn.d_head}
    q = rearrange(weights["q"], "(kv_heads group d_head) d_model -> (group kv_heads d_head) d_model", **heads)
    o = rearrange(weights["o"], "d_model (kv_heads group d_head) -> d_model (group kv_heads d_head)", **heads)

    def make() -> nn.Module:
        layers = import_module("x_transformers").Decoder(
            dim=block.d_model,
            depth=1,
            heads=attn.num_heads,
            attn_kv_heads=attn.num_kv_heads,
            attn_dim_head=attn.d_head,
            attn_flash=True,
            use_rmsnorm=True,
            norm_add_unit_offset=False,
            pre_norm_has_final_norm=False,
            rotary_pos_emb=True,
            rotary_emb_dim=attn.d_head,
            ff_mult=(d_ff + 0.5) / block.d_model,  # which x-transformers multiplies and rounds down
            ff_glu=True,
            ff_swish=True,
            ff_no_bias=True,
            verbose=False,
        )
        layers.rotary_pos_emb = None  # its angles are an argument
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
    angles = repeat(_angles(block, seq_len), "seq half -> 1 seq (half pair)", pair=2).float()
    return Candidate.of(layers, rotary_pos_emb=(angles, 1.0))


def _build_torchtune(block: Block, seq_len: int) -> Candidate:
    modules = import_module("torchtune.modules")
    attn, weights = block.attn, _weights(block)
    d_ff = weights["w1"].shape[0]

    def linear(d_in: int, d_out: int) -> nn.Linear:
        return nn.Linear(d_in, d_out, bias=False)

    def make() -> nn.Module:
        attention = modules.MultiHeadAttention(
            embed_dim=block.d_model,
            num_heads=attn.num_heads,
            num_kv_heads=attn.num_kv_heads,
            head_dim=attn.d_head,
            q_proj=linear(block.d_model, attn.num_heads * attn.d_head),
            k_proj=linear(block.d_model, attn.num_kv_heads * attn.d_head),
            v_proj=linear(block.d_model, attn.num_kv_heads * attn.d_head),
            output_proj=linear(attn.num_heads * attn.d_head, block.d_model),
            max_seq_len=seq_len,
        )
        mlp = modules.FeedForward(
            gate_proj=linear(block.d_model, d_ff),
            down_proj=linear(d_ff, block.d_model),
            up_proj=linear(block.d_model, d_ff),
        )
        norms = {name: modules.RMSNorm(block.d_model, eps=_eps(block)) for name in ("sa_norm", "mlp_norm")}
        return modules.TransformerSelfAttentionLayer(attention, mlp, **norms)

    layer = _load(
        make,
        {
            "attn.q_proj.weight": weights["q"],
            "attn.k_proj.weight": weights["k"],
            "attn.v_proj.weight": weights["v"],
            "attn.output_proj.weight": weights["o"],
            "mlp.w1.weight": weights["w1"],
            "mlp.w2.weight": weights["w2"],
            "mlp.w3.weight": weights["w3"],
            "sa_norm.scale": weights["ln1"],
            "mlp_norm.scale": weights["ln2"],
        },
    )
    # After _load, so that its table stays float32, as it does in torchtune's own models.
    with torch.device(weights["q"].device):
        rope = modules.RotaryPositionalEmbeddings(attn.d_head, max_seq_len=seq_len, base=_theta(block))
    layer.attn.pos_embeddings = rope  # type: ignore[union-attr]
    return Candidate.of(layer)


PEERS: Mapping[str, Peer] = {
    "limit": Peer(_build_limit, "limit: the matrix products and SDPA", agrees=False),
    "operations": Peer(_build_operations, "operations: the Block's, without modules or checks"),
    "control": Peer(_build_control, "control: a second copy of the Block", takes_positions=True),
    "transformers": Peer(_build_hugging_face, "Hugging Face LlamaDecoderLayer", "transformers"),
    "liger": Peer(_build_liger, "Liger-Kernel's LlamaDecoderLayer", "liger-kernel", cuda_only=True),
    "litgpt": Peer(_build_litgpt, "litgpt Block", "litgpt"),
    "torchtune": Peer(_build_torchtune, "torchtune TransformerSelfAttentionLayer", "torchtune"),
    "x-transformers": Peer(_build_x_transformers, "x-transformers Decoder of depth 1", "x-transformers"),
}


# What the builders share ----------------------------------------------------------------------------------------------


def private_copy(name: str) -> ModuleType:
    """Import a second, independent copy of a module, which can be patched without reaching the first."""
    original = importlib.util.find_spec(name)
    if original is None or original.origin is None:
        raise ImportError(f"no source of {name} to copy")
    return import_as(f"{name}_private_copy", Path(original.origin))


def import_as(name: str, source: Path) -> ModuleType:
    """Import a file under another name, once; an `__init__.py` brings the modules of its package along."""
    if name not in sys.modules:
        folders = [str(source.parent)] if source.name == "__init__.py" else None
        spec = importlib.util.spec_from_file_location(name, source, submodule_search_locations=folders)
        if spec is None or spec.loader is None:
            raise ImportError(f"no loader for {source}")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _load(make: Callable[[], nn.Module], state: dict[str, Tensor]) -> nn.Module:
    """Make a module on the device and in the dtype of the weights in `state`, and load all of them into it."""
    like = next(iter(state.values()))
    with torch.device(like.device):
        module = make().to(like.dtype)
    module.load_state_dict(state, strict=True)
    return module


def _weights(block: Block) -> dict[str, Any]:
    attn: Any = block.attn
    ffn: Any = block.ffn
    layers = {"q": attn.q_proj, "k": attn.k_proj, "v": attn.v_proj, "o": attn.output_proj}
    layers |= {"w1": ffn.w1, "w2": ffn.w2, "w3": ffn.w3, "ln1": block.ln1, "ln2": block.ln2}
    return {name: layer.weight for name, layer in layers.items()}


def _eps(block: Block) -> float:
    return block.ln1.eps


def _theta(block: Block) -> Any:
    assert block.attn.rope is not None
    return block.attn.rope.theta


def _split_halves(weight: Tensor, d_head: int) -> Tensor:
    """Reorder the rows of each head, (x0, x1), (x2, x3), ... to x0, x2, ..., x1, x3, ..."""
    return rearrange(weight, "(heads half pair) d_model -> (heads pair half) d_model", half=d_head // 2, pair=2)


def _angles(block: Block, seq_len: int) -> Tensor:
    d_head, device = block.attn.d_head, block.ln1.weight.device
    exponents = torch.arange(0, d_head, 2, dtype=torch.float64, device=device) / d_head
    return torch.arange(seq_len, device=device)[:, None] * _theta(block) ** -exponents


def _half_split_tables(block: Block, seq_len: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of shape (1, seq, d_head) in the dtype of the weights, as these peers' stacks do."""
    angles = repeat(_angles(block, seq_len), "seq half -> 1 seq (pair half)", pair=2)
    return angles.cos().to(block.ln1.weight.dtype), angles.sin().to(block.ln1.weight.dtype)


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        return []
    return [tensor for value in values for tensor in _tensors(value)]
