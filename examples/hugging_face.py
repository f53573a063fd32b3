"""Load a Llama, Qwen2 or Qwen3 checkpoint from a folder or the Hugging Face hub.

    pip install transformers safetensors
    python examples/hugging_face.py Qwen/Qwen3-0.6B

This command prints how far the logits are from the logits of transformers.

A config can describe what this model does not have, such as windows or different
activations. So `load` raises an error for every field that is not listed below. Hugging
Face's RoPE pairs x[k] with x[k + d_head/2]; `load` permutes the rows of the query and
key weights, so that they become the consecutive pairs of tinyblock.
"""

import functools
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from language_model import CachedAttention, LanguageModel
from safetensors import SafetensorError
from safetensors.torch import load_file
from scaled_rope import DividedRope, Llama31Rope, YarnRope
from torch import Tensor, nn

from tinyblock import RotaryPositionalEmbedding

Config = dict[str, Any]

# Each model has these fields.
REQUIRED = {
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
}
OPTIONAL = {
    "num_key_value_heads",
    "head_dim",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "tie_word_embeddings",
}
# They change no logits. The weights say which dtype they have.
IGNORED = {
    "architectures",
    "dtype",
    "torch_dtype",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "unk_token_id",
    "initializer_range",
    "use_cache",
    "transformers_version",
    "attention_dropout",
    "pretraining_tp",
    "max_window_layers",
    "_name_or_path",
    "_attn_implementation_autoset",
    "id2label",
    "label2id",
    "return_dict",
    "problem_type",
    "chunk_size_feed_forward",
    "transformers.js_config",
}
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
# For each type, our class, the names of its fields, and the fields without a default.
ROPES: dict[str, tuple[Any, dict[str, str], set[str]]] = {
    "default": (RotaryPositionalEmbedding, {}, set()),
    "llama3": (Llama31Rope, LLAMA3, {"factor", "low_freq_factor", "high_freq_factor"}),
    "yarn": (YarnRope, YARN, {"factor"}),
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
    if name in REQUIRED | OPTIONAL | IGNORED:
        return True
    return not value or value == ACCEPTED.get(name)


def build(
    config: Config, tied: bool, factors: Sequence[float] | None = None
) -> LanguageModel:
    """Return the model that the config describes, on the device meta.

    `factors` divide the frequencies of RoPE.

    Raises:
        ValueError: the config has fields that this model does not understand, or lacks
            some that it requires.
    """
    missing = REQUIRED - config.keys()
    if missing:
        raise ValueError(f"config must have the fields {sorted(missing)}")
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
        rope=build_rope(config, d_head, factors),
        num_kv_heads=config.get("num_key_value_heads"),
        d_head=d_head,
        eps=config["rms_norm_eps"],
        device="meta",
        **FAMILIES[config["model_type"]],
    )


def build_rope(
    config: Config, d_head: int, factors: Sequence[float] | None
) -> RotaryPositionalEmbedding:
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    length = config["max_position_embeddings"]
    fields = {name: value for name, value in given.items() if value is not None}
    theta = fields.pop("rope_theta", config.get("rope_theta")) or 10000.0
    kind = fields.pop("rope_type", fields.pop("type", "default"))
    if factors is not None:
        return DividedRope(float(theta), d_head, length, factors=factors, device="cpu")
    if kind not in ROPES:
        raise ValueError(f"RoPE must be a plain {' or '.join(ROPES)}, got {given}")
    rope, names, required = ROPES[kind]
    if required:  # scales the length in training, which the config need not repeat
        fields.setdefault("original_max_position_embeddings", length)
    if fields.keys() - names.keys() or required - fields.keys():
        raise ValueError(
            f"RoPE of the type {kind} must have {sorted(required)}, and may have "
            f"{sorted(names)}, got {given}"
        )
    options: Config = {names[field]: value for field, value in fields.items()}
    return rope(float(theta), d_head, length, device="cpu", **options)


def rename(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights under our names, without the frequencies of old checkpoints."""
    renamed = {}
    for name, weight in state.items():
        if name.endswith("rotary_emb.inv_freq"):  # of Llama 2; theta says the same
            continue
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        renamed[name] = weight
    return renamed


def assign(model: LanguageModel, state: dict[str, Tensor]) -> LanguageModel:
    """Make these tensors the weights of a model, which gets the widest of their dtypes.

    Raises:
        ValueError: the names or shapes of the tensors are not those of the model.
    """
    needed = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    given = {name: tuple(weight.shape) for name, weight in state.items()}
    if given != needed:
        missing = sorted(needed.items() - given.items())
        unknown = sorted(given.items() - needed.items())
        raise ValueError(
            "the files must have the weights of the model and no others, but lack "
            f"{len(missing)}, {missing[:3]}, and have {len(unknown)} others, {unknown[:3]}"
        )
    model.load_state_dict(state, assign=True)
    dtypes = [weight.dtype for weight in state.values()]
    return model.to(functools.reduce(torch.promote_types, dtypes))


@torch.no_grad()
def pair_consecutively(model: LanguageModel) -> None:
    """Permute the rows of queries and keys from Hugging Face's pairs to consecutive ones."""
    pattern = "(heads pair half) ... -> (heads half pair) ..."
    block: Any = model.transformer.layers[0]
    half = block.attn.d_head // 2
    for name, weight in model.named_parameters():
        if re.search("[qk]_(proj|norm)", name):
            weight.copy_(rearrange(weight, pattern, pair=2, half=half).clone())


def load(source: str | Path) -> LanguageModel:
    """Return the model of a checkpoint in a folder, or download it by its name.

    Head and embedding are tied if the config says so, and the files have no head.

    Raises:
        ValueError: the folder has no config or no weights in safetensors; the config or
            the names of the weights are not those of a plain Llama, Qwen2 or Qwen3.
    """
    folder = find_folder(source)
    path = folder / "config.json"
    if not path.exists():
        raise ValueError(f"{folder} must have a file config.json")
    config = json.loads(path.read_text())
    state = rename(read_weights(folder))
    tied = bool(config.get("tie_word_embeddings")) and "lm_head.weight" not in state
    model = assign(build(config, tied), state)
    pair_consecutively(model)
    return model


def weight_map(folder: Path) -> dict[str, str] | None:
    """Return the file of each weight, by the index; None if there is no index."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return None
    return json.loads(index.read_text())["weight_map"]


def weight_files(folder: Path) -> list[str]:
    """Return the files that the index names or, without an index, the only one."""
    places = weight_map(folder)
    return ["model.safetensors"] if places is None else sorted(set(places.values()))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint: those that the index names, if there is one."""
    places = weight_map(folder)
    state = {}
    for file in weight_files(folder):
        if not (folder / file).exists():
            raise ValueError(
                f"{folder} must have the file {file}: save a checkpoint of another format "
                "again with save_pretrained of transformers"
            )
        try:
            weights = load_file(folder / file)
        except SafetensorError as error:
            raise ValueError(
                f"{folder / file} must be a complete safetensors file, got: {error}"
            ) from error
        for name, weight in weights.items():
            if places is None or places.get(name) == file:
                # Cloned: views of the file are aligned to 16 bytes, and slow on a CPU.
                state[name] = weight.clone()
    return state


def find_folder(source: str | Path) -> Path:
    """Return the folder of a checkpoint. Download it first if `source` is a name."""
    if Path(source).is_dir():
        return Path(source)
    if Path(source).exists():
        raise ValueError(f"the model must be a folder or a name, got the file {source}")
    from huggingface_hub import snapshot_download

    texts = ["*.json", "*.txt", "*.model", "*.jinja"]
    folder = Path(snapshot_download(str(source), allow_patterns=texts))
    # Now the index tells which files have the weights.
    return Path(snapshot_download(str(source), allow_patterns=weight_files(folder)))


@torch.no_grad()
def main() -> None:
    from transformers import AutoModelForCausalLM

    ours = load(sys.argv[1])
    theirs = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
    tokens = torch.randint(theirs.config.vocab_size, (1, 32))
    expected = theirs(tokens).logits.double()
    error = (ours(tokens).double() - expected).norm() / expected.norm()
    print(f"relative difference from the logits of transformers: {error:.1e}")


if __name__ == "__main__":
    main()
