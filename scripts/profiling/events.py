"""Record a run: which part calls which operation, and what that does to which memory."""

import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from lab.timing import Clock, Run
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)

from .operations import Flops, facts_of, flops_of, tensors_in
from .parts import Watch, results_in

_SPARSE_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_SPARSE_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)
_COMPOUND = torch._C.DispatchKey.CompositeImplicitAutograd
NO_FLOPS = Flops(0, torch.float32)


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in a storage.

    storage: its number, which no other storage of the run has.
    stored: bytes of the storage.
    itemsize: bytes of a number.
    offset, axes: where it begins, and the size and stride of each axis, in numbers.
    touched: how many numbers are read or written, somewhere in it; None for all.
    """

    storage: int
    stored: int
    itemsize: int
    offset: int
    axes: tuple[tuple[int, int], ...]
    touched: int | None = None


@dataclass(frozen=True)
class Event:
    """A call of an operation, such as aten.mm.

    seconds: with those of the call itself.
    flops: None if they are unknown.
    read, written: nothing of views.
    made: results that are no views.
    """

    operation: str
    seconds: float = 0.0
    flops: Flops | None = NO_FLOPS
    read: tuple[Place, ...] = ()
    written: tuple[Place, ...] = ()
    made: tuple[Place, ...] = ()

    @property
    def name(self) -> str:
        return self.operation.rpartition(".")[2]


@dataclass(frozen=True)
class Stay:
    """What a part does until another one works.

    phase: forward, backward or step.
    is_called: whether the call of a module begins it.
    left: storages that it wrote, and that live at its end.
    """

    part: str
    phase: str
    is_called: bool = False
    events: tuple[Event, ...] = ()
    left: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Held:
    """A storage that lives at the end of forward, and a part that made or saved it."""

    part: str
    storage: int
    nbytes: int


@dataclass
class Record:
    """One run.

    call_s: seconds of an operation on one number.
    held: in the order in which it was saved, then made; None if the model forbids to see
        what is saved.
    optimizers: as a Watch has them.
    """

    call_s: float = 0.0
    stays: list[Stay] = field(default_factory=list)
    held: list[Held] | None = field(default_factory=list)
    optimizers: set[str] = field(default_factory=set)


class Recorder(TorchDispatchMode, Watch):
    """Appends what a run does to `record`."""

    supports_higher_order_operators = True

    def __init__(
        self,
        parts: Mapping[nn.Module, str],
        inputs: object,
        device: torch.device,
        clock: Clock,
    ) -> None:
        super().__init__()
        Watch.__init__(self, parts)
        self.clock = clock
        self.record = Record(
            self._seconds_of_a_call(device), optimizers=self.optimizers
        )
        self._is_called = False
        self._events: list[Event] = []
        # A weak reference keeps the number of a storage from being used again.
        self._storages: dict[int, StorageWeakRef] = {}
        self._saved: list[tuple[Held, weakref.ref[Tensor]]] = []
        self._is_paused = False
        # Autograd may keep what the run made or was given. The rest is the model's.
        self._own = {place.storage for place in self._places(inputs)}

    def begin(self, is_called: bool) -> None:
        self._is_called = is_called
        self._events = []

    def end(self) -> None:
        written = {place.storage for event in self._events for place in event.written}
        left = {each for each in written if not self._storages[each].expired()}
        stay = Stay(
            self.part,
            self.phase,
            self._is_called,
            tuple(self._events),
            frozenset(left),
        )
        self.record.stays.append(stay)

    def forward_ended(self, output: Any) -> None:
        """Note what lives at the end of forward, besides the output.

        Some of it is hidden from `save`: what selective checkpointing stores, or the user's
        own saved_tensors_hooks. Some of what `save` saw is gone, with its graph.
        """
        if self.record.held is None or not torch.is_grad_enabled():
            return
        results = list(results_in(output, set()))
        self._is_paused = True
        outputs = {place.storage for place in self._places(results)}
        self._is_paused = False
        self.record.held += [held for held, kept in self._saved if kept() is not None]
        for stay in self.record.stays:
            for place in [place for event in stay.events for place in event.made]:
                is_alive = not self._storages[place.storage].expired()
                if is_alive and place.storage not in outputs:
                    held = Held(stay.part, place.storage, place.stored)
                    self.record.held.append(held)

    def save(self, tensor: Tensor) -> Tensor:
        """Note what autograd keeps, unless the model holds it.

        In backward, activation checkpointing keeps what it computes again.
        """
        self._is_paused = True
        kept = tensor.detach()  # an output as it is would keep the graph alive
        if self.phase == "forward":
            for place in self._places(tensor):
                if place.storage in self._own:
                    held = Held(self.part, place.storage, place.stored)
                    self._saved.append((held, weakref.ref(kept)))
        self._is_paused = False
        return kept

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return function(*args, **kwargs)
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # a wrapper calls operations on what it wraps
        if isinstance(function, HigherOrderOperator):  # such as flex_attention
            result, seconds = self._timed(function, args, kwargs)
            given = {str(place): value for place, value in enumerate(args)} | kwargs
            self._note(f"higher_order.{function}", seconds, given, result)
            return result
        # In inference mode, compound operations arrive as one. Others may have a
        # decomposition in Python, for compilers, which is not what runs.
        compound = torch._C._dispatch_has_kernel_for_dispatch_key(
            function.name(), _COMPOUND.name
        )
        # Nested tensors have kernels of their own.
        if compound and not any(each.is_nested for each in tensors_in((args, kwargs))):
            with self:
                return function._op_dk(_COMPOUND, *args, **kwargs)
        result, seconds = self._timed(function, args, kwargs)
        arguments = function._schema.arguments
        names = [each.name for each in arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        written = [each.name for each in arguments if each.is_write]
        unread = [each.name for each in arguments if each.is_out]
        if given.get("grad_scale") is None:  # an optimizer may divide gradients by it
            written = [name for name in written if name != "grads"]
        operation = str(function._overloadpacket)
        self._note(operation, seconds, given, result, written, unread)
        return result

    def _timed(
        self, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Any, float]:
        """Call an operation; return its result, and the seconds that it took."""
        start = self.clock.now()
        result = function(*args, **kwargs)
        return result, self.clock.now() - start

    def _seconds_of_a_call(self, device: torch.device) -> float:
        """Return the time of an operation on one number."""
        one = torch.ones(1, device=device)
        multiply = torch.ops.aten.mul.Tensor
        return median([self._timed(multiply, (one, one), {})[1] for _ in range(100)])

    def _note(
        self,
        operation: str,
        seconds: float,
        given: dict[str, Any],
        result: Any,
        changed: list[str] | None = None,
        unread: list[str] | None = None,
    ) -> None:
        """Append an event.

        changed, unread: the names of the arguments that it writes, and does not read.
        """
        if operation == "aten.detach":  # autograd's own
            return
        facts = facts_of(operation)
        changed, unread = changed or [], unread or []
        if facts.overwrites:
            unread = unread + changed
        places = {name: self._places(value) for name, value in given.items()}
        for name in facts.touches.keys() & places.keys():
            if places[name]:
                numbers = facts.touches[name](given, result)
                places[name] = [replace(x, touched=numbers) for x in places[name]]
        old = {place.storage for found in places.values() for place in found}
        results = self._places(result)
        new = [place for place in results if place.storage not in old]
        made = results if operation == "aten.lift_fresh" else new
        self._own |= {place.storage for place in made}
        written = [place for name in changed for place in places.get(name, [])]
        if not operation.startswith(("aten.empty", "aten.new_empty")):
            written += new
        read = [x for name in places if name not in unread for x in places[name]]
        event = Event(
            operation,
            seconds,
            flops_of(operation, given, result),
            # What writes nothing is a view.
            tuple(x for x in read if x.touched != 0) if written else (),
            tuple(written),
            tuple(made),
        )
        self._events.append(event)

    def _places(self, value: Any) -> list[Place]:
        """Return where the tensors of a value lie, and hold the numbers of their storages."""
        places = []
        for tensor in stored_in(value):
            place = place_of(tensor)
            places.append(place)
            if place.storage not in self._storages:
                reference = StorageWeakRef(tensor.untyped_storage())
                self._storages[place.storage] = reference
        return places


def record(
    parts: Mapping[nn.Module, str],
    inputs: object,
    device: torch.device,
    run: Run,
    clock: Clock,
) -> Record:
    """Record a run. Models with torch.func.grad forbid the hooks that see what is saved."""
    for sees_saved in (True, False):
        recorder = Recorder(parts, inputs, device, clock)
        hooks = saved_tensors_hooks(recorder.save, lambda tensor: tensor)
        if not sees_saved:
            recorder.record.held = None
        try:
            with hooks if sees_saved else nullcontext(), recorder:
                recorder.watch(run)
        except RuntimeError as error:
            if not sees_saved or "saved tensor hooks" not in str(error):
                raise
        else:
            break
    return recorder.record


def stored_in(value: Any) -> list[Tensor]:
    """Return the tensors that have a storage, also inside of those that have none.

    A sparse tensor and a wrapper (torchao's int8 weights, DTensor) consist of others.
    """
    found = []
    for each in tensors_in(value):
        if is_traceable_wrapper_subclass(each):
            names, _ = each.__tensor_flatten__()
            found += stored_in([getattr(each, name) for name in names])
        elif each.layout == torch.sparse_coo:
            found += [each._indices(), each._values()]
        elif each.layout in _SPARSE_ROWS:
            found += [each.crow_indices(), each.col_indices(), each.values()]
        elif each.layout in _SPARSE_COLUMNS:
            found += [each.ccol_indices(), each.row_indices(), each.values()]
        elif each.layout == torch.strided:
            found.append(each.values() if each.is_nested else each)
    return found


def place_of(tensor: Tensor) -> Place:
    """Return where a tensor lies. An expanded axis repeats the same numbers."""
    storage = tensor.untyped_storage()
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    return Place(
        storage._cdata,
        storage.nbytes(),
        tensor.element_size(),
        int(tensor.storage_offset()),
        tuple((size, stride) for size, stride in axes if stride or not size),
    )


def nbytes(value: Any) -> int:
    return sum(tensor.nbytes for tensor in stored_in(value))
