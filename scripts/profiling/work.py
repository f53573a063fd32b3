"""What each part does: operations, FLOPs, bytes that it moves, bytes that autograd keeps."""

import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
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

from .flops import flops_of, tensors_in
from .parts import OUTSIDE, Watch, may_be_fused, never_compiled, results_in
from .roofline import Row, name_of

_SPARSE_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_SPARSE_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)

# Arguments of which a few numbers are read or changed: here, one for each number of the
# largest other tensor.
_NUMBERS = {
    "embedding": "weight",
    "gather": "self",
    "index": "self",
    "_unsafe_index": "self",
    "index_select": "self",
    "take": "self",
    "index_add_": "self",
    "index_copy_": "self",
    "index_put_": "self",
    "_index_put_impl_": "self",
    "index_reduce_": "self",
    "put_": "self",
    "scatter_": "self",
    "scatter_add_": "self",
    "scatter_reduce_": "self",
}
# A row for each position.
_ROWS = {
    "_embedding_bag": ("weight", "indices"),
    "_embedding_bag_forward_only": ("weight", "indices"),
    "_embedding_bag_per_sample_weights_backward": ("weight", "indices"),
    "embedding_renorm_": ("self", "indices"),
    "index_fill_": ("self", "index"),
}
# What a binary search meets.
_SORTED = {"bucketize": "boundaries", "searchsorted": "sorted_sequence"}
# Neighbors of each number of the result.
_NEIGHBORS = {
    "upsample_nearest1d": 1,
    "upsample_nearest2d": 1,
    "upsample_nearest3d": 1,
    "_upsample_nearest_exact1d": 1,
    "_upsample_nearest_exact2d": 1,
    "_upsample_nearest_exact3d": 1,
    "upsample_linear1d": 2,
    "upsample_bilinear2d": 4,
    "upsample_trilinear3d": 8,
    "upsample_bicubic2d": 16,
    "grid_sampler_2d": 4,
    "grid_sampler_3d": 8,
}
_BILINEAR, _NEAREST, _BICUBIC = range(3)  # the modes of grid_sampler
THREADS = "modules in Python threads"
COMPOUND = torch._C.DispatchKey.CompositeImplicitAutograd
_DRAWING = ("bernoulli_", "exponential_", "normal_", "random_", "uniform_")
# They do not read what they change.
_OVERWRITING = ("copy_", "fill_", "zero_", *_DRAWING)


@dataclass
class Call:
    """One call of an operation.

    given: its arguments by name.
    written: the names of those that it changes.
    overwritten: the names of those that it does not read.
    """

    operation: str
    given: dict[str, Any]
    written: list[str]
    overwritten: list[str]
    result: Any
    seconds: float

    @property
    def name(self) -> str:
        return self.operation.rpartition(".")[2]

    @property
    def read(self) -> list[Tensor]:
        """Return the tensors that the operation reads."""
        return stored_in(
            [self.given[name] for name in self.given if name not in self.overwritten]
        )

    @property
    def changed(self) -> list[Tensor]:
        """Return the arguments that the operation changes."""
        return stored_in([self.given.get(name) for name in self.written])

    @property
    def new(self) -> list[Tensor]:
        """Return the results that are no views of arguments."""
        old = {storage_of(each) for each in stored_in(self.given)}
        return [each for each in stored_in(self.result) if storage_of(each) not in old]

    def nbytes(self, tensor: Tensor) -> int:
        """Return how many bytes of an argument or a result are read or written."""
        size = distinct_bytes(tensor)
        numbers = self._numbers_of_table(tensor)
        return size if numbers is None else min(size, numbers * tensor.element_size())

    def _numbers_of_table(self, tensor: Tensor) -> int | None:
        """Return how many numbers of a table are read or changed; None of another tensor."""
        given, name = self.given, self.name
        if name in _ROWS and tensor is given.get(_ROWS[name][0]):
            positions = given[_ROWS[name][1]].numel()
            return positions * tensor.numel() // tensor.shape[given.get("dim", 0)]
        if name in _SORTED and tensor is given.get(_SORTED[name]):
            return self.result.numel() * tensor.shape[-1].bit_length()
        if name in _NEIGHBORS and tensor is given.get("input", given.get("self")):
            mode = given.get("interpolation_mode", _BILINEAR)
            sizes = {_NEAREST: 1, _BICUBIC: 16, _BILINEAR: _NEIGHBORS[name]}
            return self.result.numel() * sizes[mode]
        if name in _NUMBERS and tensor is given.get(_NUMBERS[name]):
            others = stored_in([given, self.result])
            return max(each.numel() for each in others if each is not tensor)
        return None


@dataclass
class Holder:
    """A part that holds a storage, until `is_gone()`."""

    part: str
    is_gone: Callable[[], bool]
    nbytes: int


class Ledger(TorchDispatchMode, Watch):
    """Notes the work of each part in one run, in all passes together.

    A part reads what others made, and writes what outlives it.
    rows: in the order of the last operations of forward.
    read: bytes of all storages that existed before the run, and are read in it.
    sees_kept: False for models with torch.func.grad, which forbids the hooks that see
        what autograd keeps.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        model: nn.Module,
        inputs: object,
        device: torch.device,
        clock: Clock,
        sees_kept: bool = True,
    ) -> None:
        super().__init__()
        Watch.__init__(self, model)
        self.clock = clock
        self.sees_kept = sees_kept
        self.rows: dict[str, Row] = {}
        self.read: dict[int, int] = {}
        self._call_s = self._seconds_of_a_call(device)
        self._made: set[int] = set()  # storages
        self._inputs = {storage_of(each) for each in stored_in(inputs)}
        # Parts that keep, or have made, a storage in forward.
        self._keepers: dict[int, list[Holder]] = defaultdict(list)
        self._makers_of: dict[int, Holder] = {}
        self._part_read: dict[int, int] = {}  # bytes, by storage
        self._part_written: dict[int, tuple[StorageWeakRef, int]] = {}

    def note(self, run: Run) -> None:
        """Run the model once, and note what it does."""
        hooks = saved_tensors_hooks(self._keep, lambda tensor: tensor)
        with hooks if self.sees_kept else nullcontext(), self:
            self.watch(run)
        for name in self.in_threads:
            row = self.rows.setdefault(name, Row(name))
            row.unknown.append(THREADS)
            row.kept_bytes = None
        for name, optimizer in self.optimizers.items():
            if name in self.rows:
                self.rows[name].is_optimizer = True
                self.rows[name].may_be_fused = may_be_fused(optimizer)
        for module in never_compiled(self.model):
            name = self.parts.get(module, OUTSIDE)
            if name in self.rows:
                self.rows[name].compiles = False
        counted: set[Tensor] = set()
        for module, name in self.parts.items():
            own = set(module.parameters(recurse=False)) - counted
            if name in self.rows:
                self.rows[name].parameters += sum(each.numel() for each in own)
            counted |= own

    def begin(self) -> None:
        self._part_read = {}
        self._part_written = {}

    def end(self) -> None:
        if self.part not in self.rows:
            return
        moved = sum(self._part_read.values())
        for storage, size in self._part_written.values():
            if not storage.expired():
                moved += size
        self.rows[self.part].moved_bytes += moved

    def called(self) -> None:
        self._row().calls += 1

    def _row(self) -> Row:
        kept_bytes = 0 if self.sees_kept else None
        return self.rows.setdefault(self.part, Row(self.part, kept_bytes=kept_bytes))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # a wrapper calls operations on what it wraps
        if isinstance(function, HigherOrderOperator):  # such as flex_attention
            result, seconds = self._timed(function, args, kwargs)
            given = {str(place): value for place, value in enumerate(args)} | kwargs
            operation = f"higher_order.{function}"
            self._note(Call(operation, given, [], [], result, seconds))
            return result
        # In inference mode, compound operations arrive as one. Others may have a
        # decomposition in Python, for compilers, which is not what runs.
        compound = torch._C._dispatch_has_kernel_for_dispatch_key(
            function.name(), COMPOUND.name
        )
        # Nested tensors have kernels of their own.
        if compound and not any(each.is_nested for each in tensors_in((args, kwargs))):
            with self:
                return function._op_dk(COMPOUND, *args, **kwargs)
        result, seconds = self._timed(function, args, kwargs)
        operation = str(function._overloadpacket)
        name = operation.rpartition(".")[2]
        arguments = function._schema.arguments
        names = [each.name for each in arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        written = [each.name for each in arguments if each.is_write]
        overwritten = [each.name for each in arguments if each.is_out]
        if operation.endswith(_OVERWRITING):
            overwritten += written
        if name.startswith("new_") or name.endswith("_like"):
            overwritten.append("self")  # they need its shape alone
        if given.get("grad_scale") is None:  # an optimizer may divide gradients by it
            written = [name for name in written if name != "grads"]
        call = Call(operation, given, written, overwritten, result, seconds)
        self._note(call)
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

    def _note(self, call: Call) -> None:
        if call.name == "detach":  # autograd's own, and ours in _keep
            return
        row = self._row()
        if not self.backward:  # it moves to the end
            self.rows[self.part] = self.rows.pop(self.part)
        operation = row.operation(call.name)
        operation.calls += 1
        operation.backward_calls += self.backward and self.part not in self.optimizers
        operation.total_s += max(0.0, call.seconds - self._call_s)
        operation.moved_bytes += self._move(call)
        flops = flops_of(call.operation, call.given, call.result)
        if any(map(is_sparse, tensors_in(call.given))):
            row.compiles = False
        if flops is None:
            if call.operation not in row.unknown:
                row.unknown.append(call.operation)
        elif flops.count:
            dtype = name_of(flops.dtype)
            row.flops[dtype] = row.flops.get(dtype, 0) + flops.count

    def _move(self, call: Call) -> int:
        """Note what an operation reads and writes, and return its bytes. Views do neither."""
        new = call.new
        made = stored_in(call.result) if call.name == "lift_fresh" else new
        self._made.update(storage_of(x) for x in made)
        if not self.backward:
            for x in made:
                self._makers_of[storage_of(x)] = self._holder(x)
        written = call.changed
        if not call.name.startswith(("empty", "new_empty")):  # they write nothing
            written += new
        if not written:
            return 0
        moved = 0
        for x in call.read:
            storage, size = storage_of(x), call.nbytes(x)
            moved += size
            if storage not in self._made:
                self.read[storage] = stored_bytes(x)
            if storage not in self._part_written:
                size += self._part_read.get(storage, 0)
                self._part_read[storage] = min(size, stored_bytes(x))
        for x in written:
            reference = StorageWeakRef(x.untyped_storage())
            size = call.nbytes(x)
            moved += size
            self._part_written[storage_of(x)] = (reference, size)
        return moved

    def _holder(self, tensor: Tensor) -> Holder:
        storage = tensor.untyped_storage()
        return Holder(self.part, StorageWeakRef(storage).expired, storage.nbytes())

    def _keep(self, tensor: Tensor) -> Tensor:
        """Note what autograd keeps, unless the model holds it.

        In backward, activation checkpointing keeps what it computes again.
        """
        kept = tensor.detach()  # an output as it is would keep the graph alive
        reference = weakref.ref(kept)  # goes with the graph

        def is_gone() -> bool:
            return reference() is None

        for each in [] if self.backward else stored_in(tensor):
            storage = storage_of(each)
            if storage in self._made or storage in self._inputs:
                holder = Holder(self.part, is_gone, stored_bytes(each))
                self._keepers[storage].append(holder)
        return kept

    def forward_ended(self, output: Any) -> None:
        """Count what lives at the end of forward, besides the output.

        Some of it is hidden from `_keep`: what selective checkpointing stores, or the
        user's own saved_tensors_hooks. Some of what `_keep` saw is gone, with its graph.
        """
        if not (torch.is_grad_enabled() and self.sees_kept):
            return
        outputs = {storage_of(x) for x in stored_in(list(results_in(output, set())))}
        for storage in {**self._makers_of, **self._keepers}:
            holders = list(self._keepers[storage])
            if storage in self._makers_of and storage not in outputs:
                holders.append(self._makers_of[storage])
            alive = [each for each in holders if not each.is_gone()]
            row = self.rows.get(alive[0].part) if alive else None
            if row is not None:
                row.kept_bytes = (row.kept_bytes or 0) + alive[0].nbytes


def ledgers_of(
    model: nn.Module,
    inputs: object,
    device: torch.device,
    run: Run,
    clock: Clock,
    count: int,
) -> list[Ledger]:
    """Note several runs."""
    ledgers: list[Ledger] = []
    sees_kept = True
    while len(ledgers) < count:
        ledger = Ledger(model, inputs, device, clock, sees_kept)
        try:
            ledger.note(run)
        except RuntimeError as error:
            if not sees_kept or "saved tensor hooks" not in str(error):
                raise
            sees_kept = False
        else:
            ledgers.append(ledger)
    return ledgers


def rows_of(ledgers: list[Ledger]) -> list[Row]:
    """Return the rows of the first run that has them, with the median time of operations.

    Outside of the model, only copies of its inputs may be left out.
    """
    rows: dict[str, Row] = {}
    for ledger in ledgers:
        rows = ledger.rows | rows
    for row in rows.values():
        for operation in row.operations:
            found = [each.rows[row.name] for each in ledgers if row.name in each.rows]
            times = [
                each.total_s
                for again in found
                for each in again.operations
                if each.name == operation.name
            ]
            operation.total_s = median(times)
        row.operations.sort(key=lambda each: -each.total_s)
    if OUTSIDE in rows and copies_only(rows[OUTSIDE]):
        rows.pop(OUTSIDE)
    return list(rows.values())


def copies_only(row: Row) -> bool:
    working = {each.name for each in row.operations if each.moved_bytes}
    return working <= {"clone"} and not row.unknown


def runs_that_differ(ledgers: list[Ledger]) -> list[str]:
    """Return the parts whose calls or operations are not the same in each run."""

    def work(ledger: Ledger, part: str) -> object:
        row = ledger.rows.get(part, Row(part))
        return row.calls, sorted((each.name, each.calls) for each in row.operations)

    parts = dict.fromkeys(part for ledger in ledgers for part in ledger.rows)
    first, *others = ledgers
    return [
        part
        for part in parts
        if any(work(other, part) != work(first, part) for other in others)
    ]


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


def is_sparse(tensor: Tensor) -> bool:
    return tensor.layout in (torch.sparse_coo, *_SPARSE_ROWS, *_SPARSE_COLUMNS)


def storage_of(tensor: Tensor) -> int:
    """Return what is equal for tensors that share their storage."""
    return tensor.untyped_storage()._cdata


def stored_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def distinct_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor in memory. An expanded axis repeats the same ones."""
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    sizes = [size for size, stride in axes if stride]
    return min(tensor.element_size() * prod(sizes), stored_bytes(tensor))


def nbytes(value: Any) -> int:
    return sum(tensor.nbytes for tensor in stored_in(value))
