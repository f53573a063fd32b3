"""How far the training is: a line that is overwritten on a terminal, and one that stays for each validation."""

import math
import sys
import time
from typing import Any

import torch
from lab.environment import device_name
from lab.machine import datasheet
from lab.sizes import Size

from .run import Settings
from .text import SYMBOLS


def flops_per_token(settings: Settings, d_ff: int) -> float:
    """Return the FLOPs of the matrix products, forward and backward, that a causal mask leaves."""
    heads, d_model = settings.num_heads, settings.d_model
    size = Size(1, settings.seq_len, d_model, heads, heads, d_model // heads, d_ff, num_layers=settings.num_layers)
    return size.costs("train").matmul_flops / settings.seq_len + 3 * 2 * d_model * SYMBOLS


class Progress:
    """Counts tokens and time from the first step that this process takes."""

    def __init__(self, settings: Settings, step: int, flops: float, device: torch.device, devices: int) -> None:
        self.settings, self.first, self.flops = settings, step, flops
        sheet = datasheet(device_name(device)) if device.type == "cuda" else None
        peak = sheet and sheet.flops_per_second(torch.bfloat16)
        self.peak = peak and peak * devices
        self.start, self.shown = time.perf_counter(), 0.0

    def tokens_per_second(self, step: int) -> float:
        seconds = time.perf_counter() - self.start
        return (step - self.first) * self.settings.batch_size * self.settings.seq_len / seconds

    def show(self, record: dict[str, Any]) -> None:
        """Print a line where there is a validation; else overwrite the one on a terminal, ten times a second."""
        now, terminal = time.perf_counter(), sys.stderr.isatty()
        if terminal and ("validation" in record or now - self.shown > 0.1):
            self.shown = now
            line = "" if "validation" in record else self._line(record)
            print(f"\r{line}\033[K", end="", file=sys.stderr, flush=True)
        if "validation" in record:
            print(self._line(record), flush=True)

    def _line(self, record: dict[str, Any]) -> str:
        step, steps, loss = record["step"], self.settings.steps, record["loss"]
        left = (steps - step) * (time.perf_counter() - self.start) / (step - self.first)
        shown = [f"step {step}/{steps}", f"loss {loss:.3f} nats ({bits(loss):.3f} bits/byte)"]
        if "validation" in record:
            shown.append(f"validation {record['validation']:.3f} ({bits(record['validation']):.3f})")
        speed = self.tokens_per_second(step)
        shown.append(f"{speed:,.0f} tokens/s")
        if self.peak:
            shown.append(f"MFU {speed * self.flops / self.peak:.1%}")
        return ", ".join([*shown, f"{left // 60:.0f}:{left % 60:02.0f} left"])


def bits(nats: float) -> float:
    return nats / math.log(2)
