"""Follow a model while it runs: which part of it works, in forward, backward and AdamW.

A part is what one module does itself, without its children: a projection, the kernel and
the reshapes of an attention layer, the gate of a feed-forward layer, the sums of a block.
"""

import sys
import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from operator import itemgetter, methodcaller
from typing import Any

import torch
from lab.timing import Clock, Run, Sampler, wall_sampler
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.nn.modules import module as modules
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves

# Rows that are no module's, and the total.
ADAMW = "AdamW"
REST = "rest"
GPU_IDLE = "GPU idle"
TOTAL = "total"
OUTSIDE = "outside of the model"
NO_PART = "weights of no part"
_OWN = (ADAMW, REST, GPU_IDLE, TOTAL, OUTSIDE, NO_PART)


@dataclass(frozen=True)
class Part:
    """What is known of a part before it runs.

    parameters: numbers in its modules; what modules share counts in the first of them.
    may_be_sparse: an embedding whose gradient has all rows of its table.
    """

    name: str
    parameters: int = 0
    is_optimizer: bool = False
    may_be_sparse: bool = False


def parts_of(model: nn.Module, threads: bool = False) -> dict[nn.Module, str]:
    """Name the part of each module. The model itself is named by its class.

    threads: Python threads work in the model, so it is one part. Nobody knows which of its
        modules autograd's nodes belong to, because each thread counts its own.

    Layers of a list that are alike are one part: `layers.*`. In a list of unlike layers,
    `layers.2*` is the third layer and the later ones that are like it. A child that is
    called as a row of ours is marked: `rest (module)`.
    """
    name = type(model).__name__
    if threads:
        return dict.fromkeys(model.modules(), name)
    inside = _parts_inside(model, "")
    own = f"{name} (model)" if name in inside.values() else name
    return {model: own, **inside}


def _parts_inside(module: nn.Module, name: str) -> dict[nn.Module, str]:
    parts = {}
    children = dict(module.named_children())
    keys = {key: key for key in children}
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        keys = _shared_keys(children)
    for key, child in children.items():
        inside = f"{name}.{keys[key]}".removeprefix(".")
        parts[child] = f"{inside} (module)" if inside in _OWN else inside
        parts |= _parts_inside(child, inside)
    return parts


def _shared_keys(children: dict[str, nn.Module]) -> dict[str, str]:
    """Return the key that each layer of a list shares with those that are like it."""
    groups: dict[str, list[str]] = defaultdict(list)
    for key, child in children.items():
        groups[_structure(child)].append(key)
    shared = {}
    for keys in groups.values():
        name = f"{keys[0]}*" if len(keys) > 1 else keys[0]
        for key in keys:
            shared[key] = "*" if len(groups) == 1 else name
    return shared


def _structure(module: nn.Module) -> str:
    """Return what layers must have in common to be one part."""
    modules = []
    for name, each in module.named_modules():
        kind = f"{type(each).__module__}.{type(each).__qualname__}"
        modules.append(f"{name}: {kind}({each.extra_repr()}), {each.training}")
    for name, weight in module.named_parameters():
        shape = list(weight.shape)
        modules.append(f"{name}: {shape}, {weight.dtype}, {weight.requires_grad}")
    return "\n".join(modules)


def known_parts(
    parts: Mapping[nn.Module, str], optimizers: Iterable[str]
) -> dict[str, Part]:
    """Return what is known of the parts of a model, and of its optimizers, by name."""
    owners: dict[nn.Parameter, list[nn.Module]] = defaultdict(list)
    for module in parts:
        for weight in module.parameters(recurse=False):
            owners[weight].append(module)
    known = {name: Part(name, is_optimizer=True) for name in optimizers}
    for module, name in parts.items():
        weights = list(module.parameters(recurse=False))
        part = known.get(name, Part(name))
        known[name] = Part(
            name,
            part.parameters + sum(x.numel() for x in weights if owners[x][0] is module),
            # The gradient of a table that is also the output layer's weight is dense
            # anyway, and AdamW takes no other.
            may_be_sparse=isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            and not (module.sparse or optimizers)
            and all(owners[weight] == [module] for weight in weights),
        )
    return known


class Watch:
    """Follows runs of a model: which part works, and in which phase.

    phase: forward, backward or step.
    optimizers: the parts that are optimizers, which are named by their class.
    """

    def __init__(self, parts: Mapping[nn.Module, str]) -> None:
        self.parts = parts
        self.part = OUTSIDE
        self.phase = "forward"
        self.optimizers: set[str] = set()
        self.runs = 0
        self._callers: list[tuple[str, str]] = []  # with their phases
        # In the order of forward: the number of autograd's next node, and the part that makes it.
        self._makers: list[tuple[int, str]] = []

    def begin(self, is_called: bool) -> None:
        """Do what a subclass does when `self.part` starts, by the call of a module or not."""

    def end(self) -> None:
        """Do what a subclass does when `self.part` stops."""

    def forward_ended(self, output: Any) -> None:
        """Do what a subclass does between forward and backward."""

    def watch(self, run: Run) -> None:
        """Run the model once: forward and, if the run has them, backward and AdamW.

        Compiled parts of the model run in eager mode, because hooks break their graphs.
        """
        hooks = [
            modules.register_module_forward_pre_hook(self._enter),
            # Activation checkpointing may end a module early, by an exception.
            modules.register_module_forward_hook(self._leave, always_call=True),
            optimizers.register_optimizer_step_pre_hook(self._begin_step),
            optimizers.register_optimizer_step_post_hook(self._end_step),
        ]
        self.part, self.phase = OUTSIDE, "forward"
        self._thread = threading.get_ident()
        self._makers.clear()
        self._callers.clear()
        with torch.compiler.set_stance("force_eager"):
            self.begin(is_called=False)
            try:
                run()
            finally:
                self.end()
                for hook in hooks:
                    hook.remove()
        self.runs += 1

    def _next(self, part: str, phase: str, is_called: bool = False) -> None:
        self.end()
        self.part, self.phase = part, phase
        if phase == "forward":
            self._makers.append((_get_sequence_nr(), part))
        self.begin(is_called)

    def _begin_step(self, optimizer: Optimizer, *_: Any) -> None:
        name = type(optimizer).__name__
        self.optimizers.add(name)
        self._callers.append((self.part, self.phase))
        self._next(name, "step")

    def _end_step(self, *_: Any) -> None:
        self._next(*self._callers.pop())

    def _enter(self, module: nn.Module, *_: Any) -> None:
        if self._is_elsewhere():
            return
        part = self.parts.get(module, self.part)
        self._callers.append((self.part, self.phase))
        self._next(part, self.phase, is_called=module in self.parts)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_elsewhere():
            return
        part, _ = self._callers.pop()
        self._next(part, self.phase)
        # A model may call itself. Its output is None after an error.
        if not self._callers and self.phase == "forward" and output is not None:
            self.forward_ended(output)
            self.phase = "backward"
            self._follow(output)

    def _is_elsewhere(self) -> bool:
        """Say if a Python thread of the model works. Autograd's own run backward."""
        return self.phase == "forward" and threading.get_ident() != self._thread

    def _follow(self, output: Any) -> None:
        """Start a part of backward at the first node that this part made.

        Autograd runs the nodes from the newest to the oldest. Nodes that add to the .grad
        of a weight have the greatest number, and belong to no part.
        """
        nodes: set[Node] = set()
        waiting = [result_in(output).grad_fn]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in nodes:
                nodes.add(node)
                waiting += [earlier for earlier, _ in node.next_functions]
        last = OUTSIDE
        for node in sorted(nodes, key=methodcaller("_sequence_nr"), reverse=True):
            number = node._sequence_nr()
            place = bisect_right(self._makers, number, key=itemgetter(0))
            # Each thread counts from 0, so this one may not have made the node.
            part = self._makers[place - 1][1] if place else OUTSIDE
            if last == OUTSIDE:
                node.register_prehook(self._end_with_backward)
            if part != last:
                node.register_prehook(partial(self._next_in_backward, part))
            last = part

    def _next_in_backward(self, part: str, *_: Any) -> None:
        self._next(part, "backward")

    def _end_with_backward(self, *_: Any) -> None:
        """Stop the last part at the end of backward. Releasing the graph comes later."""
        end = partial(self._next_in_backward, OUTSIDE)
        Variable._execution_engine.queue_callback(end)


@contextmanager
def noticing_threads() -> Iterator[set[str]]:
    """Collect the names of Python threads that begin, or call a module, in the meantime."""
    names: set[str] = set()
    own, before = threading.current_thread(), threading.getprofile()

    def begin(*_: Any) -> None:
        sys.setprofile(None)
        thread = threading.current_thread()
        if type(thread).__module__ != "tqdm._monitor":  # which belongs to progress bars
            names.add(thread.name)

    def call(*_: Any) -> None:
        if threading.current_thread() is not own:
            names.add(threading.current_thread().name)

    hook = modules.register_module_forward_pre_hook(call)
    threading.setprofile(begin)
    try:
        yield names
    finally:
        threading.setprofile(before)
        hook.remove()


class Labels(Watch):
    """Names the parts in a trace as the table does."""

    def begin(self, is_called: bool) -> None:
        self._label = record_function(self.part)
        self._label.__enter__()

    def end(self) -> None:
        self._label.__exit__(None, None, None)


def result_in(output: Any) -> Tensor:
    """Return the tensor at which backward starts: the first that has a gradient.

    Without gradients, return the first tensor. The output of a model may be any object
    with tensors in its attributes.

    Raises:
        ValueError: there is no tensor.
    """
    tensors = list(results_in(output, set()))
    if not tensors:
        kind = type(output).__name__
        raise ValueError(f"the model must return a tensor, or several, got {kind}")
    return next((each for each in tensors if each.requires_grad), tensors[0])


def results_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors of an output, also those in the attributes of objects."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, nn.Module) or id(leaf) in seen:
            continue
        elif is_dataclass(leaf):
            seen.add(id(leaf))
            values = [getattr(leaf, field.name) for field in fields(leaf)]
            yield from results_in(values, seen)
        elif hasattr(leaf, "__dict__"):
            seen.add(id(leaf))
            yield from results_in(list(vars(leaf).values()), seen)


@dataclass(frozen=True)
class Mark:
    """The moments at which a part begins and ends to work in a phase."""

    part: str
    phase: str
    is_called: bool
    begin: Any
    end: Any


@dataclass
class PartTime:
    """Seconds of one part in one run, in all passes and in forward, and its calls."""

    total: float = 0.0
    forward: float = 0.0
    calls: float = 0.0


class Stopwatch(Watch):
    """Takes the time of each part.

    taken: the times of the parts, one dict for each sample.
    """

    def __init__(self, parts: Mapping[nn.Module, str], clock: Clock) -> None:
        super().__init__(parts)
        self.clock = clock
        self.taken: list[dict[str, PartTime]] = []
        self._marks: list[Mark] = []

    def sampler(self, run: Run) -> Sampler:
        """Return a sampler that appends to `taken`, and returns seconds of a whole run."""
        sample = wall_sampler(partial(self.watch, run), clock=self.clock)

        def take() -> float:
            self.runs = 0
            self._marks.clear()
            seconds = sample()
            self.taken.append(self._times())
            return seconds

        return take

    def _times(self) -> dict[str, PartTime]:
        times: dict[str, PartTime] = defaultdict(PartTime)
        for mark in self._marks:
            seconds = self.clock.seconds(mark.begin, mark.end) / self.runs
            times[mark.part].total += seconds
            if mark.phase == "forward":
                times[mark.part].forward += seconds
            times[mark.part].calls += mark.is_called
        for each in times.values():
            each.calls /= self.runs
        return times

    def begin(self, is_called: bool) -> None:
        self._is_called = is_called
        self._begin = self.clock.begin()

    def end(self) -> None:
        end = self.clock.end()
        mark = Mark(self.part, self.phase, self._is_called, self._begin, end)
        self._marks.append(mark)
