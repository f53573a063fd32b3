"""generate.py prints the text of transformers, and uses each of its options."""

import json

import pytest
import torch
from saved_checkpoints import BYTES, save, save_tokenizer, write_gguf

generate = pytest.importorskip("generate", reason="requires the extra examples")
train = pytest.importorskip("train", reason="requires the extra examples")


@pytest.fixture
def checkpoint(tmp_path):
    """The model of a checkpoint with a tokenizer, in tmp_path, and the tokenizer."""
    return save("llama", tmp_path), save_tokenizer(tmp_path)


def printed(capsys, *arguments):
    generate.main([str(argument) for argument in arguments])
    return capsys.readouterr().out


@pytest.mark.parametrize("chat", [False, True], ids=["a text", "a chat"])
def test_generate_prints_the_text_of_transformers_until_it_stops(
    chat, checkpoint, tmp_path, capsys
):
    """By default, 100 tokens are added."""
    theirs, tokenizer = checkpoint
    # With --chat, the tokenizer's template stands around the text.
    prompt = "user: naïve 🙂 A:" if chat else "naïve 🙂"
    tokens = tokenizer(prompt, return_tensors="pt")["input_ids"]
    written = theirs.generate(tokens, max_new_tokens=100, do_sample=False)
    new = written[0, tokens.shape[1] :].tolist()
    options = ["--chat"] if chat else []
    stop_at = new[15]  # any token that it writes
    for stop, end in ((None, 100), (stop_at, new.index(stop_at))):
        content = json.dumps({"eos_token_id": stop})
        (tmp_path / "generation_config.json").write_text(content)
        text = tokenizer.decode(new[:end], skip_special_tokens=True)
        assert text, "the model stops at its first token"
        assert printed(capsys, tmp_path, "naïve 🙂", *options) == f"{text}\n"


@pytest.mark.usefixtures("checkpoint")
def test_tokens_that_end_a_text_come_from_the_first_file_that_has_some(tmp_path):
    """The files are generation_config.json, then config.json, then the tokenizer's."""
    _, _, stop = generate.load(str(tmp_path))
    assert stop == {256}  # "<end>" of the tokenizer
    for of_generation, of_config, expected in (
        (0, 5, {0}),
        ([3, 4], 5, {3, 4}),
        (None, 5, {5}),
    ):
        for name, token in (
            ("generation_config", of_generation),
            ("config", of_config),
        ):
            content = json.dumps({"eos_token_id": token})
            (tmp_path / f"{name}.json").write_text(content)
        assert generate.stop_tokens(str(tmp_path)) == expected


@pytest.mark.usefixtures("checkpoint")
def test_temperature_and_top_k_draw_tokens(tmp_path, capsys):
    run = [tmp_path, "abcd", "--tokens", "12"]
    likeliest = printed(capsys, *run)
    assert printed(capsys, *run, "--temperature", "5") != likeliest
    assert printed(capsys, *run, "--temperature", "1e-9") == likeliest
    assert printed(capsys, *run, "--temperature", "5", "--top-k", "1") == likeliest


WRONG = {
    ("FOLDER", "a" * 128, "--tokens", "2"): "128 positions",  # of the checkpoint
    ("FOLDER", "a", "--top-k", "3"): "top_k must come with a temperature",
    ("FOLDER", ""): "each prompt must have a token",
    ("FOLDER", "a", "--chat"): "--chat requires a model that has a chat template",
    ("missing.gguf", "a"): "cannot load missing.gguf: ",
    ("FOLDER/empty", "a"): "cannot load ",
}


@pytest.mark.usefixtures("checkpoint")
@pytest.mark.parametrize(("arguments", "message"), WRONG.items())
def test_a_wrong_argument_is_named(arguments, message, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for path in tmp_path.glob("chat_template*"):  # for the row with --chat
        path.unlink()
    with pytest.raises(SystemExit, match="2"):
        generate.main([word.replace("FOLDER", str(tmp_path)) for word in arguments])
    assert message in capsys.readouterr().err


def test_a_model_of_train_continues_bytes(tmp_path, capsys):
    path = str(tmp_path / "run.pt")
    config = train.Config(steps=1, d_model=16, layers=1, seq=16)
    train.main([__file__, "--checkpoint", path], config)
    capsys.readouterr()
    prompt = torch.tensor([list("ï=".encode())])  # three bytes
    expected = train.load(path).generate(prompt, 14)[0, 3:]
    text = bytes(expected.tolist()).decode(errors="replace")
    assert printed(capsys, path, "ï=", "--tokens", "14") == text + "\n"


def test_a_gguf_file_brings_its_tokenizer_and_stop_tokens(tmp_path, monkeypatch):
    """They go before the tokenizer beside the file, which has no token for "ab"."""
    save_tokenizer(tmp_path)
    monkeypatch.chdir(tmp_path)
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*BYTES, "ab", "<end>"],  # 0 to 255, 256 and 257
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 257,
    }
    more = {"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 11}
    theirs = save("llama", tmp_path, vocab_size=258)
    for given, stop in ((fields, {257}), (fields | more, {257, 9, 11})):
        write_gguf(tmp_path / "model.gguf", theirs, given)
        _, tokenizer, found = generate.load("model.gguf")
        assert tokenizer.encode("ab") == [256]
        assert found == stop


class Words:
    """A tokenizer that drops the space at the start, as Llama's does, and cleans up."""

    def decode(self, tokens, skip_special_tokens, clean_up_tokenization_spaces):
        text = "".join([" do", " n't", "!"][token] for token in tokens)[1:]
        return text.replace(" n't", "n't") if clean_up_tokenization_spaces else text


def test_pieces_are_what_each_token_adds_to_the_text(tmp_path):
    """Special tokens add nothing. A character is added when it is complete.

    The space that a tokenizer drops at the start is there after a prompt.
    """
    pieces = generate.pieces(Words(), [0], [1, 0, 2])
    assert [*filter(None, pieces)] == [" n't", " do", "!"]
    tokenizer = save_tokenizer(tmp_path)
    [*first, last] = tokenizer.encode("aïb")
    tokens = [*first, tokenizer.eos_token_id, last]
    assert [*filter(None, generate.pieces(tokenizer, [], tokens))] == ["a", "ï", "b"]


def test_the_last_piece_has_unfinished_characters_and_invalid_bytes():
    for end in (b"\xf0\x9f", b"\xff\xfe\xff"):  # of an emoji, and of no character
        found = "".join(generate.pieces(generate.Bytes(), [*b"a"], b"b" + end))
        assert found == (b"b" + end).decode(errors="replace")
