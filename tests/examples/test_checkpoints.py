"""Checkpoints of transformers: the same logits and texts, or one ValueError."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf", reason="requires the extra examples")
huggingface_hub = pytest.importorskip(
    "huggingface_hub", reason="requires the extra examples"
)
safetensors = pytest.importorskip(
    "safetensors.torch", reason="requires the extra examples"
)
transformers = pytest.importorskip("transformers", reason="requires the extra examples")
tokenizers = pytest.importorskip("tokenizers", reason="requires the extra examples")
from_gguf = pytest.importorskip("from_gguf", reason="requires the extra examples")
generate = pytest.importorskip("generate", reason="requires the extra examples")
hugging_face = pytest.importorskip("hugging_face", reason="requires the extra examples")
train = pytest.importorskip("train", reason="requires the extra examples")

# `make story` downloads the file. .ci/run does so first, and fails if a test is skipped.
MODEL = Path.home() / ".cache/tinyblock/SmolLM2-135M-Instruct.Q4_1.gguf"

YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e5,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LLAMA3 = {
    **YARN,
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
ACCEPTED = {
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "llama 3.1's positions": ("llama", {"rope_parameters": LLAMA3}),
    "yarn": ("qwen3", {"rope_parameters": YARN}),
    "yarn's mscale": ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.5}}),
}
REJECTED: dict[str, Any] = {
    "model_type": ("mistral", {}),
    "attention_multiplier": ("granite", {"attention_multiplier": 0.1}),
    "attention_bias": ("llama", {"attention_bias": True}),
    "hidden_act": ("llama", {"hidden_act": "gelu"}),
    "sliding_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 8}),
    "linear": ("llama", {"rope_parameters": {**YARN, "rope_type": "linear"}}),
    "truncate": ("qwen3", {"rope_parameters": {**YARN, "truncate": False}}),
}


def save(kind, folder, shards="100KB", **options):
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=257,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        **options,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder, max_shard_size=shards)
    return model.eval()


def greedy(theirs, prompt, count):
    return theirs.generate(
        prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False
    )


@torch.no_grad()
def assert_equal(ours, theirs):
    tokens = torch.randint(257, (2, 100))
    expected = theirs(tokens).logits
    error = float((ours(tokens) - expected).norm() / expected.norm())
    assert error < 1e-5, f"logits differ by {error:.0e} of their norm"


@pytest.mark.parametrize(("kind", "options"), ACCEPTED.values(), ids=ACCEPTED)
def test_a_checkpoint_has_the_logits_of_transformers(kind, options, tmp_path):
    theirs = save(kind, tmp_path, **options)
    ours = hugging_face.load(tmp_path)
    assert ours.tied == bool(options.get("tie_word_embeddings"))
    assert_equal(ours, theirs)


def change_json(path, change):
    """Let `change` edit the content of a file."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def change_weights(path, change):
    """Let `change` edit the weights of a file."""
    state = safetensors.load_file(path)
    change(state)
    safetensors.save_file(state, path, metadata={"format": "pt"})


def test_a_head_in_the_file_is_used_even_if_the_config_says_tied(tmp_path):
    theirs = save("llama", tmp_path)

    def tie(config):
        config["tie_word_embeddings"] = True

    change_json(tmp_path / "config.json", tie)
    assert_equal(hugging_face.load(tmp_path), theirs)


@pytest.mark.parametrize("name", REJECTED)
def test_a_config_that_is_not_understood_raises(name, tmp_path):
    kind, options = REJECTED[name]
    save(kind, tmp_path, **options)
    with pytest.raises(ValueError, match=f"must .*(but has|got) .*{name}"):
        hugging_face.load(tmp_path)


@pytest.mark.parametrize(
    "name", ["model_type", "hidden_size", "rms_norm_eps", "max_position_embeddings"]
)
def test_a_config_that_lacks_a_field_raises(name, tmp_path):
    save("llama", tmp_path)

    def remove(config):
        del config[name]

    change_json(tmp_path / "config.json", remove)
    with pytest.raises(ValueError, match=f"must have the fields .*{name}"):
        hugging_face.load(tmp_path)


# --- Configs as older releases of transformers wrote them ---------------------------------


def as_written_by_release_4(config):
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    config["_attn_implementation_autoset"] = True


def as_written_before_rope_type(config):
    as_written_by_release_4(config)
    if config["rope_scaling"]:
        config["rope_scaling"]["type"] = config["rope_scaling"].pop("rope_type")


@pytest.mark.parametrize(
    "rope",
    [{"rope_type": "default", "rope_theta": 5e5}, LLAMA3, YARN],
    ids=["plain", "llama3", "yarn"],
)
@pytest.mark.parametrize(
    "change", [as_written_by_release_4, as_written_before_rope_type]
)
def test_an_old_config_has_the_logits_of_transformers(change, rope, tmp_path):
    theirs = save("llama", tmp_path, rope_parameters=dict(rope))
    change_json(tmp_path / "config.json", change)
    assert_equal(hugging_face.load(tmp_path), theirs)


def test_without_a_length_of_training_it_is_the_length_of_the_model(tmp_path):
    rope = {**YARN, "original_max_position_embeddings": 128}
    theirs = save("llama", tmp_path, rope_parameters=rope)

    def remove(config):
        del config["rope_parameters"]["original_max_position_embeddings"]

    change_json(tmp_path / "config.json", remove)
    assert_equal(hugging_face.load(tmp_path), theirs)


@pytest.mark.parametrize("name", ["factor", "low_freq_factor", "high_freq_factor"])
def test_a_rope_that_lacks_a_field_raises(name, tmp_path):
    save("llama", tmp_path, rope_parameters=LLAMA3)

    def remove(config):
        del config["rope_parameters"][name]

    change_json(tmp_path / "config.json", remove)
    with pytest.raises(ValueError, match=f"llama3 must have .*{name}"):
        hugging_face.load(tmp_path)


# --- Which file has the weights -----------------------------------------------------------


def write_wrong_weights(source, target):
    state = {name: 2 * weight for name, weight in safetensors.load_file(source).items()}
    safetensors.save_file(state, target)


@pytest.mark.parametrize(
    "other",
    [
        "model.fp16.safetensors",
        "model-00001-of-00001.safetensors",
        "model_old.safetensors",
    ],
)
def test_without_an_index_only_model_safetensors_is_read(other, tmp_path):
    theirs = save("llama", tmp_path, shards="1GB")
    write_wrong_weights(tmp_path / "model.safetensors", tmp_path / other)
    assert_equal(hugging_face.load(tmp_path), theirs)


@pytest.mark.parametrize(
    "other", ["model.safetensors", "model-00099-of-00099.safetensors"]
)
def test_with_an_index_only_its_files_are_read(other, tmp_path):
    theirs = save("llama", tmp_path)
    for shard in list(tmp_path.glob("model-*.safetensors")):
        write_wrong_weights(shard, tmp_path / other)
    assert_equal(hugging_face.load(tmp_path), theirs)


def test_the_index_may_name_any_file(tmp_path):
    theirs = save("llama", tmp_path)
    for shard in list(tmp_path.glob("model-*.safetensors")):
        shard.rename(tmp_path / f"weights-{shard.name}")

    def change(index):
        places = index["weight_map"]
        for name, place in places.items():
            places[name] = f"weights-{place}"

    change_json(tmp_path / "model.safetensors.index.json", change)
    assert_equal(hugging_face.load(tmp_path), theirs)


def test_a_weight_is_read_from_the_file_that_the_index_names(tmp_path):
    theirs = save("llama", tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    [first, *_, last] = sorted(set(index["weight_map"].values()))
    for source, target in ((first, last), (last, first)):
        names = [name for name, file in index["weight_map"].items() if file == source]
        wrong = {name: torch.zeros_like(theirs.state_dict()[name]) for name in names}
        state = safetensors.load_file(tmp_path / target) | wrong
        safetensors.save_file(state, tmp_path / target, metadata={"format": "pt"})
    assert_equal(hugging_face.load(tmp_path), theirs)


def test_a_missing_shard_raises(tmp_path):
    save("llama", tmp_path)
    [shard, *_] = sorted(tmp_path.glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(ValueError, match=f"must have the file {shard.name}"):
        hugging_face.load(tmp_path)


def test_weights_in_another_format_raise(tmp_path):
    theirs = save("llama", tmp_path, shards="1GB")
    (tmp_path / "model.safetensors").unlink()
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"must have the file model\.safetensors"):
        hugging_face.load(tmp_path)


def test_a_file_that_git_lfs_has_not_fetched_raises(tmp_path):
    save("llama", tmp_path, shards="1GB")
    pointer = "version https://git-lfs.github.com/spec/v1\nsize 1000\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    with pytest.raises(ValueError, match="must be a complete safetensors file"):
        hugging_face.load(tmp_path)


def test_a_folder_without_a_config_raises(tmp_path):
    with pytest.raises(ValueError, match=r"must have a file config\.json"):
        hugging_face.load(tmp_path)


def test_a_download_takes_the_files_that_the_index_names(tmp_path, monkeypatch):
    theirs = save("llama", tmp_path)
    files = {path.name for path in tmp_path.glob("model-*.safetensors")}
    patterns = []

    def download(name, allow_patterns):
        assert name == "someone/something"
        patterns.append(set(allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert_equal(hugging_face.load("someone/something"), theirs)
    assert not any("safetensors" in pattern for pattern in patterns[0])
    assert patterns[1] == files


# --- Names, shapes and dtypes of weights --------------------------------------------------


def remove_head(state):
    del state["lm_head.weight"]


def add_a_bias(state):
    state["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(64)


def cut_queries(state):
    queries = "model.layers.0.self_attn.q_proj.weight"
    state[queries] = state[queries][:63].clone()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove_head, r"lack 1, .*'lm_head\.weight', \(257, 64\).* have 0 others"),
        (add_a_bias, r"lack 0, .* have 1 others, .*output_proj\.bias', \(64,\)"),
        (cut_queries, r"lack 1, .* have 1 others, .*q_proj\.weight', \(63, 64\)"),
    ],
    ids=["no head, and not tied", "a bias", "a shape"],
)
def test_weights_that_are_not_those_of_the_model_raise(change, message, tmp_path):
    save("llama", tmp_path, shards="1GB")
    change_weights(tmp_path / "model.safetensors", change)
    with pytest.raises(ValueError, match=message):
        hugging_face.load(tmp_path)


def test_the_frequencies_in_a_llama_2_file_are_skipped(tmp_path):
    theirs = save("llama", tmp_path, shards="1GB")
    name = "model.layers.{}.self_attn.rotary_emb.inv_freq"

    def add(state):
        for layer in (0, 1):
            state[name.format(layer)] = torch.ones(8)

    change_weights(tmp_path / "model.safetensors", add)
    assert_equal(hugging_face.load(tmp_path), theirs)


@torch.no_grad()
def test_the_widest_dtype_in_the_file_is_the_dtype_of_the_model(tmp_path):
    theirs = save("llama", tmp_path, shards="1GB")
    for name, weight in theirs.named_parameters():
        if "norm" not in name:
            weight.copy_(weight.bfloat16())

    def mix(state):
        for name, weight in theirs.state_dict().items():
            state[name] = weight if "norm" in name else weight.bfloat16()

    change_weights(tmp_path / "model.safetensors", mix)
    ours = hugging_face.load(tmp_path)
    assert {weight.dtype for weight in ours.parameters()} == {torch.float32}
    assert_equal(ours, theirs)


# --- Generation ---------------------------------------------------------------------------


def save_tokenizer(folder):
    """Save a tokenizer whose tokens are single bytes: parts of characters."""
    letters = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "<end>"]
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    path = str(folder / "tokenizer.json")
    tokenizers.ByteLevelBPETokenizer(vocabulary, merges=[]).save(path)
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_file=path,
        eos_token="<end>",
        chat_template="Q: {{ messages[0].content }}",
    )
    wrapped.save_pretrained(folder)
    return wrapped


@pytest.fixture
def with_tokenizer(tmp_path):
    """A checkpoint with a tokenizer, in tmp_path."""
    theirs = save("llama", tmp_path)
    return theirs, save_tokenizer(tmp_path)


def name_stop_tokens(folder, **files):
    """Write eos_token_id into config.json and generation_config.json, or remove it."""
    for name in ("config", "generation_config"):
        path = folder / f"{name}.json"
        content = json.loads(path.read_text())
        content.pop("eos_token_id", None)
        if name in files:
            content["eos_token_id"] = files[name]
        path.write_text(json.dumps(content))


def test_generate_prints_the_text_of_transformers_until_it_stops(
    with_tokenizer, tmp_path, capsys
):
    theirs, tokenizer = with_tokenizer
    prompt = tokenizer("Q: naïve 🙂", return_tensors="pt")["input_ids"]
    tokens = greedy(theirs, prompt, 20)[0].tolist()
    stop = tokens[-5]
    name_stop_tokens(tmp_path, generation_config=[stop])
    generate.main([str(tmp_path), "naïve 🙂", "--chat", "--tokens", "20"])

    new = tokens[prompt.shape[1] :]
    text = tokenizer.decode(new[: new.index(stop)], skip_special_tokens=True)
    assert text.rstrip("\ufffd"), "the model stops at its first token"
    assert capsys.readouterr().out == text.rstrip("\ufffd") + "\n"


@pytest.mark.parametrize(
    ("files", "stop"),
    [
        ({"generation_config": 0, "config": 5}, {0}),
        ({"generation_config": [3, 4]}, {3, 4}),
        ({"config": 5}, {5}),
        ({}, {256}),
    ],
    ids=["token 0", "a list", "in config.json only", "in the tokenizer only"],
)
def test_generate_stops_at_the_tokens_that_the_files_name(
    files, stop, with_tokenizer, tmp_path
):
    name_stop_tokens(tmp_path, **files)
    _, _, found = generate.load(str(tmp_path))
    assert found == stop


def printed(capsys, *arguments):
    generate.main([str(argument) for argument in arguments])
    return capsys.readouterr().out


def test_tokens_limits_the_text(with_tokenizer, tmp_path, capsys):
    name_stop_tokens(tmp_path, generation_config=999)
    model = hugging_face.load(tmp_path)
    _, tokenizer = with_tokenizer
    prompt = tokenizer("abc", return_tensors="pt")["input_ids"]
    for count in (4, 8):
        expected = tokenizer.decode(model.generate(prompt, count)[0, 3:])
        text = expected.rstrip("\ufffd")
        assert text, "the model generates no complete character"
        assert printed(capsys, tmp_path, "abc", "--tokens", count) == text + "\n"


def test_temperature_and_top_k_draw_tokens(with_tokenizer, tmp_path, capsys):
    name_stop_tokens(tmp_path, generation_config=999)
    run = [tmp_path, "abc", "--tokens", "12"]
    likeliest = printed(capsys, *run)
    assert printed(capsys, *run, "--temperature", "5") != likeliest
    assert printed(capsys, *run, "--temperature", "1e-9") == likeliest
    assert printed(capsys, *run, "--temperature", "5", "--top-k", "1") == likeliest
    assert printed(capsys, *run, "--temperature", "5", "--top-k", "9") != likeliest


def test_the_longest_prompt_leaves_room_for_one_token(with_tokenizer, tmp_path, capsys):
    printed(capsys, tmp_path, "a" * 128, "--tokens", "1")
    with pytest.raises(SystemExit):
        printed(capsys, tmp_path, "a" * 128, "--tokens", "2")
    assert "128 positions, of which the last new" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "--tokens", "0"], "argument --tokens: must be at least 1, got 0"),
        (["a", "--top-k", "0"], "argument --top-k: must be at least 1, got 0"),
        (["a", "--top-k", "3"], "--top-k must come with a --temperature"),
        (["a", "--temperature=-1"], "argument --temperature: must be at least 0"),
        (["a", "--temperature=nan"], "argument --temperature: must be at least 0"),
        ([""], "each prompt must have a token"),
    ],
)
def test_generate_names_a_wrong_argument(
    arguments, message, with_tokenizer, tmp_path, capsys
):
    with pytest.raises(SystemExit):
        generate.main([str(tmp_path), *arguments])
    assert message in capsys.readouterr().err


def test_chat_requires_a_template(with_tokenizer, tmp_path, capsys):
    for path in tmp_path.glob("chat_template*"):
        path.unlink()
    with pytest.raises(SystemExit):
        generate.main([str(tmp_path), "a", "--chat"])
    assert "--chat requires a model that has a chat template" in capsys.readouterr().err


def test_a_model_of_train_continues_bytes(tmp_path, capsys):
    path = str(tmp_path / "run.pt")
    sizes = ["--d-model=16", "--layers=1", "--steps=1", "--seq=16"]
    train.main([__file__, *sizes, "--checkpoint", path])
    capsys.readouterr()
    expected = train.load(path).generate(torch.tensor([list(b"im")]), 15)[0, 2:]
    found = printed(capsys, path, "im", "--tokens", "15")
    text = bytes(expected.tolist()).decode(errors="replace").rstrip("\ufffd")
    assert text, "the model generates no complete character"
    assert found == text + "\n"
    with pytest.raises(SystemExit):
        generate.main([path, "im", "--chat"])


class Contracting:
    """A tokenizer whose clean-up joins what two tokens begin and end."""

    def decode(self, tokens, skip_special_tokens, clean_up_tokenization_spaces):
        text = "".join({0: "do", 1: " n't", 2: "!"}[token] for token in tokens)
        return text.replace(" n't", "n't") if clean_up_tokenization_spaces else text


def test_pieces_add_up_to_the_text():
    assert "".join(generate.pieces(Contracting(), [0], [1, 2])) == " n't!"


@pytest.mark.parametrize("name", ["missing.gguf", "README.md"])
def test_generate_reports_a_model_that_it_does_not_find(name, tmp_path, capsys):
    (tmp_path / "README.md").write_text("no model")
    with pytest.raises(SystemExit, match="2"):
        generate.main([str(tmp_path / name), "text"])
    assert name in capsys.readouterr().err


# --- GGUF ---------------------------------------------------------------------------------

GGUF_FIELDS: dict[str, Any] = {
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "llama.rope.dimension_count": 16,
    "llama.rope.freq_base": 5e5,
    "llama.vocab_size": 257,
}


def write_gguf(path, theirs, tensors=None, architecture="llama", **changes):
    """Write a model of transformers as llama.cpp does.

    `changes` of fields have underscores for dots. None removes a field.
    """
    writer = gguf.GGUFWriter(path, architecture)
    fields = GGUF_FIELDS | {
        name.replace("__", "."): value for name, value in changes.items()
    }
    for name, value in fields.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    weights = {
        names.get_name(name, try_suffixes=(".weight",)): weight.detach().numpy()
        for name, weight in theirs.state_dict().items()
    }
    if theirs.config.tie_word_embeddings:
        del weights["output.weight"]
    for name, weight in (weights | (tensors or {})).items():
        if weight is None:
            continue
        heads = {"attn_q": 4, "attn_k": 2}.get(name.split(".")[-2])
        if heads:  # as in convert_hf_to_gguf.py
            halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


DEFAULT = {"rope_type": "default", "rope_theta": 5e5}


def small_llama(folder, **options):
    options.setdefault("rope_parameters", DEFAULT)
    return save("llama", folder, **options)


@pytest.mark.parametrize("tied", [False, True])
def test_a_written_gguf_file_has_the_logits_of_transformers(tied, tmp_path):
    theirs = small_llama(tmp_path, tie_word_embeddings=tied)
    ours = from_gguf.load(write_gguf(tmp_path / "model.gguf", theirs))
    assert ours.tied == tied
    assert_equal(ours, theirs)


def test_a_gguf_file_may_state_the_head_size(tmp_path):
    theirs = small_llama(tmp_path, head_dim=32)
    sizes = {
        "llama__attention__key_length": 32,
        "llama__attention__value_length": 32,
        "llama__rope__dimension_count": 32,
    }
    path = write_gguf(tmp_path / "model.gguf", theirs, **sizes)
    assert_equal(from_gguf.load(path), theirs)


def test_a_gguf_file_of_llama_3_1_has_its_positions(tmp_path):
    theirs = small_llama(tmp_path, rope_parameters=dict(LLAMA3))
    plain = 5e5 ** (-torch.arange(0, 16, 2).double() / 16)
    factors = (plain / theirs.model.rotary_emb.inv_freq.double()).float().numpy()
    assert factors.max() > 3.9
    tensors = {"rope_freqs.weight": factors}
    path = write_gguf(tmp_path / "model.gguf", theirs, tensors)
    assert_equal(from_gguf.load(path), theirs)


NOT_LLAMA: dict[str, tuple[str, dict[str, Any]]] = {
    "another architecture": ("got qwen2", {"architecture": "qwen2"}),
    "experts": ("expert_count", {"llama__expert_count": 8}),
    "a size per layer": ("head_count_kv", {"llama__attention__head_count_kv": [2, 2]}),
    "no width": ("hidden_size", {"llama__embedding_length": None}),
    "half of a head rotated": ("must be the head", {"llama__rope__dimension_count": 8}),
    "scaled positions": ("scaling", {"llama__rope__scaling__factor": 4.0}),
    "a weight missing": ("lack 1", {"tensors": {"blk.1.ffn_up.weight": None}}),
    "no embedding": ("lack 2", {"tensors": {"token_embd.weight": None}}),
    "a bias": (
        "have 1 others",
        {"tensors": {"blk.0.attn_output.bias": np.zeros(64, "f4")}},
    ),
    "too few factors": ("got 5", {"tensors": {"rope_freqs.weight": np.ones(5, "f4")}}),
}


@pytest.mark.parametrize("what", NOT_LLAMA)
def test_a_gguf_file_that_is_not_understood_raises(what, tmp_path):
    message, changes = NOT_LLAMA[what]
    path = write_gguf(tmp_path / "model.gguf", small_llama(tmp_path), **changes)
    with pytest.raises(ValueError, match=message):
        from_gguf.load(path)


def test_a_file_that_is_not_gguf_raises(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"something else" * 9)
    with pytest.raises(ValueError, match="GGUF"):
        from_gguf.load(tmp_path / "model.gguf")


def test_all_tokens_that_end_a_text_stop_a_gguf_model(tmp_path):
    stops = {
        "tokenizer__ggml__eos_token_id": 7,
        "tokenizer__ggml__eot_token_id": 9,
    }
    path = write_gguf(tmp_path / "model.gguf", small_llama(tmp_path), **stops)
    assert from_gguf.stop_tokens(path) == {7, 9}


needs_story = pytest.mark.skipif(
    not MODEL.exists(), reason="`make story` downloads the model"
)


@needs_story
def test_a_gguf_file_has_the_text_of_transformers():
    source = {"pretrained_model_name_or_path": MODEL.parent, "gguf_file": MODEL.name}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    text = "The lighthouse keeper opened the door, and"
    prompt = tokenizer(text, return_tensors="pt")["input_ids"]
    ours = from_gguf.load(MODEL)
    assert torch.equal(ours.generate(prompt, 24), greedy(theirs, prompt, 24))


@needs_story
def test_a_tokenizer_beside_a_gguf_file_is_not_read(tmp_path):
    save_tokenizer(tmp_path)
    (tmp_path / "model.gguf").symlink_to(MODEL)
    tokenizer = generate.gguf_tokenizer(tmp_path / "model.gguf")
    assert len(tokenizer) == 49152
