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
from hugging_face import assign, build
from language_model import LanguageModel

# Fields of the file, and their names in configs of Hugging Face.
FIELDS = {
    "llama.block_count": "num_hidden_layers",
    "llama.context_length": "max_position_embeddings",
    "llama.embedding_length": "hidden_size",
    "llama.feed_forward_length": "intermediate_size",
    "llama.attention.head_count": "num_attention_heads",
    "llama.attention.head_count_kv": "num_key_value_heads",
    "llama.attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "llama.rope.dimension_count": "head_dim",
    "llama.rope.freq_base": "rope_theta",
}
# The shapes of the weights must agree with these.
IGNORED = {
    "llama.vocab_size",
    "llama.attention.key_length",
    "llama.attention.value_length",
}

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
        ValueError: the file has fields that this model does not understand.
    """
    reader = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    config: dict[str, Any] = {"model_type": architecture}
    for name, field in reader.fields.items():
        if name.startswith(f"{architecture}.") and name not in IGNORED:
            config[FIELDS.get(name, name)] = field.contents()
    state = {}
    for tensor in reader.tensors:
        name = ".".join(NAMES.get(part, part) for part in tensor.name.split("."))
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        state[name] = torch.tensor(values)  # copies a possible view of the file
    config["vocab_size"] = len(state["token_embeddings.weight"])
    return assign(build(config, tied="lm_head.weight" not in state), state)


if __name__ == "__main__":
    print(load(sys.argv[1]))
