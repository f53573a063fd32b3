"""Continue a text with a language model.

    pip install transformers gguf tqdm
    python examples/generate.py MODEL.gguf "The capital of France is"
    python examples/generate.py Qwen/Qwen3-0.6B "Why is the sky blue?" --chat
    python examples/generate.py run.pt "import " --tokens 60

The model is a GGUF file, a checkpoint of train.py (run.pt), or a checkpoint in the
format of Hugging Face: a folder, or a name, which is downloaded. Without options, this
command adds at most 100 tokens, each the likeliest. `make story` downloads a small model
and calls this file.
"""

import argparse
import itertools
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from language_model import LanguageModel
from merged import merge
from transformers import AutoTokenizer
from transformers.utils import cached_file


class Bytes:
    """The tokenizer of train.py."""

    chat_template = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int], **_: Any) -> str:
        return bytes(tokens).decode(errors="replace")


def load(source: str) -> tuple[LanguageModel, Any, set[int]]:
    """Return the model, its tokenizer, and the tokens that end a text."""
    if source.endswith(".gguf"):
        import from_gguf  # here, because a checkpoint does not require gguf

        model = from_gguf.load(source)
        tokenizer = gguf_tokenizer(Path(source))
        stop = from_gguf.stop_tokens(source)
        return model, tokenizer, stop or {tokenizer.eos_token_id}

    if source.endswith(".pt"):
        import train

        return train.load(source), Bytes(), set()

    import hugging_face

    model = hugging_face.load(source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    return model, tokenizer, stop_tokens(source) or {tokenizer.eos_token_id}


def gguf_tokenizer(path: Path) -> Any:
    """Return the tokenizer of a GGUF file."""
    # In a folder of its own, because transformers prefers a tokenizer.json beside it.
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / path.name).symlink_to(path.resolve())
        return AutoTokenizer.from_pretrained(folder, gguf_file=path.name)


def stop_tokens(source: str) -> set[int]:
    """Return the tokens that end a text, by the first file that names some."""
    for name in ("generation_config.json", "config.json"):
        try:
            path = Path(cached_file(source, name))
        except OSError:  # a model need not have both
            continue
        stop = json.loads(path.read_text()).get("eos_token_id")
        if stop is not None:
            return set(stop) if isinstance(stop, list) else {stop}
    return set()


def pieces(tokenizer: Any, prompt: list[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text that tokens add. A character may consist of several tokens.

    The last piece has what no token has completed, as the tokenizer shows it.
    """

    def decode(tokens: list[int]) -> str:
        # A clean-up would change text that is already printed.
        return tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    seen = list(prompt)
    text = longer = decode(seen)
    for token in tokens:
        seen.append(token)
        longer = decode(seen)
        if not longer.endswith("\ufffd"):  # an unfinished character
            yield longer[len(text) :]
            text = longer
    yield longer[len(text) :]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model",
        help="load a GGUF file, a .pt file of train.py, or a checkpoint's folder or name",
    )
    parser.add_argument("prompt", help="continue this text, or answer this question")
    parser.add_argument(
        "--tokens",
        type=int,
        default=100,
        help="generate at most this many tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="divide the logits by this, and draw a token; 0 takes the likeliest token "
        "(default: 0)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        help="draw from this many likely tokens (default: all)",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="use the tokenizer's chat template (default: do not)",
    )
    return parser


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        model, tokenizer, stop = load(options.model)
    except (OSError, ValueError) as error:  # no model, or a rejected one
        parser.error(f"cannot load {options.model}: {error}")

    if options.chat:
        if not tokenizer.chat_template:
            parser.error("--chat requires a model that has a chat template")
        message = {"role": "user", "content": options.prompt}
        prompt = tokenizer.apply_chat_template(
            [message], add_generation_prompt=True, return_dict=True
        )["input_ids"]
    else:
        prompt = tokenizer.encode(options.prompt)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    merge(model.to(device))
    try:
        tokens = model.stream(
            torch.tensor([prompt], device=device, dtype=torch.long),
            options.tokens,
            options.temperature,
            options.top_k,
        )
    except ValueError as error:  # a number out of range, or a prompt that does not fit
        parser.error(str(error))
    until_stop = itertools.takewhile(lambda token: token not in stop, map(int, tokens))
    for text in pieces(tokenizer, prompt, until_stop):
        print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
