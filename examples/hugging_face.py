"""Load a Llama, Qwen2 or Qwen3 checkpoint in the format of Hugging Face, and save one.

    python examples/hugging_face.py          three random checkpoints of transformers
    python examples/hugging_face.py FOLDER   your checkpoint, or a name: Qwen/Qwen3-0.6B

Either command prints how far the logits are from those of transformers, and whether
saving restores every value.

Hugging Face's weights and tinyblock's have different names. Hugging Face's RoPE pairs
x[k] with x[k + d_head/2]; tinyblock's pairs x[2k] with x[2k + 1]. `load` therefore
permutes the rows of the query and key weights. With `halves=True` it keeps the rows and
uses a RoPE that rotates halves. checkpoint_config.py lists what a config may contain.
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attention_variants import AttentionWithBiases
from checkpoint_config import (
    FAMILIES,
    Config,
    check_config,
    head_size,
    read_config,
    rope_parameters,
)
from einops import rearrange
from language_model import CachedAttention, LanguageModel
from llama31_rope import Llama31Rope
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tinyblock import Block, RMSNorm, RotaryPositionalEmbedding, SwiGLU, Transformer

State = dict[str, Tensor]


class QwenAttention(AttentionWithBiases, CachedAttention):
    """The attention of Qwen2, which has biases and here a cache, too."""


class RopeOfHalves(nn.Module):
    """Pair x[k] with x[k + d_k/2], as Hugging Face does, and rotate by another RoPE."""

    def __init__(self, rope: RotaryPositionalEmbedding) -> None:
        super().__init__()
        self.rope = rope
        self.d_k = rope.d_k

    def forward(self, x: Tensor, token_positions: Tensor | None = None) -> Tensor:
        pairs = rearrange(x, "... (pair half) -> ... (half pair)", pair=2)
        rotated = self.rope(pairs, token_positions)
        return rearrange(rotated, "... (half pair) -> ... (pair half)", pair=2)


def build_rope(config: Config) -> RotaryPositionalEmbedding:
    """Return the RoPE that the config describes, with its table on the CPU."""
    parameters = rope_parameters(config)
    theta = float(parameters["rope_theta"])
    sizes = theta, head_size(config), config["max_position_embeddings"]
    if parameters["rope_type"] == "default":
        return RotaryPositionalEmbedding(*sizes, device="cpu")
    return Llama31Rope(
        *sizes,
        device="cpu",
        factor=parameters["factor"],
        low_freq_factor=parameters["low_freq_factor"],
        high_freq_factor=parameters["high_freq_factor"],
        original_max_seq_len=parameters["original_max_position_embeddings"],
    )


def build(config: Config, halves: bool = False) -> LanguageModel:
    """Return the model that the config describes, on the device meta."""
    family = FAMILIES[config["model_type"]]
    rope = build_rope(config)
    return LanguageModel(
        config["vocab_size"],
        config["num_hidden_layers"],
        config["hidden_size"],
        config["num_attention_heads"],
        config["intermediate_size"],
        tied=bool(config.get("tie_word_embeddings")),
        max_seq_len=config["max_position_embeddings"],
        rope=RopeOfHalves(rope) if halves else rope,
        num_kv_heads=config.get("num_key_value_heads"),
        d_head=head_size(config),
        qk_norm=family.qk_norm,
        eps=config["rms_norm_eps"],
        attention=QwenAttention if family.biases else CachedAttention,
        device="meta",
    )


# A config describes only models that consist of these.
DESCRIBED = {
    LanguageModel,
    Transformer,
    Block,
    QwenAttention,
    CachedAttention,
    RotaryPositionalEmbedding,
    Llama31Rope,
    RopeOfHalves,
    RMSNorm,
    SwiGLU,
    nn.Embedding,
    nn.Linear,
    nn.ModuleList,
    nn.RMSNorm,
}


def config_of(model: LanguageModel) -> Config:
    """Return the config that describes a model.

    Raises:
        ValueError: the model has a layer that no config describes, or layers that
            differ from each other.
    """
    for name, layer in model.named_modules():
        if type(layer) not in DESCRIBED:
            kind = type(layer).__name__
            raise ValueError(f"no config describes {name}, which is {kind}")
    rope = rope_of(model)
    eps = model.transformer.ln_final.eps
    require_eps(model, eps)
    sizes = sizes_of_layers(model)
    weight = model.token_embeddings.weight
    return {
        "architectures": [FAMILIES[sizes["model_type"]].architecture],
        **sizes,
        "vocab_size": weight.shape[0],
        "hidden_size": weight.shape[1],
        "num_hidden_layers": len(model.transformer.layers),
        "hidden_act": "silu",
        "max_position_embeddings": model.transformer.max_seq_len,
        "rms_norm_eps": eps,
        "rope_theta": rope.theta,
        "rope_scaling": scaling_of(rope),
        "tie_word_embeddings": model.tied,
        "torch_dtype": str(weight.dtype).removeprefix("torch."),
    }


def rope_of(model: LanguageModel) -> RotaryPositionalEmbedding:
    """Return the RoPE that all layers share."""
    shared = model.transformer.rope
    layers: Any = model.transformer.layers
    for number, block in enumerate(layers):
        if block.attn.rope is not shared:
            raise ValueError(
                f"layer {number} must have the rope of the Transformer, "
                f"got {block.attn.rope}: a config describes one for all layers"
            )
    rope = shared.rope if isinstance(shared, RopeOfHalves) else shared
    if not isinstance(rope, RotaryPositionalEmbedding):
        got = None if rope is None else type(rope).__name__
        raise ValueError(
            f"rope must be a RotaryPositionalEmbedding, got {got}: "
            "a config describes no other positions"
        )
    return rope


def require_eps(model: LanguageModel, eps: Any) -> None:
    """Raise unless all norms have this eps."""
    for name, norm in model.named_modules():
        if isinstance(norm, (RMSNorm, nn.RMSNorm)) and norm.eps != eps:
            raise ValueError(
                f"{name} must have eps={eps}, as the last norm, got {norm.eps}: "
                "a config describes one eps for all norms"
            )


def sizes_of_layers(model: LanguageModel) -> Config:
    """Return the fields of a config that follow from a layer, the same for each."""
    layers: Any = model.transformer.layers
    expected = sizes_of(layers[0])
    for number, block in enumerate(layers):
        for name, size in sizes_of(block).items():
            if size != expected[name]:
                raise ValueError(
                    f"layer {number} must have {name}={expected[name]}, as layer 0, "
                    f"got {size}: a config describes one size for all layers"
                )
    return expected


def sizes_of(block: Any) -> Config:
    return {
        "model_type": model_type_of(block.attn),
        "intermediate_size": block.ffn.w1.out_features,
        "num_attention_heads": block.attn.num_heads,
        "num_key_value_heads": block.attn.num_kv_heads,
        "head_dim": block.attn.d_head,
    }


def model_type_of(attention: CachedAttention) -> str:
    if isinstance(attention, QwenAttention):
        return "qwen2"
    if attention.q_norm is not None:
        return "qwen3"
    return "llama"


def scaling_of(rope: RotaryPositionalEmbedding) -> Config | None:
    if not isinstance(rope, Llama31Rope):
        return None
    return {
        "rope_type": "llama3",
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_seq_len,
    }


# --- The weights ------------------------------------------------------------------

# Parts of the names: theirs, ours.
NAMES = {
    "model.embed_tokens.": "token_embeddings.",
    "model.layers.": "transformer.layers.",
    "model.norm.": "transformer.ln_final.",
    ".input_layernorm.": ".ln1.",
    ".self_attn.": ".attn.",
    ".o_proj.": ".output_proj.",
    ".post_attention_layernorm.": ".ln2.",
    ".mlp.gate_proj.": ".ffn.w1.",
    ".mlp.down_proj.": ".ffn.w2.",
    ".mlp.up_proj.": ".ffn.w3.",
}
ROTATED = (".q_proj.", ".k_proj.", ".q_norm.", ".k_norm.")


def from_hugging_face(state: State, d_head: int, halves: bool = False) -> State:
    """Return the weights under tinyblock's names.

    The rows of q and k are permuted into consecutive pairs unless `halves`.
    """
    result = {}
    for name, weight in state.items():
        if is_rotated(name) and not halves:
            pattern = "(heads pair half) ... -> (heads half pair) ..."
            weight = rearrange(weight, pattern, pair=2, half=d_head // 2)
        result[renamed(name, NAMES)] = weight
    return result


def to_hugging_face(state: State, d_head: int, halves: bool = False) -> State:
    """Undo `from_hugging_face`."""
    theirs = {ours: name for name, ours in NAMES.items()}
    result = {}
    for name, weight in state.items():
        if is_rotated(name) and not halves:
            pattern = "(heads half pair) ... -> (heads pair half) ..."
            weight = rearrange(weight, pattern, pair=2, half=d_head // 2)
        result[renamed(name, theirs)] = weight
    return result


def is_rotated(name: str) -> bool:
    return any(part in name for part in ROTATED)


def renamed(name: str, parts: Mapping[str, str]) -> str:
    for old, new in parts.items():
        name = name.replace(old, new)
    return name


def assign_weights(model: LanguageModel, state: State, source: object) -> None:
    """Make these tensors the weights of a model.

    Nothing is copied, and their dtype becomes that of the model.

    Raises:
        ValueError: a weight is missing or superfluous, or has another shape.
    """
    expected = model.state_dict()
    if model.tied:
        del expected["lm_head.weight"]  # the embedding
    if unknown := sorted(state.keys() - expected.keys()):
        raise ValueError(f"{source} has weights that are unknown: {shortened(unknown)}")
    if missing := sorted(expected.keys() - state.keys()):
        raise ValueError(f"{source} must have the weights {shortened(missing)}")
    for name, weight in state.items():
        if weight.shape != expected[name].shape:
            shapes = f"{tuple(expected[name].shape)}, got {tuple(weight.shape)}"
            raise ValueError(f"{source}: {name} must have shape {shapes}")
    model.load_state_dict(state, assign=True)


def shortened(names: Sequence[str]) -> str:
    if len(names) < 4:
        return ", ".join(names)
    return f"{names[0]} and {len(names) - 1} more"


# --- Files ------------------------------------------------------------------------


def load(source: str | Path, *, halves: bool = False) -> LanguageModel:
    """Return the model of a checkpoint: a folder, or a name.

    A name is downloaded into Hugging Face's cache. The weights keep the dtype of the
    file. `halves` leaves their rows in place, and rotates halves instead of pairs.

    Raises:
        ValueError: the folder is no checkpoint, or this model does not compute what its
            config describes.
    """
    folder = find_folder(source)
    config = read_config(folder)
    check_config(config)
    weights = read_weights(folder)
    if config.get("tie_word_embeddings"):
        weights.pop("lm_head.weight", None)  # some files repeat the embedding
    model = build(config, halves)
    state = from_hugging_face(weights, head_size(config), halves)
    assign_weights(model, state, folder)
    return model


def save(model: LanguageModel, folder: str | Path, **fields: Any) -> None:
    """Write a model as a checkpoint, which transformers and `load` read.

    `fields` go into the config, such as eos_token_id=2. The tokenizer is not written.

    Raises:
        ValueError: no config describes the model.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(model)
    halves = isinstance(model.transformer.rope, RopeOfHalves)
    weights = to_hugging_face(model.state_dict(), config["head_dim"], halves)
    if config["tie_word_embeddings"]:
        del weights["lm_head.weight"]
    contiguous = {name: weight.contiguous() for name, weight in weights.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps({**config, **fields}, indent=2)
    (folder / "config.json").write_text(text + "\n")


def find_folder(source: str | Path) -> Path:
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
        return Path(snapshot_download(str(source), allow_patterns=patterns))
    except (OSError, HFValidationError) as error:
        raise ValueError(
            f"{source} must be a folder, or the name of a checkpoint that can be "
            f"downloaded: {first_line(error)}"
        ) from error


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def read_weights(folder: Path) -> State:
    """Return the weights of a checkpoint in one file or in several."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    state = {}
    for name in names:
        if not (folder / name).exists():
            raise ValueError(
                f"{folder} must contain {name}: save other formats as safetensors with "
                "transformers first"
            )
        state.update(load_file(folder / name))
    # Early conversions of Llama saved this table, which follows from theta.
    return {
        name: weight
        for name, weight in state.items()
        if not name.endswith(".rotary_emb.inv_freq")
    }


# --- Comparison with transformers -------------------------------------------------


@torch.no_grad()
def relative_error(source: str | Path, *, halves: bool = False) -> float:
    """Return how far the logits of a random text are from those of transformers.

    The distance is relative to the norm of the logits.
    """
    from transformers import AutoModelForCausalLM

    ours = load(source, halves=halves)
    theirs = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    tokens = torch.randint(theirs.config.vocab_size, (1, 32))
    expected = theirs(tokens).logits.double()
    logits = ours(tokens).double()
    return float((logits - expected).norm() / expected.norm())


def restores(source: str | Path, *, halves: bool = False) -> bool:
    """Save a checkpoint again, and return whether all weights are equal."""
    with tempfile.TemporaryDirectory() as folder:
        save(load(source, halves=halves), folder)
        saved = read_weights(Path(folder))
        original = read_weights(find_folder(source))
        return saved.keys() == original.keys() and all(
            torch.equal(saved[name], original[name]) for name in saved
        )


def compare(name: str, source: str | Path) -> None:
    for halves in (False, True):
        error = relative_error(source, halves=halves)
        saving = "restores" if restores(source, halves=halves) else "does not restore"
        how = "rotates halves" if halves else "permutes rows"
        print(f"{name}, {how}: off by {error:.1e}; saving {saving} every value")


def write_random(model_type: str, folder: str) -> None:
    """Write a small random checkpoint in several files, as large ones are stored."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        model_type,
        vocab_size=99,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder, max_shard_size="100KB")


def main() -> int:
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    try:
        if len(sys.argv) > 1:
            compare(sys.argv[1], sys.argv[1])
            return 0
        for model_type in FAMILIES:
            with tempfile.TemporaryDirectory() as folder:
                write_random(model_type, folder)
                compare(model_type, folder)
    except ValueError as error:
        print(f"hugging_face.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
