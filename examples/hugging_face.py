"""Load a Llama, Qwen2 or Qwen3 checkpoint from a folder or the Hugging Face hub.


    pip install transformers safetensors
    python examples/hugging_face.py Qwen/Qwen3-0.6B

This command prints how far the logits are from the logits of transformers.

A config can describe what this model does not have, such as windows or different
activations. So `load` raises an error for every field that is not listed below. Hugging
Face's RoPE pairs x[k] with x[k + d_head/2]; `load` permutes the rows of the query and
key weights, so that they become the consecutive pairs of tinyblock.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from language_model import CachedAttention, LanguageModel
from safetensors.torch import load_file
from scaled_rope import Llama31Rope, YarnRope
from torch import Tensor, nn

from tinyblock import RotaryPositionalEmbedding

Config = dict[str, Any]

READ = """model_type vocab_size hidden_size intermediate_size num_hidden_layers
num_attention_heads num_key_value_heads head_dim max_position_embeddings rms_norm_eps
rope_theta rope_scaling rope_parameters"""
# The weights say which dtype they have, and whether head and embedding are tied.
IGNORED = """architectures tie_word_embeddings dtype torch_dtype bos_token_id eos_token_id
pad_token_id unk_token_id initializer_range use_cache transformers_version
attention_dropout pretraining_tp max_window_layers _name_or_path id2label label2id
return_dict problem_type chunk_size_feed_forward transformers.js_config"""
# These fields may have only these values. Others may only be empty, such as null.
ACCEPTED = {
    "hidden_act": "silu",
    "is_llama_config": True,
    "partial_rotary_factor": 1.0,
}

# For each type of RoPE, the fields of the config, and our names for them.
LLAMA3 = {
    "factor": "factor",
    "original_max_position_embeddings": "original",
    "low_freq_factor": "low",
    "high_freq_factor": "high",
}
YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original",
    "beta_slow": "low",
    "beta_fast": "high",
    "attention_factor": "mscale",
}
ROPES: dict[str, Any] = {
    "default": (RotaryPositionalEmbedding, {}),
    "llama3": (Llama31Rope, LLAMA3),
    "yarn": (YarnRope, YARN),
}

# Hugging Face's names of weights, and ours.
NAMES = {
    "model.embed_tokens": "token_embeddings",
    "model.layers": "transformer.layers",
    "model.norm": "transformer.ln_final",
    "input_layernorm": "ln1",
    "self_attn": "attn",
    "o_proj": "output_proj",
    "post_attention_layernorm": "ln2",
    "mlp.gate_proj": "ffn.w1",
    "mlp.down_proj": "ffn.w2",
    "mlp.up_proj": "ffn.w3",
}


class AttentionWithBiases(CachedAttention):
    """Add a bias to queries, keys and values, as Qwen2 does."""

    def __init__(self, d_model: int, num_heads: int, **options: Any) -> None:
        super().__init__(d_model, num_heads, **options)
        for linear in (self.q_proj, self.k_proj, self.v_proj):
            linear.bias = nn.Parameter(linear.weight.new_zeros(linear.out_features))


# How the layers of a model_type differ from Llama's.
FAMILIES: dict[str, Config] = {
    "llama": {},
    "qwen2": {"attention": AttentionWithBiases},
    "qwen3": {"qk_norm": True},
}


def is_understood(name: str, value: Any, config: Config) -> bool:
    if name == "model_type":
        return value in FAMILIES
    if name == "sliding_window" and config.get("use_sliding_window") is False:
        return True
    if name == "layer_types" and value:
        return set(value) == {"full_attention"}
    if name in f"{READ} {IGNORED}".split():
        return True
    return not value or value == ACCEPTED.get(name)


def build(config: Config, tied: bool) -> LanguageModel:
    """Return the model that the config describes, on the device meta.

    Raises:
        ValueError: the config has fields that this model does not understand.
    """
    unknown = {
        name: value
        for name, value in config.items()
        if not is_understood(name, value, config)
    }
    if unknown:
        raise ValueError(
            f"config must describe a plain Llama or Qwen, but has {unknown}"
        )
    heads = config["num_attention_heads"]
    d_head = config.get("head_dim") or config["hidden_size"] // heads
    return LanguageModel(
        config["vocab_size"],
        config["num_hidden_layers"],
        config["hidden_size"],
        heads,
        config["intermediate_size"],
        tied=tied,
        max_seq_len=config["max_position_embeddings"],
        rope=build_rope(config, d_head),
        num_kv_heads=config.get("num_key_value_heads"),
        d_head=d_head,
        eps=config["rms_norm_eps"],
        device="meta",
        **FAMILIES[config["model_type"]],
    )


def build_rope(config: Config, d_head: int) -> RotaryPositionalEmbedding:
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    fields = {name: value for name, value in given.items() if value is not None}
    theta = fields.pop("rope_theta", config.get("rope_theta")) or 10000.0
    kind = fields.pop("rope_type", fields.pop("type", "default"))
    rope, names = ROPES.get(kind, (None, {}))
    if rope is None or fields.keys() - names.keys():
        raise ValueError(f"RoPE must be a plain {' or '.join(ROPES)}, got {given}")
    options: Config = {names[field]: value for field, value in fields.items()}
    length = config["max_position_embeddings"]
    return rope(float(theta), d_head, length, device="cpu", **options)


def rename(state: dict[str, Tensor], d_head: int) -> dict[str, Tensor]:
    """Return the weights under our names, with the rows of q and k in our order."""
    renamed = {}
    for name, weight in state.items():
        if re.search("[qk]_(proj|norm)", name):
            pattern = "(heads pair half) ... -> (heads half pair) ..."
            weight = rearrange(weight, pattern, pair=2, half=d_head // 2)
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        renamed[name] = weight
    return renamed


def assign(model: LanguageModel, state: dict[str, Tensor]) -> LanguageModel:
    """Make these tensors the weights of a model, which gets their dtype."""
    if model.tied:
        state["lm_head.weight"] = state["token_embeddings.weight"]
    model.load_state_dict(state, assign=True)
    model.tie()
    return model


def load(source: str | Path) -> LanguageModel:
    """Return the model of a checkpoint in a folder, or download it by its name.


    Head and embedding are tied if the files have no head, whatever the config says.

    Raises:
        ValueError: the config has fields that this model does not understand.
    """
    folder = find_folder(source)
    config = json.loads((folder / "config.json").read_text())
    state: dict[str, Tensor] = {}
    for path in folder.glob("model*.safetensors"):
        # Cloned, because views of the file are aligned to 16 bytes, and slow on a CPU.
        state |= {name: weight.clone() for name, weight in load_file(path).items()}
    model = build(config, tied="lm_head.weight" not in state)
    layer: Any = model.transformer.layers[0]
    return assign(model, rename(state, layer.attn.d_head))


def find_folder(source: str | Path) -> Path:
    """Return the folder of a checkpoint. Download it first if `source` is a name."""
    if Path(source).is_dir():
        return Path(source)
    if Path(source).exists():
        raise ValueError(f"the model must be a folder or a name, got the file {source}")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "model*.safetensors", "*.txt", "*.model", "*.jinja"]
    return Path(snapshot_download(str(source), allow_patterns=patterns))


@torch.no_grad()
def main() -> None:
    from transformers import AutoModelForCausalLM

    ours = load(sys.argv[1])
    theirs = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
    tokens = torch.randint(theirs.config.vocab_size, (1, 32))
    expected = theirs(tokens).logits
    error = (ours(tokens) - expected).norm() / expected.norm()
    print(f"relative difference from the logits of transformers: {error:.1e}")


if __name__ == "__main__":
    main()
