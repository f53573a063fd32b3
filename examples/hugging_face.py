"""Load a Llama, Qwen2 or Qwen3 checkpoint from a folder or the Hugging Face hub.

    pip install transformers
    python examples/hugging_face.py Qwen/Qwen3-0.6B

transformers reads the config and the weights. `load` builds our model with the same
weights, and compares the logits of both in float64, also at far positions, and again with
random weights, in training. So it needs no list of the fields that a config may have: a
model that computes anything else raises an error. This command prints the difference.

Hugging Face's RoPE pairs x[k] with x[k + d_head/2]; `load` permutes the rows of the
query and key weights, so that they become the consecutive pairs of tinyblock.
"""

import functools
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from float64 import in_float64
from language_model import CachedAttention, LanguageModel
from safetensors.torch import load_file
from scaled_rope import DividedRope, Llama31Rope, YarnRope
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import cached_file, find_adapter_config_file

from tinyblock import RotaryPositionalEmbedding

# Parts of Hugging Face's names of weights, and ours.
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
TOLERANCE = 2.0**-40  # of float64's 53 bits, the sums in all layers may lose 13


class AttentionWithBiases(CachedAttention):
    """Add a bias to queries, keys and values, as Qwen2 does."""

    def __init__(self, d_model: int, num_heads: int, **options: Any) -> None:
        super().__init__(d_model, num_heads, **options)
        for linear in (self.q_proj, self.k_proj, self.v_proj):
            linear.bias = nn.Parameter(linear.weight.new_zeros(linear.out_features))


@torch.no_grad()
def load(source: str | Path) -> LanguageModel:
    """Return the model of a folder, or of a name on the Hugging Face hub.

    It has the widest dtype of its files, and the logits of transformers. While they are
    compared, each weight takes 8 bytes of memory, beside those that it has afterwards.

    Raises:
        ValueError: transformers cannot read the files, or they do not have exactly the
            weights of a model; the model is not built like Llama, attends within
            windows, has dropout, or has other logits than ours.
    """
    theirs = read(source)
    dtype = theirs.dtype
    for weight in theirs.parameters():
        # A copy: views of a file are slow on a CPU, and keep the whole file in memory.
        weight.data = weight.to(torch.float64, copy=True)
    ours = convert(theirs)
    require_same(ours, theirs, "")
    for weight in ours.parameters():
        weight.data = weight.to(dtype)  # exact: the files have no wider one
    # With weights of zero, a mistake may not show, and without training, dropout.
    draw(theirs.train())
    require_same(convert(theirs), theirs, " with random weights, in training")
    return ours


def draw(model: nn.Module) -> None:
    """Give a model new weights, of which none is special. A seed of its own draws them."""
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.ndim == 1:
            drawn = 0.5 + torch.rand(weight.shape, generator=generator)
        else:
            drawn = torch.randn(weight.shape, generator=generator)
            drawn /= weight.shape[-1] ** 0.5
        weight.data = drawn.double()  # not in place, which might change our weights


def require_same(ours: LanguageModel, theirs: PreTrainedModel, when: str) -> None:
    """Raise a ValueError if the logits differ."""
    error = difference(ours, theirs)
    if not error < TOLERANCE:
        raise ValueError(
            "the model must compute what Llama, Qwen2 or Qwen3 compute, without dropout, "
            f"but its logits differ by {error:.0e} of their norm{when}: {theirs.config}"
        )


def read(source: str | Path) -> PreTrainedModel:
    """Return the model of transformers, all of whose weights are in the files."""
    if adapter := find_adapter_config_file(str(source)):
        raise ValueError(
            f"the files must have one model, without an adapter, got {adapter}: merge the "
            "adapter with peft, by merge_and_unload, and save the result"
        )
    try:
        theirs, report = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=widest_dtype(source),
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # the report has them
            output_loading_info=True,
        )
    except Exception as error:  # of many types, also of safetensors
        raise ValueError(f"cannot load {source}: {error}") from error
    problems = {name: min(found) for name, found in report.items() if found}
    if problems:  # transformers draws missing weights
        raise ValueError(
            "the files must have the weights of the model and no others, but there are "
            f"{problems}, for example"
        )
    return theirs


def widest_dtype(source: str | Path) -> torch.dtype:
    """Return a dtype that holds all weights, which are downloaded if need be."""
    found = []
    for name in ("model.safetensors", "model.safetensors.index.json"):
        with suppress(OSError):  # if both are missing, transformers says why
            found.append(Path(cached_file(source, name)))
    if len(found) > 1:
        raise ValueError(
            f"either one file or the files of an index must have the weights, got {found}: "
            "remove the older ones"
        )
    names = {path.name for path in found}
    for path in found:
        if path.suffix == ".json":
            names = set(json.loads(path.read_text())["weight_map"].values())
    dtypes: set[torch.dtype] = set()
    for name in names:
        weights = load_file(cached_file(source, name))  # views, which take no memory
        dtypes.update(weight.dtype for weight in weights.values())
    return functools.reduce(torch.promote_types, dtypes, torch.bool)


def convert(theirs: PreTrainedModel) -> LanguageModel:
    """Return our model, whose weights are theirs."""
    name = type(theirs).__name__
    try:
        ours = build(theirs)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"the model must be built like Llama, got {name}") from error
    state = {}
    for name, weight in theirs.state_dict().items():
        for part, our_part in NAMES.items():
            name = name.replace(part, our_part)
        state[name] = weight
    if ours.tied:
        del state["lm_head.weight"]
    try:
        ours.load_state_dict(state, assign=True)
    except RuntimeError as error:  # names or shapes
        raise ValueError(
            f"the weights must be those of Llama, Qwen2 or Qwen3: {error}"
        ) from error
    half = theirs.model.layers[0].self_attn.head_dim // 2
    for name, weight in ours.named_parameters():
        if any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm")):
            pattern = "(heads pair half) ... -> (heads half pair) ..."
            weight.data = rearrange(weight, pattern, pair=2, half=half).clone()
    return ours


def build(theirs: Any) -> LanguageModel:
    """Return our model of the same sizes, on the device meta."""
    config = theirs.config
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    # They may be longer than the text that is compared.
    if window is not None or chunk is not None or kinds != {"full_attention"}:
        raise ValueError(
            f"attention must be full, got {kinds}, a window of {window} and chunks of "
            f"{chunk}"
        )
    first, *_ = theirs.model.layers
    attention = first.self_attn
    has_biases = attention.q_proj.bias is not None
    return LanguageModel(
        config.vocab_size,
        len(theirs.model.layers),
        config.hidden_size,
        config.num_attention_heads,
        config.intermediate_size,
        tied=theirs.lm_head.weight is theirs.model.embed_tokens.weight,
        max_seq_len=config.max_position_embeddings,
        rope=build_rope(theirs, attention.head_dim),
        num_kv_heads=config.num_key_value_heads,
        d_head=attention.head_dim,
        eps=config.rms_norm_eps,
        qk_norm=hasattr(attention, "q_norm"),
        attention=AttentionWithBiases if has_biases else CachedAttention,
        device="meta",
    )


def build_rope(theirs: Any, d_head: int) -> RotaryPositionalEmbedding:
    """Return our RoPE of the same type: its frequencies are more exact than theirs."""
    given = theirs.config.rope_parameters
    theta = float(given["rope_theta"])
    sizes = theta, d_head, theirs.config.max_position_embeddings
    match given["rope_type"]:
        case "default":
            return RotaryPositionalEmbedding(*sizes)
        case "linear":
            factors = [given["factor"]] * (d_head // 2)
            return DividedRope(*sizes, factors=factors)
        case "llama3":
            return Llama31Rope(
                *sizes,
                factor=given["factor"],
                original=given["original_max_position_embeddings"],
                low=given["low_freq_factor"],
                high=given["high_freq_factor"],
            )
        case "yarn":
            return YarnRope(
                *sizes,
                factor=given["factor"],
                original=given["original_max_position_embeddings"],
                low=given.get("beta_slow") or 1.0,
                high=given.get("beta_fast") or 32.0,
                attention_factor=theirs.model.rotary_emb.attention_scaling,
            )
        case other:
            raise ValueError(
                f"RoPE must be of the type default, linear, llama3 or yarn, got {other}"
            )


def difference(ours: Any, theirs: Any) -> float:
    """Return the norm of the difference of all logits, divided by their norm.

    Both models are in float64. The first tokens are neighbors, and then each is twice as
    far as the one before.
    """
    rope = ours.transformer.rope
    last = rope.max_seq_len - 1
    powers = [2**i for i in range(last.bit_length())]  # up to `last`
    near = range(last)[:16]
    positions = torch.tensor(sorted({*near, *powers, last}))
    tokens = positions[None] % theirs.config.vocab_size
    found = ours.logits(ours.transformer(ours.token_embeddings(tokens), positions))
    with in_float64():
        rotary = type(theirs.model.rotary_emb)(theirs.config)  # theirs is in float32
        require_same_frequencies(rope.frequencies(), rotary.inv_freq)
        rotary.inv_freq = rope.frequencies()  # at far positions, the last bit matters
        theirs.model.rotary_emb = rotary
        # Without a mask, transformers would take a gap for the start of another text.
        expected = theirs(
            tokens,
            position_ids=positions[None],
            attention_mask=torch.ones_like(tokens),
        ).logits
    error = (found - expected).norm()
    return float(error / expected.norm()) if error else 0.0  # logits may all be 0


def require_same_frequencies(own: Tensor, given: Tensor) -> None:
    """Raise a ValueError if the frequencies of RoPE differ, (half,), in float64."""
    if own.shape != given.shape:
        raise ValueError(
            f"RoPE must turn all {len(own)} pairs of a head, got {len(given)}"
        )
    error = (own / given - 1).abs().max()
    if not error < TOLERANCE:
        raise ValueError(
            "the frequencies of RoPE must be those of its type, but one differs by "
            f"{error:.0e} of its size"
        )


@torch.no_grad()
def main(source: str) -> None:
    theirs = read(source).double()
    error = difference(convert(theirs), theirs)
    print(f"relative difference from the logits of transformers: {error:.1e}")


if __name__ == "__main__":
    main(sys.argv[1])
