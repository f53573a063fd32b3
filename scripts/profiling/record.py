"""Cut one run of any model into stretches that can run by themselves.

A stretch is what one module calls in a row, without what its children do: a projection,
the kernel and the reshapes of an attention layer, the gate of a feed-forward layer, the
sums of a block. Each becomes a graph with the tensors and gradients that it had in the run.
"""

import operator
from collections.abc import Callable
from functools import partial
from types import MethodWrapperType
from typing import Any

import torch
from torch import Tensor, UntypedStorage, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

Storages = dict[int, UntypedStorage]  # by address


def tensors_in(value: Any) -> list[Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def first_tensor(output: Any) -> Tensor:
    """Return the first tensor of a model's output, which may be a tuple or a dict."""
    return tensors_in(output)[0]


def storages(tensors: list[Tensor]) -> Storages:
    found = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage for storage in found}


class Stretch:
    """Calls in a row by one module, as a graph with its tensors.

    saved: what autograd saves for its backward.
    gradients: of the results that have one.
    """

    def __init__(self, name: str, grad_enabled: bool) -> None:
        self.name = name
        self.grad_enabled = grad_enabled
        self.inputs: list[Tensor] = []
        self.results: dict[int, Tensor] = {}  # by id
        self.saved: Storages = {}
        self.gradients: dict[int, Tensor] = {}  # by the id of the result
        self._graph = fx.Graph()
        self._nodes: dict[int, fx.Node] = {}  # by the id of the tensor

    def append(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        if isinstance(function, MethodWrapperType):  # a property, such as x.mT
            function, args = getattr, (args[0], getattr(function, "__self__").__name__)  # noqa: B009
        args, kwargs = tree_map(self._node_of, (args, kwargs))
        self._name(result, self._graph.call_function(function, args, kwargs))

    def change(self, tensor: Tensor) -> None:
        """Note that a call changes a tensor in place: a replay changes a copy."""
        if id(tensor) not in self._nodes:
            node = self._node_of(tensor)
            self._nodes[id(tensor)] = self._graph.call_function(torch.clone, (node,))
        self.results[id(tensor)] = tensor

    def finish(self, used: set[int]) -> None:
        """Return from the graph what is used outside of it."""
        self.results = {key: each for key, each in self.results.items() if key in used}
        self._graph.output([self._nodes[key] for key in self.results])
        self.run: Callable[..., list[Tensor]] = fx.GraphModule({}, self._graph).forward

    def detach(self, gradients: dict[int, Tensor]) -> None:
        """Cut inputs and results from the model's autograd graph."""
        for key, result in self.results.items():
            if key in gradients and result.requires_grad and self.grad_enabled:
                self.gradients[key] = gradients[key]
            self.results[key] = result.detach()
        for index, each in enumerate(self.inputs):
            if not each.is_leaf:
                self.inputs[index] = each.detach().requires_grad_(each.requires_grad)

    def forward(self) -> list[Tensor]:
        if self.grad_enabled == torch.is_grad_enabled():  # a context takes time
            return self.run(*self.inputs)
        with torch.set_grad_enabled(self.grad_enabled):
            return self.run(*self.inputs)

    def backward(self, results: list[Tensor]) -> tuple[Tensor | None, ...]:
        outs, gradients = [], []
        for key, result in zip(self.results, results, strict=True):
            # A result that a later call changes may need no gradient yet.
            if key in self.gradients and result.requires_grad:
                outs.append(result)
                gradients.append(self.gradients[key])
        if not outs:
            return ()
        leaves = [each for each in self.inputs if each.requires_grad]
        return torch.autograd.grad(outs, leaves, gradients, allow_unused=True)

    def _node_of(self, value: Any) -> Any:
        """Return the node that makes a tensor, or a new input; other values stay."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._nodes:
            self.inputs.append(value)
            node = self._graph.placeholder(f"input_{len(self.inputs)}")
            self._nodes[id(value)] = node
        return self._nodes[id(value)]

    def _name(self, result: Any, node: fx.Node) -> None:
        """Note which node makes each tensor of a result."""
        if isinstance(result, Tensor):
            self.results[id(result)] = result
            self._nodes[id(result)] = node
        elif isinstance(result, tuple | list):
            for index, each in enumerate(result):
                item = self._graph.call_function(operator.getitem, (node, index))
                self._name(each, item)


class Recorder(TorchFunctionMode):
    """Notes the calls of torch's functions, and what autograd saves, by stretch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.stretches: list[Stretch] = []
        self.modules: list[str] = []  # that are running, the innermost last
        self.alive: list[Any] = []  # so that no id is used twice
        self.hooks = []
        for name, module in model.named_modules():
            enter = partial(self._enter, name)
            self.hooks.append(module.register_forward_pre_hook(enter, prepend=True))
            self.hooks.append(module.register_forward_hook(self._leave))

    def _enter(self, name: str, *_: Any) -> None:
        self.modules.append(name)
        self._begin()

    def _leave(self, *_: Any) -> None:
        self.modules.pop()
        if self.modules:
            self._begin()

    def _begin(self) -> None:
        stretch = Stretch(self.modules[-1], torch.is_grad_enabled())
        self.stretches.append(stretch)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        versions = [_version(each) for each in given]
        # Before the call, in which autograd saves tensors.
        if self.stretches[-1].grad_enabled != torch.is_grad_enabled():
            self._begin()
        result = function(*args, **kwargs)
        now = map(_version, given)
        changed = [
            each
            for each, old, new in zip(given, versions, now, strict=True)
            if old != new
        ]
        if changed or tensors_in(result):
            self.alive.append((args, kwargs, result))
            for each in changed:
                self.stretches[-1].change(each)
            self.stretches[-1].append(function, args, kwargs, result)
        return result

    def pack(self, tensor: Tensor) -> Tensor:
        self.stretches[-1].saved.update(storages([tensor]))
        return tensor.detach()  # an output as it is would keep the graph alive


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def record(model: nn.Module, x: Tensor) -> list[Stretch]:
    """Run the model, and return its stretches in their order."""
    recorder = Recorder(model)
    try:
        with saved_tensors_hooks(recorder.pack, lambda tensor: tensor), recorder:
            output = model(x)
    finally:
        for hook in recorder.hooks:
            hook.remove()
    out = first_tensor(output)
    used = set(map(id, tensors_in(output)))
    for stretch in recorder.stretches:
        used |= set(map(id, stretch.inputs))
    for stretch in recorder.stretches:
        stretch.finish(used)
    stretches = [each for each in recorder.stretches if each.results]
    gradients: dict[int, Tensor] = {}
    if out.requires_grad:
        results = {}
        for stretch in stretches:
            results.update(stretch.results)
        results = {key: each for key, each in results.items() if each.requires_grad}
        found = torch.autograd.grad(
            out,
            list(results.values()),
            torch.randn_like(out),
            allow_unused=True,
            materialize_grads=True,
        )
        gradients = dict(zip(results, found, strict=True))
    for stretch in stretches:
        stretch.detach(gradients)
    return stretches


def whole_stretch(model: nn.Module, x: Tensor) -> Stretch:
    """Return the model as one stretch, for a model that cannot be cut."""
    stretch = Stretch("", torch.is_grad_enabled())

    def pack(tensor: Tensor) -> Tensor:
        stretch.saved.update(storages([tensor]))
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = first_tensor(model(x))
    stretch.inputs = [x, *model.parameters()]
    stretch.results = {id(out): out.detach()}
    if out.requires_grad:
        stretch.gradients = {id(out): torch.randn_like(out)}
    stretch.run = lambda *_: [first_tensor(model(x))]
    return stretch
