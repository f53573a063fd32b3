"""FLOPs of operations and layers, compared with numbers calculated by hand.

x has 2 sequences of 6 tokens, so each weight of a projection is used 12 times. Two FLOPs
are a product that is added to a sum. Backward takes twice as many as forward: for the
gradients of the input, and of the weights.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from profiling.flops import flops_of
from torch import nn
from torch.utils.checkpoint import checkpoint

SHAPE = (2, 6, 8)
TOKENS = 12
SCORES = 2 * (1 + 2 + 3 + 4 + 5 + 6)  # causal, in both sequences


class Transposed(nn.Module):
    """Calls a convolution, whose channels are the second axis."""

    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x):
        return self.conv(x.mT).mT


class First(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


class Attention(nn.Module):
    def forward(self, x):
        q = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q[:, :1], q[:, :1], enable_gqa=True)


class Causal(nn.Module):
    def forward(self, x):
        x = x[:, None]
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


class Narrow(nn.Module):
    """Attends to 3 keys. Their values are half as wide."""

    def forward(self, x):
        x = x[:, None]
        return F.scaled_dot_product_attention(x, x[:, :, :3], x[:, :, :3, :4])


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 5, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.weight).real


class Products(nn.Module):
    """Matrix times vector, dot product, sums of products, products of batches."""

    def forward(self, x):
        matrix = x[0]  # (6, 8)
        vector = matrix @ matrix[0]
        added = torch.addmv(vector, matrix, matrix[1])
        number = torch.dot(vector, added)
        square = torch.addmm(matrix @ matrix.T, matrix, matrix.T)
        summed = torch.addbmm(square, x, x.mT)
        batch = torch.baddbmm(summed.expand(2, 6, 6), x, x.mT)
        return batch * number


def conv(*args, **options):
    return Transposed(nn.Conv1d(*args, **options))


# In a convolution over 6 positions, padded at both ends.
LAYER_AND_FLOPS = {
    "projection": (nn.Linear(8, 5), 2 * TOKENS * 8 * 5),
    "complex product": (Complex(), 8 * TOKENS * 8 * 5),
    "convolution": (conv(8, 4, 3, padding=1), 2 * TOKENS * 4 * 8 * 3),
    "with a stride": (conv(8, 4, 2, stride=2), 2 * (TOKENS // 2) * 4 * 8 * 2),
    "depthwise": (conv(8, 8, 3, padding=1, groups=8), 2 * TOKENS * 8 * 3),
    "grouped": (conv(8, 4, 3, padding=1, groups=2), 2 * TOKENS * 4 * 4 * 3),
    "transposed": (
        Transposed(nn.ConvTranspose1d(8, 4, 3, stride=2)),
        2 * TOKENS * 8 * 4 * 3,
    ),
    "transposed in groups": (
        Transposed(nn.ConvTranspose1d(8, 4, 3, stride=2, groups=4)),
        2 * TOKENS * 8 * 1 * 3,
    ),
    # Two matmuls of width 4 in two heads, and all 6 x 6 scores of two sequences.
    "attention": (Attention(), 2 * 2 * 2 * 2 * 36 * 4),
    "attention with narrow values": (Narrow(), 2 * 2 * 6 * 3 * (8 + 4)),
    "causal attention": (Causal(), 2 * 2 * SCORES * 8),
    # Four gates, each with a matrix of the input and one of the hidden numbers.
    "LSTM": (
        First(nn.LSTM(8, 5, batch_first=True)),
        2 * TOKENS * 4 * (5 * 8 + 5 * 5),
    ),
    "LSTM of two layers in both directions": (
        First(nn.LSTM(8, 5, 2, batch_first=True, bidirectional=True)),
        2 * TOKENS * 4 * 2 * ((5 * 8 + 5 * 5) + (5 * 10 + 5 * 5)),
    ),
}


@pytest.mark.parametrize("name", LAYER_AND_FLOPS)
def test_layer_takes_the_flops_of_its_formula(name, profile_of):
    layer, expected = LAYER_AND_FLOPS[name]
    assert profile_of(layer, SHAPE, "forward").whole.flops == {"float32": expected}
    assert profile_of(layer, SHAPE).whole.flops == {"float32": 3 * expected}


def test_products_take_two_flops_for_each_pair(profile_of):
    vectors = 2 * 6 * 8 * 2 + 2 * 6
    matrices = 2 * 6 * 8 * 6 * (1 + 1 + 2 + 2)
    found = profile_of(Products(), SHAPE, "forward").whole.flops
    assert found == {"float32": vectors + matrices}


def test_gru_and_rnn_need_no_gradient_of_their_first_state(profile_of):
    for layer, gates in ((nn.GRU, 3), (nn.RNN, 1)):
        model = First(layer(8, 5, batch_first=True))
        forward = 2 * TOKENS * gates * (5 * 8 + 5 * 5)
        found = profile_of(model, SHAPE, "forward").whole.flops
        assert found == {"float32": forward}
        backward = 2 * forward - 2 * 2 * gates * 5 * 5
        found = profile_of(model, SHAPE).whole.flops
        assert found == {"float32": forward + backward}


def encoder_layer(**options):
    return nn.TransformerEncoderLayer(8, 2, 24, batch_first=True, **options)


def test_fused_encoder_layer_takes_the_flops_of_its_parts(profile_of):
    weights = 4 * 8 * 8 + 2 * 8 * 24
    expected = 2 * TOKENS * weights + 2 * 2 * 2 * 36 * 8
    measured = profile_of(encoder_layer(), SHAPE, "forward")
    names = [operation.name for operation in measured.whole.operations]
    assert "_transformer_encoder_layer_fwd" in names
    assert measured.whole.flops == {"float32": expected}
    assert profile_of(encoder_layer(), SHAPE).whole.flops == {"float32": 3 * expected}


def test_fused_attention_takes_the_flops_of_its_parts(profile_of):
    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            return self.attend(x, x, x, need_weights=False)[0]

    measured = profile_of(Attend(), SHAPE, "forward")
    names = [operation.name for operation in measured.whole.operations]
    assert "_native_multi_head_attention" in names
    expected = 2 * TOKENS * 4 * 8 * 8 + 2 * 2 * 2 * 36 * 8
    assert measured.whole.flops == {"float32": expected}


def test_operations_in_inference_mode_are_counted(profile_of):
    class Inference(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        @torch.inference_mode()
        def forward(self, x):
            h = self.linear(x)[:, None]
            attended = F.scaled_dot_product_attention(h, h, h, is_causal=True)
            return torch.einsum("bhsd,bhtd->bhst", attended, h)

    attended = 2 * 2 * SCORES * 8
    expected = 2 * TOKENS * 8 * 8 + attended + 2 * 2 * 6 * 6 * 8
    found = profile_of(Inference(), SHAPE, "forward").whole.flops
    assert found == {"float32": expected}


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_computes_again(reentrant, profile_of):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(8, 16, bias=False)
            self.down = nn.Linear(16, 8, bias=False)

        def inside(self, x):
            return self.down(self.up(x))

        def forward(self, x):
            return checkpoint(self.inside, x, use_reentrant=reentrant)

    once = 2 * TOKENS * 8 * 16
    # Without reentry, the last product is not needed again.
    again = 2 if reentrant else 1
    found = profile_of(Checkpointed(), SHAPE).whole.flops
    assert found == {"float32": (3 * 2 + again) * once}


def test_frozen_weights_have_no_gradient(profile_of):
    frozen = nn.Linear(8, 5).requires_grad_(False)
    found = profile_of(nn.Sequential(frozen, nn.Linear(5, 8)), SHAPE).whole.flops
    assert found == {"float32": (2 + 3) * 2 * TOKENS * 5 * 8}
    frozen = conv(8, 4, 3, padding=1).requires_grad_(False)
    found = profile_of(frozen, SHAPE).whole.flops
    assert found == {"float32": 2 * 2 * TOKENS * 4 * 8 * 3}


def test_each_dtype_has_its_flops(profile_of):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.low = nn.Linear(8, 5)
            self.high = nn.Linear(5, 8)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                h = self.low(x)
            return self.high(h.float())

    once = 3 * 2 * TOKENS * 5 * 8
    found = profile_of(Mixed(), SHAPE).whole.flops
    assert found == {"bfloat16": once, "float32": once}


# The shapes of the arguments, and how many pairs of numbers are multiplied.
PRODUCTS: dict[str, tuple[dict[str, tuple[int, ...]], int]] = {
    "mm": ({"self": (3, 4), "mat2": (4, 5)}, 3 * 4 * 5),
    "bmm": ({"self": (2, 3, 4), "mat2": (2, 4, 5)}, 2 * 3 * 4 * 5),
    "mv": ({"self": (3, 4), "vec": (4,)}, 3 * 4),
    "dot": ({"self": (4,), "tensor": (4,)}, 4),
    "vdot": ({"self": (4,), "other": (4,)}, 4),
    "addmm": ({"self": (5,), "mat1": (3, 4), "mat2": (4, 5)}, 3 * 4 * 5),
    "_addmm_activation": ({"self": (5,), "mat1": (3, 4), "mat2": (4, 5)}, 3 * 4 * 5),
    "addmv": ({"self": (3,), "mat": (3, 4), "vec": (4,)}, 3 * 4),
    "baddbmm": (
        {"self": (2, 3, 5), "batch1": (2, 3, 4), "batch2": (2, 4, 5)},
        2 * 3 * 4 * 5,
    ),
    "addbmm": (
        {"self": (3, 5), "batch1": (2, 3, 4), "batch2": (2, 4, 5)},
        2 * 3 * 4 * 5,
    ),
}
IN_PLACE = ["addmm", "addmv", "baddbmm", "addbmm"]


@pytest.mark.parametrize("name", [*PRODUCTS, *(f"{name}_" for name in IN_PLACE)])
def test_operation_takes_two_flops_for_each_pair_that_it_multiplies(name):
    shapes, pairs = PRODUCTS[name.removesuffix("_")]
    schema = getattr(torch.ops.aten, name).default._schema
    assert shapes.keys() <= {each.name for each in schema.arguments}
    given = {argument: torch.empty(shape) for argument, shape in shapes.items()}
    assert flops_of(f"aten.{name}", given, None).count == 2 * pairs


def arguments_of(name, argument):
    """Return all arguments of one of torch's operations, each with the same value."""
    schema = getattr(torch.ops.aten, name).default._schema
    return {each.name: argument for each in schema.arguments}


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_kernels_of_attention_on_a_gpu_count_their_products(kernel):
    """Two products in forward, and four in backward, in 6 heads of width 8.

    Each head has 4 x 4 scores, of which 10 belong to a query and an earlier or equal key.
    """
    x = torch.empty(2, 3, 4, 8)
    for name, products in (("attention", 2), ("attention_backward", 4)):
        name = f"_scaled_dot_product_{kernel}_{name}"
        given = arguments_of(name, x) | {"is_causal": False}
        assert flops_of(f"aten.{name}", given, x).count == products * 2 * 6 * 16 * 8
        given["is_causal"] = True
        assert flops_of(f"aten.{name}", given, x).count == products * 2 * 6 * 10 * 8


def test_recurrent_layer_on_a_gpu_counts_its_matrices():
    """12 tokens meet 20 x 8 and 20 x 5 weights; the biases add no products."""
    weights = [torch.empty(20, 8), torch.empty(20, 5), torch.empty(20)]
    for name, passes in (("_cudnn_rnn", 1), ("_cudnn_rnn_backward", 2)):
        given = arguments_of(name, torch.empty(SHAPE)) | {"weight": weights}
        count = flops_of(f"aten.{name}", given, None).count
        assert count == passes * 2 * TOKENS * 20 * (8 + 5)


def grouped(left, right, ends):
    given = {
        "self": torch.empty(left),
        "mat2": torch.empty(right),
        "offs": torch.tensor(ends),
    }
    return flops_of("aten._grouped_mm", given, None).count


def test_experts_take_the_rows_that_they_get():
    # Of 7 rows, two groups get 2 and 3.
    assert grouped((7, 8), (2, 8, 5), [2, 5]) == 2 * 5 * 8 * 5
    # The gradient of their weights sums over the rows.
    assert grouped((8, 7), (7, 5), [2, 5]) == 2 * 8 * 5 * 5
    # Of 7 columns.
    assert grouped((2, 4, 8), (8, 7), [2, 5]) == 2 * 4 * 8 * 5
    same = {"self": torch.empty(2, 4, 8), "mat2": torch.empty(2, 8, 5)}
    assert flops_of("aten._grouped_mm", same, None).count == 2 * 2 * 4 * 8 * 5


@torch.library.custom_op("tests::copied", mutates_args=())
def copied(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


UNKNOWN: dict[str, tuple[Any, str]] = {
    "an operation of the user": (copied, "tests.copied"),
    "Fourier transform": (lambda x: torch.fft.rfft(x).real, "aten._fft_r2c"),
    "bilinear form": (
        lambda x: F.bilinear(x, x, torch.ones(3, 8, 8)),
        "aten._trilinear",
    ),
    "distances": (
        lambda x: torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist"),
        "aten._cdist_forward",
    ),
    "linear equations": (
        lambda x: torch.linalg.solve(torch.eye(6), x),
        "aten._linalg_solve_ex",
    ),
    "integers": (lambda x: x.int()[0] @ x.int()[0].T, "aten.mm"),
    "a sparse matrix": (lambda x: torch.eye(6).to_sparse() @ x[0], "aten.mm"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_flops_are_named(name, profile_of):
    function, expected = UNKNOWN[name]

    class Model(nn.Module):
        def forward(self, x):
            function(x)
            return function(x)

    unknown = profile_of(Model(), SHAPE, "forward").whole.unknown
    assert len(unknown) == 1
    assert unknown[0].replace("_sparse_addmm", "mm") == expected


def test_labels_and_references_of_torch_have_no_flops():
    x = torch.ones(2, 2)
    for name in ("profiler._record_function_enter_new", "prims.mul"):
        assert flops_of(name, {"self": x}, x).count == 0


PRODUCTS_WITHOUT_A_FORMULA = [
    "_int_mm",
    "_scaled_mm",
    "_weight_int4pack_mm",
    "_sparse_mm",
    "addr",
    "mkldnn_linear",
    "mkldnn_convolution",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "lstm",
    "gru",
    "_cdist_forward",
    "_pdist_forward",
    "_fft_c2c",
    "linalg_solve_triangular",
    "triangular_solve",
    "cholesky_inverse",
    "lu_unpack",
    "ormqr",
    "geqrf",
    "svd",
    "_linalg_eigh",
    "linalg_matrix_exp",
    "_trilinear",
]


@pytest.mark.parametrize("name", PRODUCTS_WITHOUT_A_FORMULA)
def test_product_without_a_formula_is_unknown(name):
    assert hasattr(torch.ops.aten, name)
    assert flops_of(f"aten.{name}", {"self": torch.ones(2, 2)}, None) is None


def test_operations_without_products_have_no_flops(profile_of):
    class Model(nn.Module):
        def forward(self, x):
            image = F.interpolate(x[:, None], size=(3, 4), mode="bilinear")
            normal = F.layer_norm(F.normalize(image, dim=-1), (4,))
            return F.embedding_bag(torch.arange(3)[None], normal[0, 0]).softmax(-1)

    whole = profile_of(Model(), SHAPE, "forward").whole
    assert (whole.flops, whole.unknown) == ({}, [])
