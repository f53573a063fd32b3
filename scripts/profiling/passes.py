"""Run the stretches of a model in its order, so that weights are as cold as in the model."""

from time import perf_counter
from typing import Any

import torch
from lab.timing import Run, clock
from torch import Tensor

from .record import Stretch


class InOrder:
    """A sampler: forward of all stretches, backward of all in reverse, and the step.

    It returns seconds of shape (2, stretches + 1): forward and backward of each stretch
    and, as the last one, of the step, which is a backward pass.
    """

    def __init__(self, stretches: list[Stretch], step: Run, on_gpu: bool) -> None:
        self.stretches = stretches
        self.step = step
        self.on_gpu = on_gpu
        for _ in range(2):
            self.longest = 0.0  # seconds of a call on the host
            self.one_pass()  # allocates
        self.calls = 1 if on_gpu else 1 + int(0.01 / self.one_pass().sum())

    def __call__(self) -> Tensor:
        self.one_pass()  # leaves the caches as a pass does
        return torch.stack([self.one_pass() for _ in range(self.calls)]).mean(0)

    def one_pass(self) -> Tensor:
        marks: list[Any] = []

        def timed(run: Any, *args: Any) -> Any:
            if self.on_gpu:  # at 2 GHz, it sleeps until all is launched, or 1 ms
                torch.cuda._sleep(int(4e9 * max(self.longest, 5e-4)))
            start = perf_counter()
            marks.append(self._now())
            result = run(*args)
            marks.append(self._now())
            self.longest = max(self.longest, perf_counter() - start)
            return result

        outputs = []
        for stretch in self.stretches:
            results = timed(stretch.forward)
            outputs.append(
                results if stretch.gradients else []
            )  # freed as in the model
        # The gradients live as long as in the model.
        gradients = [
            timed(each.backward, outputs.pop()) for each in self.stretches[::-1]
        ]
        timed(self.step)
        del gradients
        clock()  # waits for the GPU
        pairs = zip(marks[::2], marks[1::2], strict=True)
        if self.on_gpu:
            seconds = [start.elapsed_time(end) * 1e-3 for start, end in pairs]
        else:
            seconds = [end - start for start, end in pairs]
        count = len(self.stretches)
        forward, backward = seconds[:count], seconds[count:-1][::-1]
        return torch.tensor([[*forward, 0.0], [*backward, seconds[-1]]]).double()

    def _now(self) -> Any:
        """Return the moment by the host's clock, or an event of the GPU."""
        if not self.on_gpu:
            return clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
