"""Measure how far layers are from the exact result, tinyblock's beside other projects', for docs/exactness.md."""

import copy
import functools
import math
import statistics
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout's tinyblock, installed or not

import torch
from einops import rearrange
from lab.cli import Parser, check_outputs, device_of, run
from lab.environment import environment
from lab.files import atomic
from lab.progress import Progress
from lab.sizes import Size
from lab.tables import markdown, number
from peers.candidates import Candidate, Peer, build_control, weights_of
from peers.measuring import make_block
from peers.projects import PEERS
from torch import Tensor, nn

from tinyblock import Block, RotaryPositionalEmbedding

EPILOG = """\
examples:
  the page and its picture:
    python scripts/exactness.py --write docs/exactness.md --plot docs/exactness.png
  on a GPU:
    python scripts/exactness.py --device cuda
  a check that everything works:
    python scripts/exactness.py --quick

Peers are measured where they are installed: transformers, litgpt, torchtune, x-transformers, rotary-embedding-torch.
"""
INTRODUCTION = """\
# Exactness

Written by `scripts/exactness.py` (`make exactness`); changes by hand are lost.

Each layer gets the same weights and inputs as its peers, already rounded to the dtype, and is compared with the result
in float64. Errors are in units of the dtype's eps: first the root mean square error, as a share of the exact result's
root mean square, with the range over three seeds where it shows; then the largest error, as a share of the largest
exact value. "gradient" is the gradient of the input. The first row is the exact result, rounded once: no layer is
closer than that.
"""
NOTES = """\
## What costs digits, from the sources

- tinyblock computes its table in float64 and keeps it in float32; norms and rotations round once, at the end.
- torch.nn: `RMSNorm` is the function that tinyblock calls. `MultiheadAttention` computes q, k and v in one product,
  which rounds the gradient of the input once instead of three times. There is no RoPE and no SwiGLU.
- Hugging Face: the norm rounds before it multiplies by the gain, and again after it. Frequencies and angles are
  float32; cosines and sines are rounded to the dtype of x, and so is each product of the rotation.
- litgpt: the norm rounds once. Angles are float32. The table is rounded to the dtype of the model, and the rotation
  rounds each product.
- torchtune: norm and rotation compute in float32 and round once. Angles are float32.
- x-transformers: the norm rounds after each of its three steps. SwiGLU computes both inner products in one, which
  rounds the gradient of the input once instead of twice. Angles are float32, and the rotation rounds once. A module in
  half precision would round its frequencies as well, so it gets those of float32 here.
- rotary-embedding-torch counts positions in the dtype of x: bfloat16 has no odd numbers above 256, and float16 ends at
  65,504. Angles are float32.
- Meta: angles are float32. The table is complex64, and the rotation rounds once.

The angle at position p is p times a frequency. In float32 it is off by up to p times half the eps: that is the slope.
"""
ROUNDED = "the exact result, rounded"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SEEDS, BLOCKS, WINDOW, THETA, D_HEAD = 3, 8, 64, 10000.0, 64
# eps is far below that of each dtype, because the norm of x-transformers has none.
SIZE = Size(2, 128, 256, 4, 4, D_HEAD, 704, theta=THETA, eps=1e-12)
Function = Callable[[Tensor], Any]
Rotation = Callable[[Tensor, Tensor], Tensor]
Errors = dict[str, list[tuple[float, float]]]  # by peer; root mean square and largest, one pair for each seed
Results = dict[str, dict[str, Errors]]  # by section and column


def build_tinyblock(block: Block, size: Size) -> Candidate:
    candidate = build_control(block, size)
    attention: Any = copy.deepcopy(block.attn)
    attention.rope = None
    return Candidate(candidate.call, [], parts={**candidate.parts, "attention without RoPE": attention})


def build_torch(block: Block, size: Size) -> Candidate:
    """Return torch's own norm and attention with the weights of a Block."""
    weights, x = weights_of(block), next(block.parameters())
    with torch.device(x.device):
        norm = nn.RMSNorm(size.d_model, size.eps, dtype=x.dtype)
        attention = nn.MultiheadAttention(size.d_model, size.num_heads, bias=False, batch_first=True, dtype=x.dtype)
        mask = nn.Transformer.generate_square_subsequent_mask(size.seq_len, dtype=x.dtype)
    norm.load_state_dict({"weight": weights["ln1"]})
    in_proj = torch.cat([weights[name] for name in "qkv"])
    attention.load_state_dict({"in_proj_weight": in_proj, "out_proj.weight": weights["o"]})
    causal = functools.partial(attention, need_weights=False, attn_mask=mask, is_causal=True)
    return Candidate(norm, [], parts={"norm": norm, "attention without RoPE": lambda x: causal(x, x, x)})


LAYERS = {
    "tinyblock": Peer(build_tinyblock, "tinyblock"),
    "torch.nn": Peer(build_torch, "torch.nn"),
    "Hugging Face": PEERS["transformers"],
    **{name: PEERS[name] for name in ("litgpt", "torchtune", "x-transformers")},
}
SECTIONS = [
    "RMSNorm",
    *(f"RoPE, {dtype}" for dtype in DTYPES),
    *("SwiGLU", "attention", "attention without RoPE", "Block", f"{BLOCKS} Blocks"),
]


def layers_of(peer: Peer, blocks: Sequence[Block], size: Size) -> dict[str, Function]:
    """Return the layers of a peer with the weights of the first Block, and a stack of all Blocks."""
    candidates = [peer.build(block, size) for block in blocks]
    layers = {"RMSNorm" if name == "norm" else name: part for name, part in candidates[0].parts.items()}
    if "ffn" in layers:
        layers["SwiGLU"] = layers.pop("ffn")
        calls = [functools.partial(candidate.call, **candidate.keywords) for candidate in candidates]
        layers["Block"] = calls[0]
        layers[f"{BLOCKS} Blocks"] = lambda x: functools.reduce(lambda h, call: first(call(h)), calls, x)
    return layers


def rotate(x: Tensor, positions: Tensor, real: torch.dtype = torch.float32) -> Tensor:
    """Rotate as Meta's Llama does, which computes angles, table and product in float32; in float64 this is exact."""
    frequencies = 1 / THETA ** (torch.arange(0, D_HEAD, 2, device=x.device).to(real) / D_HEAD)
    angles = torch.outer(positions.to(real), frequencies)
    pairs = torch.view_as_complex(rearrange(x.to(real), "... (half pair) -> ... half pair", pair=2))
    rotated = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles))
    return rearrange(rotated, "... half pair -> ... (half pair)")


def _tinyblock(device: torch.device, length: int, compiled: bool = False) -> Rotation:
    rope = RotaryPositionalEmbedding(THETA, D_HEAD, length, device=device)
    return torch.compile(rope) if compiled else rope


def _hugging_face(device: torch.device, length: int) -> Rotation:
    llama = import_module("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(hidden_size=D_HEAD, num_attention_heads=1, head_dim=D_HEAD, rope_theta=THETA)
    tables = llama.LlamaRotaryEmbedding(config).to(device)
    return in_halves(lambda x, positions: llama.apply_rotary_pos_emb(x, x, *tables(x, positions[None]))[0])


def _litgpt(device: torch.device, length: int) -> Rotation:
    litgpt = import_module("litgpt.model")
    tables = litgpt.build_rope_cache(length, D_HEAD, device=device, base=THETA)
    return in_halves(lambda x, at: litgpt.apply_rope(x, *(table[at][None].to(x.dtype) for table in tables)))


def _torchtune(device: torch.device, length: int) -> Rotation:
    with torch.device(device):
        rope = import_module("torchtune.modules").RotaryPositionalEmbeddings(D_HEAD, length, THETA)
    return lambda x, positions: rope(x.transpose(1, 2), input_pos=positions[None]).transpose(1, 2)


def _x_transformers(device: torch.device, length: int) -> Rotation:
    module = import_module("x_transformers.x_transformers")
    rope = module.RotaryEmbedding(D_HEAD, base=THETA).to(device)
    return lambda x, positions: module.apply_rotary_pos_emb(x, *rope(positions))


def _rotary_embedding_torch(device: torch.device, length: int) -> Rotation:
    rope = import_module("rotary_embedding_torch").RotaryEmbedding(D_HEAD, theta=THETA).to(device)

    def rotated(x: Tensor, positions: Tensor) -> Tensor:
        windows = zip(x.split(WINDOW, -2), positions.split(WINDOW), strict=True)
        return torch.cat([rope.rotate_queries_or_keys(part, offset=int(at[0])) for part, at in windows], -2)

    return rotated


def in_halves(rotation: Rotation) -> Rotation:
    """Return a rotation of consecutive pairs by one that pairs x[k] with x[k + d_head/2]."""

    def rotated(x: Tensor, positions: Tensor) -> Tensor:
        halves = rotation(rearrange(x, "... (half pair) -> ... (pair half)", pair=2), positions)
        return rearrange(halves, "... (pair half) -> ... (half pair)", pair=2)

    return rotated


ROTATIONS: Mapping[str, Callable[[torch.device, int], Rotation]] = {
    "tinyblock": _tinyblock,
    "tinyblock, compiled": functools.partial(_tinyblock, compiled=True),
    "Hugging Face": _hugging_face,
    "Meta": lambda device, length: lambda x, positions: rotate(x, positions).to(x.dtype),
    "litgpt": _litgpt,
    "torchtune": _torchtune,
    "x-transformers": _x_transformers,
    "rotary-embedding-torch": _rotary_embedding_torch,
}


def first(outputs: Any) -> Tensor:
    return outputs[0] if isinstance(outputs, tuple) else outputs


def passes(function: Callable[..., Any], x: Tensor, gradient: Tensor, *more: object) -> dict[str, Tensor]:
    """Return the output of a function of x, and the gradient of x."""
    x = x.detach().clone().requires_grad_()
    y = first(function(x, *more))
    return {"forward": y.detach(), "gradient": torch.autograd.grad(y, x, gradient.to(y.dtype))[0]}


def error(actual: Tensor, exact: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """Return the root mean square error and the largest, in units of the dtype's eps."""
    wrong, eps = actual.double() - exact, torch.finfo(dtype).eps
    return float(wrong.norm() / exact.norm()) / eps, float(wrong.abs().max() / exact.abs().max()) / eps


def measure_layers(results: Results, dtype: str, seed: int, device: torch.device, compiled: bool) -> None:
    """Add the errors of all layers in one dtype, with the weights and inputs of one seed."""
    made = [make_block(SIZE, DTYPES[dtype], device, seed * BLOCKS + block) for block in range(BLOCKS)]
    blocks, x, gradient = [block for block, _ in made], made[0][1], made[1][1]
    exact = layers_of(LAYERS["tinyblock"], [copy.deepcopy(block).double() for block in blocks], SIZE)
    expected = {layer: passes(function, x.double(), gradient) for layer, function in exact.items()}

    def add(peer: str, layer: str, actual: Mapping[str, Tensor]) -> None:
        for what, tensor in actual.items():
            errors = results.setdefault(layer, {}).setdefault(f"{dtype} {what}", {})
            errors.setdefault(peer, []).append(error(tensor, expected[layer][what], DTYPES[dtype]))

    for layer, outputs in expected.items():
        add(ROUNDED, layer, {what: y.to(DTYPES[dtype]) for what, y in outputs.items()})
    for name, peer in LAYERS.items():
        try:
            layers = layers_of(peer, blocks, SIZE)
        except ImportError:
            continue
        for layer, function in layers.items():
            add(name, layer, passes(function, x, gradient))
            if compiled and name == "tinyblock" and "Blocks" not in layer:
                add("tinyblock, compiled", layer, passes(torch.compile(function, dynamic=False), x, gradient))


def measure_rotations(results: Results, device: torch.device, starts: Sequence[int], compiled: bool) -> None:
    """Add the errors of RoPE in windows of positions from each start, in every dtype."""
    positions = torch.cat([torch.arange(start, start + WINDOW, device=device) for start in starts])
    for peer, build in ROTATIONS.items():
        if peer.endswith("compiled") and not compiled:
            continue
        try:
            rotation = build(device, starts[-1] + WINDOW)
        except ImportError:
            continue
        for name, dtype in DTYPES.items():
            for seed in range(SEEDS):
                generator = torch.Generator().manual_seed(seed)
                x, gradient = torch.randn(2, 2, 2, len(positions), D_HEAD, generator=generator).to(device, dtype)
                actual = passes(rotation, x, gradient, positions)
                exact = passes(rotate, x.double(), gradient, positions, torch.float64)
                for what in actual:
                    windows = zip(actual[what].split(WINDOW, -2), exact[what].split(WINDOW, -2), strict=True)
                    for start, (y, expected) in zip(starts, windows, strict=True):
                        errors = results.setdefault(f"RoPE, {name}", {}).setdefault(f"{what} at {start:,}", {})
                        errors.setdefault(peer, []).append(error(y, expected, dtype))


def page(results: Results, facts: Mapping[str, object], plot: Path | None) -> str:
    """Return docs/exactness.md."""
    versions = [f"{peer.package} {peer.version()}" for peer in LAYERS.values() if peer.version()]
    where = f"Measured on {facts['device']}, torch {facts['torch']}, {', '.join(versions)}; commit {facts['commit']}."
    parts = [INTRODUCTION.strip(), where, shares(results)]
    for section in SECTIONS:
        columns = results[section]
        if section.startswith("RoPE"):  # a few of the windows in the picture
            starts = ("at 0", "at 8,192", "at 131,072", "at 1,048,512")
            columns = {column: errors for column, errors in columns.items() if column.endswith(starts)}
        peers = dict.fromkeys(peer for errors in columns.values() for peer in errors)
        rows = [[peer, *(cell(errors.get(peer)) for errors in columns.values())] for peer in peers]
        parts += [f"## {section}", markdown(["", *columns], rows), closer(columns)]
        if section == "RoPE, float16" and plot:
            parts.append(f"![The error of RoPE over the position]({plot.name})")
    return "\n\n".join([*parts, NOTES.strip()]) + "\n"


def rms(errors: Errors, peer: str) -> float:
    return statistics.median(error for error, _ in errors[peer])


def shares(results: Results) -> str:
    """Return tinyblock's root mean square errors as shares of those of Hugging Face."""
    columns = [f"{dtype} {what}" for dtype in DTYPES for what in ("forward", "gradient")]
    rows = []
    for section, errors in results.items():
        if all("Hugging Face" in errors.get(column, {}) for column in columns):
            ratios = (rms(errors[column], "tinyblock") / rms(errors[column], "Hugging Face") for column in columns)
            rows.append([section, *(f"{ratio:.2f}" for ratio in ratios)])
    return markdown(["tinyblock / Hugging Face", *columns], rows)


def cell(errors: list[tuple[float, float]] | None) -> str:
    if errors is None:
        return ""
    if not all(math.isfinite(error) for pair in errors for error in pair):
        return "not finite"
    low, middle, high = (number(of([error for error, _ in errors])) for of in (min, statistics.median, max))
    return f"{middle}{f' ({low}-{high})' if low != high else ''}, {number(max(largest for _, largest in errors))}"


def closer(columns: Mapping[str, Errors]) -> str:
    """Name the peers whose error is smaller than that of tinyblock by more than 1%."""
    found: dict[str, list[str]] = defaultdict(list)
    for column, errors in columns.items():
        for peer in errors.keys() - {"tinyblock", "tinyblock, compiled", ROUNDED}:
            if (share := rms(errors, peer) / rms(errors, "tinyblock")) < 0.99:
                found[peer].append(f"{column} {share:.2f}")
    named = (f"{peer} ({', '.join(where)} of the error)" for peer, where in sorted(found.items()))
    return f"Closer than tinyblock: {'; '.join(named)}." if found else "No peer is closer than tinyblock."


def draw(results: Results, facts: Mapping[str, object], path: Path) -> None:
    """Draw the relative error of RoPE over the position, one line for each peer."""
    from lab.plots import COLORS, MARKERS, new_figure, save

    figure = new_figure("RoPE: relative error over the position", f"{facts['device']}, torch {facts['torch']}")
    for axes, name in zip(figure.subplots(1, 2, sharey=True), ("float32", "bfloat16"), strict=True):
        eps = torch.finfo(DTYPES[name]).eps
        columns = {k: v for k, v in results[f"RoPE, {name}"].items() if k.startswith("forward")}
        positions = [int(column.rpartition(" ")[2].replace(",", "")) + WINDOW / 2 for column in columns]
        peers = [peer for peer in ROTATIONS if peer in next(iter(columns.values()))]
        for index, peer in enumerate(peers):
            errors = [eps * rms(of_peer, peer) for of_peer in columns.values()]
            style = {"color": COLORS[index], "marker": MARKERS[index], "markersize": 12 - 1.2 * index}
            axes.loglog(positions, errors, linewidth=5 - 0.5 * index, label=peer, **style)  # many lie upon each other
        axes.set(title=name, xlabel="position in tokens", ylabel="relative error, root mean square")
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("exactness.py", (__doc__ or "").strip(), EPILOG)
    parser.add_argument("--device", default="cpu", metavar="D", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument("--quick", action="store_true", help="one seed, short tables, and nothing is compiled")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page of Markdown")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw RoPE's error over the position")
    args = parser.parse_args(argv)
    with parser.reporting():
        check_outputs(args, "write", "plot")
        device = device_of(args.device)

    def work() -> int:
        results, facts = Results(), environment(device, seed=0)
        starts = [
            0,
            *(2**power for power in range(6, 12 if args.quick else 20)),
            2**12 if args.quick else 2**20 - WINDOW,
        ]
        with Progress() as progress, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the peers': they are not ours to mend
            for dtype in DTYPES:
                for seed in range(1 if args.quick else SEEDS):
                    progress.start(f"layers in {dtype}, seed {seed}")
                    measure_layers(results, dtype, seed, device, compiled=not args.quick and seed == 0)
            progress.start("RoPE")
            measure_rotations(results, device, starts, compiled=not args.quick)
        text = page(results, facts, args.plot)
        if args.plot:
            draw(results, facts, args.plot)
        if args.write:
            with atomic(args.write) as temporary:
                temporary.write_text(text)
        print(text)
        return 0

    return run(parser, work)


if __name__ == "__main__":
    sys.exit(main())
