"""A pre-norm Transformer block, one file per layer, with shapes that are checked at run time."""

from . import attention, block, ffn, rmsnorm, rope, transformer
from .typecheck import typecheck, warn_if_unchecked

warn_if_unchecked()  # here, so that the warning names the line that imports tinyblock

# The one list of the layers.
LAYERS = (
    rmsnorm,
    ffn,
    rope,
    attention,
    block,
    transformer,
)
for _layer in LAYERS:
    typecheck(_layer)
del _layer, warn_if_unchecked

# After the checks, so that these are the checked functions.
from .attention import CausalMultiHeadSelfAttention, scaled_dot_product_attention  # noqa: E402
from .block import Block  # noqa: E402
from .ffn import FeedForward, SwiGLU, feed_forward, gelu, glu, silu, swiglu  # noqa: E402
from .parallelize import parallelize  # noqa: E402
from .rmsnorm import RMSNorm, rms_norm  # noqa: E402
from .rope import RotaryPositionalEmbedding, apply_rope  # noqa: E402
from .transformer import Transformer  # noqa: E402

__version__ = "0.1.0"
__all__ = [
    "Block",
    "CausalMultiHeadSelfAttention",
    "FeedForward",
    "RMSNorm",
    "RotaryPositionalEmbedding",
    "SwiGLU",
    "Transformer",
    "apply_rope",
    "feed_forward",
    "gelu",
    "glu",
    "parallelize",
    "rms_norm",
    "scaled_dot_product_attention",
    "silu",
    "swiglu",
    "typecheck",
]
