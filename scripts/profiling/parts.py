"""Follow a model while it runs: which part of it works, in forward, backward and AdamW.

A part is what one module does itself, without its children: a projection, the kernel and
the reshapes of an attention layer, the gate of a feed-forward layer, the sums of a block.
"""

from bisect import bisect_right
from collections import defaultdict
from functools import partial
from operator import itemgetter, methodcaller
from typing import Any

import torch
from lab.timing import Run, clock, wall_sampler
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr
from torch.autograd.graph import Node
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils._pytree import tree_leaves

OUTSIDE = ""  # of all modules


def tensors_in(value: Any) -> list[Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def parts_of(module: nn.Module, name: str = "") -> dict[nn.Module, str]:
    """Name the part of each module; the layers of a list are one part."""
    parts = {module: name or "sums"}
    for key, child in module.named_children():
        if isinstance(module, nn.ModuleList):
            key = "*"
        parts |= parts_of(child, f"{name}.{key}".removeprefix("."))
    return parts


class Watch:
    """Calls `end` when a part stops, and `begin` when the next one starts."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parts = parts_of(model)
        self.runs = 0
        self._callers: list[str] = []
        # In the order of forward: the number of autograd's next node, and the part that makes it.
        self._makers: list[tuple[int, str]] = []

    def begin(self) -> None:
        """Do what a subclass does when `self.part` starts."""

    def end(self) -> None:
        """Do what a subclass does when `self.part` stops."""

    def watch(self, run: Run) -> None:
        """Run the model once: forward and, if the run has them, backward and AdamW."""
        hooks = [
            modules.register_module_forward_pre_hook(self._enter),
            # Activation checkpointing may end a module early, by an exception.
            modules.register_module_forward_hook(self._leave, always_call=True),
            optimizers.register_optimizer_step_pre_hook(partial(self._next, "AdamW")),
        ]
        self.part = OUTSIDE
        self.backward = False
        self._makers.clear()
        self.begin()
        run()
        self.end()
        self.runs += 1
        for hook in hooks:
            hook.remove()

    def _next(self, part: str, *_: Any) -> None:
        self.end()
        self.part = part
        if not self.backward:
            self._makers.append((_get_sequence_nr(), part))
        self.begin()

    def _enter(self, module: nn.Module, *_: Any) -> None:
        self._callers.append(self.part)
        self._next(self.parts.get(module, self.part))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._next(self._callers.pop())
        if module is self.model:
            self.backward = True
            self._follow(output)

    def _follow(self, output: Any) -> None:
        """Start a part of backward at the first node that this part made.

        Autograd runs the nodes from the newest to the oldest. Nodes that add to the .grad
        of a weight have the greatest number, and belong to no part.
        """
        nodes: set[Node] = set()
        waiting = [tensor.grad_fn for tensor in tensors_in(output)[:1]]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in nodes:
                nodes.add(node)
                waiting += [earlier for earlier, _ in node.next_functions]
        last = OUTSIDE
        for node in sorted(nodes, key=methodcaller("_sequence_nr"), reverse=True):
            number = node._sequence_nr()
            place = bisect_right(self._makers, number, key=itemgetter(0))
            part = self._makers[place - 1][1]
            if part != last:
                node.register_prehook(partial(self._next, part))
            last = part


class Stopwatch(Watch):
    """A sampler of the seconds of each part, and of its forward pass, in one run.

    On CUDA, they are the GPU's own.
    """

    def __init__(self, model: nn.Module, run: Run, on_gpu: bool) -> None:
        super().__init__(model)
        self.on_gpu = on_gpu
        self.marks: list[Any] = []
        self.sample = wall_sampler(partial(self.watch, run))

    def __call__(self) -> dict[str, float]:
        self.runs = 0
        self.marks.clear()
        self.sample()
        times: dict[str, float] = defaultdict(float)
        for names, start, end in self.marks:
            seconds = 1e-3 * start.elapsed_time(end) if self.on_gpu else end - start
            for name in names:
                times[name] += seconds / self.runs
        return times

    def begin(self) -> None:
        if self.on_gpu:
            torch.cuda._sleep(4_000_000)  # 2 ms, while the host launches the part
        self.start = self._now()

    def end(self) -> None:
        names = [self.part]
        if not self.backward:
            names.append(f"forward of {self.part}")
        self.marks.append((names, self.start, self._now()))

    def _now(self) -> Any:
        """Return the moment by the host's clock, or an event of the GPU."""
        if not self.on_gpu:
            return clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
