import sys

import generate
import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")
import hugging_face
from language_model import LanguageModel

pytestmark = pytest.mark.filterwarnings(
    "default::DeprecationWarning", "default::FutureWarning"
)  # of transformers' imports


@pytest.fixture(scope="module")
def tokenizer():
    """Return a tokenizer of bytes: a letter with an accent is two tokens. Token 0 ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(["<end>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    """Return a checkpoint whose model repeats the last token."""
    model = LanguageModel(257, 1, 64, 4, max_seq_len=32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("output_proj.weight", "w2.weight")):
                weight.zero_()  # the Blocks add nothing
        model.lm_head.weight.copy_(model.token_embeddings.weight)
    path = tmp_path_factory.mktemp("checkpoint")
    hugging_face.save(model, path)
    tokenizer.save_pretrained(path)
    return path


def run(capsys, *arguments):
    """Return the exit code, and what was written to stdout and stderr."""
    try:
        code = generate.main([str(argument) for argument in arguments])
    except SystemExit as ended:
        return ended.code, *capsys.readouterr()
    return code, *capsys.readouterr()


def test_main_prints_the_continuation(folder, capsys):
    code, out, err = run(capsys, folder, "ab", "--tokens", 5)
    assert (code, out, err) == (0, "bbbbb\n", "")


def test_main_draws_with_a_temperature(folder, capsys):
    hot = ["--temperature", 1000]
    drawn = {run(capsys, folder, "ab", "--tokens", 9, *hot)[1] for _ in range(4)}
    assert len(drawn) == 4
    assert run(capsys, folder, "ab", "--tokens", 5, *hot, "--top-k", 1)[1] == "bbbbb\n"


def test_main_fills_the_chat_template(tokenizer, folder, tmp_path, capsys):
    code, _, err = run(capsys, folder, "ab", "--chat")
    assert code == 2
    assert "--chat requires a model with a chat template" in err
    hugging_face.save(hugging_face.load(folder), tmp_path)
    tokenizer.chat_template = (
        "{{ messages[0]['content'] }}{% if add_generation_prompt %}?{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path)
    assert run(capsys, tmp_path, "ab", "--chat", "--tokens", 3)[1] == "???\n"


def test_decoded_yields_whole_characters(tokenizer):
    text = "aé日🙂"
    tokens = tokenizer.encode(text)
    assert len(tokens) == 1 + 2 + 3 + 4
    pieces = generate.decoded(tokenizer, tokens[:3], tokens[3:])
    assert [piece for piece in pieces if piece] == ["日", "🙂"]


def test_until_ends_before_a_stop_token():
    tokens = iter([5, 6, 0, 7])
    assert list(generate.until({0, 9}, tokens)) == [5, 6]
    assert next(tokens) == 7  # the model has computed no token beyond the stop


def test_stop_tokens_are_those_of_the_checkpoint(tmp_path):
    assert generate.stop_tokens(tmp_path) == set()
    settings = tmp_path / "generation_config.json"
    settings.write_text('{"eos_token_id": [3, 5]}')
    assert generate.stop_tokens(tmp_path) == {3, 5}
    settings.write_text('{"eos_token_id": 3}')
    assert generate.stop_tokens(tmp_path) == {3}
    settings.write_text('{"do_sample": false}')
    assert generate.stop_tokens(tmp_path) == set()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", 40], "must fit into max_seq_len=32"),
        (["--tokens", 5, "--temperature", "nan"], "temperature must be 0"),
        (["--tokens", 5, "--temperature", 1, "--top-k", 0], "top_k must be at least 1"),
    ],
    ids=str,
)
def test_main_reports_an_argument_out_of_range(folder, arguments, message, capsys):
    code, _, err = run(capsys, folder, "ab", *arguments)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_main_reports_a_file_that_is_no_model(tmp_path, capsys):
    pytest.importorskip("gguf", reason="needs gguf")
    (tmp_path / "notes.txt").write_text("not a model, but a text")
    for name, message in {
        "notes.txt": "must be a complete GGUF file",
        "none.gguf": "No such file",
        "": "must be a checkpoint",
    }.items():
        code, _, err = run(capsys, tmp_path / name, "ab")
        assert code == 2
        assert message in err
        assert err.count("\n") == 1


def test_main_reports_a_missing_package(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.delitem(sys.modules, "from_gguf", raising=False)
    code, _, err = run(capsys, tmp_path / "model.gguf", "ab")
    assert code == 2
    assert err.startswith("generate.py: error: import of gguf halted")
    assert err.count("\n") == 1


def test_main_reports_too_little_memory(monkeypatch, folder, capsys):
    def load(source):
        torch.empty(2**50, dtype=torch.float32)  # a petabyte

    monkeypatch.setattr(generate, "load", load)
    code, _, err = run(capsys, folder, "ab")
    assert code == 2
    assert "too little memory" in err
    assert err.count("\n") == 1


def test_main_ends_at_ctrl_c(monkeypatch, folder, capsys):
    def load(source):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "load", load)
    assert run(capsys, folder, "ab")[0] == 130


def test_help_has_examples(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert 'python examples/generate.py MODEL.gguf "The capital' in out
