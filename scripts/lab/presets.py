"""The blocks of well-known models, as sizes of one token and of all of the model's layers."""

from .sizes import Size


def _model(
    d_model: int,
    d_ff: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    d_head: int,
    theta: float = 10000.0,
    eps: float = 1e-5,
    qk_norm: bool = False,
) -> Size:
    return Size(1, 1, d_model, num_heads, num_kv_heads, d_head, d_ff, qk_norm, theta, eps, num_layers)


# CS336: the table of model sizes in assignment 2.
# The others: the config.json that each model was published with.
PRESETS = {
    "small": _model(768, 3072, 12, 12, 12, 64),
    "medium": _model(1024, 4096, 24, 16, 16, 64),
    "large": _model(1280, 5120, 36, 20, 20, 64),
    "xl": _model(1600, 6400, 48, 25, 25, 64),
    "2.7b": _model(2560, 10240, 32, 32, 32, 80),
    "llama-3.2-1b": _model(2048, 8192, 16, 32, 8, 64, theta=500000.0),
    "llama-3.1-8b": _model(4096, 14336, 32, 32, 8, 128, theta=500000.0),
    "llama-3.1-70b": _model(8192, 28672, 80, 64, 8, 128, theta=500000.0),
    "qwen3-8b": _model(4096, 12288, 36, 32, 8, 128, theta=1000000.0, eps=1e-6, qk_norm=True),
    # Version 0.3, which attends to the whole sequence; 0.1 slides a window over it, with theta 10000.
    "mistral-7b": _model(4096, 14336, 32, 32, 8, 128, theta=1000000.0),
}
