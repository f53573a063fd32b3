"""A model in training: its settings, its optimizer and its learning rate, one step, and its losses."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .model import LanguageModel
from .text import batch


def require_at_least_one(record: object, *names: str) -> None:
    """Raise a ValueError for a field of a record that is below 1."""
    for name in names:
        value = getattr(record, name)
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


@dataclass(frozen=True)
class Settings:
    """What determines a run, apart from the text.

    steps: number of updates.
    batch_size: sequences in each batch.
    seq_len: bytes in each sequence.
    d_model, num_layers, num_heads: size of the model.
    seed: of the weights and the batches.
    lr: peak learning rate.
    warmup: steps in which the learning rate rises to its peak.
    """

    steps: int
    batch_size: int
    seq_len: int
    d_model: int
    num_layers: int
    num_heads: int
    seed: int
    lr: float
    warmup: int

    def __post_init__(self) -> None:
        require_at_least_one(self, "steps", "batch_size", "seq_len")
        require_at_least_one(self, "d_model", "num_layers", "num_heads")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be positive and finite, got {self.lr}")
        if not 0 <= self.warmup <= self.steps:
            raise ValueError(
                f"warmup must be from 0 to steps {self.steps}, got {self.warmup}"
            )

    @property
    def max_seq_len(self) -> int:
        """Return the longest sequence that the model takes: the comparison of positions validates on it."""
        return 4 * self.seq_len

    def build(self, **options: Any) -> LanguageModel:
        return LanguageModel(
            self.num_layers,
            self.d_model,
            self.num_heads,
            max_seq_len=self.max_seq_len,
            **options,
        )


@dataclass
class StepRecord:
    """What is known of one step.

    step: its number, from 1 on.
    loss: mean over the batch, in nats per byte.
    lr: learning rate.
    grad_norm: norm of the gradient, before it was clipped.
    bytes_per_second: speed of the last 100 steps; None in the first steps of a run.
    validation: loss on the held-out text; None where it was not computed.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    bytes_per_second: int | None = None
    validation: float | None = None


class Diverged(Exception):
    """The loss or the gradient is infinite or NaN."""


class Trainer:
    """A model with its optimizer and a record of each step."""

    def __init__(self, model: LanguageModel, text: Tensor, settings: Settings) -> None:
        self.model = model
        self.text = text
        self.settings = settings
        self.device = next(model.parameters()).device
        self.history: list[StepRecord] = []
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        gains = [parameter for parameter in model.parameters() if parameter.ndim == 1]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": gains, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)

    @property
    def step(self) -> int:
        """Return the number of steps that were taken."""
        return len(self.history)

    def learning_rate(self) -> float:
        """Return the rate of the next step: a linear warm-up, then a cosine from the peak to a tenth of it."""
        settings = self.settings
        if self.step < settings.warmup:
            return settings.lr * (self.step + 1) / settings.warmup
        decay_steps = max(1, settings.steps - settings.warmup)
        done = (self.step - settings.warmup) / decay_steps
        # The factor falls from 1 to 0.1.
        return settings.lr * (0.55 + 0.45 * math.cos(math.pi * done))

    def _losses(self, windows: Tensor) -> Tensor:
        """Return the loss of each byte but the first of each window."""
        tokens = windows[:, :-1].to(self.device)
        targets = windows[:, 1:].to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            logits = self.model(tokens).flatten(0, 1)
            losses = nn.functional.cross_entropy(
                logits, targets.flatten(), reduction="none"
            )
        return losses.view_as(targets)

    def advance(self) -> StepRecord:
        """Take one step, and return its record, which is also the last of the history.

        Raises:
            Diverged: the loss or the norm of its gradient is not finite; the weights are those before the step.
        """
        settings = self.settings
        step = self.step + 1
        lr = self.learning_rate()
        windows = batch(
            self.text, settings.seed, step, settings.batch_size, settings.seq_len
        )
        loss = self._losses(windows).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        record = StepRecord(step, float(loss.detach()), lr, float(norm))
        if not (math.isfinite(record.loss) and math.isfinite(record.grad_norm)):
            raise Diverged(
                f"step {step}: the loss is {record.loss:.4g}, the learning rate {lr:.3g}, "
                f"the gradient norm {record.grad_norm:.3g}"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.history.append(record)
        return record

    @torch.no_grad()
    def validate(self, windows: Tensor) -> Tensor:
        """Return the mean loss at each position of the windows, which may have any length."""
        parts = windows.split(self.settings.batch_size)
        losses = torch.cat([self._losses(part) for part in parts])
        return losses.mean(0).cpu()

    @torch.no_grad()
    def continue_text(
        self, prompt: bytes, count: int, temperature: float = 0.8
    ) -> bytes:
        """Draw `count` bytes that follow the prompt."""
        generator = torch.Generator().manual_seed(self.settings.seed)
        text = list(prompt)
        for _ in range(count):
            context = text[-self.settings.seq_len :]
            tokens = torch.tensor([context], device=self.device)
            logits = self.model(tokens)[0, -1].float().cpu()
            probabilities = (logits / temperature).softmax(-1)
            text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        return bytes(text[len(prompt) :])
