"""Compare the speed of generating text, one token per call, with transformers' Llama.

    python scripts/compare_decoding.py
    python scripts/compare_decoding.py --layers 4 --rounds 3     # a quick look

The model has the sizes of SmolLM2-135M and random weights. Each candidate has its own
copy of them. The logits must agree before anything is timed. Then the candidates take
turns in one process. A token reads every weight once. So the time in which torch sums
all weights is a lower bound for a model that does not fit into the CPU's caches.
"""

import argparse
import copy
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "examples"))

import hugging_face
import torch
from lab.machine import environment
from lab.tables import markdown, number
from lab.timing import Run, Spread, interleave, wall_sampler
from language_model import Cache, LanguageModel
from peers.own import relative_error
from peers.projects import versions
from static_cache import StaticCache, compile_step
from torch import Tensor

TOKENS = 32
SAMPLE_SECONDS = 0.2
# Relative errors of logits, after dozens of layers that round.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.1}
READING = "reading the weights"
PEER = "transformers, DynamicCache"


def build_models(layers: int, dtype: torch.dtype) -> tuple[LanguageModel, Any]:
    """Return tinyblock's model and transformers', both with the weights of one file."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    peer = LlamaForCausalLM(config).to(dtype).eval()
    with tempfile.TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        model = hugging_face.load(folder)
    return model, peer


@torch.no_grad()
def decode(
    step: Callable[[Tensor, Any], Tensor], new_cache: Callable[[], Any], text: Tensor
) -> Tensor:
    """Run the tokens one by one, and return the last logits."""
    cache = new_cache()
    for token in text.split(1, dim=-1):
        logits = step(token, cache)
    return logits[:, -1]


def their_step(forward: Callable[..., Any]) -> Callable[[Tensor, Any], Tensor]:
    return lambda token, cache: forward(token, past_key_values=cache).logits


def candidates(model: LanguageModel, peer: Any, text: Tensor) -> dict[str, Run]:
    """Return functions that decode the text, by name."""
    from transformers import DynamicCache
    from transformers import StaticCache as TheirStaticCache

    compiled = copy.deepcopy(model)
    compile_step(compiled)
    static = partial(StaticCache, TOKENS)
    their_compiled = torch.compile(copy.deepcopy(peer).forward)
    their_static = partial(TheirStaticCache, peer.config, max_cache_len=TOKENS)
    dynamic = partial(DynamicCache, config=peer.config)
    return {
        "growing cache": partial(decode, model, Cache, text),
        "static cache, compiled": partial(decode, compiled, static, text),
        PEER: partial(decode, their_step(peer), dynamic, text),
        "transformers, StaticCache, compiled": partial(
            decode, their_step(their_compiled), their_static, text
        ),
    }


def require_equal_logits(runs: dict[str, Run], tolerance: float) -> None:
    """Raise a RuntimeError if candidates differ by more than roundings."""
    results: dict[str, Any] = {name: run() for name, run in runs.items()}
    for name, logits in results.items():
        error = relative_error(logits, results[PEER])
        if not error < tolerance:
            raise RuntimeError(
                f"logits must be within {tolerance}, got {error:.1e} for {name}"
            )


def measure(layers: int, dtype: torch.dtype, rounds: int) -> str:
    """Return a table of tokens per second, and of ratios of times."""
    torch.compiler.reset()
    model, peer = build_models(layers, dtype)
    text = torch.randint(49152, (1, TOKENS))
    runs = candidates(model, peer, text)
    require_equal_logits(runs, TOLERANCES[dtype])
    weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    # Every dtype is read as float32, which torch sums as fast as memory delivers it.
    runs[READING] = weights.view(torch.float32).sum
    samplers = {name: wall_sampler(run, SAMPLE_SECONDS) for name, run in runs.items()}
    samples = interleave(samplers, rounds)
    for name in runs.keys() - {READING}:
        samples[name] = [seconds / TOKENS for seconds in samples[name]]
    rows = []
    for name, seconds in samples.items():
        cells = [number(1 / median(seconds))]
        for other in (PEER, READING):
            # The clock of a shared machine drifts, which the ratio in a round cancels.
            pairs = zip(seconds, samples[other], strict=True)
            ratio = Spread.of([own / others for own, others in pairs])
            cells.append(f"{ratio.median:.2f} ({ratio.p20:.2f}-{ratio.p80:.2f})")
        rows.append([name, *cells])
    header = [f"{dtype}, {layers} layers".removeprefix("torch."), "tokens/s"]
    return markdown([*header, f"time / {PEER}", f"time / {READING}"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--layers", type=int, default=30, help="build this many layers (default: 30)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=7,
        help="take this many samples of each (default: 7)",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"# {environment(torch.device('cpu'))}\n")
    print(f"{versions(['transformers'])}; `{' '.join(sys.argv)}`\n")
    for dtype in TOLERANCES:
        print(measure(options.layers, dtype, options.rounds), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
