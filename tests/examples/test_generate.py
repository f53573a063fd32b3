"""Generation prints the texts of transformers, and its options are used."""

import io
import json
import re
import sys

import pytest
import torch
from saved_checkpoints import greedy, save, save_tokenizer

generate = pytest.importorskip("generate", reason="requires the extra examples")
hugging_face = pytest.importorskip("hugging_face", reason="requires the extra examples")
train = pytest.importorskip("train", reason="requires the extra examples")


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
    prompt = tokenizer("user: naïve 🙂 A:", return_tensors="pt")["input_ids"]
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


def test_a_text_ends_before_its_first_stop_token(
    with_tokenizer, tmp_path, monkeypatch, capsys
):
    _, tokenizer = with_tokenizer
    a, b, c = tokenizer.encode("abc")
    name_stop_tokens(tmp_path, generation_config=[b])
    tokens = torch.tensor([[a], [a], [b], [c]])
    monkeypatch.setattr(generate.LanguageModel, "stream", lambda *_: iter(tokens))
    assert printed(capsys, tmp_path, "abc") == "aa\n"


def test_help_shows_the_docstring(capsys):
    with pytest.raises(SystemExit):
        generate.main(["--help"])
    assert generate.__doc__ in capsys.readouterr().out


def printed(capsys, *arguments):
    generate.main([str(argument) for argument in arguments])
    return capsys.readouterr().out


def test_tokens_limits_the_text(with_tokenizer, tmp_path, capsys):
    name_stop_tokens(tmp_path, generation_config=999)
    model = hugging_face.load(tmp_path)
    _, tokenizer = with_tokenizer
    prompt = tokenizer("abcd", return_tensors="pt")["input_ids"]
    for count in (4, 8):
        expected = tokenizer.decode(model.generate(prompt, count)[0, 4:])
        text = expected.rstrip("\ufffd")
        assert text, "the model generates no complete character"
        assert printed(capsys, tmp_path, "abcd", "--tokens", count) == text + "\n"


def test_without_options_at_most_100_likeliest_tokens_are_added(
    with_tokenizer, tmp_path, monkeypatch
):
    calls = []

    def stream(model, tokens, *options):
        calls.append(options)
        return iter(())

    monkeypatch.setattr(generate.LanguageModel, "stream", stream)
    generate.main([str(tmp_path), "abc"])
    assert calls == [(100, 0.0, None)]


def test_temperature_and_top_k_draw_tokens(with_tokenizer, tmp_path, capsys):
    name_stop_tokens(tmp_path, generation_config=999)
    run = [tmp_path, "abcd", "--tokens", "12"]
    likeliest = printed(capsys, *run)
    assert printed(capsys, *run, "--temperature", "5") != likeliest
    assert printed(capsys, *run, "--temperature", "1e-9") == likeliest
    assert printed(capsys, *run, "--temperature", "0") == likeliest
    assert printed(capsys, *run, "--temperature", "0.5", "--top-k", "1") == likeliest
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
    ids=[
        "no token to write",
        "top-k of 0",
        "top-k without a temperature",
        "a negative temperature",
        "temperature nan",
        "an empty prompt",
    ],
)
def test_generate_names_a_wrong_argument(
    arguments, message, with_tokenizer, tmp_path, capsys
):
    with pytest.raises(SystemExit):
        generate.main([str(tmp_path), *arguments])
    assert message in capsys.readouterr().err


def test_chat_is_a_message_of_the_user(with_tokenizer, tmp_path, monkeypatch):
    _, tokenizer = with_tokenizer
    prompts = []

    def stream(model, tokens, *options):
        prompts.append(tokenizer.decode(tokens[0]))
        return iter(())

    monkeypatch.setattr(generate.LanguageModel, "stream", stream)
    generate.main([str(tmp_path), "abc", "--chat"])
    assert prompts == ["user: abc A:"]


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
    assert generate.load(path)[2] == set()  # no byte ends a text
    prompt = torch.tensor([list("ï=".encode())])  # three bytes
    expected = train.load(path).generate(prompt, 14)[0, 3:]
    found = printed(capsys, path, "ï=", "--tokens", "14")
    text = bytes(expected.tolist()).decode(errors="replace").rstrip("\ufffd")
    assert text, "the model generates no complete character"
    assert found == text + "\n"
    with pytest.raises(SystemExit):
        generate.main([path, "im", "--chat"])
    assert "--chat requires" in capsys.readouterr().err


class Contracting:
    """A tokenizer whose clean-up joins what two tokens begin and end."""

    def decode(self, tokens, skip_special_tokens, clean_up_tokenization_spaces):
        text = "".join({0: "do", 1: " n't", 2: "!"}[token] for token in tokens)
        return text.replace(" n't", "n't") if clean_up_tokenization_spaces else text


def test_pieces_add_up_to_the_text():
    assert "".join(generate.pieces(Contracting(), [0], [1, 2])) == " n't!"


class Words:
    """A tokenizer that drops the space at the start of a text, as Llama's does."""

    def decode(self, tokens, **_):
        return "".join(f" {token}" for token in tokens)[1:]


def test_a_word_after_the_prompt_keeps_its_space():
    assert list(generate.pieces(Words(), [1], [2, 3])) == [" 2", " 3"]


def test_text_is_shown_as_it_is_generated(with_tokenizer, tmp_path, monkeypatch):
    shown = set()

    class Terminal(io.StringIO):
        def flush(self):
            shown.add(self.getvalue())

    name_stop_tokens(tmp_path, generation_config=999)
    monkeypatch.setattr(sys, "stdout", Terminal())
    generate.main([str(tmp_path), "abcd", "--tokens", "12"])
    assert len(shown) > 2


def test_special_tokens_are_not_printed(with_tokenizer):
    _, tokenizer = with_tokenizer
    a, b = tokenizer.encode("ab")
    tokens = [a, tokenizer.eos_token_id, b]
    assert "".join(generate.pieces(tokenizer, [], tokens)) == "ab"


@pytest.mark.parametrize(
    ("name", "reason"),
    [("missing.gguf", "No such file"), ("README.md", "must be a folder or a name")],
)
def test_generate_says_why_it_cannot_load_a_model(name, reason, tmp_path, capsys):
    (tmp_path / "README.md").write_text("no model")
    with pytest.raises(SystemExit, match="2"):
        generate.main([str(tmp_path / name), "text"])
    assert re.search(rf"cannot load .*{name}: .*{reason}", capsys.readouterr().err)
