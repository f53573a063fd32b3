"""The errors that docs/exactness.md reports: the exact result, the order of the weights, the units, and the tables."""

import cmath

import exactness
import pytest
import torch
from peers import errors, rotations
from peers.measuring import make_block

pytestmark = pytest.mark.filterwarnings("ignore")  # of the peers, which this project cannot fix
CPU, SIZE = torch.device("cpu"), errors.SIZE


@pytest.fixture(scope="module")
def measured():
    return errors.measure(CPU, quick=True)


def test_error_is_in_units_of_eps():
    exact = torch.tensor([1.0, 2.0, -4.0], dtype=torch.float64)
    eps = torch.finfo(torch.bfloat16).eps
    assert errors.error(exact * (1 + eps), exact, torch.bfloat16) == pytest.approx((1, 1))
    assert errors.error(exact + eps * torch.tensor([0.0, 0.0, 2.0]), exact, torch.bfloat16)[1] == pytest.approx(0.5)
    assert errors.error(exact * torch.tensor([1, 1, torch.nan]), exact, torch.bfloat16) == (torch.inf, torch.inf)


def test_exact_rotation_is_that_of_complex_numbers():
    x, position = torch.randn(1, 1, 1, SIZE.d_head, dtype=torch.float64), 1_000_003
    rotation = rotations.exact(SIZE.theta, SIZE.d_head, position + 1)
    actual = rotation(x, torch.tensor([position])).flatten().tolist()
    for pair in range(SIZE.d_head // 2):
        angle = position * SIZE.theta ** (-2 * pair / SIZE.d_head)
        rotated = complex(*x.flatten()[2 * pair : 2 * pair + 2].tolist()) * cmath.exp(1j * angle)
        assert actual[2 * pair : 2 * pair + 2] == pytest.approx([rotated.real, rotated.imag], abs=1e-8)


@pytest.mark.parametrize("project", ["tinyblock", "torch.nn", "Hugging Face", "litgpt", "torchtune", "x-transformers"])
def test_gradients_of_the_weights_have_the_order_of_the_block(project):
    peer, _ = errors.PROJECTS[project]
    assert peer
    block, x = make_block(SIZE, torch.float64, CPU, seed=0)
    gradient = torch.randn_like(x)
    try:
        layers = errors.layers_of(peer, [block])
    except ImportError as error:
        pytest.skip(str(error))

    def norm(x):
        return torch.einsum("...m,m->...m", x * (x.pow(2).mean(-1, keepdim=True) + SIZE.eps).rsqrt(), block.ln1.weight)

    def swiglu(x):
        gate, up = (torch.einsum("fm,...m->...f", w.weight, x) for w in (block.ffn.w1, block.ffn.w3))
        return torch.einsum("mf,...f->...m", block.ffn.w2.weight, gate * torch.sigmoid(gate) * up)

    def attention(x):
        attn = block.attn
        q, k, v = (torch.einsum("nm,bsm->bsn", p.weight, x) for p in (attn.q_proj, attn.k_proj, attn.v_proj))
        q, k, v = (each.unflatten(-1, (SIZE.num_heads, -1)) for each in (q, k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / SIZE.d_head**0.5
        shares = scores.masked_fill(torch.ones(2 * (SIZE.seq_len,)).triu(1).bool(), -torch.inf).softmax(-1)
        attended = torch.einsum("bhqk,bkhd->bqhd", shares, v).flatten(-2)
        return torch.einsum("mn,...n->...m", attn.output_proj.weight, attended)

    formulas = {"RMSNorm": norm, "SwiGLU": swiglu, "attention without RoPE": attention}
    assert formulas.keys() & layers.keys()
    for section in formulas.keys() & layers.keys():
        leaf = x.clone().requires_grad_()
        y = formulas[section](leaf)
        inputs = [leaf, *block.parameters()]
        dx, *dw = torch.autograd.grad(y, inputs, gradient, allow_unused=True, materialize_grads=True)
        weights = torch.cat([each.flatten() for each in dw])[layers[section].places]
        expected = {"forward": y.detach(), "gradient of x": dx, "gradient of the weights": weights}
        for what, actual in layers[section].passes(x, gradient).items():  # some projects compute norms in float32
            assert (actual - expected[what]).norm() < 1e-6 * expected[what].norm(), (section, what)


def test_measured_errors_are_those_of_known_roundings(measured):
    def rms(*key):
        return exactness.rms(measured[key])

    assert all(0 < error < 12 for key, pairs in measured.items() if "RoPE" not in key[0] for error, _ in pairs), (
        measured
    )
    for what in errors.PASSES:  # rounded once, at the end
        assert rms("RMSNorm", "bfloat16", "tinyblock", what) < 1.01 * rms("RMSNorm", "bfloat16", errors.ROUNDED, what)
    twice = ("RMSNorm", "bfloat16", "Hugging Face", "forward")
    if twice in measured:
        assert 1.2 < rms(*twice) / rms("RMSNorm", "bfloat16", errors.ROUNDED, "forward") < 1.6
    at = "RoPE at 2,048"  # angles in float32 are off by up to half an eps of each position
    assert rms(at, "float32", "tinyblock", "forward") < 0.5
    assert 50 < rms(at, "float32", "Meta", "forward") < 500


def test_page_shows_ranges_ratios_and_who_is_closer():
    ours, theirs = [(1.0, 2.0), (1.5, 1.0), (1.25, 3.0)], [(1.0, 2.0)]
    measured = {("RMSNorm", dtype, "tinyblock", "forward"): ours for dtype in errors.DTYPES}
    measured |= {("RMSNorm", "float32", "litgpt", "forward"): theirs}
    measured |= {("RMSNorm", "bfloat16", "litgpt", "forward"): [(2.5, 2.0)]}
    measured |= {("RMSNorm", "float16", "litgpt", "forward"): [(torch.inf, torch.inf)]}
    page = exactness.page(measured, {"device": "a device", "commit": "abc"})
    lines = [" ".join(line.replace("|", " ").split()) for line in page.splitlines()]
    assert lines[0].startswith("Measured on a device, with torch ")
    assert "RMSNorm 0.00-1.25" in lines
    assert "tinyblock 1.25 (1.00-1.50), 3.00" in lines
    assert {"litgpt **1.00, 2.00**", "litgpt 2.50, 2.00", "litgpt not finite"} <= set(lines)


def test_write_requires_a_page_with_the_mark(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("my notes")
    with pytest.raises(SystemExit, match="2"):
        exactness.main(["--write", str(page)])
    assert "--write must be a page with the line <!-- scripts/exactness.py" in capsys.readouterr().err
    assert page.read_text() == "my notes"
