"""Cut one run of any model into stretches that can run by themselves.

A stretch is what one module calls in a row, without what its children do: a projection,
the kernel and the reshapes of an attention layer, the gate of a feed-forward layer, the
sums of a block. Each becomes a graph with the tensors and gradients that it had in the run.
"""

import operator
from typing import Any

import torch
from torch import Tensor, UntypedStorage, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as global_hooks
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

    results: by their id, those that are used outside of the stretch.
    saved: what autograd saves for its backward.
    gradients: of the results that have one, by their id.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.grad_enabled = torch.is_grad_enabled()
        self.inputs: list[Tensor] = []
        self.results: dict[int, Tensor] = {}
        self.changed = 0  # bytes of inputs that calls change in place
        self.saved: Storages = {}
        self.gradients: dict[int, Tensor] = {}
        self._graph = fx.Graph()
        self._nodes: dict[int, fx.Node] = {}  # by the id of the tensor

    def append(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        if function.__name__ == "__get__":  # a property, such as x.mT
            function, args = getattr, (args[0], function.__self__.__name__)
        args, kwargs = tree_map(self._node_of, (args, kwargs))
        self._name(result, self._graph.call_function(function, args, kwargs))

    def change(self, tensor: Tensor) -> None:
        """Note that a call changes a tensor in place: a replay changes a copy."""
        node = self._node_of(tensor)
        if node.op == "placeholder":
            self._nodes[id(tensor)] = self._graph.call_function(torch.clone, (node,))
            self.changed += tensor.nbytes
        self.results[id(tensor)] = tensor

    def pack(self, tensor: Tensor) -> Tensor:
        """Note what autograd saves."""
        self.saved.update(storages([tensor]))
        return tensor.detach()  # an output as it is would keep the graph alive

    def finish(self, gradients: dict[int, Tensor]) -> None:
        """Cut inputs and results from the graphs of autograd and of other stretches."""
        self._graph.output([self._nodes[key] for key in self.results])
        self._run = fx.GraphModule({}, self._graph).forward
        if self.grad_enabled != torch.is_grad_enabled():
            self._run = torch.set_grad_enabled(self.grad_enabled)(self._run)
        for key, result in self.results.items():
            if key in gradients:
                self.gradients[key] = gradients[key]
            self.results[key] = result.detach()
        for index, each in enumerate(self.inputs):
            if not each.is_leaf:
                self.inputs[index] = each.detach().requires_grad_(each.requires_grad)

    def forward(self) -> list[Tensor]:
        return self._run(*self.inputs)

    def backward(self, results: list[Tensor]) -> tuple[Tensor | None, ...]:
        outs = dict(zip(self.results, results, strict=False))
        # A result that a later call changes may need no gradient yet.
        keys = [key for key in self.gradients if outs[key].requires_grad]
        if not keys:
            return ()
        return torch.autograd.grad(
            [outs[key] for key in keys],
            [each for each in self.inputs if each.requires_grad],
            [self.gradients[key] for key in keys],
            allow_unused=True,
        )

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
    """Notes the calls of torch's functions, by stretch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.stretches: list[Stretch] = []
        self.names = {module: name for name, module in model.named_modules()}
        self.modules: list[str] = []  # that are running, the innermost last
        self.alive: list[Any] = []  # so that no id is used twice

    def enter(self, module: nn.Module, *_: Any) -> None:
        self.modules.append(self.names[module])
        self._begin()

    def leave(self, *_: Any) -> None:
        self.modules.pop()
        if self.modules:
            self._begin()

    def _begin(self) -> None:
        self.stretches.append(Stretch(self.modules[-1]))

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        versions = [each._version for each in given]
        # Before the call, in which autograd saves tensors.
        if self.stretches[-1].grad_enabled != torch.is_grad_enabled():
            self._begin()
        stretch = self.stretches[-1]
        result = function(*args, **kwargs)
        changed = []
        for each, version in zip(given, versions, strict=True):
            if each._version != version:
                changed.append(each)
                stretch.change(each)
        if changed or tensors_in(result):
            self.alive.append((args, kwargs, result))
            stretch.append(function, args, kwargs, result)
        return result


def record(model: nn.Module, x: Tensor) -> list[Stretch]:
    """Run the model, and return its stretches in their order."""
    recorder = Recorder(model)
    stretches = recorder.stretches
    # Hooks of single modules would keep torch from its fast paths.
    hooks = [
        global_hooks.register_module_forward_pre_hook(recorder.enter),
        global_hooks.register_module_forward_hook(recorder.leave),
    ]
    keep = saved_tensors_hooks(lambda x: stretches[-1].pack(x), lambda x: x)
    try:
        with keep, recorder:
            output = model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return finish(stretches, output)


def record_whole(model: nn.Module, x: Tensor) -> list[Stretch]:
    """Return a model that cannot be cut as one stretch."""

    def run(x: Tensor, *_: Tensor) -> Tensor:
        return first_tensor(model(x))

    stretch = Stretch("model")
    with saved_tensors_hooks(stretch.pack, lambda x: x):
        out = run(x)
    stretch.append(run, (x, *model.parameters()), {}, out)
    return finish([stretch], out)


def finish(stretches: list[Stretch], output: Any) -> list[Stretch]:
    """Return the stretches that compute something, with the gradients of the run."""
    used = {id(each) for each in tensors_in(output)}
    used |= {id(each) for stretch in stretches for each in stretch.inputs}
    needed: dict[int, Tensor] = {}
    for stretch in stretches:
        for key in stretch.results.keys() - used:
            del stretch.results[key]
        needed |= {key: x for key, x in stretch.results.items() if x.requires_grad}
    out = first_tensor(output)
    gradients = {}
    if out.requires_grad:
        found = torch.autograd.grad(
            out, list(needed.values()), torch.randn_like(out), materialize_grads=True
        )
        gradients = dict(zip(needed, found, strict=True))
    stretches = [each for each in stretches if each.results]
    for stretch in stretches:
        stretch.finish(gradients)
    return stretches
