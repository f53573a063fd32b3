"""Check the shapes of a function of your own, in eager mode and in compiled code.

    python examples/check_shapes.py

The third call passes keys of another width. The fourth passes one key head for three,
which torch would broadcast without an error, so the scores would be wrong.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from tinyblock import typecheck


@typecheck
def scores(
    q: Float[Tensor, "*batch query d"], k: Float[Tensor, "*batch key d"]
) -> Float[Tensor, "*batch query key"]:
    """Return the scores of attention."""
    return q @ k.mT


def main() -> None:
    compiled = torch.compile(scores)
    q = torch.randn(2, 3, 5, 8)  # batch, heads, query, d
    print("eager:", *scores(q, torch.randn(2, 3, 7, 8)).shape)
    print("compiled:", *compiled(q, torch.randn(2, 3, 7, 8)).shape)
    for k in (torch.randn(2, 3, 7, 9), torch.randn(2, 1, 7, 8)):
        try:
            compiled(q, k)
        except TypeError as error:
            print(f"\nTypeCheckError: {error}")


if __name__ == "__main__":
    main()
