"""One training run: the model, its optimizer and schedule, the steps, and what they leave behind."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .model import LanguageModel
from .text import Text, batch


@dataclass(frozen=True)
class Settings:
    """What decides the course of a run, apart from the text; batch_size is that of all processes together."""

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
    accumulate: int

    def must_agree(self) -> dict[str, Any]:
        """Return what a checkpoint must have in common: not the steps, so that a run may be made longer."""
        return {name: value for name, value in asdict(self).items() if name not in ("steps", "accumulate")}

    def build(self, **options: Any) -> LanguageModel:
        return LanguageModel(self.num_layers, self.d_model, self.num_heads, max_seq_len=self.max_seq_len, **options)


@dataclass(frozen=True)
class Processes:
    """Where this process stands among all: its rank, and which part of how many of each batch it has."""

    device: torch.device
    mesh: DeviceMesh | None = None
    rank: int = 0
    count: int = 1
    dp_rank: int = 0
    dp: int = 1

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over all processes; those along "tp" have the same."""
        if self.mesh is not None:
            dist.all_reduce(value)
        return value / self.count


class Diverged(Exception):
    """The loss or the gradient is infinite or NaN."""


class Trainer:
    """A model with its optimizer, its schedule and its place in the text: all that a checkpoint must hold."""

    def __init__(self, model: LanguageModel, text: Text, settings: Settings, processes: Processes) -> None:
        self.model, self.text, self.settings, self.processes = model, text, settings, processes
        self.step = 0
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        gains = [parameter for parameter in model.parameters() if parameter.ndim == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._share_of_lr)

    def _share_of_lr(self, step: int) -> float:
        """Rise in a straight line, then fall like a cosine to a tenth; `step` counts from 0."""
        settings = self.settings
        if step < settings.warmup:
            return (step + 1) / settings.warmup
        done = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
        return 0.55 + 0.45 * math.cos(math.pi * min(1.0, done))

    def _rows(self, part: int = 0, of: int = 1) -> slice:
        """Return which rows of a batch are this process's, or which are a part of its own."""
        each = self.settings.batch_size // (self.processes.dp * of)
        first = (self.processes.dp_rank * of + part) * each
        return slice(first, first + each)

    def _loss(self, windows: Tensor) -> Tensor:
        windows = windows.to(self.processes.device)
        with torch.autocast(windows.device.type, torch.bfloat16, enabled=windows.is_cuda):
            return self.model(windows[:, :-1], windows[:, 1:])

    def advance(self) -> dict[str, Any]:
        """Take one step, and return what is to be known of it.

        Raises:
            Diverged: the loss or the norm of its gradient is not finite; the weights are those before the step.
        """
        settings, losses = self.settings, []
        for part in range(settings.accumulate):
            rows = self._rows(part, settings.accumulate)
            windows = batch(self.text, settings.seed, self.step + 1, settings.batch_size, settings.seq_len, rows)
            loss = self._loss(windows) / settings.accumulate
            loss.backward()
            losses.append(loss.detach())
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        record = {
            "step": self.step + 1,
            "loss": float(self.processes.mean(torch.stack(losses).sum())),
            "lr": self.schedule.get_last_lr()[0],
            "grad_norm": float(norm),
        }
        if not (math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"])):
            found = "step {step}: the loss is {loss:.4g}, the learning rate {lr:.3g}, the gradient norm {grad_norm:.3g}"
            raise Diverged(found.format(**record))
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.step += 1
        return record

    @torch.no_grad()
    def validate(self, windows: Tensor) -> float:
        """Return the mean loss over windows, of shape (a multiple of the batch, seq_len + 1)."""
        losses = [self._loss(part[self._rows()]) for part in windows.split(self.settings.batch_size)]
        return float(self.processes.mean(torch.stack(losses).mean()))

    @torch.no_grad()
    def losses_by_position(self, windows: Tensor) -> Tensor:
        """Return the mean loss at each position of windows, of any length."""
        total = torch.zeros(windows.shape[1] - 1)
        for part in windows.to(self.processes.device).split(8):
            logits = self.model(part[:, :-1])
            total += nn.functional.cross_entropy(logits.mT, part[:, 1:], reduction="none").sum(0).cpu()
        return total / len(windows)

    @torch.no_grad()
    def continue_text(self, prompt: Tensor, count: int, temperature: float = 0.8) -> bytes:
        """Draw `count` bytes that follow the prompt; every process along "dp" and "tp" must take part."""
        generator, tokens = torch.Generator().manual_seed(self.settings.seed), prompt[None]
        for _ in range(count):
            last = tokens[:, -self.settings.seq_len :].to(self.processes.device)
            logits = self.model(last)[0, -1].float().cpu()
            drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            tokens = torch.cat((tokens, drawn[None]), dim=1)
        return bytes(tokens[0, len(prompt) :].tolist())
