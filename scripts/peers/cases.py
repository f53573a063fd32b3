"""What is measured: passes of a Block at certain sizes, and the targets that were set for them."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from profiling.presets import PRESETS, Size

CUDA_PRESETS = ("llama-3.2-1b", "llama-3.1-8b")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Case:
    """What is run, and the ratios that it must not exceed; a target of None is measured and not judged.

    "forward" is without gradients, "train" is forward and backward, to the input and all of the weights. "accuracy"
    takes no time: its samples are the errors of stacks of layers.
    """

    name: str
    work: str
    size: Size
    dtype: torch.dtype
    compiled: bool = False
    to_peers: float | None = None
    to_limit: float | None = None
    positions: bool = False

    def target(self, peer: str) -> float | None:
        ours = ("operations", "control", "unchecked", "against")
        return self.to_limit if peer == "limit" else None if peer in ours else self.to_peers

    def describe(self) -> str:
        size, dtype, how = self.size, dtype_name(self.dtype), "compiled" if self.compiled else "eager"
        text = {
            "forward": f"forward without gradients, {how}, {dtype}",
            "train": f"forward and backward, {how}, {dtype}",
            "accuracy": f"relative error of {size.layers} layers in {dtype} against their own float64 run",
        }[self.work]
        text += f", batch {size.batch_size}, sequence {size.seq_len}, d_model {size.d_model}, heads {size.num_heads}"
        text += f", key heads {size.num_kv_heads}" if size.num_kv_heads != size.num_heads else ""
        return f"{text}, d_ff {size.d_ff}" + (", token positions given" if self.positions else "")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def all_cases(device: torch.device, presets: Iterable[str]) -> list[Case]:
    """Return the cases of every device, and on CUDA those of the presets."""
    bf16, f32 = torch.bfloat16, torch.float32
    d_768, d_2048 = Size(4, 512, 768, 12, 12, 64, 2048), Size(4, 512, 2048, 32, 32, 64, 5440)
    one_token = dataclasses.replace(d_768, batch_size=1, seq_len=1)
    stack = dataclasses.replace(d_768, batch_size=1, seq_len=128, num_layers=8)
    cases = [
        Case("forward-bf16-768", "forward", d_768, bf16),
        Case("forward-f32-768", "forward", d_768, f32),
        Case("forward-compiled-bf16-768", "forward", d_768, bf16, True),
        Case("forward-compiled-f32-768", "forward", d_768, f32, True),
        Case("train-bf16-768", "train", d_768, bf16, False, 1.03, 1.10),
        Case("train-f32-768", "train", d_768, f32, False, 1.03, 1.04),
        Case("train-bf16-2048", "train", d_2048, bf16, False, 1.03, 1.04),
        Case("train-compiled-bf16-768", "train", d_768, bf16, True, 1.03, 1.03),
        Case("train-compiled-f32-768", "train", d_768, f32, True, 1.03, 1.03),
        Case("one-token-f32", "forward", one_token, f32, False, 1.00, 1.15),
        Case("one-token-bf16", "forward", one_token, bf16, False, 1.00, 1.20),
        Case("one-token-compiled-f32", "forward", one_token, f32, True, 1.00, 1.15),
        Case("one-token-compiled-bf16", "forward", one_token, bf16, True, 1.00, 1.15),
        Case("one-token-tiny-f32", "forward", Size(1, 1, 64, 4, 4, 16, 192), f32),
        Case("accuracy-bf16", "accuracy", stack, bf16, False, 1.00),
    ]
    for name in presets if device.type == "cuda" else ():
        p = PRESETS[name]
        size = Size(4, 2048, p.d_model, p.num_heads, p.num_kv_heads, p.d_head, p.d_ff, theta=p.theta, eps=p.eps)
        for work in ("forward", "train"):
            cases.append(Case(f"{work}-bf16-{name}", work, size, bf16, False, 1.03))
            cases.append(Case(f"{work}-compiled-bf16-{name}", work, size, bf16, True, 1.03))
    return cases


def with_positions(case: Case) -> Case:
    """Return the case with positions 0, 1, 2, ... given to the Block; no target was set for it."""
    return dataclasses.replace(case, name=f"{case.name}-positions", positions=True, to_peers=None, to_limit=None)


def shrink(case: Case) -> Case:
    """Return the case at a size that only shows that everything works: what it measures means nothing."""
    size = dataclasses.replace(
        case.size,
        batch_size=min(2, case.size.batch_size),
        seq_len=min(16, case.size.seq_len),
        d_model=64,
        num_heads=4,
        num_kv_heads=4 * case.size.num_kv_heads // case.size.num_heads,
        d_head=16,
        d_ff=128,
    )
    return dataclasses.replace(case, size=size, to_peers=None, to_limit=None)
