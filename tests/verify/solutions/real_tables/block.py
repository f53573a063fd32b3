from torch import nn

from .attention import CausalMultiHeadSelfAttention
from .ffn import SwiGLU
from .rmsnorm import RMSNorm


class Block(nn.Module):
    def __init__(self, d_model, num_heads, d_ff, rope):
        super().__init__()
        self.ln1 = RMSNorm(d_model, 1e-5)
        self.attn = CausalMultiHeadSelfAttention(d_model, num_heads, rope)
        self.ln2 = RMSNorm(d_model, 1e-5)
        self.ffn = SwiGLU(d_model, d_ff)

    def forward(self, x, token_positions=None):
        y = x + self.attn(self.ln1(x), token_positions)
        return y + self.ffn(self.ln2(y))
