"""Layers that are not tinyblock's: right ones have no failure, wrong ones have theirs."""

import re
import shutil
from pathlib import Path

import pytest
from defects import Defect
from forked import verify

SOLUTIONS = Path(__file__).parent / "solutions"


@pytest.mark.parametrize("name", ["real_tables", "complex_tables", "torch_functions"])
def test_a_right_solution_has_no_failures(name):
    code, report = verify(SOLUTIONS / name, "-vv")
    assert code == 0, report
    for file in (SOLUTIONS / name).glob("*.py"):
        equation = rf"test_{file.stem}\.py::\w+::test_equation\[cpu-float32\] PASSED"
        assert re.search(equation, report), report


DEFECTS = {
    "a table of the last instance": Defect(
        "rope",
        "self.register_buffer(",
        "(lambda name, table, **_: setattr(RotaryPositionalEmbedding, name, table))(",
        "test_each_instance_has_its_own_table",
    ),
    "detached v": Defect(
        "attention",
        "v = rearrange(self.v_proj(x)",
        "v = rearrange(self.v_proj(x).detach()",
        "test_equation",
    ),
    "two roundings": Defect(
        "rmsnorm",
        "result = x / rms * self.weight",
        "result = (x / rms).to(in_dtype) * self.weight",
        "test_rounds_once",
    ),
    "a wrong name of a weight": Defect(
        "ffn",
        "self.w3",
        "self.v",
        "test_equation",
    ),
    "an axis for heads that must be there": Defect(
        "attention",
        '"... q d, ... k d -> ... q k"',
        '"b h q d, b h k d -> b h q k"',
        "test_equation",
    ),
    "a softmax without the maximum": Defect(
        "attention",
        "return exponentials / exponentials.sum(dim, keepdim=True)",
        "return (x.double().exp() / x.double().exp().sum(dim, keepdim=True)).float()",
        "test_large_scores_do_not_overflow",
    ),
    "dropout": Defect(
        "ffn",
        "return self.w2(",
        "return nn.functional.dropout(torch.tensor(1.0), 0.5, self.training) * self.w2(",
        "test_calls_change_nothing",
    ),
    "a kept axis": Defect(
        "rope",
        "return rotated.flatten(-2)",
        "return rotated.flatten(-2)[None]",
        "test_equation",
    ),
    "a mask that shows the next token": Defect(
        "attention",
        ".tril()",
        ".tril(1)",
        "test_later_tokens_change_nothing",
    ),
    "squares in float16": Defect(
        "rmsnorm",
        "x = x.to(torch.float32)",
        "x = x.to(self.weight.dtype)",
        "test_rounds_once",
    ),
    "a sigmoid that overflows": Defect(
        "ffn",
        "gate * torch.sigmoid(gate)",
        "gate * gate.exp() / (1 + gate.exp())",
        "test_equation",
    ),
    "a cache that ignores max_seq_len": Defect(
        "rope",
        '        self.register_buffer("cos"',
        "        tables = RotaryPositionalEmbedding.__dict__.get('tables', {})\n"
        "        RotaryPositionalEmbedding.tables = tables\n"
        "        angles = tables.setdefault((theta, d_k), angles)\n"
        '        self.register_buffer("cos"',
        "test_each_instance_has_its_own_table",
    ),
    "no rotation without positions": Defect(
        "attention",
        "if self.rope is not None:",
        "if self.rope is not None and token_positions is not None:",
        "test_positions_are_0_1_2_if_none_are_passed",
    ),
    "an input that is overwritten": Defect(
        "rmsnorm",
        "x = x.to(torch.float32)",
        "x, inputs = x.to(torch.float32, copy=True), x\n        inputs.data.zero_()",
        "test_calls_change_nothing",
    ),
    "an operation that torch lacks": Defect(
        "ffn",
        "gate = self.w1(x)",
        "gate = self.w1(x)\n        (x > 0).logcumsumexp(0)",
        "test_equation",
    ),
    "a backward pass that writes into positions": Defect(
        "rope",
        "        cos, sin = ",
        "        if x.requires_grad:\n"
        "            x.register_hook(lambda gradient: (token_positions.zero_(), gradient)[1])\n"
        "        cos, sin = ",
        "test_calls_change_nothing",
    ),
    "a window of 64 tokens": Defect(
        "attention",
        ".tril()",
        ".tril().triu(-63)",
        "test_equation",
    ),
    "a masked score that is not the least": Defect(
        "attention",
        'float("-inf")',
        "-1e4",
        "test_large_scores_do_not_overflow",
    ),
    "a class of another name": Defect(
        "rmsnorm",
        "class RMSNorm",
        "class Norm",
        "test_layer_is_defined",
    ),
    "a result without a gradient": Defect(
        "ffn",
        "gate = self.w1(x)",
        "return self.w2(torch.sigmoid(self.w1(x)) * self.w1(x) * self.w3(x)).detach()",
        "test_equation",
    ),
    "an x that must have a batch axis": Defect(
        "rope",
        "        cos, sin = ",
        "        batch, *_, seq, d_k = x.shape\n        cos, sin = ",
        "test_equation",
    ),
    "a mask that is required": Defect(
        "attention",
        "if mask is not None:",
        "if True:",
        "test_equation",
    ),
    "a uniform variable": Defect(
        "ffn",
        "nn.init.trunc_normal_(self.weight, std=std, a=-3 * std, b=3 * std)",
        "nn.init.uniform_(self.weight, -1.71 * std, 1.71 * std)",
        "test_initial_weights",
    ),
    "another standard deviation": Defect(
        "attention",
        "self.num_heads = num_heads",
        "self.num_heads = num_heads\n"
        "        nn.init.normal_(self.q_proj.weight, std=0.16)",
        "test_initial_weights",
    ),
    "gains that differ": Defect(
        "rmsnorm",
        "torch.ones(d_model",
        "torch.linspace(1, 2, d_model",
        "test_initial_weights",
    ),
    "a normal variable that is not cut": Defect(
        "ffn",
        "nn.init.trunc_normal_(self.weight, std=std, a=-3 * std, b=3 * std)",
        "nn.init.normal_(self.weight, std=std)",
        "test_initial_weights",
    ),
    "a dtype of the gains": Defect(
        "rmsnorm",
        "return result.to(in_dtype)",
        "return result.to(self.weight.dtype)",
        "test_gains_of_another_dtype",
    ),
    "a frozen weight": Defect(
        "ffn",
        "self.w3 = Linear(d_model, d_ff)",
        "self.w3 = Linear(d_model, d_ff).requires_grad_(False)",
        "test_equation",
    ),
    "a weight that is not in the equation": Defect(
        "ffn",
        "self.w3 = Linear(d_model, d_ff)",
        "self.w3 = Linear(d_model, d_ff)\n"
        "        self.b1 = nn.Parameter(torch.zeros(d_ff))",
        "test_equation",
    ),
    "another name of a part": Defect("block", "self.attn", "self.mha", "test_equation"),
    "an error of the gradient that changes no sum": Defect(
        "ffn",
        "return self.w2(gate * torch.sigmoid(gate) * self.w3(x))",
        "y = self.w2(gate * torch.sigmoid(gate) * self.w3(x))\n"
        "        return y + 1e-3 * ((y - y.mean()) - (y - y.mean()).detach())",
        "test_equation",
    ),
    "a width that is rounded up": Defect(
        "ffn",
        "super().__init__()\n        self.w1",
        "super().__init__()\n        d_ff = -(-d_ff // 64) * 64\n        self.w1",
        "test_equation",
        "w1.weight must have the shape (100, 24), got (128, 24)",
    ),
    "weights of the transposed shape": Defect(
        "ffn",
        "torch.empty(d_out, d_in))\n"
        "        std = (2 / (d_in + d_out)) ** 0.5\n"
        "        nn.init.trunc_normal_(self.weight, std=std, a=-3 * std, b=3 * std)\n\n"
        "    def forward(self, x):\n"
        "        return x @ self.weight.T",
        "torch.empty(d_in, d_out))\n\n"
        "    def forward(self, x):\n"
        "        return x @ self.weight",
        "test_equation",
        "w1.weight must have the shape (64, 24), got (24, 64)",
    ),
    "a gradient of NaN below -88": Defect(
        "ffn",
        "gate * torch.sigmoid(gate)",
        "gate / (1 + torch.exp(-gate))",
        "test_equation",
    ),
    "a mask of the first call": Defect(
        "attention",
        "        causal = torch.ones(x.shape[-2], x.shape[-2]).tril().bool()\n",
        "        if not hasattr(self, 'mask'):\n"
        "            self.mask = torch.ones(x.shape[-2], x.shape[-2]).tril().bool()\n"
        "        causal = self.mask[: x.shape[-2], : x.shape[-2]]\n",
        "test_earlier_calls_change_nothing",
    ),
    "positions of the first call": Defect(
        "attention",
        "            token_positions = token_positions.unsqueeze(-2)\n",
        "            if not hasattr(self, 'positions'):\n"
        "                self.positions = token_positions\n"
        "            if self.positions.shape == token_positions.shape:\n"
        "                token_positions = self.positions\n"
        "            token_positions = token_positions.unsqueeze(-2)\n",
        "test_earlier_positions_change_nothing",
    ),
    "a table in the dtype of the first call": Defect(
        "rope",
        "        cos, sin = ",
        "        self.cos, self.sin = self.cos.to(x.dtype), self.sin.to(x.dtype)\n"
        "        cos, sin = ",
        "test_earlier_calls_change_nothing",
    ),
    "a result that the first call without gradients keeps": Defect(
        "rmsnorm",
        "result = x / rms * self.weight",
        "self.scale = getattr(self, 'scale', self.weight * 1)\n"
        "        result = x / rms * self.scale",
        "test_earlier_calls_change_nothing",
    ),
    "a window of 1,024 tokens": Defect(
        "attention",
        ".tril()",
        ".tril().triu(-1023)",
        "test_long_sequence",
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_noticed(name, tmp_path):
    folder = tmp_path / "layers"
    shutil.copytree(SOLUTIONS / "real_tables", folder)
    DEFECTS[name].require_failure(folder)
