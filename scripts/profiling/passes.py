"""Time the stretches of a model in its order, so that weights are as cold as in the model."""

from dataclasses import dataclass

import torch
from lab.timing import Run, clock
from torch import Tensor

from .record import Stretch


@dataclass(frozen=True)
class Pass:
    """Seconds of each stretch, and of the optimizer's step."""

    forward: list[float]
    backward: list[float]
    step: float = 0.0

    @property
    def total(self) -> list[float]:
        return [a + b for a, b in zip(self.forward, self.backward, strict=True)]


class InOrder:
    """A sampler: forward of all stretches, backward of all in reverse, and the step.

    `taken` has the seconds of all samples. A sample is the mean of some passes.
    """

    def __init__(
        self, stretches: list[Stretch], step: Run | None, device: torch.device
    ) -> None:
        self.stretches = stretches
        self.step = step
        self.on_gpu = device.type == "cuda"
        self.taken: list[Pass] = []
        for _ in range(2):
            self.one_pass()  # allocates, and compiles what is to be compiled
        self.calls = 1
        if not self.on_gpu:
            start = clock()
            self.one_pass()
            self.calls = 1 + int(0.01 / max(clock() - start, 1e-6))

    def __call__(self) -> float:
        self.one_pass()  # leaves the caches as a pass does
        passes = [self.one_pass() for _ in range(self.calls)]
        mean = Pass(
            _means([each.forward for each in passes]),
            _means([each.backward for each in passes]),
            sum(each.step for each in passes) / self.calls,
        )
        self.taken.append(mean)
        return sum(mean.total) + mean.step

    def one_pass(self) -> Pass:
        marks = _Events() if self.on_gpu else _Clock()
        marks.start()
        outputs = []
        for stretch in self.stretches:
            outputs.append(stretch.forward())
            marks.mark()
        gradients: list[tuple[Tensor | None, ...]] = []  # as long as in the whole
        for index in reversed(range(len(self.stretches))):
            stretch = self.stretches[index]
            if stretch.gradients:
                gradients.append(stretch.backward(outputs[index]))
            outputs[index] = []
            marks.mark()
        if self.step is not None:
            self.step()
            marks.mark()
        seconds = marks.seconds()
        count = len(self.stretches)
        backward = seconds[count : 2 * count][::-1]
        return Pass(seconds[:count], backward, sum(seconds[2 * count :]))


class _Clock:
    """Moments by the clock of the host."""

    def start(self) -> None:
        self.moments = [clock()]

    def mark(self) -> None:
        self.moments.append(clock())

    def seconds(self) -> list[float]:
        pairs = zip(self.moments, self.moments[1:], strict=False)
        return [after - before for before, after in pairs]


class _Events:
    """Moments of the GPU, behind a kernel that sleeps until all is launched."""

    def start(self) -> None:
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)  # 50 ms at 2 GHz
        self.moments: list[torch.cuda.Event] = []
        self.mark()

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.moments.append(event)

    def seconds(self) -> list[float]:
        torch.cuda.synchronize()
        pairs = zip(self.moments, self.moments[1:], strict=False)
        return [before.elapsed_time(after) * 1e-3 for before, after in pairs]


def _means(samples: list[list[float]]) -> list[float]:
    return [sum(each) / len(each) for each in zip(*samples, strict=True)]
