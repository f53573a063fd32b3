"""Measure what the shape checks cost: tinyblock as it is imported against a second, unchecked import of it.

    python scripts/benchmark_typecheck.py [--rounds 15] [--threads 1]

Prints microseconds per call and the ratio of checked to unchecked, interleaved round by round: for one checked function
that does nothing, and for a whole eager Block on one token.
"""

import argparse
import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout's tinyblock, installed or not

import torch
from jaxtyping import Float, Int, config
from profiling.timing import Spread, interleave, paired_ratio
from torch import Tensor

import tinyblock
from tinyblock.typecheck import typecheck
from tinyblock.vendoring.parser import OneLineParser


def import_unchecked() -> ModuleType:
    """Import the package once more under another name, with the checks left out."""
    init = Path(tinyblock.__file__)
    spec = importlib.util.spec_from_file_location("unchecked", init, submodule_search_locations=[str(init.parent)])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["unchecked"] = module
    checks_were_off = config.jaxtyping_disable
    config.update("jaxtyping_disable", True)
    spec.loader.exec_module(module)
    config.update("jaxtyping_disable", checks_were_off)
    return module


def do_nothing(
    x: Float[Tensor, "*batch seq d_model"], token_positions: Int[Tensor, "*#batch seq"] | None = None
) -> Float[Tensor, "*batch seq d_model"]:
    return x


def checked_do_nothing() -> Callable[..., Tensor]:
    module = ModuleType("benchmark")
    module.do_nothing = do_nothing  # type: ignore[attr-defined]
    do_nothing.__module__ = module.__name__
    typecheck(module)
    return module.do_nothing


def blocks_on_one_token(*packages: ModuleType, d_model: int) -> list[Callable[[], Tensor]]:
    """Return a call of each package's Block, with the same weights: others lie elsewhere and may be faster to read."""
    torch.manual_seed(0)
    d_k = 64 if d_model >= 128 else 16
    blocks = [
        package.Block(d_model, d_model // d_k, rope=package.RotaryPositionalEmbedding(10000.0, d_k, 16))
        for package in packages
    ]
    for block in blocks:
        block.load_state_dict(blocks[0].state_dict(), assign=True)
        block.requires_grad_(False)
    x = torch.randn(1, 1, d_model)
    return [functools.partial(block, x) for block in blocks]


def main() -> None:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    unchecked = import_unchecked()

    x, positions = torch.randn(1, 1, 64), torch.zeros(1, dtype=torch.long)
    checked = checked_do_nothing()
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "one call, a tensor": (lambda: checked(x), lambda: do_nothing(x)),
        "one call, two tensors": (lambda: checked(x, positions), lambda: do_nothing(x, positions)),
        "one call, two, by name": (
            lambda: checked(x, token_positions=positions),
            lambda: do_nothing(x, token_positions=positions),
        ),
    }
    for d_model in (64, 768):
        checked_block, unchecked_block = blocks_on_one_token(tinyblock, unchecked, d_model=d_model)
        pairs[f"Block, one token, d_model {d_model}"] = checked_block, unchecked_block
    print(f"torch {torch.__version__}, {arguments.threads} threads, {arguments.rounds} rounds; median (p20 - p80)")
    print(f"{'':30}{'unchecked us':>14}{'checked us':>14}{'more us':>10}{'ratio':>26}")
    for name, (with_checks, without) in pairs.items():
        samples = interleave({"checked": with_checks, "unchecked": without}, arguments.rounds, warmup_calls=50)
        more = Spread.of([a - b for a, b in zip(samples["checked"], samples["unchecked"], strict=True)])
        ratio = paired_ratio(samples["checked"], samples["unchecked"])
        absolute = [Spread.of(samples[key]).median * 1e6 for key in ("unchecked", "checked")]
        spread = f"{ratio.median:.3f} ({ratio.p20:.3f} - {ratio.p80:.3f})"
        print(f"{name:30}{absolute[0]:>14.2f}{absolute[1]:>14.2f}{more.median * 1e6:>10.2f}{spread:>26}")


if __name__ == "__main__":
    main()
