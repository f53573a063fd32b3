"""A model in training: its settings, its optimizer and its learning rate, one step, and its losses."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lab.processes import launched
from torch import Tensor, nn

from .model import LanguageModel
from .text import batch


@dataclass(frozen=True)
class Settings:
    """What determines a run, apart from the text; all processes together take batch_size sequences a step."""

    steps: int
    batch_size: int
    seq_len: int
    max_seq_len: int
    d_model: int
    num_layers: int
    num_heads: int
    seed: int
    lr: float
    warmup: int

    def build(self, **options: Any) -> LanguageModel:
        return LanguageModel(
            self.num_layers,
            self.d_model,
            self.num_heads,
            max_seq_len=self.max_seq_len,
            **options,
        )


class Diverged(Exception):
    """The loss or the gradient is infinite or NaN."""


class Trainer:
    """A model with its optimizer and a record of each step taken; of each batch, this process takes `rows`."""

    def __init__(
        self,
        model: LanguageModel,
        text: Tensor,
        settings: Settings,
        rows: slice = slice(None),
    ) -> None:
        self.model, self.text, self.settings, self.rows = model, text, settings, rows
        self.device = next(model.parameters()).device
        self.history: list[dict[str, Any]] = []
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        gains = [parameter for parameter in model.parameters() if parameter.ndim == 1]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": gains, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)

    @property
    def step(self) -> int:
        return len(self.history)

    def learning_rate(self) -> float:
        """Return that of the next step: a linear warm-up, then a cosine from the highest to a tenth of it."""
        settings = self.settings
        if self.step < settings.warmup:
            return settings.lr * (self.step + 1) / settings.warmup
        done = (self.step - settings.warmup) / max(1, settings.steps - settings.warmup)
        return settings.lr * (0.55 + 0.45 * math.cos(math.pi * done))

    def _losses(self, windows: Tensor) -> Tensor:
        """Return the loss of each byte but the first of this process's rows."""
        tokens, targets = (
            windows[self.rows, :-1].to(self.device),
            windows[self.rows, 1:].to(self.device),
        )
        with torch.autocast(self.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            logits = self.model(tokens).flatten(0, 1)
            return nn.functional.cross_entropy(
                logits, targets.flatten(), reduction="none"
            ).view_as(targets)

    def _mean(self, value: Tensor) -> Tensor:
        """Return the mean over all processes; those along "tp" have the same value."""
        if launched() > 1:
            dist.all_reduce(value)
        return value / launched()

    def advance(self) -> dict[str, Any]:
        """Take one step, and return its record: number, loss, learning rate and gradient norm.

        Raises:
            Diverged: the loss or the norm of its gradient is not finite; the weights are those before the step.
        """
        lr, settings = self.learning_rate(), self.settings
        windows = batch(
            self.text,
            settings.seed,
            self.step + 1,
            settings.batch_size,
            settings.seq_len,
        )
        loss = self._losses(windows).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        record = {
            "step": self.step + 1,
            "loss": float(self._mean(loss.detach())),
            "lr": lr,
            "grad_norm": float(norm),
        }
        if not all(map(math.isfinite, record.values())):
            found = "step {step}: the loss is {loss:.4g}, the learning rate {lr:.3g}, the gradient norm {grad_norm:.3g}"
            raise Diverged(found.format(**record))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.history.append(record)
        return record

    @torch.no_grad()
    def validate(self, windows: Tensor) -> Tensor:
        """Return the mean loss at each position of windows, whose number is a multiple of the batch, of any length."""
        losses = torch.cat(
            [self._losses(part) for part in windows.split(self.settings.batch_size)]
        )
        return self._mean(losses.mean(0)).cpu()

    @torch.no_grad()
    def continue_text(
        self, prompt: bytes, count: int, temperature: float = 0.8
    ) -> bytes:
        """Draw `count` bytes that follow the prompt; every process of the mesh must take part."""
        generator, text = (
            torch.Generator().manual_seed(self.settings.seed),
            list(prompt),
        )
        for _ in range(count):
            tokens = torch.tensor([text[-self.settings.seq_len :]], device=self.device)
            probabilities = (
                self.model(tokens)[0, -1].float().cpu() / temperature
            ).softmax(-1)
            text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        return bytes(text[len(prompt) :])
