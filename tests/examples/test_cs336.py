"""examples/cs336 judges solutions by the functions of their tests/adapters.py."""

import os
import re
import subprocess
import sys
from pathlib import Path

from contract import solutions

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


def verify(folder, defects):
    """Write a solution with these defects, and return the exit code and the output."""
    for name in ("tests", "solution"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").touch()
    (folder / "tests" / "adapters.py").write_text(ADAPTERS)
    files = dict(solutions.RIGHT["real tables"])
    for name, (right, wrong) in defects.items():
        assert right in files[name]
        files[name] = files[name].replace(right, wrong)
    solutions.write(files, folder / "solution")
    paths = [str(folder), *sys.path]
    done = subprocess.run(
        [sys.executable, "-m", "tinyblock", "verify", EXAMPLE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=EXAMPLE.parents[1],
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout


def test_a_right_solution_has_no_failures(tmp_path):
    code, report = verify(tmp_path, {})
    assert code == 0, report
    assert "no case" not in report


def test_three_defects_are_found_on_one_screen(tmp_path):
    code, report = verify(tmp_path, DEFECTS)
    lines = report.splitlines()
    assert (code, len(lines) <= 24) == (1, True), report
    failed = {line.partition(":")[0] for line in lines if line.startswith("FAILED")}
    assert failed == {
        f"FAILED {name}" for name in ("attention", "block", "ffn", "rmsnorm")
    }
    for name in failed:
        pattern = rf"{name}: test_\w+, [1-9]\d* of \d+, first \[.*\]: ."
        assert any(re.match(pattern, line) for line in lines), name
    [positions] = [line for line in lines if "FAILED attention: test_equation" in line]
    assert "positions" in positions
