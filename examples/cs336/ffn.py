"""A feed-forward layer that calls a function of a CS336 solution: see rmsnorm.py."""

from tests.adapters import run_swiglu
from torch import Tensor, nn


def frozen_linear(d_in: int, d_out: int) -> nn.Module:
    return nn.Linear(d_in, d_out, bias=False).requires_grad_(False)


class SwiGLU(nn.Module):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.sizes = {"d_model": d_model, "d_ff": d_ff}
        self.w1 = frozen_linear(d_model, d_ff)
        self.w2 = frozen_linear(d_ff, d_model)
        self.w3 = frozen_linear(d_model, d_ff)

    def forward(self, x: Tensor) -> Tensor:
        return run_swiglu(
            **self.sizes,
            w1_weight=self.w1.weight,
            w2_weight=self.w2.weight,
            w3_weight=self.w3.weight,
            in_features=x,
        )
