"""GeGLU: a gated feed-forward layer whose gate is a GELU.

    w2(gelu(w1(x)) * w3(x)),  with  gelu(x) = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))

    python examples/blocks/gelu_gate.py

This command prints how far this form of GELU, with tanh, is from the exact one, with erf.

Source: Shazeer, "GLU Variants Improve Transformer" (arXiv 2002.05202), equation 6; Gemma
(arXiv 2403.08295), for the form with tanh.
To copy this file, import SwiGLU from your copy of ffn.py.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tinyblock import SwiGLU


class GeGLU(SwiGLU):
    """SwiGLU with GELU in place of SiLU. The weights have the same names."""

    def forward(
        self, x: Float[Tensor, "*batch {self.d_model}"]
    ) -> Float[Tensor, "*batch {self.d_model}"]:
        return self.w2(F.gelu(self.w1(x), approximate="tanh") * self.w3(x))


def main() -> None:
    x = torch.linspace(-6, 6, 10001)
    difference = (F.gelu(x, approximate="tanh") - F.gelu(x)).abs()
    print(f"largest difference: {difference.max():.0e} at {x[difference.argmax()]:.1f}")


if __name__ == "__main__":
    main()
