"""The blocks of well-known models, as sizes of one token and of all of the model's layers."""

from .sizes import Size

# CS336: the table of model sizes in assignment 2.
# The others: the config.json that each model was published with.
PRESETS = {
    "small": Size(1, 1, 768, 12, 12, 64, 3072, num_layers=12),
    "medium": Size(1, 1, 1024, 16, 16, 64, 4096, num_layers=24),
    "large": Size(1, 1, 1280, 20, 20, 64, 5120, num_layers=36),
    "xl": Size(1, 1, 1600, 25, 25, 64, 6400, num_layers=48),
    "2.7b": Size(1, 1, 2560, 32, 32, 80, 10240, num_layers=32),
    "llama-3.2-1b": Size(1, 1, 2048, 32, 8, 64, 8192, theta=500000.0, num_layers=16),
    "llama-3.1-8b": Size(1, 1, 4096, 32, 8, 128, 14336, theta=500000.0, num_layers=32),
    "llama-3.1-70b": Size(1, 1, 8192, 64, 8, 128, 28672, theta=500000.0, num_layers=80),
    "qwen3-8b": Size(
        1,
        1,
        4096,
        32,
        8,
        128,
        12288,
        qk_norm=True,
        theta=1000000.0,
        eps=1e-6,
        num_layers=36,
    ),
    # Version 0.3, which attends to the whole sequence; 0.1 slides a window over it, with theta 10000.
    "mistral-7b": Size(1, 1, 4096, 32, 8, 128, 14336, theta=1000000.0, num_layers=32),
}
