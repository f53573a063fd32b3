"""FLOPs of layers and operations, compared with formulas.

x has 2 sequences of 5 tokens of width 4, so each weight of a projection is used 10 times.
Two FLOPs are a product that is added to a sum. Backward takes twice as many as forward, for
the gradients of the input and of the weights.
"""

import pytest
import torch
import torch.nn.functional as F
from lab.timing import HOST
from profiling.operations import flops_of, multiplies_nothing
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.flop_counter import flop_registry

TOKENS = 10
PAIRS = 2 * 5 * 5  # of queries and keys in both sequences


def vectors(x):
    """Multiply 5 x 4 numbers by a vector twice, and 5 by 5."""
    vector = x[0] @ x[0, 0]
    return torch.dot(vector, torch.addmv(vector, x[0], x[0, 1]))


def attend(x):
    """Attend with two heads of queries, one of keys, of width 2, and of values, of width 1."""
    q = x.unflatten(-1, (2, 2)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q[:, :1], q[:, :1, :, :1], enable_gqa=True)


TRANSPOSED = nn.ConvTranspose1d(4, 6, 3, stride=2)
FROZEN = nn.Conv1d(4, 6, 3, padding=1, groups=2).requires_grad_(False)
LSTM = nn.LSTM(4, 3, batch_first=True, bidirectional=True)
GATE = 4 * 3 + 3 * 3  # weights of one of its four gates
EXPERTS, ROWS = nn.Parameter(torch.ones(2, 4, 8)), nn.Parameter(torch.ones(4, 8))
ENDS = torch.tensor([1, 3], dtype=torch.int32)  # Two groups have 1 and 2.
# Functions of x, and their FLOPs: usually three passes, and two for each product.
LAYERS = {
    # In backward, only the gradients of the vectors that meet a matrix are sums.
    "vectors": (vectors, 2 * (20 + 20 + 5) + 2 * (20 + 20)),
    # In both sequences, 5 x 4 numbers meet 5 columns.
    "products of a batch that add up": (
        lambda x: torch.addbmm(torch.ones(5, 5), x, x.mT),
        3 * 2 * 2 * 5 * 4 * 5,
    ),
    # Each token of its input meets each weight.
    "transposed convolution": (
        lambda x: TRANSPOSED(x.mT),
        3 * 2 * TOKENS * 4 * 6 * 3,
    ),
    # Each of 6 channels meets 2 of 4. Weights have no gradient, so there are two passes.
    "frozen convolution in groups": (
        lambda x: FROZEN(x.mT),
        2 * 2 * TOKENS * 6 * 2 * 3,
    ),
    # For both heads, a score of width 2 and a value of width 1.
    "attention": (attend, 3 * 2 * 2 * PAIRS * (2 + 1)),
    "LSTM in both directions": (lambda x: LSTM(x)[0], 3 * 2 * 2 * TOKENS * 4 * GATE),
    # 1 and 2 rows of width 4 meet the 8 columns of their group.
    "groups of rows": (
        lambda x: F.grouped_mm(x[0], EXPERTS, offs=ENDS),
        3 * 2 * 3 * 4 * 8,
    ),
    # Each sequence of 5 x 4 numbers meets the columns of its group, which are 1 and 2.
    "groups of columns": (
        lambda x: F.grouped_mm(x, ROWS, offs=ENDS),
        3 * 2 * 5 * 4 * 3,
    ),
    "equal groups": (lambda x: F.grouped_mm(x, EXPERTS), 3 * 2 * TOKENS * 4 * 8),
}


def test_all_passes_take_the_flops_of_formulas(profile_of):
    for name, (layer, count) in LAYERS.items():
        assert profile_of(layer).whole.flops == {"float32": count}, name


def test_fused_encoder_layer_takes_the_flops_of_its_layers(profile_of):
    encoder = nn.TransformerEncoderLayer(4, 2, 12, batch_first=True)
    fused = profile_of(encoder, "forward").whole
    assert "_transformer_encoder_layer_fwd" in {x.name for x in fused.operations}
    layers = profile_of(encoder.train()).whole  # not fused, in three passes
    assert layers.flops == {"float32": 3 * fused.flops["float32"]}


def flops(name, given):
    """Return the FLOPs of an operation by arguments that are given.

    All others that torch's schema names are 5 tokens of width 4.
    """
    schema = getattr(torch.ops.aten, name).default._schema
    names = [each.name for each in schema.arguments]
    others = dict.fromkeys(names, torch.ones(1, 5, 4))
    return flops_of(f"aten.{name}", others | given, None).count


def test_kernels_of_a_gpu_count_their_products():
    # Each of 6 heads has 10 scores, of 4 queries with the keys that are not later. A score
    # takes a product of width 8, and its value another one; in backward, two for each.
    heads = dict.fromkeys(["query", "key", "value"], torch.empty(2, 3, 4, 8))
    given = {**heads, "is_causal": True}
    for kernel in ("flash", "efficient", "cudnn"):
        name = f"_scaled_dot_product_{kernel}_attention"
        assert flops(name, given) == 2 * 2 * 6 * 10 * 8, name
        assert flops(f"{name}_backward", given) == 2 * 2 * 2 * 6 * 10 * 8, name
    matrices = {"mat1": torch.empty(5, 4), "mat2": torch.empty(4, 8)}
    assert flops("_addmm_activation", matrices) == 2 * 5 * 4 * 8
    # 5 tokens of width 4 meet 12 x 4 and 12 x 3 weights. Biases are no products.
    weights = {"weight": [torch.empty(12, 4), torch.empty(12, 3), torch.empty(12)]}
    assert flops("_cudnn_rnn", weights) == 2 * 5 * 12 * (4 + 3)
    assert flops("_cudnn_rnn_backward", weights) == 2 * 2 * 5 * 12 * (4 + 3)


@torch.library.custom_op("tests::copied", mutates_args=())
def copied(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def unknown(x):
    """Multiply in ways that have no formula, or for which no rate can be measured."""
    torch.cdist(x.repeat(1, 6, 1), x)
    F.bilinear(x, x, torch.ones(3, 4, 4))
    torch.linalg.svdvals(x)
    x.int()[0] @ x.int()[0].T
    torch.addmm(x[0], torch.eye(5).to_sparse(), x[0])
    flex_attention(x[:, None], x[:, None], x[:, None])
    return copied(copied(x))


UNKNOWN = [
    "aten._euclidean_dist",
    "aten._trilinear",
    "aten._linalg_svd",
    "aten.mm",
    "aten.addmm",
    "higher_order.flex_attention",
    "tests.copied",
]


def known(x):
    """Put together, choose, pool, normalize, and lose numbers, which multiplies nothing."""
    chosen = torch.cat([x, x]).topk(3)[0].sort()[0]
    normal = F.layer_norm(F.max_pool1d(chosen, 1), (3,)).softmax(-1)
    return F.cross_entropy(normal, torch.zeros(4, 3, dtype=torch.int64))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flops_are_unknown_unless_an_operation_is_known_to_multiply_nothing(profile_of):
    # Under a clock that sees operations, flex_attention does not run.
    assert list(profile_of(unknown, "forward", by=HOST).whole.unknown) == UNKNOWN
    whole = profile_of(known).whole
    assert (whole.flops, whole.unknown) == ({}, {})
    # What torch's own counter knows to multiply is never said to multiply nothing.
    assert not [each for each in flop_registry if multiplies_nothing(each.__name__)]
