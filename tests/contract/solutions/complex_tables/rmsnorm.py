import torch
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, d_model, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))
        self.eps = eps

    def forward(self, features):
        wide = features.float()
        normed = nn.functional.rms_norm(wide, self.weight.shape, None, self.eps)
        return (normed * self.weight.float()).to(features.dtype)
