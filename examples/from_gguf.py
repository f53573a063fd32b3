"""Load a GGUF file of Llama's architecture.

    pip install gguf safetensors
    python examples/from_gguf.py MODEL.gguf

This command prints the layers of the model. GGUF stores the rows of the query and key
weights in consecutive pairs, as tinyblock does, so they load without a permutation. The
package gguf converts quantized weights to float32.
"""

import sys
from pathlib import Path
from typing import Any

import gguf
import torch
from hugging_face import Config, assign, build
from language_model import LanguageModel
from torch import Tensor

# Fields of the file, and their names in configs of Hugging Face.
FIELDS = {
    "llama.block_count": "num_hidden_layers",
    "llama.context_length": "max_position_embeddings",
    "llama.embedding_length": "hidden_size",
    "llama.feed_forward_length": "intermediate_size",
    "llama.attention.head_count": "num_attention_heads",
    "llama.attention.head_count_kv": "num_key_value_heads",
    "llama.attention.key_length": "head_dim",
    "llama.attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "llama.rope.freq_base": "rope_theta",
}
# The shapes of the weights must agree with these.
IGNORED = {"llama.vocab_size", "llama.attention.value_length"}
ROTATED = "llama.rope.dimension_count"  # components of a head

# Tokens that end a text. A model for chats may have more than one.
STOPS = [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom")]

# Parts of GGUF's names of weights, and ours.
NAMES = {
    "token_embd": "token_embeddings",
    "output_norm": "transformer.ln_final",
    "output": "lm_head",
    "blk": "transformer.layers",
    "attn_norm": "ln1",
    "attn_q": "attn.q_proj",
    "attn_k": "attn.k_proj",
    "attn_v": "attn.v_proj",
    "attn_output": "attn.output_proj",
    "ffn_norm": "ln2",
    "ffn_gate": "ffn.w1",
    "ffn_down": "ffn.w2",
    "ffn_up": "ffn.w3",
}


def load(path: str | Path) -> LanguageModel:
    """Return the model of a GGUF file, with weights in float32.

    Raises:
        ValueError: the file is not a GGUF file, or has fields, names of weights or
            quantized weights that this model does not understand.
    """
    reader = gguf.GGUFReader(path)
    config = read_config(reader)
    rotated = config.pop(ROTATED, None)
    weights = read_weights(reader)
    config["vocab_size"] = len(weights.get("token_embeddings.weight", ()))
    # Of Llama 3.1: what divides the frequency of each pair.
    factors = weights.pop("rope_freqs.weight", None)
    model = build(
        config,
        tied="lm_head.weight" not in weights,
        factors=None if factors is None else factors.tolist(),
    )
    rope: Any = model.transformer.rope
    if rotated not in (None, rope.d_k):
        raise ValueError(f"{ROTATED} must be the head size, {rope.d_k}, got {rotated}")
    return assign(model, weights)


def read_config(reader: gguf.GGUFReader) -> Config:
    """Return the fields of the file under the names that Hugging Face's configs have."""
    fields = {name: field.contents() for name, field in reader.fields.items()}
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise ValueError(f"the file must have Llama's architecture, got {architecture}")
    config: Config = {"model_type": "llama"}
    for name, value in fields.items():
        if name.startswith("llama.") and name not in IGNORED:
            is_known = name in FIELDS and not isinstance(value, list)  # one per layer
            config[FIELDS[name] if is_known else name] = value
    return config


def read_weights(reader: gguf.GGUFReader) -> dict[str, Tensor]:
    """Return the weights of the file in float32, under our names."""
    weights = {}
    for tensor in reader.tensors:
        name = ".".join(NAMES.get(part, part) for part in tensor.name.split("."))
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ValueError(
                f"gguf must support the type of {tensor.name}, got "
                f"{tensor.tensor_type.name}"
            ) from error
        weights[name] = torch.tensor(values)  # copies a possible view of the file
    return weights


def stop_tokens(path: str | Path) -> set[int]:
    """Return the tokens that end a text."""
    fields = gguf.GGUFReader(path).fields
    return {fields[name].contents() for name in STOPS if name in fields}


if __name__ == "__main__":
    print(load(sys.argv[1]))
