"""Files of a checkpoint: which one has the weights, and what they must be."""

import fnmatch
import json
import sys

import pytest
import torch
from saved_checkpoints import (
    assert_equal,
    change_json,
    change_weights,
    safetensors,
    save,
    shards_in,
    transformers,
)

huggingface_hub = pytest.importorskip(
    "huggingface_hub", reason="requires the extra examples"
)
hugging_face = pytest.importorskip("hugging_face", reason="requires the extra examples")


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
    write_wrong_weights(shards_in(tmp_path)[0], tmp_path / other)
    assert_equal(hugging_face.load(tmp_path), theirs)


def test_the_index_may_name_any_file(tmp_path):
    theirs = save("llama", tmp_path)
    for shard in shards_in(tmp_path):
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
    first, *_, last = shards_in(tmp_path)
    for source, target in ((first, last), (last, first)):
        wrong = {
            name: torch.zeros_like(theirs.state_dict()[name])
            for name, file in index["weight_map"].items()
            if file == source.name
        }
        state = safetensors.load_file(target) | wrong
        safetensors.save_file(state, target, metadata={"format": "pt"})
    assert_equal(hugging_face.load(tmp_path), theirs)


def test_a_missing_shard_raises(tmp_path):
    save("llama", tmp_path)
    shard = shards_in(tmp_path)[0]
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


def test_a_download_takes_texts_and_then_the_files_that_the_index_names(
    tmp_path, monkeypatch
):
    theirs = save("llama", tmp_path)
    files = {path.name for path in shards_in(tmp_path)}
    patterns = []

    def download(name, allow_patterns):
        assert name == "someone/something"
        patterns.append(set(allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert_equal(hugging_face.load("someone/something"), theirs)
    texts = {"config.json", "merges.txt", "tokenizer.model", "chat_template.jinja"}
    wanted = set()
    for pattern in patterns[0]:
        wanted.update(fnmatch.filter(texts | {"model.safetensors"}, pattern))
    assert wanted == texts
    assert patterns[1] == files


def test_the_command_prints_the_relative_difference(tmp_path, monkeypatch, capsys):
    theirs = save("llama", tmp_path)
    monkeypatch.setattr(sys, "argv", ["hugging_face.py", str(tmp_path)])
    monkeypatch.setattr(
        hugging_face,
        "load",
        lambda source: lambda tokens: 1.001 * theirs(tokens).logits,
    )
    hugging_face.main()
    assert capsys.readouterr().out.endswith("logits of transformers: 1.0e-03\n")


def test_the_command_compares_in_the_dtype_of_the_file(tmp_path, monkeypatch, capsys):
    save("llama", tmp_path).bfloat16().save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16
    )
    monkeypatch.setattr(sys, "argv", ["hugging_face.py", str(tmp_path)])
    monkeypatch.setattr(
        hugging_face, "load", lambda source: lambda tokens: theirs(tokens).logits
    )
    hugging_face.main()
    assert capsys.readouterr().out.endswith("logits of transformers: 0.0e+00\n")


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


@pytest.mark.parametrize("wide", [0, -1], ids=["first", "last"])
def test_the_widest_dtype_may_be_in_the_first_file_or_the_last(wide, tmp_path):
    save("llama", tmp_path)
    shards = shards_in(tmp_path)
    del shards[wide]

    def narrow(state):
        for name, weight in state.items():
            state[name] = weight.bfloat16()

    for shard in shards:
        change_weights(shard, narrow)
    model = hugging_face.load(tmp_path)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
