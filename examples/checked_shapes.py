"""Shape checks on a module of your own, from its jaxtyping annotations.

    python examples/checked_shapes.py

This command pools two sequences. It then passes tokens of size 60 instead of 64, and
prints the error.

`typecheck(module)` checks the public functions of a module, and `__init__` and
`forward` of its classes. Call it at the end of a file on itself, as below, or in
`conftest.py` on the modules that your tests import. A check runs once for each
combination of shapes and costs about a microsecond afterwards. Compiled code runs
unchecked.
"""

import sys

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from tinyblock import typecheck


class AttentionPool(nn.Module):
    """Average the tokens of a sequence, weighted by a softmax of their scores.

    Tokens whose `keep` is False have no weight. Without any token the result is zero.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.d_model = d_model
        self.score = nn.Linear(d_model, 1, bias=False)

    def forward(
        self,
        x: Float[Tensor, "*batch seq {self.d_model}"],
        keep: Bool[Tensor, "*batch seq"],
    ) -> Float[Tensor, "*batch {self.d_model}"]:
        scores = self.score(x).squeeze(-1)
        weights = scores.masked_fill(~keep, -torch.inf).softmax(dim=-1)
        # Without any token, the softmax is NaN.
        weights = weights.masked_fill(~keep, 0)
        return (weights[..., None] * x).sum(dim=-2)


typecheck(sys.modules[__name__])


def main() -> None:
    pool = AttentionPool(d_model=64)
    keep = torch.ones(2, 7, dtype=torch.bool)
    print("pooled:", tuple(pool(torch.randn(2, 7, 64), keep).shape))
    try:
        pool(torch.randn(2, 7, 60), keep)
    except TypeError as error:
        print(error)


if __name__ == "__main__":
    main()
