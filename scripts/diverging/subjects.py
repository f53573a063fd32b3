"""Build models as they are, and in float64."""

import copy
import sys
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from float64 import in_float64
from profiling.runs import Build, Inputs
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from .runs import NoTies, Run
from .values import Refused, error, floats


@dataclass
class Subject:
    """A model as it was built, the same in float64, and their inputs."""

    narrow: nn.Module
    wide: nn.Module
    inputs: Inputs

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of most weights."""
        sizes: dict[torch.dtype, int] = defaultdict(int)
        pairs = zip(self.narrow.parameters(), self.wide.parameters(), strict=True)
        for weight, exact in pairs:
            if weight.is_floating_point():
                sizes[weight.dtype] += exact.numel()
        return max(sizes, key=sizes.__getitem__, default=torch.float32)

    def run_wide(self, **options: Any) -> Run:
        try:
            with in_float64(), NoTies():
                inputs = tree_map_only(Tensor, beginning, self.inputs)
                return Run(self.wide, **options).start(inputs)
        except Exception as refused:
            refused.add_note(
                "The model ran in float64. Give its eager form where a kernel has no "
                "float64, such as attn_implementation='eager'."
            )
            raise


def beginning(tensor: Tensor) -> Tensor:
    """Return a copy of an input, which may be changed in place, with a gradient."""
    copied = tensor.detach().clone()
    if copied.is_floating_point():
        copied.requires_grad_()
    return copied.clone()


def plain(model: nn.Module) -> nn.Module:
    """Return the model that torch.compile wraps, for evaluation."""
    inner: nn.Module = getattr(model, "_orig_mod", model)
    inner.eval()
    for weight in floats(inner.parameters()):
        weight.requires_grad_()
    return inner


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast to a lower dtype, but not complex buffers, which would become real."""
    casts = {torch.bfloat16: model.bfloat16, torch.float16: model.half}
    return casts[dtype]() if dtype in casts else model


def subjects_of(builds: list[Build], device: torch.device, dtype: torch.dtype) -> Any:
    """Build each model as it is, and in float64, where its constants are exact.

    If a model cannot be built in float64, all models keep the constants that they have.

    Raises:
        Refused: a model comes without inputs, or with some that a run could change.
    """
    narrow, inputs = [], []
    for build in builds:
        torch.manual_seed(0)
        built = build(device, torch.float32)  # which casts nothing
        if not isinstance(built, tuple):
            raise Refused("FUNCTION must return a model and its inputs")
        narrow.append(cast(plain(built[0]), dtype))
        inputs.append(built[1])
        for leaf in tree_leaves(built[1]):
            if not isinstance(leaf, Tensor) and hasattr(leaf, "__dict__"):
                raise Refused(
                    "inputs must be tensors and plain values, because each run gets "
                    f"them again, got {type(leaf).__name__}"
                )
    try:
        wide = []
        for build in builds:
            torch.manual_seed(0)
            with in_float64():
                built = build(device, torch.float32)
                wide.append(built[0] if isinstance(built, tuple) else built)
    except Exception as refused:
        print(f"Constants stay rounded: no float64 for {refused}", file=sys.stderr)
        wide = [copy.deepcopy(each) for each in narrow]
    weights = [id(each) for model in (*narrow, *wide) for each in model.parameters()]
    if len(weights) > len(set(weights)):
        raise Refused(
            "FUNCTION must build a model with weights of its own at each call"
        )
    wide = [plain(each.double()) for each in wide]
    for own, given in zip(wide, narrow, strict=True):
        load(own, given)
        for weight in plain_weights(given):
            weight.data = weight.data.new_empty(0)  # until `rounding`
    return [Subject(*each) for each in zip(narrow, wide, inputs, strict=True)]


def plain_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights that are no other class of tensors, such as quantized ones."""
    return [each for each in model.parameters() if type(each.data) is Tensor]


@torch.no_grad()
def load(wide: nn.Module, narrow: nn.Module) -> None:
    """Copy all weights, and buffers unless they are constants, which are nearly equal."""
    given = dict([*narrow.named_parameters(), *narrow.named_buffers()])
    for name, own in [*wide.named_parameters(), *wide.named_buffers()]:
        has_fractions = own.is_floating_point() or own.is_complex()
        is_constant = has_fractions and not isinstance(own, nn.Parameter)
        if not is_constant or error(own, given[name]) > 2.0**-6:
            own.copy_(given[name])
