"""FLOPs of layers and operations, compared with formulas.

x has 2 sequences of 6 tokens of width 8, so each weight of a projection is used 12 times.
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

SHAPE = (2, 6, 8)
TOKENS = 12
ALL = 2 * 6 * 6  # scores of both sequences
CAUSAL = 2 * (1 + 2 + 3 + 4 + 5 + 6)


class Calls(nn.Module):
    """Calls a function of x and a layer."""

    def __init__(self, function, layer=None):
        super().__init__()
        self.function = function
        self.layer = layer

    def forward(self, x):
        return self.function(x, self.layer)


def conv(layer):
    """Return a layer whose channels are the last axis."""
    return Calls(lambda x, layer: layer(x.mT).mT, layer)


def recurrent(layer):
    return Calls(lambda x, layer: layer(x)[0], layer)


def attend(x, _):
    q = x.unflatten(-1, (2, 4)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q[:, :1], q[:, :1, :, :2], enable_gqa=True)


def causal(x, _):
    x = x[:, None]
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def products(x, _):
    vector = x[0] @ x[0, 0]
    added = torch.addmv(vector, x[0], x[0, 1])
    return torch.addbmm(x[0] @ x[0].T, x, x.mT) * torch.dot(vector, added)


def autocast(x, layers):
    with torch.autocast("cpu", torch.bfloat16):
        h = layers[0](x)
    return layers[1](h.float())


def again(reentrant):
    def run(x, layers):
        return checkpoint(lambda x: layers[1](layers[0](x)), x, use_reentrant=reentrant)

    return run


def pair():
    layers = [nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)]
    return nn.ModuleList(layers)


WEIGHT = nn.Parameter(torch.ones(8, 5, dtype=torch.complex64))
ENCODER = nn.TransformerEncoderLayer(8, 2, 24, batch_first=True)
FROZEN = nn.Linear(8, 16).requires_grad_(False)
GATE = 5 * 8 + 5 * 5  # weights of a gate of a recurrent layer of width 5
ONCE = 2 * TOKENS * 8 * 16
# The FLOPs of forward, and of all passes.
LAYERS = {
    "projection": (nn.Linear(8, 16), ONCE, 3 * ONCE),
    "complex product": (
        Calls(lambda x, _: (x.to(torch.complex64) @ WEIGHT).real),
        4 * 2 * TOKENS * 8 * 5,
        3 * 4 * 2 * TOKENS * 8 * 5,
    ),
    # The gradient of the matrix in a product with a vector, and those of dot, have no sums.
    "products": (
        Calls(products),
        2 * (6 * 8 * 2 + 6 + 6 * 8 * 6 + 2 * 6 * 8 * 6),
        2 * (2 * 6 * 8 * 2 + 6 + 3 * (6 * 8 * 6 + 2 * 6 * 8 * 6)),
    ),
    "convolution": (
        conv(nn.Conv1d(8, 4, 3, padding=1, groups=2)),
        2 * TOKENS * 4 * 4 * 3,
        3 * 2 * TOKENS * 4 * 4 * 3,
    ),
    "transposed convolution": (
        conv(nn.ConvTranspose1d(8, 4, 3, stride=2, groups=4)),
        2 * TOKENS * 8 * 1 * 3,
        3 * 2 * TOKENS * 8 * 1 * 3,
    ),
    # Widths of 4 and of 2, in two heads.
    "attention": (Calls(attend), 2 * 2 * ALL * (4 + 2), 3 * 2 * 2 * ALL * (4 + 2)),
    "causal attention": (Calls(causal), 2 * 2 * CAUSAL * 8, 3 * 2 * 2 * CAUSAL * 8),
    # Scores and values have the width of all heads.
    "encoder layer": (
        ENCODER,
        2 * TOKENS * (4 * 8 * 8 + 2 * 8 * 24) + 2 * 2 * ALL * 8,
        3 * (2 * TOKENS * (4 * 8 * 8 + 2 * 8 * 24) + 2 * 2 * ALL * 8),
    ),
    "LSTM in both directions": (
        recurrent(nn.LSTM(8, 5, batch_first=True, bidirectional=True)),
        2 * 2 * TOKENS * 4 * GATE,
        3 * 2 * 2 * TOKENS * 4 * GATE,
    ),
    # Its first states need no gradient.
    "GRU": (
        recurrent(nn.GRU(8, 5, batch_first=True)),
        2 * 3 * TOKENS * GATE,
        2 * 3 * (3 * TOKENS * GATE - 2 * 5 * 5),
    ),
    "frozen weights": (nn.Sequential(FROZEN, nn.Linear(16, 8)), 2 * ONCE, 5 * ONCE),
    "frozen convolution": (
        conv(nn.Conv1d(8, 4, 3, padding=1).requires_grad_(False)),
        2 * TOKENS * 4 * 8 * 3,
        2 * 2 * TOKENS * 4 * 8 * 3,
    ),
    # The last product is not needed again.
    "checkpointing": (Calls(again(reentrant=False), pair()), 2 * ONCE, 7 * ONCE),
}


def test_layers_take_the_flops_of_their_formulas(profile_of):
    for name, (layer, *expected) in LAYERS.items():
        for mode, flops in zip(("forward", "train"), expected, strict=True):
            found = profile_of(layer, SHAPE, mode).whole.flops
            assert found == {"float32": flops}, (name, mode)
    # Reentrant checkpointing computes the last product again.
    found = profile_of(Calls(again(reentrant=True), pair()), SHAPE).whole.flops
    assert found == {"float32": 8 * ONCE}
    found = profile_of(Calls(autocast, pair()), SHAPE).whole.flops
    assert found == {"bfloat16": 3 * ONCE, "float32": 3 * ONCE}


def arguments_of(name, argument):
    """Return all arguments of one of torch's operations, each with the same value."""
    schema = getattr(torch.ops.aten, name).default._schema
    return {each.name: argument for each in schema.arguments}


def test_kernels_of_a_gpu_count_their_products():
    # 6 heads of width 8 have 4 x 4 scores, 10 of them of earlier or equal keys.
    x = torch.empty(2, 3, 4, 8)
    for kernel in ("flash", "efficient", "cudnn"):
        for passes, suffix in ((2, ""), (4, "_backward")):
            name = f"_scaled_dot_product_{kernel}_attention{suffix}"
            for causal, pairs in ((False, 16), (True, 10)):
                given = arguments_of(name, x) | {"is_causal": causal}
                found = flops_of(f"aten.{name}", given, x)
                assert found.count == passes * 2 * 6 * pairs * 8, name
    # 12 tokens meet 20 x 8 and 20 x 5 weights of an LSTM, and biases, which are no products.
    weights = [torch.empty(20, 8), torch.empty(20, 5), torch.empty(20)]
    for passes, name in ((1, "_cudnn_rnn"), (2, "_cudnn_rnn_backward")):
        given = arguments_of(name, torch.empty(SHAPE)) | {"weight": weights}
        found = flops_of(f"aten.{name}", given, None)
        assert found.count == passes * 2 * TOKENS * 20 * (8 + 5), name


# The shapes of two arguments, the ends of two groups, and the pairs that are multiplied.
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
        found = flops_of("aten._grouped_mm", given, None)
        assert found.count == 2 * pairs, name


@torch.library.custom_op("tests::copied", mutates_args=())
def copied(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


UNKNOWN = [
    ("tests.copied", copied),
    ("aten._fft_r2c", lambda x: torch.fft.rfft(x).real),
    ("aten._euclidean_dist", lambda x: torch.cdist(x.repeat(1, 5, 1), x)),
    ("aten._cdist_forward", lambda x: torch.cdist(x, x)),
    ("aten._linalg_svd", torch.linalg.svdvals),
    (
        "aten.affine_grid_generator",
        lambda x: F.affine_grid(x[:, :2, :3], [2, 1, 4, 4], align_corners=False),
    ),
    ("aten.linalg_matrix_exp", lambda x: torch.matrix_exp(x[..., :6])),
    ("aten._trilinear", lambda x: F.bilinear(x, x, torch.ones(3, 8, 8))),
    ("aten.mm", lambda x: x.int()[0] @ x.int()[0].T),
    ("aten.mm", lambda x: torch.eye(6).to_sparse() @ x[0]),
]


def known(x, _):
    """Do what multiplies nothing: move, choose, make, normalize, pool, and lose numbers."""
    image = F.interpolate(x[:, None], size=(4, 4), mode="bilinear")
    normal = F.layer_norm(F.max_pool2d(image, 2), (2,)).softmax(-1)
    rows = torch.cat([x[x > 0].sort()[0].cumsum(0), torch.rand(3)]).topk(2)[0]
    loss = F.cross_entropy(x.flatten(0, 1), torch.arange(12) % 8)
    return F.glu(x) * (normal.sum() + rows.sum() + loss)


def test_flops_are_unknown_unless_an_operation_is_known_to_multiply_nothing(profile_of):
    for name, function in UNKNOWN:
        model = Calls(lambda x, _, function=function: [function(x), function(x)])
        assert profile_of(model, SHAPE, "forward").whole.unknown == [name]
    whole = profile_of(Calls(known), SHAPE).whole
    assert (whole.flops, whole.unknown) == ({}, [])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_unknown(profile_of):
    # Under a clock that sees operations, it does not run.
    model = Calls(lambda x, _: flex_attention(*3 * [x[:, None]]))
    whole = profile_of(model, SHAPE, "forward", clock=HOST).whole
    assert whole.unknown == ["higher_order.flex_attention"]
