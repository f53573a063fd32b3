"""Check the shapes of a function of your own, in eager mode and in compiled code.

    python examples/check_shapes.py

The wrong keys have one head for three heads of queries. torch alone would broadcast it
without an error, so the scores would be wrong. The compiled function raises the same
error.
"""

import torch
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from tinyblock import typecheck


@typecheck
def scores(
    q: Float[Tensor, "*batch query d"], k: Float[Tensor, "*batch key d"]
) -> Float[Tensor, "*batch query key"]:
    """Return the scores of attention."""
    return q @ k.mT


def main() -> None:
    q = torch.randn(2, 3, 5, 8)  # batch, heads, query, d
    k = torch.randn(2, 3, 7, 8)  # batch, heads, key, d
    print("eager:", *scores(q, k).shape)
    try:
        k = torch.randn(2, 1, 7, 8)
        scores(q, k)
    except TypeCheckError as error:
        print(f"\nTypeCheckError: {error}")
    compiled = torch.compile(scores)
    print("\ncompiled:", *compiled(q, q).shape)
    try:
        compiled(q, k)
    except TypeCheckError as error:
        print(f"\nTypeCheckError: {error}")


if __name__ == "__main__":
    main()
