"""What runs in float64 is float64 throughout, and the caller's settings come back."""

import numpy
import pytest
import torch
from float64 import in_float64
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


class Quantized(Tensor):
    """An integer divided by 3, which is computed in bfloat16."""

    @staticmethod
    def __new__(cls, integers: Tensor):
        return Tensor._make_wrapper_subclass(cls, integers.shape, dtype=torch.bfloat16)

    def __init__(self, integers: Tensor):
        self.integers = integers

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        args = tree_map_only(cls, lambda each: each.integers.bfloat16() / 3, args)
        return func(*args, **(kwargs or {}))


class Lowering(nn.Module):
    """x / 3 by dtypes that cannot hold a third."""

    def __init__(self):
        super().__init__()
        torch.set_default_dtype(torch.bfloat16)
        self.register_buffer("table", torch.arange(3.0) / 3)
        self.two = torch.tensor([2], dtype=torch.float16)
        self.third = nn.Parameter(torch.full((1,), 1 / 3, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        third = torch.from_numpy(numpy.full(1, 1 / 3, dtype="float64"))
        one = torch.tensor([0x3F800000], dtype=torch.int32).view(torch.float32)
        thirds = [
            x.half().float() * self.table[1],
            x.type(torch.bfloat16) @ self.two[None] / 6,
            x.to(torch.complex64).mul(self.third).real,
            x.float() * third * one,
            x @ Quantized(torch.ones(1, 1, dtype=torch.int8)),
            torch.autocast("cpu")(nn.functional.linear)(x, self.third[None]),
            torch.compile(torch.mul)(x, 1 / 3),
        ]
        return torch.stack(thirds)


def test_a_model_that_lowers_its_dtype_is_exact_with_its_gradient():
    before = torch.get_default_dtype()
    with in_float64():
        model = Lowering()
        x = torch.tensor([[1.0 + 2**-40]], requires_grad=True)
        result = model(x)
        result.sum().backward()
    expected = torch.full((7, 1, 1), (1 + 2**-40) / 3, dtype=torch.float64)
    torch.testing.assert_close(result, expected, rtol=2**-51, atol=0)
    torch.testing.assert_close(x.grad, torch.full_like(x, 7 / 3), rtol=2**-50, atol=0)
    assert torch.get_default_dtype() == before


def test_views_and_operations_in_place_change_the_tensor_that_the_caller_holds():
    with in_float64():
        whole = torch.from_numpy(numpy.zeros(3))
        whole[1:].add_(1)[0] = 5
    assert whole.tolist() == [0, 5, 1]


def test_an_error_inside_restores_the_dtype():
    before = torch.get_default_dtype()
    with pytest.raises(ZeroDivisionError), in_float64():
        _ = 1 / 0
    assert torch.get_default_dtype() == before
