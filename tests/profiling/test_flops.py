"""FLOPs of layers and operations, compared with formulas.

x has 2 sequences of 5 tokens of width 4, so each weight of a projection is used 10 times.
Two FLOPs are a product that is added to a sum. Backward takes twice as many as forward, for
the gradients of the input and of the weights.
"""

import pytest
import torch
import torch.nn.functional as F
from lab.timing import HOST
from profiling.flops import flops_of
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

TOKENS = 10
PAIRS = 2 * 5 * 5  # of queries and keys in both sequences
CAUSAL = 2 * (1 + 2 + 3 + 4 + 5)


def over_tokens(convolution):
    return lambda x: convolution(x.mT).mT


def first_of(recurrent):
    return lambda x: recurrent(x)[0]


def attend(x):
    q = x.unflatten(-1, (2, 2)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q[:, :1], q[:, :1, :, :1], enable_gqa=True)


def causal(x):
    x = x[:, None]
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def vectors(x):
    """Multiply 5 x 4 numbers by a vector twice, and 5 by 5."""
    vector = x[0] @ x[0, 0]
    return torch.dot(vector, torch.addmv(vector, x[0], x[0, 1]))


UP, DOWN = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)
FROZEN = nn.Linear(4, 8).requires_grad_(False)
COMPLEX = nn.Parameter(torch.ones(4, 3, dtype=torch.complex64))
ENCODER = nn.TransformerEncoderLayer(4, 2, 12, batch_first=True)
ONCE = 2 * TOKENS * 4 * 8
GATE = 4 * 3 + 3 * 3  # weights of one gate of a recurrent layer of width 3
ENCODED = 2 * TOKENS * (4 * 4 * 4 + 2 * 4 * 12) + 2 * 2 * PAIRS * 4


def again(reentrant):
    return lambda x: checkpoint(lambda x: DOWN(UP(x)), x, use_reentrant=reentrant)


# A model, its FLOPs in forward, and those in all passes.
LAYERS = {
    "projection": (UP, ONCE, 3 * ONCE),
    # A complex product is four real ones.
    "complex product": (
        lambda x: (x.to(torch.complex64) @ COMPLEX).real,
        4 * 2 * TOKENS * 4 * 3,
        3 * 4 * 2 * TOKENS * 4 * 3,
    ),
    # The gradients of a matrix, of dot, and of an added vector have no sums.
    "vectors": (vectors, 2 * (2 * 20 + 5), 2 * (2 * 20 + 5 + 2 * 20)),
    "products of a batch that add up": (
        lambda x: torch.addbmm(torch.ones(5, 5), x, x.mT),
        2 * 2 * 5 * 4 * 5,
        3 * 2 * 2 * 5 * 4 * 5,
    ),
    "convolution in groups": (
        over_tokens(nn.Conv1d(4, 6, 3, padding=1, groups=2)),
        2 * TOKENS * 6 * 2 * 3,
        3 * 2 * TOKENS * 6 * 2 * 3,
    ),
    # Positions are those of its input.
    "transposed convolution": (
        over_tokens(nn.ConvTranspose1d(4, 6, 3, stride=2)),
        2 * TOKENS * 4 * 6 * 3,
        3 * 2 * TOKENS * 4 * 6 * 3,
    ),
    "frozen convolution": (
        over_tokens(nn.Conv1d(4, 6, 3, padding=1).requires_grad_(False)),
        2 * TOKENS * 4 * 6 * 3,
        2 * 2 * TOKENS * 4 * 6 * 3,
    ),
    # Two heads of queries and keys of width 2, and of values of width 1.
    "attention": (attend, 2 * 2 * PAIRS * 3, 3 * 2 * 2 * PAIRS * 3),
    "causal attention": (causal, 2 * CAUSAL * 8, 3 * 2 * CAUSAL * 8),
    # Weights of attention and of the feed-forward layer, scores and values.
    "encoder layer": (ENCODER, ENCODED, 3 * ENCODED),
    "LSTM in both directions": (
        first_of(nn.LSTM(4, 3, batch_first=True, bidirectional=True)),
        2 * 2 * TOKENS * 4 * GATE,
        3 * 2 * 2 * TOKENS * 4 * GATE,
    ),
    "frozen weights": (nn.Sequential(FROZEN, DOWN), 2 * ONCE, 5 * ONCE),
    # Of what is computed again, the last product is not needed.
    "checkpointing": (again(reentrant=False), 2 * ONCE, 7 * ONCE),
    "reentrant checkpointing": (again(reentrant=True), 2 * ONCE, 8 * ONCE),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_layers_take_the_flops_of_their_formulas(profile_of):
    for name, (layer, *expected) in LAYERS.items():
        for mode, count in zip(("forward", "train"), expected, strict=True):
            whole = profile_of(layer, mode).whole
            assert whole.flops == {"float32": count}, (name, mode)


def test_flops_of_each_dtype_are_counted_apart(profile_of):
    def autocast(x):
        with torch.autocast("cpu", torch.bfloat16):
            h = UP(x)
        return DOWN(h.float())

    found = profile_of(autocast).whole.flops
    assert found == {"bfloat16": 3 * ONCE, "float32": 3 * ONCE}


def flops(name, given):
    """Return the FLOPs of an operation whose other arguments are 5 tokens of width 4."""
    schema = getattr(torch.ops.aten, name).default._schema
    names = [each.name for each in schema.arguments]
    others = dict.fromkeys(names, torch.ones(1, 5, 4))
    return flops_of(f"aten.{name}", others | given, None).count


def test_kernels_of_a_gpu_count_their_products():
    # 6 heads of width 8 have 4 x 4 scores, 10 of them of earlier or equal keys.
    heads = dict.fromkeys(["query", "key", "value"], torch.empty(2, 3, 4, 8))
    for kernel in ("flash", "efficient", "cudnn"):
        for causal, scores in ((False, 16), (True, 10)):
            name = f"_scaled_dot_product_{kernel}_attention"
            given = {**heads, "is_causal": causal}
            assert flops(name, given) == 2 * 2 * 6 * scores * 8, name
            assert flops(f"{name}_backward", given) == 2 * 2 * 2 * 6 * scores * 8, name
    # 5 tokens of width 4 meet 12 x 4 and 12 x 3 weights. Biases are no products.
    weights = {"weight": [torch.empty(12, 4), torch.empty(12, 3), torch.empty(12)]}
    assert flops("_cudnn_rnn", weights) == 2 * 5 * 12 * (4 + 3)
    assert flops("_cudnn_rnn_backward", weights) == 2 * 2 * 5 * 12 * (4 + 3)


# Shapes of two arguments, the ends of two groups, and the pairs that are multiplied.
GROUPS = {
    "of 7 rows, two groups get 2 and 3": ((7, 8), (2, 8, 5), [2, 5], 5 * 8 * 5),
    "the gradient of weights sums over rows": ((8, 7), (7, 5), [2, 5], 8 * 5 * 5),
    "of 7 columns": ((2, 4, 8), (8, 7), [2, 5], 4 * 8 * 5),
    "equal groups": ((2, 4, 8), (2, 8, 5), None, 2 * 4 * 8 * 5),
}


def test_experts_take_the_rows_that_they_get():
    for name, (left, right, ends, pairs) in GROUPS.items():
        offs = None if ends is None else torch.tensor(ends)
        given = {"self": torch.empty(left), "mat2": torch.empty(right), "offs": offs}
        assert flops("_grouped_mm", given) == 2 * pairs, name


@torch.library.custom_op("tests::copied", mutates_args=())
def copied(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def twice(function):
    return lambda x: [function(x), function(x)]


UNKNOWN = [
    ("tests.copied", copied),
    ("aten._fft_r2c", lambda x: torch.fft.rfft(x).real),
    ("aten._euclidean_dist", lambda x: torch.cdist(x.repeat(1, 6, 1), x)),
    ("aten._linalg_svd", torch.linalg.svdvals),
    (
        "aten.affine_grid_generator",
        lambda x: F.affine_grid(x[:, :2, :3], [2, 1, 4, 4], align_corners=False),
    ),
    ("aten.linalg_matrix_exp", lambda x: torch.matrix_exp(x[..., :4, :])),
    ("aten._trilinear", lambda x: F.bilinear(x, x, torch.ones(3, 4, 4))),
    ("aten.mm", lambda x: x.int()[0] @ x.int()[0].T),
    ("aten.mm", lambda x: torch.eye(5).to_sparse() @ x[0]),
]


def known(x):
    """Do what multiplies nothing: move, choose, make, normalize, pool, and lose numbers."""
    image = F.interpolate(x[:, None], size=(4, 4), mode="bilinear")
    normal = F.layer_norm(F.max_pool2d(image, 2), (2,)).softmax(-1)
    rows = torch.cat([x[x > 0].sort()[0].cumsum(0), torch.rand(3)]).topk(2)[0]
    loss = F.cross_entropy(x.flatten(0, 1), torch.arange(10) % 4)
    return F.glu(x) * (normal.sum() + rows.sum() + loss)


def test_flops_are_unknown_unless_an_operation_is_known_to_multiply_nothing(profile_of):
    for name, function in UNKNOWN:
        whole = profile_of(twice(function), "forward").whole
        assert whole.unknown == [name]
    whole = profile_of(known).whole
    assert (whole.flops, whole.unknown) == ({}, [])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_unknown(profile_of):
    # Under a clock that sees operations, it does not run.
    measured = profile_of(
        lambda x: flex_attention(*3 * [x[:, None]]), "forward", by=HOST
    )
    assert measured.whole.unknown == ["higher_order.flex_attention"]
