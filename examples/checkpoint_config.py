"""Reject a Hugging Face config that this model would compute incorrectly.

    python examples/checkpoint_config.py            print what is accepted
    python examples/checkpoint_config.py FOLDER     check the config.json in a folder

A config can describe much that the model does not have: windows, multipliers, scaled
positions, other activations. Some of these add no weight, so the checkpoint would load
and give wrong results. Therefore each field of a config must be listed in one of the
tables below, with an accepted value. The first field that is not listed raises an
error.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Config = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """How the layers of a model type differ from Llama's.

    d_head is the head size in a config without head_dim.
    """

    architecture: str
    biases: bool = False
    qk_norm: bool = False
    d_head: int | None = None


FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", biases=True),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True, d_head=128),
}

REQUIRED = {
    "model_type",  # a key of FAMILIES
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
}

# The comment is the value of a field that is missing or null.
OPTIONAL = {
    "num_key_value_heads",  # num_attention_heads
    "head_dim",  # hidden_size / num_attention_heads, or that of the family
    "tie_word_embeddings",  # false
    "rope_theta",  # 10000
    "rope_scaling",  # no scaling
    "rope_parameters",  # configs of transformers 5 have both in this field
}

# With any other value the results would be wrong. A field may also be missing or null.
ACCEPTED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "use_sliding_window": False,
    "is_llama_config": True,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
}

# The fields of rope_parameters or rope_scaling, for each rope_type.
ROPE_FIELDS = {
    "default": {"rope_theta"},
    "llama3": {
        "rope_theta",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
}

# The logits do not depend on these fields.
IGNORED = {
    "_attn_implementation_autoset",
    "_model_name_or_path",
    "_name_or_path",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",  # the weights have one
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "max_window_layers",  # has an effect only with use_sliding_window
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",  # splits matrix products
    "problem_type",
    "return_dict",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
}


def check_config(config: Config) -> None:
    """Raise unless the model computes what the config describes.

    Raises:
        ValueError: a required field is missing, a field is unknown, or its value is not
            accepted.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise rejected("model_type", model_type, f"one of {', '.join(FAMILIES)}")
    missing = [name for name in sorted(REQUIRED) if config.get(name) is None]
    if missing:
        raise ValueError(f"config.json must have the fields {', '.join(missing)}")
    for name, value in config.items():
        if name not in REQUIRED | OPTIONAL | IGNORED and value is not None:
            check_field(name, value, model_type)
    rope_parameters(config)


def check_field(name: str, value: Any, model_type: str) -> None:
    """Raise a ValueError unless the field is known and has an accepted value."""
    architecture = FAMILIES[model_type].architecture
    if name == "architectures":
        if value != [architecture]:
            raise rejected(name, value, [architecture])
    elif name == "layer_types":
        others = sorted({each for each in value if each != "full_attention"})
        if others:
            raise rejected(name, others, "full_attention in all layers")
    elif name == "sliding_window":
        # Qwen's configs have a window that is switched off by use_sliding_window.
        if model_type == "llama":
            raise rejected(name, value, "null")
    elif name not in ACCEPTED:
        raise rejected(name, value, "left out, because its effect is not known here")
    elif value != ACCEPTED[name]:
        raise rejected(name, value, json.dumps(ACCEPTED[name]))


def rejected(name: str, value: Any, accepted: object) -> ValueError:
    return ValueError(f"{name} in config.json must be {accepted}, got {value!r}")


def rope_parameters(config: Config) -> Config:
    """Return rope_type, rope_theta and the numbers of the scaling.

    The fields are those of transformers 4 or 5.

    Raises:
        ValueError: the type is unknown, or has missing or unknown fields.
    """
    found = {"rope_theta": config.get("rope_theta") or 10000.0}
    found.update(config.get("rope_scaling") or {})
    found.update(config.get("rope_parameters") or {})
    partial = found.pop("partial_rotary_factor", 1.0)
    if partial != ACCEPTED["partial_rotary_factor"]:
        raise rejected("partial_rotary_factor", partial, 1.0)
    old_name = found.pop("type", "default")
    rope_type = found.pop("rope_type", old_name)
    if rope_type not in ROPE_FIELDS:
        raise rejected("rope_type", rope_type, f"one of {', '.join(ROPE_FIELDS)}")
    if found.keys() != ROPE_FIELDS[rope_type]:
        expected = ", ".join(sorted(ROPE_FIELDS[rope_type]))
        got = ", ".join(sorted(found))
        raise ValueError(f"rope_type {rope_type} must have {expected}, got {got}")
    return {"rope_type": rope_type, **found}


def head_size(config: Config) -> int:
    """Return the size of a head."""
    family = FAMILIES[config["model_type"]]
    default = family.d_head or config["hidden_size"] // config["num_attention_heads"]
    return config.get("head_dim") or default


def read_config(folder: Path) -> Config:
    """Return the config.json of a folder; raise a ValueError if there is none."""
    path = folder / "config.json"
    try:
        return json.loads(path.read_text())
    except OSError as error:
        reason = f"cannot read {path}: {error.strerror}"
        raise ValueError(f"{folder} must be a checkpoint: {reason}") from None
    except ValueError as error:
        raise ValueError(f"{path} must be JSON: {error}") from None


def show_tables() -> None:
    print("required:", ", ".join(sorted(REQUIRED)))
    print("model_type:", ", ".join(FAMILIES))
    print("optional:", ", ".join(sorted(OPTIONAL)))
    for rope_type, fields in ROPE_FIELDS.items():
        print(f"rope_type {rope_type}:", ", ".join(sorted(fields)))
    print("only with this value:")
    for name, value in ACCEPTED.items():
        print(f"    {name}: {json.dumps(value)}")
    print("    layer_types: full_attention in all layers")
    print("    sliding_window: null in llama; any in qwen2 and qwen3, switched off")
    print(
        "    architectures:", ", ".join(each.architecture for each in FAMILIES.values())
    )
    print("without effect on the logits:", ", ".join(sorted(IGNORED)))


def main() -> int:
    if len(sys.argv) == 1:
        show_tables()
        return 0
    try:
        check_config(read_config(Path(sys.argv[1])))
    except ValueError as error:
        print(f"checkpoint_config.py: error: {error}", file=sys.stderr)
        return 2
    print("accepted")
    return 0


if __name__ == "__main__":
    sys.exit(main())
