"""The cases: passes of a Block at given sizes, with target ratios."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from lab.presets import PRESETS
from lab.sizes import Size
from lab.tables import plural

CUDA_PRESETS = ("llama-3.2-1b", "llama-3.1-8b")
# How the layers run: as part of the name of a case, and in words.
SUFFIXES = {"eager": "", "compiled": "-compiled", "graphs": "-graphs"}
IN_WORDS = {
    "eager": "eager",
    "compiled": "compiled",
    "graphs": "compiled, CUDA graphs",
}
SHORT = {torch.bfloat16: "bf16", torch.float32: "f32"}
# Of the presets, only this one is judged: its training steps fill a GPU.
JUDGED_PRESET = "llama-3.1-8b"
PRESET_TARGETS = {
    "eager": {"transformers": 1.00, "operations": 1.03, "unchecked": 1.01},
    "compiled": {"others": 1.00, "limit": 1.05},
    "graphs": {"others": 1.00, "limit": 1.05},
}
ONE_TOKEN_TARGETS: dict[str, dict[str, float]] = {
    "eager": {},
    "compiled": {},
    "graphs": {"copy": 1.03},
}

D_768 = Size(
    batch_size=4,
    seq_len=512,
    d_model=768,
    num_heads=12,
    num_kv_heads=12,
    d_head=64,
    d_ff=2048,
)
D_2048 = Size(
    batch_size=4,
    seq_len=512,
    d_model=2048,
    num_heads=32,
    num_kv_heads=32,
    d_head=64,
    d_ff=5440,
)
TOKEN_OF_64 = Size(
    batch_size=1,
    seq_len=1,
    d_model=64,
    num_heads=4,
    num_kv_heads=4,
    d_head=16,
    d_ff=192,
)


@dataclass(frozen=True, kw_only=True)
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

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def summary(self) -> str:
        """Return the case in a few words, such as "training, 2,048 tokens of width 768, bfloat16, eager"."""
        work = "training" if self.trains else "forward"
        count = f"{self.size.tokens:,} tokens" if self.size.tokens > 1 else "1 token"
        width = f"of width {self.size.d_model}"
        return f"{work}, {count} {width}, {self.dtype_name}, {IN_WORDS[self.how]}"

    def description(self) -> str:
        """Return the pass and all sizes."""
        size = self.size
        passes = "Forward and backward" if self.trains else "Forward without gradients"
        words = [
            passes,
            IN_WORDS[self.how],
            self.dtype_name,
            f"batch {size.batch_size}",
            f"sequence {size.seq_len}",
            f"d_model {size.d_model}",
            plural(size.num_heads, "head"),
        ]
        if size.num_kv_heads != size.num_heads:
            words.append(plural(size.num_kv_heads, "key head"))
        words.append(f"d_ff {size.d_ff}")
        if size.qk_norm:
            words.append("q/k norm")
        if self.positions:
            words.append("token positions given")
        return ", ".join(words)

    def with_positions(self) -> "Case":
        """Return the case with positions 0, 1, 2, ... passed to the Block, without targets."""
        return replace(self, name=f"{self.name}-positions", positions=True, targets={})

    def shrunk(self) -> "Case":
        """Return the case at a tiny size, which tests the script; its times mean nothing."""
        heads_per_key_head = self.size.num_heads // self.size.num_kv_heads
        size = replace(
            self.size,
            batch_size=min(2, self.size.batch_size),
            seq_len=min(16, self.size.seq_len),
            d_model=64,
            num_heads=4,
            num_kv_heads=max(1, 4 // heads_per_key_head),
            d_head=16,
            d_ff=128,
        )
        return replace(self, size=size, targets={})


def all_cases(
    device: torch.device, presets: Iterable[str], qk_norm: bool = True
) -> list[Case]:
    """Return the cases of every device, and those of the presets; on CUDA, the slowest first.

    qk_norm=False leaves out the q/k norm of presets that have one.
    """
    cases = _cases_of_every_device()
    if device.type == "cuda":  # too small to fill a GPU, so they are not judged
        cases = [replace(case, targets={}) for case in cases]
    for name in presets:
        cases += _preset_cases(name, qk_norm)
    if device.type == "cuda":
        cases.sort(key=lambda case: case.size.costs(case.work).flops, reverse=True)
    return cases


def _cases_of_every_device() -> list[Case]:
    bf16 = torch.bfloat16
    f32 = torch.float32
    # Python takes more time here than the arithmetic.
    tiny = Case(
        name="one-token-tiny-f32",
        work="forward",
        size=TOKEN_OF_64,
        dtype=f32,
        targets={"transformers": 1.00},
    )
    return [
        _forward(bf16, "eager"),
        _forward(f32, "eager"),
        _forward(bf16, "compiled"),
        _forward(f32, "compiled"),
        _training(bf16, "eager", D_768, limit=1.10),
        _training(f32, "eager", D_768, limit=1.04),
        _training(bf16, "eager", D_2048, limit=1.04),
        _training(bf16, "compiled", D_768, limit=1.03),
        _training(f32, "compiled", D_768, limit=1.03),
        _one_token(f32, "eager", limit=1.15),
        _one_token(bf16, "eager", limit=1.20),
        _one_token(f32, "compiled", limit=1.15),
        _one_token(bf16, "compiled", limit=1.15),
        tiny,
    ]


def _forward(dtype: torch.dtype, how: str) -> Case:
    return Case(
        name=f"forward{SUFFIXES[how]}-{SHORT[dtype]}-768",
        work="forward",
        size=D_768,
        dtype=dtype,
        how=how,
    )


def _training(dtype: torch.dtype, how: str, size: Size, limit: float) -> Case:
    return Case(
        name=f"train{SUFFIXES[how]}-{SHORT[dtype]}-{size.d_model}",
        work="train",
        size=size,
        dtype=dtype,
        how=how,
        targets={"others": 1.03, "limit": limit},
    )


def _one_token(dtype: torch.dtype, how: str, limit: float) -> Case:
    return Case(
        name=f"one-token{SUFFIXES[how]}-{SHORT[dtype]}",
        work="forward",
        size=replace(D_768, batch_size=1, seq_len=1),
        dtype=dtype,
        how=how,
        targets={"others": 1.00, "limit": limit},
    )


def _preset_cases(name: str, qk_norm: bool) -> list[Case]:
    """Return the cases of a model's block in bfloat16."""
    token = PRESETS[name].block(batch_size=1, seq_len=1)
    label = name
    if token.qk_norm and not qk_norm:
        token = replace(token, qk_norm=False)
        label = f"{name}-without-qk-norm"
    cases = []
    for how, suffix in SUFFIXES.items():
        targets = PRESET_TARGETS[how] if name == JUDGED_PRESET else {}
        for batch, seq in ((4, 2048), (1, 8192)):
            for work in ("forward", "train"):
                case = Case(
                    name=f"{work}{suffix}-bf16-{label}-{batch}x{seq}",
                    work=work,
                    size=replace(token, batch_size=batch, seq_len=seq),
                    dtype=torch.bfloat16,
                    how=how,
                    targets=targets,
                )
                cases.append(case)
        one_token = Case(
            name=f"one-token{suffix}-bf16-{label}",
            work="forward",
            size=token,
            dtype=torch.bfloat16,
            how=how,
            targets=ONE_TOKEN_TARGETS[how],
        )
        cases.append(one_token)
    return cases
