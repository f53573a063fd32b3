from torch import nn

from .attention import CausalMultiHeadSelfAttention
from .ffn import SwiGLU
from .rmsnorm import RMSNorm


class Block(nn.Module):
    def __init__(self, d_model, num_heads, d_ff, max_seq_len, theta):
        super().__init__()
        self.ln1 = RMSNorm(d_model)
        self.attn = CausalMultiHeadSelfAttention(
            d_model, num_heads, max_seq_len=max_seq_len, theta=theta
        )
        self.ln2 = RMSNorm(d_model)
        self.ffn = SwiGLU(d_model, d_ff)

    def forward(self, x, token_positions=None):
        x = x + self.attn(self.ln1(x), token_positions)
        return x + self.ffn(self.ln2(x))
