"""Give layers the weights of their partners, to see whether they differ in weights only."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from float64 import in_float64
from torch import Tensor

from .mistakes import leaking
from .partners import Pair
from .runs import Call, Run, first_node
from .values import TOLERANCE, error, tensors_in


@dataclass(eq=False)
class Layer:
    """A call of a layer that can be exchanged: it is linear, a norm, or an embedding.

    sizes: only a layer with the same sizes may take its place.
    after: how many calls with a partner ended before.
    """

    call: Call
    sizes: tuple[int, ...]
    after: int
    is_linear: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """Return the rows that the layer returns for a tensor of any shape."""
        x = x.reshape(self.call.inputs.values[0].shape)
        return rows_of(tensors_in(self.call.module(x))[0])


@dataclass(eq=False)
class Exchange:
    """A layer of ours and one of theirs that differ in weights only.

    function: what ours returns with their weights.
    off: how far our result is from that.
    """

    ours: Layer
    theirs: Layer
    function: Callable[[Tensor], Tensor]
    off: float


def exchanges(ours: Run, theirs: Run, pairs: list[Pair]) -> list[Exchange]:
    """Find what to exchange: layers with the same input, the nearest, then in order."""
    leaks = leaking(ours, pairs)
    lone = [
        each
        for each in layers_without_partner(ours, {pair.ours for pair in pairs})
        if first_node(each.call.results) in leaks
    ]
    their_lone = layers_without_partner(theirs, {pair.theirs for pair in pairs})
    found = []
    for own in lone:
        for other in their_lone:
            near = abs(own.after - other.after)
            is_alike = own.sizes == other.sizes and own.is_linear == other.is_linear
            if not is_alike or near > 2:
                continue
            exchange = exchange_of(own, other)
            if exchange:
                distance = exchange.off if exchange.off < 0.5 else 1.0
                same = Pair.of(own.call, other.call).input <= TOLERANCE
                found.append((distance, not same, near, exchange))
    chosen: list[Exchange] = []
    for *_, new in sorted(found, key=lambda each: each[:3]):
        if not any(
            overlap(new.ours.call, old.ours.call)
            or overlap(new.theirs.call, old.theirs.call)
            for old in chosen
        ):
            chosen.append(new)
    return chosen


def overlap(one: Call, other: Call) -> bool:
    is_same = one.module is other.module
    return is_same or one.is_inside(other) or other.is_inside(one)


@torch.no_grad()
def layers_without_partner(run: Run, known: set[Call]) -> list[Layer]:
    """Return calls that take and return one tensor, and do the same for all rows."""
    layers, after = [], 0
    for each in run.calls:
        states = [*each.module.parameters(), *each.module.buffers()]
        tensors = each.inputs.values, each.results.values
        if each in known:
            after += 1
            continue
        if not states or any(len(values) != 1 for values in tensors):
            continue
        x, y = tensors[0][0], tensors[1][0]
        layer = Layer(each, (x.numel(), y.shape[-1], y.numel()), after)
        if x.is_floating_point():  # otherwise it may look up rows by index
            layer.sizes += (x.shape[-1],)
            with in_float64():
                turned = rows_of(x).flip(0)
                if error(layer(turned).flip(0), layer(x)) > 1e-9:
                    continue
                sums = layer(x + x.cos()) + layer(0 * x), layer(x) + layer(x.cos())
                layer.is_linear = error(*sums) < 1e-9
        layers.append(layer)
    return layers


@torch.no_grad()
def exchange_of(ours: Layer, theirs: Layer) -> Exchange | None:
    """Return how to exchange two layers, if they are shown to differ in weights only.

    Both look up rows, or both are linear, or their results differ by factors of features.
    """
    x, y = ours.call.inputs.values[0], ours.call.results.values[0]
    with in_float64():
        u, v = rows_of(y), theirs(x)
    is_norm = x.is_floating_point() and not ours.is_linear
    if is_norm:
        du, dv = u - u[:1], v - v[:1]  # without biases
        if error(du * dv[1:2], dv * du[1:2]) > 1e-9:
            return None
    order = torch.arange(u.shape[1], device=u.device)
    if error(u, v) > 0.5:  # the features may be permuted
        found = torch.cdist(u.T, v.T).argmin(1)
        order = found if len(found.unique()) == len(found) else order
    function = partial(rows_in_order, theirs, order, y.shape)
    return Exchange(ours, theirs, function, error(u, v[:, order]))


def rows_in_order(layer: Layer, order: Tensor, shape: torch.Size, x: Tensor) -> Tensor:
    return layer(x)[:, order].reshape(shape)


def rows_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])
