"""A layer that jaxtyping's import hook checks."""

from jaxtyping import Float
from torch import Tensor, nn


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Float[Tensor, "n {self.width}"]) -> Tensor:
        return 2 * x
