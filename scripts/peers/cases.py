"""The cases: passes of a Block at given sizes, with target ratios."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lab.presets import PRESETS
from lab.sizes import Size

CUDA_PRESETS = ("llama-3.2-1b", "llama-3.1-8b")
HOW = {
    "eager": "",
    "compiled": "-compiled",
    "graphs": "-graphs",
}  # the suffix in the name of a case


@dataclass(frozen=True)
class Case:
    """A measured pass, and the ratios that it must not exceed; without a target, it is not judged.

    "forward" is without gradients; "train" is forward and backward, to the input and all weights. `how` is "eager",
    "compiled", or "graphs", for torch.compile(mode="reduce-overhead"). The keys of `targets` are names of peers;
    "others" stands for the layers of other projects.
    """

    name: str
    work: str
    size: Size
    dtype: torch.dtype
    how: str = "eager"
    targets: Mapping[str, float] = field(default_factory=dict)
    positions: bool = False

    @property
    def trains(self) -> bool:
        return self.work == "train"

    def facts(self) -> dict[str, Any]:
        """Return the name, the description, the pass, its FLOPs and the dtype, for JSON."""
        size, cost, dtype = (
            self.size,
            self.size.costs(self.work),
            str(self.dtype).removeprefix("torch."),
        )
        text = "Forward and backward" if self.trains else "Forward without gradients"
        text += f", {self.how.replace('graphs', 'compiled, CUDA graphs')}, {dtype}"
        text += f", batch {size.batch_size}, sequence {size.seq_len}, d_model {size.d_model}, heads {size.num_heads}"
        text += (
            f", key heads {size.num_kv_heads}"
            if size.num_kv_heads != size.num_heads
            else ""
        )
        text += f", d_ff {size.d_ff}" + ", token positions given" * self.positions
        flops = {"causal": cost.matmul_flops, "dense": cost.dense_matmul_flops}
        return {
            "case": self.name,
            "describe": text,
            "work": self.work,
            "flops": flops,
            "dtype": dtype,
        }

    def with_positions(self) -> "Case":
        """Return the case with positions 0, 1, 2, ... passed to the Block, without targets."""
        return replace(self, name=f"{self.name}-positions", positions=True, targets={})

    def shrunk(self) -> "Case":
        """Return the case at a tiny size, which tests the script; its times mean nothing."""
        batch, seq = min(2, self.size.batch_size), min(16, self.size.seq_len)
        key_heads = 4 * self.size.num_kv_heads // self.size.num_heads
        size = Size(
            batch,
            seq,
            64,
            4,
            key_heads,
            16,
            128,
            theta=self.size.theta,
            eps=self.size.eps,
        )
        return replace(self, size=size, targets={})


def all_cases(device: torch.device, presets: Iterable[str]) -> list[Case]:
    """Return the cases of every device, and those of the presets; on CUDA, the slowest first."""
    bf16, f32 = torch.bfloat16, torch.float32
    d_768, d_2048 = (
        Size(4, 512, 768, 12, 12, 64, 2048),
        Size(4, 512, 2048, 32, 32, 64, 5440),
    )
    one_token = replace(d_768, batch_size=1, seq_len=1)
    cases = [
        Case("forward-bf16-768", "forward", d_768, bf16),
        Case("forward-f32-768", "forward", d_768, f32),
        Case("forward-compiled-bf16-768", "forward", d_768, bf16, "compiled"),
        Case("forward-compiled-f32-768", "forward", d_768, f32, "compiled"),
        Case(
            "train-bf16-768",
            "train",
            d_768,
            bf16,
            "eager",
            {"others": 1.03, "limit": 1.10},
        ),
        Case(
            "train-f32-768",
            "train",
            d_768,
            f32,
            "eager",
            {"others": 1.03, "limit": 1.04},
        ),
        Case(
            "train-bf16-2048",
            "train",
            d_2048,
            bf16,
            "eager",
            {"others": 1.03, "limit": 1.04},
        ),
        Case(
            "train-compiled-bf16-768",
            "train",
            d_768,
            bf16,
            "compiled",
            {"others": 1.03, "limit": 1.03},
        ),
        Case(
            "train-compiled-f32-768",
            "train",
            d_768,
            f32,
            "compiled",
            {"others": 1.03, "limit": 1.03},
        ),
        Case(
            "one-token-f32",
            "forward",
            one_token,
            f32,
            "eager",
            {"others": 1.00, "limit": 1.15},
        ),
        Case(
            "one-token-bf16",
            "forward",
            one_token,
            bf16,
            "eager",
            {"others": 1.00, "limit": 1.20},
        ),
        Case(
            "one-token-compiled-f32",
            "forward",
            one_token,
            f32,
            "compiled",
            {"others": 1.00, "limit": 1.15},
        ),
        Case(
            "one-token-compiled-bf16",
            "forward",
            one_token,
            bf16,
            "compiled",
            {"others": 1.00, "limit": 1.15},
        ),
        # Python takes more time here than the arithmetic.
        Case(
            "one-token-tiny-f32",
            "forward",
            Size(1, 1, 64, 4, 4, 16, 192),
            f32,
            "eager",
            {"transformers": 1.00},
        ),
    ]
    if (
        device.type == "cuda"
    ):  # too small to fill a GPU: only the shape checks are judged
        cases = [
            replace(
                case, targets={"unchecked": 1.01} if case.size.d_model >= 768 else {}
            )
            for case in cases
        ]
    cases += [case for name in presets for case in _preset_cases(name)]
    return (
        sorted(cases, key=lambda case: -case.size.costs(case.work).flops)
        if device.type == "cuda"
        else cases
    )


def _preset_cases(name: str) -> list[Case]:
    """Return the cases of a model's block in bfloat16, with targets if its size fills a GPU."""
    eager, compiled = (
        {"transformers": 1.00, "operations": 1.03, "unchecked": 1.01},
        {"others": 1.00, "limit": 1.05},
    )
    token = replace(PRESETS[name].block(batch_size=1, seq_len=1), qk_norm=False)
    cases = []
    for how, suffix in HOW.items():
        targets = (
            {} if name != "llama-3.1-8b" else eager if how == "eager" else compiled
        )
        for (batch, seq), work in itertools.product(
            [(4, 2048), (1, 8192)], ["forward", "train"]
        ):
            size, label = (
                replace(token, batch_size=batch, seq_len=seq),
                f"{work}{suffix}-bf16-{name}-{batch}x{seq}",
            )
            cases.append(Case(label, work, size, torch.bfloat16, how, targets))
        targets = {"copy": 1.03} if how == "graphs" else {}
        cases.append(
            Case(
                f"one-token{suffix}-bf16-{name}",
                "forward",
                token,
                torch.bfloat16,
                how,
                targets,
            )
        )
    return cases
