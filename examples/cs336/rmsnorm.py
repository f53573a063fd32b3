"""RMSNorm that calls a CS336 solution, for `tinyblock verify` (docs/verify.md).

    PYTHONPATH=path/to/solution tinyblock verify examples/cs336

`tests.adapters` is a file of the solution. Its functions and arguments have the same
names in the editions of 2026 and 2025 of assignment 1.
"""

from tests.adapters import run_rmsnorm
from torch import Tensor, nn


class RMSNorm(nn.Module):
    def __init__(self, d_model: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.sizes = {"d_model": d_model, "eps": eps}
        # The adapter copies the weights into the solution, so they get no gradient.
        self.weight = nn.RMSNorm(d_model).weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return run_rmsnorm(**self.sizes, weights=self.weight, in_features=x)
