"""Load a GGUF file of Llama's architecture.

    python examples/from_gguf.py MODEL.gguf

This command prints the layers of the model, and how many parameters it has.
`make story` downloads a small model.

GGUF stores the rows of the query and key weights in consecutive pairs, as tinyblock
does, so they load without a permutation. The package gguf turns quantized weights into
float32. `model.to(torch.bfloat16)` halves their memory. A file can describe more than
this model has, such as experts or scaled positions. `load` therefore rejects unknown
fields and weights.
"""

import sys
from pathlib import Path
from typing import Any

import gguf
import torch
from checkpoint_config import head_size
from hugging_face import assign_weights, build, renamed
from language_model import LanguageModel
from torch import Tensor

# Fields of the file, and what `hugging_face.build` calls them.
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
OPTIONAL = {
    "llama.attention.head_count_kv",
    "llama.attention.key_length",
    "llama.rope.freq_base",
}

# Another value gives other results.
ACCEPTED = {
    "llama.rope.scaling.type": "none",
    "llama.rope.scaling.factor": 1.0,
    "llama.expert_count": 0,
    "llama.expert_used_count": 0,
}

# These must be the size of a head.
HEAD_SIZES = ("llama.attention.value_length", "llama.rope.dimension_count")

# Names, licenses and the tokenizer do not change the logits. The size of the vocabulary
# is that of the embeddings.
IGNORED = ("GGUF.", "general.", "tokenizer.", "quantize.", "llama.vocab_size")

# Parts of the names of weights: theirs, ours.
NAMES = {
    "token_embd.": "token_embeddings.",
    "output_norm.": "transformer.ln_final.",
    "blk.": "transformer.layers.",
    ".attn_norm.": ".ln1.",
    ".attn_q.": ".attn.q_proj.",
    ".attn_k.": ".attn.k_proj.",
    ".attn_v.": ".attn.v_proj.",
    ".attn_output.": ".attn.output_proj.",
    ".ffn_norm.": ".ln2.",
    ".ffn_gate.": ".ffn.w1.",
    ".ffn_down.": ".ffn.w2.",
    ".ffn_up.": ".ffn.w3.",
}


def load(path: str | Path) -> LanguageModel:
    """Return the model of a GGUF file, with weights in float32.

    Raises:
        ValueError: the file is not GGUF, has another architecture, or describes what
            this model does not compute.
    """
    reader = open_file(path)
    try:
        fields = known_fields(reader)
        weights = read_weights(reader)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    config = {"model_type": "llama", **fields}
    config["vocab_size"] = len(weights["token_embeddings.weight"])
    config["tie_word_embeddings"] = "lm_head.weight" not in weights
    model = build(config)
    assign_weights(model, weights, path)
    return model


def open_file(path: str | Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(path)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, IndexError) as error:  # the second if the file ends early
        raise ValueError(f"{path} must be a complete GGUF file: {error}") from None


def known_fields(reader: gguf.GGUFReader) -> dict[str, Any]:
    """Return the sizes in the file, under the names that `build` takes.

    Raises:
        ValueError: the architecture is not llama, a field is unknown or missing, or its
            value is not accepted.
    """
    found = reader.get_field("general.architecture")
    architecture = found.contents() if found else None
    if architecture != "llama":
        raise ValueError(f"general.architecture must be llama, got {architecture}")
    fields = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith(IGNORED)
    }
    if missing := sorted(FIELDS.keys() - OPTIONAL - fields.keys()):
        raise ValueError(f"the file must have the fields {', '.join(missing)}")
    known = {FIELDS[name]: fields[name] for name in FIELDS if name in fields}
    d_head = head_size({"model_type": "llama", **known})
    accepted = {**ACCEPTED, **dict.fromkeys(HEAD_SIZES, d_head)}
    for name, value in fields.items():
        if name in FIELDS:
            continue
        if name not in accepted:
            raise ValueError(f"the field {name} is unknown and may change the results")
        if value != accepted[name]:
            raise ValueError(f"{name} must be {accepted[name]}, got {value}")
    return known


def read_weights(reader: gguf.GGUFReader) -> dict[str, Tensor]:
    """Return the weights in float32, under tinyblock's names."""
    weights = {}
    for tensor in reader.tensors:
        name = "lm_head.weight"
        if tensor.name != "output.weight":
            name = renamed(tensor.name, NAMES)
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ValueError(f"gguf cannot read {tensor.name}: {error}") from None
        # A copy: `values` may be part of the file.
        weights[name] = torch.tensor(values)
    return weights


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python examples/from_gguf.py MODEL.gguf", file=sys.stderr)
        return 2
    try:
        model = load(sys.argv[1])
    except ValueError as error:
        print(f"from_gguf.py: error: {error}", file=sys.stderr)
        return 2
    print(model)
    count = sum(weight.numel() for weight in model.parameters())
    print(f"{count:,} parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
