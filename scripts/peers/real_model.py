"""Compare the errors of a real model's logits with the errors of transformers."""

import copy
import importlib
from pathlib import Path
from statistics import median
from typing import Any

import hugging_face
import torch
from lab.tables import markdown
from language_model import LanguageModel
from torch import Tensor

from .own import relative_error

# The texts are the docstrings of these modules of Python's standard library.
MODULES = [
    "argparse",
    "hashlib",
    "heapq",
    "json",
    "re",
    "shelve",
    "statistics",
    "turtle",
]
LENGTH = 192  # tokens of a text
DTYPES = [torch.float32, torch.bfloat16]


@torch.no_grad()
def measure(name: str, device: torch.device) -> str:
    """Return a table: the errors of both projects' logits, and their ratio.

    `name` is a folder, a GGUF file, or a name on the Hugging Face hub. Both projects get
    the same weights, rounded to the dtype. tinyblock's model in float64 computes the
    exact logits. Texts begin at the first position, and at the last one that leaves room
    for them.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"pretrained_model_name_or_path": name}
    if name.endswith(".gguf"):
        path = Path(name)
        source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    texts = []
    for module in MODULES:
        text = importlib.import_module(module).__doc__
        tokens = tokenizer(text, return_tensors="pt").input_ids[:, :LENGTH]
        texts.append(tokens.to(device))
    rows = []
    for dtype in DTYPES:
        ours = load(name).to(device, dtype)
        exact = copy.deepcopy(ours).double()
        theirs = AutoModelForCausalLM.from_pretrained(**source, dtype=dtype).to(device)
        rope: Any = ours.transformer.rope
        for start in (0, rope.max_seq_len - LENGTH):
            mine = []
            others = []
            for text in texts:
                positions = torch.arange(start, start + text.shape[1], device=device)
                expected = logits(exact, text, positions)
                found = theirs(text, position_ids=positions[None]).logits
                mine.append(relative_error(logits(ours, text, positions), expected))
                others.append(relative_error(found, expected))
            ratios = [a / b for a, b in zip(mine, others, strict=True)]
            dtype_name = str(dtype).removeprefix("torch.")
            cells = [
                median_and_range(mine, ".1e"),
                median_and_range(others, ".1e"),
                median_and_range(ratios, ".2f"),
            ]
            rows.append([f"{dtype_name}, positions from {start:,}", *cells])
    return markdown(["", "tinyblock", "transformers", "ratio"], rows)


def load(name: str) -> LanguageModel:
    if not name.endswith(".gguf"):
        return hugging_face.load(name)
    import from_gguf  # here, because it requires the package gguf

    return from_gguf.load(name)


def logits(model: LanguageModel, tokens: Tensor, positions: Tensor) -> Tensor:
    x = model.token_embeddings(tokens)
    return model.logits(model.transformer(x, positions))


def median_and_range(values: list[float], digits: str) -> str:
    middle, low, high = median(values), min(values), max(values)
    return f"{middle:{digits}} ({low:{digits}} to {high:{digits}})"
