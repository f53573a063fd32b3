"""What a violation shows, which edits pass, and that the contract has no side effects."""

import re
from typing import Any

import pytest
import torch
from contract.copying import copy_layers, outcomes

from tinyblock.contract.loading import load

FLOAT64 = "equation and gradients in float64"
CUDA = "equation and gradients on CUDA"
FAST = (
    FLOAT64,
    "rms_norm",
    "apply_rope",
    "causality",
    "masks",
    "keys",
    "initial",
    "invalid h",
    "device",
    "any",
    "d_ff",
)
GATED = "self.w2(F.silu(self.w1(x)) * self.w3(x))"


@pytest.mark.parametrize(
    ("layer", "old", "new", "expected"),
    [
        (
            "block",
            "return x + _like(",
            "return _like(",
            r"Block\(24, 4, 40, rope=rotary\) of x of shape \(2, 7, 24\), seed 0, torch.float64: largest error "
            r"[\d.]+e\+00 at \[\d, \d, \d+\]: got -?[\d.]+, expected -?[\d.]+; allowed [\d.]+e-12$",
        ),
        (
            "ffn",
            GATED,
            "x[..., :3]",
            r"SwiGLU\(5, 7\) of .*: got shape \(2, 3, 3\), expected \(2, 3, 5\)$",
        ),
        (
            "ffn",
            GATED,
            "x[9]",
            r"SwiGLU\(5, 7\) of .*seed 0, torch.float64: IndexError: .* \(ffn.py, line \d+\)$",
        ),
        (
            "attention",
            "(mask & causal)",
            "mask",
            r".*seed 0, mask of shape \(2, 7, 7\), torch.float64: largest",
        ),
    ],
)
def test_a_violation_shows_input_result_and_expected_result(
    layer, old, new, expected, tmp_path
):
    violations, _ = outcomes(
        load(copy_layers(tmp_path, edits=[(layer, old, new)])), layer, FLOAT64
    )
    assert any(re.match(expected, message) for message in violations.values()), (
        violations
    )


def test_edits_that_change_no_behavior_pass(tmp_path):
    copy_layers(
        tmp_path,
        edits=[("rope", "Compute the table.", "Compute the table, since May.")],
    )
    text = (tmp_path / "rope.py").read_text()
    function = text[
        text.index("def apply_rope") : text.index("class RotaryPositionalEmbedding")
    ]
    text = (
        text.replace(function, "")
        .replace(', "apply_rope"', "")
        .replace("cos_sin", "turns")
    )
    (tmp_path / "rope.py").write_text(text)
    ffn = (tmp_path / "ffn.py").read_text()
    (tmp_path / "ffn.py").write_text(ffn.replace("FeedForward", "TwoLayers"))
    modules = load(tmp_path)
    assert outcomes(modules, "rope", FAST) == ({}, {"apply_rope is not in this copy"})
    assert outcomes(modules, "ffn", FAST) == ({}, {"FeedForward is not in this copy"})
    assert outcomes(modules, "block", FAST) == ({}, {"FeedForward is not in this copy"})


@pytest.mark.parametrize(
    ("option", "passed", "default"),
    [
        (
            "num_kv_heads: int | None = None",
            '"num_kv_heads": num_kv_heads',
            '"num_kv_heads": None',
        ),
        ("qk_norm: bool = False", '"qk_norm": qk_norm', '"qk_norm": False'),
        ("eps: float = 1e-5", "eps=eps", "eps=1e-5"),
        ("mask: Any = None", "token_positions, mask),", "token_positions),"),
        ("rope: Rope | None = None", "rope=rope", "rope=None"),
        ("norm: Callable[..., nn.Module] = RMSNorm", "norm(", "RMSNorm("),
    ],
)
def test_a_copy_may_drop_an_option_and_the_rest_is_still_checked(
    option, passed, default, tmp_path
):
    text = (copy_layers(tmp_path) / "block.py").read_text()
    assert text.count(f"        {option},\n") == 1
    text = text.replace(f"        {option},\n", "").replace(passed, default)
    (tmp_path / "block.py").write_text(text)
    owner, name = (
        "Block.forward" if passed.startswith("token") else "Block",
        option.partition(":")[0],
    )
    assert outcomes(load(tmp_path), "block", FAST) == (
        {},
        {f"{owner} has no {name} in this copy"},
    )
    (tmp_path / "block.py").write_text(
        text.replace("return x + _like(", "return _like(")
    )
    violations, _ = outcomes(load(tmp_path), "block", FLOAT64)
    assert violations


def test_a_copy_may_drop_device_and_dtype(tmp_path):
    text = (
        (copy_layers(tmp_path, "rmsnorm") / "rmsnorm.py")
        .read_text()
        .replace(", device=device, dtype=dtype", "")
    )
    (tmp_path / "rmsnorm.py").write_text(
        re.sub(r"        device: .*\n        dtype: .*\n", "", text)
    )
    missing = {
        "RMSNorm has no device in this copy",
        "RMSNorm has no dtype in this copy",
    }
    assert outcomes(load(tmp_path), "rmsnorm", FAST) == ({}, missing)


def test_a_transformer_may_have_equal_masks_and_a_table_in_float64(tmp_path):
    table = "torch.empty(shape, device=device, dtype=torch.float32)"
    size = "        self.d_model, self.max_seq_len = d_model, max_seq_len\n"
    mask = "        self.register_buffer('{}', torch.ones(9, 9, dtype=torch.bool).tril(), persistent=False)\n"
    masks = mask.format("causal") + mask.format("seen")
    edits = [
        ("rope", table, table.replace("float32", "float64")),
        ("transformer", size, size + masks),
    ]
    modules = load(copy_layers(tmp_path, edits=edits))
    assert outcomes(modules, "transformer", ("one table", "device and dtype")) == (
        {},
        set(),
    )


def test_the_equation_is_checked_on_cuda_where_there_is_one(monkeypatch, tmp_path):
    """Here another device stands for it: that of the CPU, by the name of cuda."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for moved in (torch.Tensor, torch.nn.Module):
        to: Any = moved.to
        monkeypatch.setattr(
            moved,
            "to",
            lambda self, *a, to=to, **k: to(
                self, *("cpu" if w == "cuda" else w for w in a), **k
            ),
        )
    assert outcomes({}, "rmsnorm", CUDA) == ({}, set())
    norm = "F.rms_norm(x, (self.d_model,), weight"
    broken = load(copy_layers(tmp_path, edits=[("rmsnorm", norm, f"{norm} + 1e-3")]))
    violations, _ = outcomes(broken, "rmsnorm", CUDA)
    assert re.search(r"seed 0, torch.float64, on cuda: largest error", violations[CUDA])


def test_a_property_leaves_the_random_numbers_and_the_mode_of_its_caller_alone():
    before = torch.get_rng_state()
    with torch.no_grad():
        assert outcomes({}, "rmsnorm", ("initial weights", FLOAT64)) == ({}, set())
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_layer_with_dropout_is_checked_in_eval_mode(tmp_path):
    edit = ("ffn", GATED, f"F.dropout({GATED}, 0.1, self.training)")
    assert outcomes(
        load(copy_layers(tmp_path, edits=[edit])), "ffn", f"{FLOAT64} (SwiGLU)"
    ) == ({}, set())
