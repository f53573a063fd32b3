"""Compare the speed of generating text, one token per call, with transformers' Llama.

The model has the sizes of SmolLM2-135M and random weights. The model of examples/language_model.py decodes with a
growing cache and with a static cache, and transformers' Llama decodes with a DynamicCache and with a StaticCache. All
load the same weights, and their logits must agree before anything is timed. Then they take turns in one process. Two
limits take turns with them: only the matrix products (F.linear with each weight), and a sum of all weights, which reads
each byte once. The output is a Markdown table for each dtype.
"""

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# This checkout's tinyblock and examples, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "examples"))

import einops
import torch
import torch.nn.functional as F
from lab.cli import Parser, positive_int, run
from lab.environment import environment, versions
from lab.tables import Table, number, plural, show
from lab.timing import Spread, interleave, paired_ratio
from language_model import LanguageModel
from static_cache import StaticLanguageModel
from torch import Tensor, nn

EPILOG = """\
examples:
  measure both dtypes with all caches, in 10 to 20 minutes:
    python scripts/compare_decoding.py
  try it in two minutes:
    python scripts/compare_decoding.py --dtype float32 --eager --num-layers 4 --rounds 3
"""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAX_TOKENS = 8192
PRODUCTS = "only the matrix products"
READING = "reading the weights once"

# Of the logits, after dozens of layers that round. A model that lacks a layer is off by more.
LARGEST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 0.1}
Decode = Callable[[], Tensor]  # returns the logits of the last step, (1, vocabulary)


class Disagreement(Exception):
    """Candidates compute different logits."""


def parse(argv: Sequence[str] | None) -> tuple[Parser, argparse.Namespace]:
    """Return the parser and the options."""
    parser = Parser("compare_decoding.py", (__doc__ or "").strip(), EPILOG)
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="measure only this dtype (default: both)",
    )
    parser.add_argument(
        "--eager", action="store_true", help="leave out the compiled candidates"
    )
    sizes = {
        "--num-layers": (30, "layers of the model"),
        "--tokens": (32, "tokens per sample"),
        "--rounds": (11, "samples of each candidate"),
        "--threads": (1, "threads of torch"),
    }
    for name, (default, text) in sizes.items():
        parser.add_argument(
            name,
            type=positive_int,
            default=default,
            metavar="N",
            help=f"{text} (default: {default})",
        )
    arguments = parser.parse_args(argv)
    if arguments.tokens > MAX_TOKENS:
        parser.error(
            f"--tokens must be at most {MAX_TOKENS}, the longest text of the model, got {arguments.tokens}"
        )
    if importlib.util.find_spec("transformers") is None:
        parser.error('transformers must be installed: pip install -e ".[examples]"')
    return parser, arguments


def build_models(num_layers: int, dtype: torch.dtype) -> tuple[LanguageModel, Any]:
    """Return tinyblock's model and that of transformers, which load the same random weights from one file."""
    import hugging_face  # not above, because it needs safetensors
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = LanguageModel(
        49152,
        num_layers,
        576,
        9,
        1536,
        tied=True,
        max_seq_len=MAX_TOKENS,
        theta=100000.0,
        num_kv_heads=3,
        dtype=dtype,
    )
    with tempfile.TemporaryDirectory() as folder:
        hugging_face.save(model, folder)
        model = hugging_face.load(folder)
        peer = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval(), peer.eval()


@torch.no_grad()
def decode(model: LanguageModel, text: Tensor) -> Tensor:
    """Run the tokens of the text one by one, and return the last logits."""
    cache = model.new_cache(text[:, :1], text.shape[-1] - 1)
    for token in text.split(1, dim=-1):
        logits = model.next_logits(token, cache)
    return logits


@torch.no_grad()
def decode_with_transformers(
    forward: Callable[..., Any], new_cache: Callable[[], Any], text: Tensor
) -> Tensor:
    """Run the tokens of the text one by one, and return the last logits."""
    cache = new_cache()
    for token in text.split(1, dim=-1):
        logits = forward(token, past_key_values=cache, use_cache=True).logits
    return logits[:, -1]


def candidates(
    model: LanguageModel, peer: Any, text: Tensor, eager: bool
) -> dict[str, Decode]:
    """Return functions that decode the text, by name."""
    from transformers import DynamicCache, StaticCache

    size = text.shape[-1]
    kept = StaticCache(peer.config, max_cache_len=size)
    decode_with_transformers(peer, lambda: kept, text[:, :1])  # allocates its tensors

    def emptied() -> StaticCache:
        kept.reset()
        return kept

    dynamic = partial(DynamicCache, config=peer.config)
    static = StaticLanguageModel(model, size, compile=False)
    found: dict[str, Decode] = {
        "growing cache": partial(decode, model, text),
        "static cache": partial(decode, static, text),
        "transformers, DynamicCache": partial(
            decode_with_transformers, peer, dynamic, text
        ),
        "transformers, StaticCache": partial(
            decode_with_transformers, peer, emptied, text
        ),
    }
    if not eager:
        # Otherwise torch traces the parser of einops in each layer.
        torch.compiler.allow_in_graph(einops.rearrange)
        compiled = StaticLanguageModel(model, size)
        compiled_peer = torch.compile(peer.forward, fullgraph=True)
        found["static cache, compiled"] = partial(decode, compiled, text)
        found["transformers, StaticCache, compiled"] = partial(
            decode_with_transformers, compiled_peer, emptied, text
        )
    return found


def check_agreement(found: dict[str, Decode], dtype: torch.dtype) -> str:
    """Raise Disagreement unless all candidates compute the same logits; return how far they differ."""
    reference, *others = [run_once().double() for run_once in found.values()]
    errors = [(other - reference).norm() / reference.norm() for other in others]
    largest = torch.stack(errors).max().item()  # NaN if one is NaN
    tolerance = LARGEST_ERROR[dtype]
    if not largest < tolerance:
        names = ", ".join(found)
        raise Disagreement(
            f"logits must agree to {tolerance:.1g}, got a relative error of {largest:.2g}: {names}"
        )
    return f"{largest:.1g}"


def limits(model: LanguageModel, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Return the work that every token requires: the matrix products, and reading the weights once."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    inputs = [torch.randn(1, layer.in_features).to(dtype) for layer in layers]
    weights = [layer.weight.detach() for layer in layers]
    # Read as float32 in every dtype: torch sums float32 faster than memory delivers it.
    plain = [weight.view(torch.float32) for weight in weights]

    def products() -> None:
        for x, weight in zip(inputs, weights, strict=True):
            F.linear(x, weight)

    def reading() -> None:
        for weight in plain:
            weight.sum()

    return {PRODUCTS: products, READING: reading}


def measure(arguments: argparse.Namespace, dtype: torch.dtype) -> Table:
    """Time all candidates in turns, and return the table of one dtype."""
    model, peer = build_models(arguments.num_layers, dtype)
    text = torch.randint(49152, (1, arguments.tokens))
    found = candidates(model, peer, text, arguments.eager)
    error = check_agreement(found, dtype)
    runs: dict[str, Callable[[], object]] = {**found, **limits(model, dtype)}
    samples = interleave(runs, arguments.rounds, sample_seconds=0.2, warmup_calls=1)
    seconds = dict(samples)
    for name in found:
        seconds[name] = [time / arguments.tokens for time in samples[name]]
    title = (
        f"{str(dtype).removeprefix('torch.')}, {plural(arguments.num_layers, 'layer')}, "
        f"{plural(arguments.tokens, 'token')}, relative error between logits {error}:"
    )
    columns = ["", "tokens/s", "20%-80%", "ms per token", "over reading", "20%-80%"]
    rows = [row(name, seconds) for name in seconds]
    return Table(title, columns, rows)


def row(name: str, seconds: dict[str, list[float]]) -> list[str]:
    """Return a candidate's speed, and its time divided by that of reading the weights once."""
    speed = Spread.of([1 / time for time in seconds[name]])
    ratio = paired_ratio(seconds[name], seconds[READING])
    return [
        name,
        number(speed.median),
        f"{number(speed.p20)}-{number(speed.p80)}",
        number(1000 / speed.median),
        number(ratio.median),
        f"{number(ratio.p20)}-{number(ratio.p80)}",
    ]


def describe() -> str:
    """Return machine, versions, date and command in a line."""
    found = environment(torch.device("cpu"), seed=0)
    transformers = versions("transformers")["transformers"]
    return (
        f"{found.cpu}, {plural(found.threads, 'thread')}; torch {found.torch}, "
        f"transformers {transformers}; {found.date}; commit {found.commit}; "
        f"`{found.command}`"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser, arguments = parse(argv)
    torch.set_num_threads(arguments.threads)
    chosen = [arguments.dtype] if arguments.dtype else list(DTYPES)

    def work() -> int:
        show([describe()])
        try:
            for name in chosen:
                print()
                show([measure(arguments, DTYPES[name])])
        except Disagreement as error:
            print(f"{parser.prog}: error: {error}", file=sys.stderr)
            return 1
        return 0

    return run(parser, work)


if __name__ == "__main__":
    sys.exit(main())
