"""Checkpoints that transformers has saved: the same logits, or one ValueError."""

import shutil

import pytest
import torch
from processes import run
from saved_checkpoints import LLAMA3, YARN, assert_equal, change_weights, save

from tinyblock import RotaryPositionalEmbedding

hugging_face = pytest.importorskip("hugging_face", reason="requires the extra examples")

LINEAR = {"rope_type": "linear", "rope_theta": 50.0, "factor": 4.0}
LONG = {
    **YARN,
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
}
# 1 and 2.74 turns are pairs 6.4 and 5.9. In whole pairs, 7 and 5, pair 6 is slower.
SLOW = {
    **YARN,
    "rope_theta": 1e7,
    "original_max_position_embeddings": 2_500_000,
    "beta_fast": 2.74,
}
# It scales the scores of the last position, 127, and of no other.
LATE = {**YARN, "original_max_position_embeddings": 127, "llama_4_scaling_beta": 0.1}

ACCEPTED = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "one head per key": ("llama", {"num_key_value_heads": 4}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "bfloat16": ("llama", {"dtype": torch.bfloat16}),
    "float64": ("llama", {"dtype": torch.float64}),
    "a million positions": (
        "llama",
        {"max_position_embeddings": 2**20, "rope_parameters": {"rope_theta": 5e5}},
    ),
    "llama 3.1's positions": ("llama", {"rope_parameters": LLAMA3}),
    "linear": ("llama", {"rope_parameters": LINEAR}),
    "yarn": ("qwen3", {"rope_parameters": YARN}),
    "yarn's default betas": (  # 33 turns, or 2, would interpolate other pairs
        "llama",
        {"rope_parameters": {**YARN, "original_max_position_embeddings": 2330}},
    ),
    "yarn beyond the last pair": (
        "llama",
        {"rope_parameters": {**YARN, "rope_theta": 2.0}},
    ),
    "yarn without a pair between": (
        "llama",
        {"rope_parameters": {**YARN, "original_max_position_embeddings": 6}},
    ),
    "yarn's betas": (
        "llama",
        {"rope_parameters": {**YARN, "beta_fast": 2.0, "beta_slow": 0.5}},
    ),
    "yarn's mscale": ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.5}}),
    "a window that is not used": (
        "qwen2",
        {"use_sliding_window": False, "sliding_window": 8},
    ),
    "another name": ("mistral", {"sliding_window": None}),
    "without a cache": ("llama", {"use_cache": False}),
}
OTHER_LOGITS = r"logits differ by \de[+-]0\d of their norm"
REJECTED = {
    "attention to later tokens": ("llama", {"is_causal": False}, OTHER_LOGITS),
    "activation": ("llama", {"hidden_act": "gelu"}, OTHER_LOGITS),
    "scale of scores": ("granite", {"attention_multiplier": 0.249}, OTHER_LOGITS),
    "gains of 1 + w": ("gemma", {}, OTHER_LOGITS),
    "consecutive pairs": ("ernie4_5", {}, OTHER_LOGITS),
    "a layer without positions": ("smollm3", {"no_rope_layers": [1, 0]}, OTHER_LOGITS),
    "scores by position": ("ministral3", {"rope_parameters": LATE}, OTHER_LOGITS),
    "the frequency of one slow pair": (
        "llama",
        {
            "max_position_embeddings": 2**17,
            "rope_parameters": {**SLOW, "truncate": False},
        },
        r"cosines or sines differ by up to \de-0[12]",
    ),
    "half of each head": (
        "llama",
        {"rope_parameters": {**LINEAR, "partial_rotary_factor": 0.5}},
        "must turn all 8 pairs of a head, got 4",
    ),
    "longrope": ("llama", {"rope_parameters": LONG}, "type default, .*got longrope"),
    "biases": ("llama", {"attention_bias": True}, r"output_proj\.bias"),
    "a window": ("mistral", {"sliding_window": 100}, "a window of 100"),
    "windows in some layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1},
        "must be full, got .*sliding_attention",
    ),
    "experts": ("mixtral", {"sliding_window": None}, "weights must be those of Llama"),
    "another structure": ("gpt2", {}, "built like Llama, got GPT2LMHeadModel"),
}


@pytest.mark.parametrize(("kind", "options"), ACCEPTED.values(), ids=ACCEPTED)
def test_a_checkpoint_has_the_logits_of_transformers(kind, options, tmp_path):
    theirs = save(kind, tmp_path, **options)
    random_state = torch.get_rng_state()
    ours = hugging_face.load(tmp_path)
    assert torch.equal(torch.get_rng_state(), random_state)  # no weight was drawn
    assert ours.tied == bool(options.get("tie_word_embeddings"))
    assert {weight.dtype for weight in ours.parameters()} == {theirs.dtype}
    assert_equal(ours.double(), theirs.float())


@pytest.mark.parametrize(
    ("kind", "options", "message"), REJECTED.values(), ids=REJECTED
)
def test_a_model_that_computes_anything_else_raises(kind, options, message, tmp_path):
    save(kind, tmp_path, **options)
    with pytest.raises(ValueError, match=message):
        hugging_face.load(tmp_path)


def test_a_loaded_model_turns_by_exact_angles(tmp_path):
    """In float32, as transformers computes them, far ones are off by 1e-3."""
    rope = {"rope_type": "default", "rope_theta": 5e5}
    save("llama", tmp_path, max_position_embeddings=2**17, rope_parameters=rope)
    found = hugging_face.load(tmp_path).transformer.rope.cos_sin
    expected = RotaryPositionalEmbedding(5e5, 16, 2**17).cos_sin
    assert torch.equal(found, expected)


# --- Files --------------------------------------------------------------------------------

UP = "model.layers.1.mlp.up_proj.weight"
BIAS = "model.layers.1.mlp.up_proj.bias"
OTHER_WEIGHTS = {
    "missing_keys": lambda state: state.pop(UP),
    "unexpected_keys": lambda state: state.update({BIAS: torch.ones(96)}),
    "mismatched_keys": lambda state: state.update({UP: torch.ones(95, 64)}),
}


@pytest.mark.parametrize("problem", OTHER_WEIGHTS)
def test_other_weights_than_those_of_the_config_raise(problem, tmp_path):
    save("llama", tmp_path, shards="1GB")
    change_weights(tmp_path / "model.safetensors", OTHER_WEIGHTS[problem])
    with pytest.raises(ValueError, match=f"{problem}.*up_proj"):
        hugging_face.load(tmp_path)


def pickle_the_weights(folder):
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def save_again_in_several_files(folder):
    save("llama", folder / "new")
    for path in (folder / "new").iterdir():
        shutil.move(path, folder / path.name)


def lose_one_of_several_files(folder):
    save_again_in_several_files(folder)
    (folder / "model.safetensors").unlink()
    min(folder.glob("model-*.safetensors")).unlink()


BROKEN = {
    pickle_the_weights: r"cannot load .*model\.safetensors",
    save_again_in_several_files: "remove the older ones",
    lose_one_of_several_files: "cannot load .*00001-of",
}


@pytest.mark.parametrize("change", BROKEN, ids=lambda change: change.__name__)
def test_a_folder_that_is_not_one_whole_checkpoint_raises(change, tmp_path):
    save("llama", tmp_path, shards="1GB")
    change(tmp_path)
    with pytest.raises(ValueError, match=BROKEN[change]):
        hugging_face.load(tmp_path)


@pytest.mark.parametrize("shards", ["100KB", "1GB"], ids=["in several files", "in one"])
def test_a_model_has_the_widest_dtype_of_its_files(shards, tmp_path):
    theirs = save("llama", tmp_path, shards=shards)

    def narrow(state):
        for name in state:
            if "norm" not in name:
                state[name] = state[name].bfloat16()
                theirs.state_dict()[name].copy_(state[name])

    for path in tmp_path.glob("*.safetensors"):
        change_weights(path, narrow)
    ours = hugging_face.load(tmp_path)
    assert {weight.dtype for weight in ours.parameters()} == {torch.float32}
    assert_equal(ours.double(), theirs)


def test_the_command_prints_the_difference(tmp_path):
    save("qwen3", tmp_path)
    failed, printed = run(hugging_face.__file__, tmp_path, processes=1)
    assert not failed, printed
    assert float(printed.rpartition(": ")[2]) < hugging_face.TOLERANCE
