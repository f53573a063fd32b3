"""A model to profile: any function without arguments that returns an nn.Module.

    PYTHONPATH=examples python scripts/profile_block.py --block profile_a_model:build \
        --d-model 256 --seq-len 128

The profiler calls the model with one tensor of shape (batch, seq, d_model).
"""

from torch import nn


def build() -> nn.Module:
    """Return two of torch's own Transformer layers."""
    layer = nn.TransformerEncoderLayer(
        d_model=256, nhead=4, dim_feedforward=1024, batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
