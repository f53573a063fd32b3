"""examples/cs336 judges solutions by the functions of their tests/adapters.py."""

import os
import re
import sys
from pathlib import Path

import pytest
from contract import solutions

from tinyblock import copies

EXAMPLE = Path(__file__).parents[2] / "examples" / "cs336"
ADAPTERS = """
from torch.func import functional_call
from solution.attention import CausalMultiHeadSelfAttention, scaled_dot_product_attention
from solution.block import Block
from solution.ffn import SwiGLU
from solution.rmsnorm import RMSNorm
from solution.rope import RotaryPositionalEmbedding

def run_silu(in_features):
    return in_features * in_features.sigmoid()

def run_rmsnorm(d_model, eps, weights, in_features):
    return functional_call(RMSNorm(d_model, eps), {"weight": weights}, in_features)

def run_swiglu(d_model, d_ff, w1_weight, w2_weight, w3_weight, in_features):
    state = {"w1.weight": w1_weight, "w2.weight": w2_weight, "w3.weight": w3_weight}
    return functional_call(SwiGLU(d_model, d_ff), state, in_features)

def run_rope(d_k, theta, max_seq_len, in_query_or_key, token_positions):
    return RotaryPositionalEmbedding(theta, d_k, max_seq_len)(in_query_or_key, token_positions)

def run_scaled_dot_product_attention(Q, K, V, mask=None):
    return scaled_dot_product_attention(Q, K, V, mask)

def run_multihead_self_attention_with_rope(
    d_model, num_heads, max_seq_len, theta, q_proj_weight, k_proj_weight, v_proj_weight,
    o_proj_weight, in_features, token_positions=None, rope=True,
):
    if rope:
        rope = RotaryPositionalEmbedding(theta, d_model // num_heads, max_seq_len)
    layer = CausalMultiHeadSelfAttention(d_model, num_heads, rope or None)
    state = {
        "q_proj.weight": q_proj_weight,
        "k_proj.weight": k_proj_weight,
        "v_proj.weight": v_proj_weight,
        "output_proj.weight": o_proj_weight,
    }
    return functional_call(layer, state, (in_features, token_positions))

def run_multihead_self_attention(**inputs):
    return run_multihead_self_attention_with_rope(
        **inputs, max_seq_len=None, theta=None, rope=False
    )

def run_transformer_block(d_model, num_heads, d_ff, max_seq_len, theta, weights, in_features):
    rope = RotaryPositionalEmbedding(theta, d_model // num_heads, max_seq_len)
    return functional_call(Block(d_model, num_heads, d_ff, rope), weights, in_features)
"""
DEFECTS = {
    "attention": ("            token_positions = token_positions.unsqueeze(-2)\n", ""),
    "ffn": ("gate = self.w1(x)", "gate = self.w3(x)"),
    "rmsnorm": ("x = x.to(torch.float32)", "pass"),
}


@pytest.fixture
def verify(tmp_path, monkeypatch, capfd):
    """Return a function that judges a solution with these defects: exit code, output."""

    def verify(defects):
        for name in ("tests", "solution"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").touch()
        (tmp_path / "tests" / "adapters.py").write_text(ADAPTERS)
        files = dict(solutions.RIGHT["real tables"])
        for name, (right, wrong) in defects.items():
            assert right in files[name]
            files[name] = files[name].replace(right, wrong)
        solutions.write(files, tmp_path / "solution")
        paths = [str(tmp_path), *sys.path]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
        return copies.main(["verify", str(EXAMPLE)]), capfd.readouterr().out

    return verify


def test_a_right_solution_has_no_failures(verify):
    code, report = verify({})
    assert code == 0, report
    assert "no case" not in report


def test_three_defects_are_found_on_one_screen(verify):
    code, report = verify(DEFECTS)
    assert code == 1
    assert len(report.splitlines()) <= 24, report
    pattern = r"^FAILED (\w+): test_\w+, [1-9]\d* of \d+, first \[.*\]: ."
    failed = re.findall(pattern, report, re.MULTILINE)
    assert set(failed) == {"attention", "block", "ffn", "rmsnorm"}, report
    assert re.search("FAILED attention: test_equation.*positions", report), report
