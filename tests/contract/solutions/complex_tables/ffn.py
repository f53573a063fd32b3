import math

import torch.nn.functional as F
from torch import nn


def linear(d_in, d_out):
    layer = nn.Linear(d_in, d_out, bias=False)
    std = math.sqrt(2 / (d_in + d_out))
    nn.init.trunc_normal_(layer.weight, 0, std, -3 * std, 3 * std)
    return layer


class SwiGLU(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.w1 = linear(d_model, d_ff)
        self.w2 = linear(d_ff, d_model)
        self.w3 = linear(d_model, d_ff)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))
