"""A language model of bytes made of tinyblock's layers, and a post-norm block."""

from typing import Any, cast

from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyblock import Block, Transformer

from .text import SYMBOLS


class LanguageModel(nn.Module):
    """Embed bytes, apply a Transformer, and project to a logit for each byte that may come next."""

    def __init__(
        self, num_layers: int, d_model: int, num_heads: int, **options: Any
    ) -> None:
        super().__init__()
        self.token_embeddings = nn.Embedding(SYMBOLS, d_model)
        self.transformer = Transformer(num_layers, d_model, num_heads, **options)
        self.lm_head = nn.Linear(d_model, SYMBOLS, bias=False)
        nn.init.trunc_normal_(self.token_embeddings.weight, std=1, a=-3, b=3)
        # As in tinyblock's layers: variance 2 / (d_in + d_out), cut at three sigma.
        std = (2 / (d_model + SYMBOLS)) ** 0.5
        nn.init.trunc_normal_(self.lm_head.weight, std=std, a=-3 * std, b=3 * std)

    def forward(
        self, tokens: Int[Tensor, "batch seq"]
    ) -> Float[Tensor, "batch seq symbols"]:
        return self.lm_head(self.transformer(self.token_embeddings(tokens)))


class PostNormBlock(nn.Module):
    """Normalize after each sub-layer and its residual addition: z = norm(x + attention(x)), then norm(z + ffn(z)).

    The block of Vaswani et al. (arXiv 1706.03762), which Xiong et al. (arXiv 2002.04745) compare with the pre-norm
    block. It takes the layers of a Block, and so its weights.
    """

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.attn = block.attn
        self.ln1 = block.ln1
        self.ffn = block.ffn
        self.ln2 = block.ln2

    def forward(
        self,
        x: Tensor,
        token_positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        x = self.ln1(x + self.attn(x, token_positions, mask))
        return self.ln2(x + self.ffn(x))


def with_post_norm(model: LanguageModel) -> LanguageModel:
    """Make every block post-norm; the last one's second norm replaces the final norm."""
    stack = model.transformer
    stack.layers = nn.ModuleList(
        PostNormBlock(cast(Block, block)) for block in stack.layers
    )
    stack.ln_final = nn.Identity()
    return model


def d_ff_of(model: LanguageModel) -> int:
    """Return the inner width of the feed-forward layers."""
    block = cast(Block, model.transformer.layers[0])
    return cast(int, block.ffn.d_ff)
