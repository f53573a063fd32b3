"""Continue a text with a language model.

    python examples/generate.py MODEL.gguf "The capital of France is"

This command prints the continuation while it is generated. The model is a GGUF file, or
a checkpoint in the format of Hugging Face: a folder, or a name, which is downloaded.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

DESCRIPTION = (
    "Continue a text with a language model: a GGUF file, or a checkpoint in the format "
    "of Hugging Face."
)
EPILOG = """\
examples:
  continue a text with the most likely tokens:
    python examples/generate.py MODEL.gguf "The capital of France is" --tokens 40
  let a chat model answer, and draw from its 50 most likely tokens:
    python examples/generate.py FOLDER "Why is the sky blue?" --chat \\
        --temperature 0.8 --top-k 50
  download a checkpoint by its name:
    python examples/generate.py Qwen/Qwen3-0.6B "Why is the sky blue?" --chat

`make story` downloads a small model, and prints where it is.
The exit code is 2 after an error, and 130 after Ctrl-C.
"""
UNFINISHED = "\ufffd"  # what decoders return for a part of a character


class Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def parser() -> Parser:
    layout = argparse.RawDescriptionHelpFormatter
    made = Parser(
        "generate.py",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=layout,
        allow_abbrev=False,
    )
    made.add_argument(
        "model", help="a GGUF file, a folder with a checkpoint, or its name"
    )
    made.add_argument("prompt", help="the text to continue, or the question")
    made.add_argument(
        "--tokens",
        type=int,
        default=100,
        metavar="N",
        help="how many tokens to generate at most (default: 100)",
    )
    made.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="draw tokens; lower values draw likely ones more often "
        "(default: 0, the most likely token)",
    )
    made.add_argument(
        "--top-k",
        type=int,
        metavar="K",
        help="draw from the K most likely tokens (default: all)",
    )
    made.add_argument(
        "--chat",
        action="store_true",
        help="put the prompt into the model's chat template",
    )
    return made


def load(source: str) -> tuple[Any, Any, set[int]]:
    """Return the model, the tokenizer, and the tokens that end a text.

    Raises:
        ValueError: the source is no model, or has no tokenizer.
    """
    if source.endswith(".gguf") or Path(source).is_file():
        import from_gguf  # here, because a checkpoint does not require gguf

        model = from_gguf.load(source)
        path = Path(source)
        tokenizer = load_tokenizer(path.parent, gguf_file=path.name)
        return model, tokenizer, {tokenizer.eos_token_id}

    import hugging_face

    folder = hugging_face.find_folder(source)
    model = hugging_face.load(folder)
    tokenizer = load_tokenizer(folder)
    return model, tokenizer, stop_tokens(folder) or {tokenizer.eos_token_id}


def load_tokenizer(folder: Path, **options: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, **options)
    except (OSError, ValueError) as error:
        from hugging_face import first_line

        reason = first_line(error)
        raise ValueError(f"{folder} must contain a tokenizer: {reason}") from None


def stop_tokens(folder: Path) -> set[int]:
    """Return the tokens at which the checkpoint's own settings end a text, if any."""
    from transformers import GenerationConfig

    if not (folder / "generation_config.json").exists():
        return set()
    found = GenerationConfig.from_pretrained(folder).eos_token_id
    if found is None:
        return set()
    return set(found) if isinstance(found, list) else {found}


def encode(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    if not chat:
        return tokenizer.encode(prompt)
    if tokenizer.chat_template is None:
        raise ValueError(
            "--chat requires a model with a chat template: leave --chat out"
        )
    messages = [{"role": "user", "content": prompt}]
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True
    )
    return encoded["input_ids"]


def decoded(tokenizer: Any, prompt: list[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text that each token adds to that of the tokens before it.

    A token may be a part of a character; the character is then yielded with its last
    token. The whole text is decoded for each token, because some tokenizers decode the
    first token differently: the time is quadratic in the length.
    """
    seen = list(prompt)
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    text = tokenizer.decode(seen, **options)
    for token in tokens:
        seen.append(token)
        longer = tokenizer.decode(seen, **options)
        if not longer.endswith(UNFINISHED):
            yield longer[len(text) :]
            text = longer
    yield tokenizer.decode(seen, **options)[len(text) :]


def is_out_of_memory(error: Exception) -> bool:
    # On a CPU, torch raises a plain RuntimeError, "you tried to allocate ... bytes".
    return isinstance(error, MemoryError) or "allocate" in str(error)


def main(argv: Sequence[str] | None = None) -> int:
    command = parser()
    arguments = command.parse_args(argv)
    try:
        write(arguments)
    except ImportError as error:
        command.error(
            f"{error}: install what the examples need, see examples/README.md"
        )
    except BrokenPipeError:  # such as of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print("\ngenerate.py: interrupted", file=sys.stderr)
        return 130
    except ValueError as error:
        command.error(str(error))
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        command.error(f"too little memory for {arguments.model}: {error}")
    return 0


def write(arguments: argparse.Namespace) -> None:
    """Print the text while it is generated."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    model, tokenizer, stop = load(arguments.model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    prompt = encode(tokenizer, arguments.prompt, arguments.chat)
    if not prompt:
        raise ValueError("the prompt must have at least one token, got none")
    stream = model.stream(
        torch.tensor([prompt], device=device),
        arguments.tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
    )
    for text in decoded(tokenizer, prompt, until(stop, map(int, stream))):
        print(text, end="", flush=True)
    print()


def until(stop: set[int], tokens: Iterable[int]) -> Iterator[int]:
    """Yield the tokens before the first one that ends a text."""
    return itertools.takewhile(lambda token: token not in stop, tokens)


if __name__ == "__main__":
    sys.exit(main())
