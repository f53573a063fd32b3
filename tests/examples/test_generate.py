"""generate.py prints the text of transformers, and uses each of its options."""

import json

import pytest
import torch
from saved_checkpoints import (
    BYTES,
    greedy,
    save,
    save_llama,
    save_tokenizer,
    write_gguf,
)

generate = pytest.importorskip("generate", reason="requires the extra examples")
train = pytest.importorskip("train", reason="requires the extra examples")


@pytest.fixture
def checkpoint(tmp_path):
    """The model of a checkpoint with a tokenizer, in tmp_path, and the tokenizer."""
    theirs = save("llama", tmp_path)
    tokenizer = save_tokenizer(tmp_path)
    name_stop_tokens(tmp_path, generation_config=999)  # no token
    return theirs, tokenizer


def name_stop_tokens(folder, **files):
    """Write eos_token_id into config.json and generation_config.json, or remove it."""
    for name in ("config", "generation_config"):
        path = folder / f"{name}.json"
        content = json.loads(path.read_text())
        content.pop("eos_token_id", None)
        if name in files:
            content["eos_token_id"] = files[name]
        path.write_text(json.dumps(content))


def printed(capsys, *arguments):
    generate.main([str(argument) for argument in arguments])
    return capsys.readouterr().out


def error_of(capsys, *arguments):
    with pytest.raises(SystemExit, match="2"):
        generate.main([str(argument) for argument in arguments])
    return capsys.readouterr().err


@pytest.mark.parametrize("chat", [False, True], ids=["a text", "a chat"])
def test_generate_prints_the_text_of_transformers_until_it_stops(
    chat, checkpoint, tmp_path, capsys
):
    theirs, tokenizer = checkpoint
    prompt = "user: naïve 🙂 A:" if chat else "naïve 🙂"
    tokens = tokenizer(prompt, return_tensors="pt")["input_ids"]
    new = greedy(theirs, tokens, 20)[0, tokens.shape[1] :].tolist()
    name_stop_tokens(tmp_path, generation_config=[new[-5]])
    options = ["--chat"] if chat else []
    found = printed(capsys, tmp_path, "naïve 🙂", "--tokens", "20", *options)
    text = tokenizer.decode(new[: new.index(new[-5])], skip_special_tokens=True)
    assert text.rstrip("\ufffd"), "the model stops at its first token"
    assert found == text.rstrip("\ufffd") + "\n"


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
def test_the_tokens_that_end_a_text_are_those_that_the_files_name(
    files, stop, checkpoint, tmp_path
):
    name_stop_tokens(tmp_path, **files)
    _, _, found = generate.load(str(tmp_path))
    assert found == stop


def test_without_options_100_likeliest_tokens_are_added(checkpoint, tmp_path, capsys):
    theirs, tokenizer = checkpoint
    tokens = tokenizer("abcd", return_tensors="pt")["input_ids"]
    text = tokenizer.decode(greedy(theirs, tokens, 100)[0, 4:])
    assert printed(capsys, tmp_path, "abcd") == text.rstrip("\ufffd") + "\n"


@pytest.mark.usefixtures("checkpoint")
def test_temperature_and_top_k_draw_tokens(tmp_path, capsys):
    run = [tmp_path, "abcd", "--tokens", "12"]
    likeliest = printed(capsys, *run)
    assert printed(capsys, *run, "--temperature", "5") != likeliest
    assert printed(capsys, *run, "--temperature", "1e-9") == likeliest
    assert printed(capsys, *run, "--temperature", "5", "--top-k", "1") == likeliest
    assert printed(capsys, *run, "--temperature", "5", "--top-k", "9") != likeliest


WRONG = {
    "no token to write": (
        ["a", "--tokens", "0"],
        "new tokens must be at least 1, got 0",
    ),
    "too many tokens": (["a" * 128, "--tokens", "2"], "128 positions"),
    "top-k alone": (["a", "--top-k", "3"], "top_k must come with a temperature"),
    "below zero": (["a", "--temperature=-1"], "temperature must be at least 0"),
    "no prompt": ([""], "each prompt must have a token"),
}


@pytest.mark.usefixtures("checkpoint")
@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named(arguments, message, tmp_path, capsys):
    assert message in error_of(capsys, tmp_path, *arguments)


@pytest.mark.parametrize("name", ["missing.gguf", "README.md", "empty"])
def test_generate_says_that_it_cannot_load_a_model(name, tmp_path, capsys):
    (tmp_path / "README.md").write_text("no model")
    (tmp_path / "empty").mkdir()
    assert f"cannot load {tmp_path / name}: " in error_of(
        capsys, tmp_path / name, "text"
    )


@pytest.mark.usefixtures("checkpoint")
def test_chat_requires_a_template(tmp_path, capsys):
    for path in tmp_path.glob("chat_template*"):
        path.unlink()
    message = "--chat requires a model that has a chat template"
    assert message in error_of(capsys, tmp_path, "a", "--chat")


def test_a_model_of_train_continues_bytes(tmp_path, capsys):
    path = str(tmp_path / "run.pt")
    config = train.Config(steps=1, d_model=16, layers=1, seq=16)
    train.main([__file__, "--checkpoint", path], config)
    capsys.readouterr()
    prompt = torch.tensor([list("ï=".encode())])  # three bytes
    expected = train.load(path).generate(prompt, 14)[0, 3:]
    text = bytes(expected.tolist()).decode(errors="replace").rstrip("\ufffd")
    assert text, "the model generates no complete character"
    assert printed(capsys, path, "ï=", "--tokens", "14") == text + "\n"


def test_a_gguf_file_brings_its_tokenizer_and_stop_tokens(tmp_path, monkeypatch):
    """Another tokenizer is beside the file, whose path is relative."""
    save_tokenizer(tmp_path)
    fields = {
        "llama.vocab_size": 258,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*BYTES, "ab", "<end>"],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 257,
    }
    write_gguf(tmp_path / "model.gguf", save_llama(tmp_path, vocab_size=258), fields)
    monkeypatch.chdir(tmp_path)
    _, tokenizer, stop = generate.load("model.gguf")
    assert tokenizer.encode("ab") == [256]
    assert stop == {257}


class Contracting:
    """A tokenizer whose clean-up joins what two tokens begin and end."""

    def decode(self, tokens, skip_special_tokens, clean_up_tokenization_spaces):
        text = "".join({0: "do", 1: " n't", 2: "!"}[token] for token in tokens)
        return text.replace(" n't", "n't") if clean_up_tokenization_spaces else text


class Words:
    """A tokenizer that drops the space at the start of a text, as Llama's does."""

    def decode(self, tokens, **_):
        return "".join(f" {token}" for token in tokens)[1:]


def test_pieces_are_what_each_token_adds_to_the_text():
    assert list(generate.pieces(Contracting(), [0], [1, 2])) == [" n't", "!"]
    assert list(generate.pieces(Words(), [1], [2, 3])) == [" 2", " 3"]


def test_pieces_are_whole_characters_without_special_tokens(tmp_path):
    tokenizer = save_tokenizer(tmp_path)
    [*first, last] = tokenizer.encode("aïb")
    tokens = [*first, tokenizer.eos_token_id, last]
    assert [*filter(None, generate.pieces(tokenizer, [], tokens))] == ["a", "ï", "b"]
