"""What is measured: a model with an input, and its runs."""

from collections.abc import Callable
from dataclasses import dataclass

import einops
import torch
from lab.timing import clock
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.optim import AdamW

from .tensors import result_in

Build = Callable[[torch.device, torch.dtype], nn.Module]


@dataclass(frozen=True)
class Settings:
    """How to measure. `mode` is forward, train (and backward) or step (and AdamW)."""

    device: torch.device
    dtype: torch.dtype
    mode: str = "train"
    compile: bool = False
    rounds: int = 15

    @property
    def train(self) -> bool:
        return self.mode != "forward"

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def describe(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}, {self.mode}, {'compiled' if self.compile else 'eager'}"


@dataclass
class Subject:
    """A model with an input, and its runs.

    whole: the model or, with --compile, the compiled model.
    changes_x: whether the model changes its input, so that each run needs a copy.
    gradient: where backward starts.
    """

    model: nn.Module
    whole: Callable[[Tensor], object]
    settings: Settings
    x: Tensor
    changes_x: bool
    gradient: Tensor | None
    weights: list[nn.Parameter]
    optimizer: torch.optim.Optimizer

    def run_parts(self) -> None:
        """Run all passes of the mode in eager mode, so that hooks see the parts."""
        self._run(self.model)

    def run_whole(self) -> None:
        """Run all passes of the mode."""
        self._run(self.whole)

    def _run(self, model: Callable[[Tensor], object]) -> None:
        self.clear()
        out = result_in(model(self.x.clone() if self.changes_x else self.x))
        if self.settings.train:
            out.backward(self.gradient)
        if self.settings.mode == "step":
            self.optimizer.step()

    def clear(self) -> None:
        """Release all gradients."""
        for leaf in (self.x, *self.weights):
            leaf.grad = None


def prepare(build: Build, shape: tuple[int, int, int], settings: Settings) -> Subject:
    """Build the model, and run it twice.

    Raises:
        ValueError: no tensor of the result has a gradient, in a mode that trains.
        Exception: an error of the model, with a note on how it was called.
    """
    x = torch.randn(shape, device=settings.device, dtype=settings.dtype)
    x.requires_grad_(settings.train)
    model = build(settings.device, settings.dtype)
    if not settings.train:
        model.eval()
    given = x.clone()
    try:
        out = result_in(model(given))
    except Exception as error:
        error.add_note(
            "profile_block.py called the model with one tensor of shape (batch, seq, "
            f"d_model) = {shape}. --batch-size, --seq-len and --d-model change it."
        )
        raise
    if settings.train and not out.requires_grad:
        raise ValueError(
            f"the result of the model must have a gradient in mode {settings.mode}, "
            "got none; use --mode forward"
        )
    weights = list(model.parameters())
    subject = Subject(
        model=model,
        whole=model,
        settings=settings,
        x=x,
        changes_x=not given.is_inference() and given._version > 0,
        gradient=torch.randn_like(out) if settings.train else None,
        weights=weights,
        # A learning rate of 0 leaves the weights as they are for the other runs.
        optimizer=AdamW([{"params": weights}], lr=0.0),
    )
    subject.run_parts()  # allocates AdamW's state
    return subject


def compile_whole(subject: Subject) -> str:
    """Compile the whole by its first run; return a note on the graphs."""
    # Otherwise tracing takes most of the time.
    torch.compiler.allow_in_graph(einops.rearrange)
    counters.clear()
    subject.whole = torch.compile(subject.model, dynamic=False)
    start = clock()
    subject.run_whole()
    took = clock() - start
    breaks = [reason.splitlines()[0] for reason in counters["graph_break"]]
    return (
        f"Compilation: {took:.1f} s, graphs: {counters['stats']['unique_graphs']}, "
        f"breaks: {', '.join(breaks) or 'none'}"
    )


def compiles_itself(subject: Subject) -> bool:
    """Say if something was compiled since the counters were cleared, or will be."""
    in_place = [each for each in subject.model.modules() if each._compiled_call_impl]
    return bool(counters["stats"] or in_place)
