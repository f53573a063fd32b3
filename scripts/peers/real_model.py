"""Measure a real model: the errors of its logits, and whether a row depends on what else is in the call.

Both models have the same weights, already rounded to the dtype. tinyblock's model in float64 computes the exact logits
from them.
"""

import importlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import from_gguf
import hugging_face
import torch
from language_model import Cache, LanguageModel
from torch import Tensor

from .measuring import as_tuple

OURS, THEIRS = "tinyblock", "Hugging Face"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STARTS = (0, 8000)
# The texts are the docstrings of these modules of Python's standard library.
MODULES = (
    "argparse",
    "hashlib",
    "heapq",
    "json",
    "re",
    "shelve",
    "statistics",
    "turtle",
)
LENGTH = 192  # tokens of each text
PREFIX = 100  # tokens in the prefix, and in the prompt before the cache is read

# By dtype, start and project: the relative error of the logits of each text.
Errors = dict[tuple[str, int, str], list[float]]
# By layer, dtype, project and condition: the relative difference; 0 if all bits are equal.
Differences = dict[tuple[str, str, str, str], float]
Model = Callable[[Tensor, Tensor], Tensor]


def texts(path: Path, count: int = len(MODULES)) -> Tensor:
    """Return the tokens of the texts, of shape (count, LENGTH)."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    rows = []
    for name in MODULES[:count]:
        text = importlib.import_module(name).__doc__
        rows.append(tokenizer.encode(text)[:LENGTH])
    return torch.tensor(rows)


@contextmanager
def checkpoint(path: Path) -> Iterator[Path]:
    """Yield a folder with the GGUF file's model in the format of Hugging Face, which both projects read."""
    with tempfile.TemporaryDirectory() as folder:
        hugging_face.save(from_gguf.load(path), folder)
        yield Path(folder)


def load_theirs(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def load_ours(folder: Path, dtype: torch.dtype) -> LanguageModel:
    return hugging_face.load(folder).to(dtype)


# --- Errors of the logits --------------------------------------------------------------------------------------------


@torch.no_grad()
def measure_errors(
    folder: Path, tokens: Tensor, begin: Callable[[str], None]
) -> Errors:
    """Return the errors of both projects, for each text, at each start and in each dtype."""
    errors: Errors = {}
    for name, dtype in DTYPES.items():
        ours = load_ours(folder, dtype)
        theirs = load_theirs(folder, dtype)
        exact = load_ours(folder, dtype).double()
        for start in STARTS:
            begin(f"errors: {name}, from position {start:,}")
            positions = torch.arange(start, start + LENGTH)
            for text in tokens.split(1):
                expected = exact(text, positions)
                actual = {
                    OURS: ours(text, positions),
                    THEIRS: theirs(text, position_ids=positions[None]).logits,
                }
                for project, logits in actual.items():
                    error = relative(logits, expected)
                    errors.setdefault((name, start, project), []).append(error)
    return errors


def relative(actual: Tensor, expected: Tensor) -> float:
    """Return the root mean square difference as a share of the root mean square of the expected values."""
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm())


# --- Invariance ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """A layer of a model: `start` returns a function that continues from what it has been called with."""

    start: Callable[[], Callable[[Tensor], Tensor]]

    def whole(self, x: Tensor) -> Tensor:
        return self.start()(x)

    def decoded(self, x: Tensor) -> Tensor:
        """Compute a prompt in one call, and each further token in one."""
        step = self.start()
        parts = [step(x[:, :PREFIX])]
        parts += [step(token) for token in x[:, PREFIX:].split(1, dim=1)]
        return torch.cat(parts, dim=1)


def our_layers(model: LanguageModel) -> dict[str, Layer]:
    block: Any = model.transformer.layers[0]

    def cached(layer: Any) -> Layer:
        def start() -> Callable[[Tensor], Tensor]:
            cache = Cache()

            def step(x: Tensor) -> Tensor:
                positions = cache.advance(x.shape[1], x.device)
                return layer(x, positions, cache)

            return step

        return Layer(start)

    return {
        "RMSNorm": Layer(lambda: block.ln1),
        "SwiGLU": Layer(lambda: block.ffn),
        "attention": cached(block.attn),
        "Block": cached(block),
        "the model": cached(model),
    }


def their_layers(model: Any) -> dict[str, Layer]:
    block = model.model.layers[0]

    def cached(layer: Any) -> Layer:
        def start() -> Callable[[Tensor], Tensor]:
            from transformers import DynamicCache

            cache = DynamicCache(config=model.config)

            def step(x: Tensor) -> Tensor:
                first = cache.get_seq_length()
                positions = torch.arange(first, first + x.shape[1])[None]
                rotation = model.model.rotary_emb(x, positions)
                options = {"position_embeddings": rotation, "past_key_values": cache}
                out = layer(x, attention_mask=None, **options)
                return as_tuple(out)[0]

            return step

        return Layer(start)

    def start_model() -> Callable[[Tensor], Tensor]:
        from transformers import DynamicCache

        cache = DynamicCache(config=model.config)
        return lambda tokens: model(tokens, past_key_values=cache).logits

    return {
        "RMSNorm": Layer(lambda: block.input_layernorm),
        "SwiGLU": Layer(lambda: block.mlp),
        "attention": cached(block.self_attn),
        "Block": cached(block),
        "the model": Layer(start_model),
    }


IN_A_BATCH = "in a batch"
AS_A_PREFIX = "as a prefix"
FROM_A_CACHE = "from a cache"
CONDITIONS = (IN_A_BATCH, AS_A_PREFIX, FROM_A_CACHE)


def compare(layer: Layer, x: Tensor) -> dict[str, float]:
    """Return how much the results of all rows differ under each condition.

    All rows in one call are compared with one call for each row, a prefix with the first results of the full text, and
    results from a cache with those of the full text.
    """
    expected = layer.whole(x)
    rows = torch.cat([layer.whole(row) for row in x.split(1)])
    prefix = layer.whole(x[:, :PREFIX])
    return {
        IN_A_BATCH: difference(rows, expected),
        AS_A_PREFIX: difference(prefix, expected[:, :PREFIX]),
        FROM_A_CACHE: difference(layer.decoded(x), expected),
    }


def difference(actual: Tensor, expected: Tensor) -> float:
    """Return the relative difference; 0 only if all bits are equal."""
    return 0.0 if torch.equal(actual, expected) else relative(actual, expected)


@torch.no_grad()
def measure_invariance(
    folder: Path, tokens: Tensor, begin: Callable[[str], None]
) -> Differences:
    """Return the differences of both projects, for each layer and each dtype, on the embeddings of the texts."""
    differences: Differences = {}
    for name, dtype in DTYPES.items():
        ours = load_ours(folder, dtype)
        layers = {
            OURS: our_layers(ours),
            THEIRS: their_layers(load_theirs(folder, dtype)),
        }
        embedded = ours.token_embeddings(tokens)
        normalized = layers[OURS]["RMSNorm"].whole(embedded)
        inputs = {
            "RMSNorm": embedded,
            "SwiGLU": normalized,
            "attention": normalized,
            "Block": embedded,
            "the model": tokens,
        }
        for project, of_project in layers.items():
            for layer_name, layer in of_project.items():
                begin(f"invariance: {project}, {name}, {layer_name}")
                for condition, value in compare(layer, inputs[layer_name]).items():
                    differences[layer_name, name, project, condition] = value
    return differences
