import torch
from torch import nn


class RMSNorm(nn.RMSNorm):
    def __init__(self, d_model, eps=1e-5):
        super().__init__(d_model, eps)

    def forward(self, x):
        dtype = torch.promote_types(x.dtype, torch.float32)
        shape = self.normalized_shape
        weight = self.weight.to(dtype)
        return nn.functional.rms_norm(x.to(dtype), shape, weight, self.eps).to(x.dtype)
