"""Load a GGUF file of Llama's architecture.

    pip install gguf
    python examples/from_gguf.py MODEL.gguf

This command prints the layers of the model. GGUF stores the rows of the query and key
weights in consecutive pairs, as tinyblock does, so they load without a permutation. The
package gguf converts quantized weights to float32.

The reader of transformers ignores scaled positions, windows, biases and other fields, so
it cannot prove what this file reads. `load` rejects each field that is not listed here.
"""

import sys
from pathlib import Path
from typing import Any

import gguf
import torch
from language_model import LanguageModel
from scaled_rope import DividedRope
from torch import Tensor

from tinyblock import RotaryPositionalEmbedding

# Fields of the model that `load` reads.
FIELDS = {
    "llama.block_count",
    "llama.context_length",
    "llama.embedding_length",
    "llama.feed_forward_length",
    "llama.attention.head_count",
    "llama.attention.head_count_kv",
    "llama.attention.key_length",
    "llama.attention.value_length",
    "llama.attention.layer_norm_rms_epsilon",
    "llama.rope.dimension_count",
    "llama.rope.freq_base",
    "llama.vocab_size",
}
# Fields about the file, and about its tokens.
OTHER_FIELDS = ("GGUF.", "general.", "quantize.", "tokenizer.")

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
    fields = {name: field.contents() for name, field in reader.fields.items()}
    require_known(fields)
    weights = read_weights(reader)
    # Of Llama 3.1: what divides the frequency of each pair.
    factors = weights.pop("rope_freqs.weight", None)
    model = build(fields, weights, factors)
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:  # names or shapes
        raise ValueError(f"the weights must be those of Llama: {error}") from error
    return model


def require_known(fields: dict[str, Any]) -> None:
    """Raise a ValueError for a field that may change what the model computes."""
    for name, only in (("general.architecture", "llama"), ("general.type", "model")):
        if fields.get(name, only) != only:
            raise ValueError(f"{name} must be {only}, got {fields[name]}")
    unknown = {
        name: value
        for name, value in fields.items()
        if name not in FIELDS and not name.startswith(OTHER_FIELDS)
    }
    if unknown:
        raise ValueError(f"the file must describe a plain Llama, but has {unknown}")
    lists = {
        name: fields[name]
        for name in FIELDS & fields.keys()
        if isinstance(fields[name], list)
    }
    if lists:
        raise ValueError(f"all layers must have the same sizes, got {lists}")


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


def build(
    fields: dict[str, Any], weights: dict[str, Tensor], factors: Tensor | None
) -> LanguageModel:
    """Return the model that the fields describe, on the device meta."""
    try:
        layers = fields["llama.block_count"]
        length = fields["llama.context_length"]
        d_model = fields["llama.embedding_length"]
        d_ff = fields["llama.feed_forward_length"]
        heads = fields["llama.attention.head_count"]
        eps = fields["llama.attention.layer_norm_rms_epsilon"]
        vocabulary = len(weights["token_embeddings.weight"])
    except KeyError as error:
        raise ValueError(f"the file must have {error}") from error
    d_head = fields.get("llama.attention.key_length", d_model // heads)
    stated_twice = {
        "llama.attention.value_length": d_head,
        "llama.rope.dimension_count": d_head,
        "llama.vocab_size": vocabulary,
    }
    for name, size in stated_twice.items():
        if fields.get(name, size) != size:
            raise ValueError(f"{name} must be {size}, got {fields[name]}")
    theta = fields.get("llama.rope.freq_base", 10000.0)
    rope = (
        RotaryPositionalEmbedding(theta, d_head, length)
        if factors is None
        else DividedRope(theta, d_head, length, factors=factors.tolist())
    )
    return LanguageModel(
        vocabulary,
        layers,
        d_model,
        heads,
        d_ff,
        tied="lm_head.weight" not in weights,
        max_seq_len=length,
        rope=rope,
        num_kv_heads=fields.get("llama.attention.head_count_kv"),
        d_head=d_head,
        eps=eps,
        device="meta",
    )


def stop_tokens(path: str | Path) -> set[int]:
    """Return the tokens that end a text."""
    fields = gguf.GGUFReader(path).fields
    return {fields[name].contents() for name in STOPS if name in fields}


def main(path: str) -> None:
    print(load(path))


if __name__ == "__main__":
    main(sys.argv[1])
