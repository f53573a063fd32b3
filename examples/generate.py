"""Continue a text with a language model.

    pip install transformers safetensors gguf
    python examples/generate.py MODEL.gguf "The capital of France is"
    python examples/generate.py Qwen/Qwen3-0.6B "Why is the sky blue?" --chat
    python examples/generate.py run.pt "import " --tokens 60

The model is a GGUF file, a checkpoint of train.py (run.pt), or a checkpoint in the
format of Hugging Face: a folder, or a name, which is downloaded. `make story` downloads
a small model and calls this file.
"""

import argparse
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from language_model import LanguageModel
from transformers import AutoTokenizer, GenerationConfig


class Bytes:
    """The tokenizer of train.py."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int], **_: Any) -> str:
        return bytes(tokens).decode(errors="replace")


def load(source: str) -> tuple[LanguageModel, Any, set[int]]:
    """Return the model, its tokenizer, and the tokens that end a text."""
    if source.endswith(".gguf"):
        import from_gguf  # here, because a checkpoint does not require gguf

        path = Path(source)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        return from_gguf.load(path), tokenizer, {tokenizer.eos_token_id}

    if source.endswith(".pt"):
        import train

        return train.load(source), Bytes(), set()

    import hugging_face

    folder = hugging_face.find_folder(source)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stop = tokenizer.eos_token_id
    if (folder / "generation_config.json").exists():
        stop = GenerationConfig.from_pretrained(folder).eos_token_id or stop
    model = hugging_face.load(folder)
    return model, tokenizer, set(stop) if isinstance(stop, list) else {stop}


def pieces(tokenizer: Any, prompt: list[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text that tokens add. A character may consist of several tokens."""
    seen = list(prompt)
    text = tokenizer.decode(seen, skip_special_tokens=True)
    for token in tokens:
        seen.append(token)
        longer = tokenizer.decode(seen, skip_special_tokens=True)
        if not longer.endswith("\ufffd"):  # an unfinished character
            yield longer[len(text) :]
            text = longer


def main(arguments: list[str] | None = None) -> None:
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
        help="generate at most this many tokens (default: 100)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="divide the logits by this, and draw a token; 0 takes the likeliest token "
        "(default: 0)",
    )
    parser.add_argument(
        "--top-k", type=int, help="draw from this many likely tokens (default: all)"
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="use the tokenizer's chat template (default: do not)",
    )
    options = parser.parse_args(arguments)
    if not options.prompt:
        parser.error("prompt must not be empty")
    if options.temperature < 0:
        parser.error(f"--temperature must be at least 0, got {options.temperature}")
    if options.top_k is not None and options.top_k < 1:
        parser.error(f"--top-k must be at least 1, got {options.top_k}")

    try:
        model, tokenizer, stop = load(options.model)
    except (OSError, ValueError) as error:  # no model, or a rejected one
        parser.error(f"cannot load {options.model}: {error}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    prompt = tokenizer.encode(options.prompt)
    if options.chat:
        message = {"role": "user", "content": options.prompt}
        prompt = tokenizer.apply_chat_template(
            [message], add_generation_prompt=True, return_dict=True
        )["input_ids"]
    longest = model.transformer.max_seq_len
    if len(prompt) + options.tokens > longest:
        total = f"{len(prompt)} tokens and --tokens {options.tokens}"
        parser.error(f"the model has {longest} positions, got a prompt of {total}")
    tokens = model.to(device).stream(
        torch.tensor([prompt], device=device),
        options.tokens,
        options.temperature,
        options.top_k,
    )
    until_stop = itertools.takewhile(lambda token: token not in stop, map(int, tokens))
    for text in pieces(tokenizer, prompt, until_stop):
        print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
