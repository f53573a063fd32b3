"""What each part must do at least: FLOPs, bytes that it moves, bytes that autograd keeps."""

import re
from collections import Counter
from typing import Any

from lab.timing import Run
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from .parts import Watch, tensors_in
from .roofline import Row

_TORCHS = ("aten", "prims", "profiler")  # namespaces
_PRODUCTS = re.compile(
    r"(^|_|b|add)m[mv]|dot|linear(?!ize)|matmul|conv|attention|encoder|lstm|gru|rnn"
)


def attention_flops(given: dict[str, Any]) -> int:
    """Return the FLOPs of a fused attention: two matmuls for each score that it needs.

    Backward has twice as many matmuls, and what a kernel computes again is not counted.
    """
    q, k, v = (given[name].shape for name in ("query", "key", "value"))
    pairs = q[-2] * k[-2]
    if given.get("is_causal"):
        pairs = sum(min(query + 1, k[-2]) for query in range(q[-2]))
    passes = 2 if "logsumexp" in given else 1
    return passes * 2 * q[:-2].numel() * pairs * (q[-1] + v[-1])


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Ledger(TorchDispatchMode, Watch):
    """Notes the work of each part in one run, in all passes together.

    A part reads what others made, and writes what outlives it.
    rows: in the order of the last operations of forward.
    unknown: operations that multiply matrices and have no formula.
    """

    def __init__(self, model: nn.Module, run: Run) -> None:
        super().__init__()
        Watch.__init__(self, model)
        self.rows: dict[str, Row] = {}
        self.unknown: set[str] = set()
        self._counts = Counter(self.parts.values())
        self._kept = {address(x) for x in (*model.parameters(), *model.buffers())}
        with saved_tensors_hooks(self._keep, lambda tensor: tensor), self:
            self.watch(run)

    def begin(self) -> None:
        self._read: dict[int, int] = {}  # bytes, by address
        self._written: dict[int, tuple[StorageWeakRef, int]] = {}

    def end(self) -> None:
        if self.part not in self.rows:  # it only calls others
            return
        moved = sum(self._read.values())
        for storage, size in self._written.values():
            if not storage.expired():
                moved += size
        self.rows[self.part].bytes += moved

    def _row(self) -> Row:
        return self.rows.setdefault(self.part, Row(self.part, self._counts[self.part]))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        row = self._row()
        if not self.backward:
            self.rows[self.part] = self.rows.pop(self.part)
        arguments = function._schema.arguments
        names = [each.name for each in arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        changed = [given.get(each.name) for each in arguments if each.is_write]
        self._move(tensors_in(given), tensors_in(changed), tensors_in(result))
        operation = function._overloadpacket
        if operation.__name__.startswith("_scaled_dot_product"):
            row.flops += attention_flops(given)
        elif operation in flop_registry:
            row.flops += flop_registry[operation](*args, **kwargs, out_val=result)
        elif function.namespace not in _TORCHS or _PRODUCTS.search(operation.__name__):
            self.unknown.add(str(operation))
        return result

    def _move(
        self, read: list[Tensor], changed: list[Tensor], results: list[Tensor]
    ) -> None:
        """Note what an operation reads and writes; views do neither."""
        old = {address(x) for x in read}
        written = [*changed, *(x for x in results if address(x) not in old)]
        if not written:
            return
        for x in read:
            if address(x) not in self._written:
                size = self._read.get(address(x), 0) + x.nbytes
                self._read[address(x)] = min(size, x.untyped_storage().nbytes())
        for x in written:
            self._written[address(x)] = (StorageWeakRef(x.untyped_storage()), x.nbytes)

    def _keep(self, tensor: Tensor) -> Tensor:
        """Note what autograd keeps, unless it is a weight or an earlier part keeps it."""
        if address(tensor) not in self._kept:
            self._kept.add(address(tensor))
            self._row().kept += tensor.untyped_storage().nbytes()
        return tensor.detach()  # an output as it is would keep the graph alive
