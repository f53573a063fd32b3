"""The contract notices what breaks a promise of tinyblock in a copy of a layer."""

import pytest
from defects import Defect

from tinyblock import copies

LAYERS = ["rmsnorm", "ffn", "rope", "attention", "block", "transformer"]


def graphs_with(statement):
    """Return a defect of compilation: a statement before those of RMSNorm's forward."""
    first = "        weight = self.weight  #"
    wrong = f"        {statement}\n{first}"
    return Defect("rmsnorm", first, wrong, "test_compiles_to_one_graph")


DEFECTS = {
    # Code that reads a number is missing: it fails in test_built_on_meta.
    "a function that is not compiled": graphs_with(
        "x = torch.compiler.disable(torch.neg)(-x)"
    ),
    "a loop over tokens": graphs_with("for _ in range(x.shape[-2]): x = x + 0"),
    "another result for several tokens when compiled": graphs_with(
        "x = -x if torch.compiler.is_compiling() and x.shape[-2] > 1 else x"
    ),
    "a result on the CPU for meta": Defect(
        "rmsnorm",
        "weight = self.weight  #",
        "if x.is_meta:\n"
        "            return torch.empty(x.shape, dtype=x.dtype)\n"
        "        weight = self.weight  #",
        "test_built_on_meta",
    ),
    "gains on the CPU by default": Defect(
        "rmsnorm",
        "        eps: float = 1e-5,\n        device: torch.device | str | None = None",
        "        eps: float = 1e-5,\n        device: torch.device | str | None = 'cpu'",
        "test_built_on_the_default_device",
    ),
    "an eps that may be infinite": Defect(
        "rmsnorm",
        "if not 0 < eps < math.inf:",
        "if not 0 < eps:",
        "test_rejects_options",
    ),
    "gains that are not trained": Defect(
        "rmsnorm",
        "torch.empty(d_model, device=device, dtype=dtype))",
        "torch.empty(d_model, device=device, dtype=dtype), False)",
        "test_initial_weights",
    ),
    "an eps that the function ignores": Defect(
        "rmsnorm",
        "torch.rsqrt(mean_square + eps)",
        "torch.rsqrt(mean_square + 1e-5)",
        "test_equation",
    ),
    "gains that are rounded to the dtype of x": Defect(
        "rmsnorm",
        "wide = torch.promote_types(x.dtype, weight.dtype)",
        "wide = x.dtype",
        "test_gains_of_another_dtype",
    ),
    "weights that are cut at 2 sigma": Defect(
        "ffn",
        "a=-3 * std, b=3 * std",
        "a=-2 * std, b=2 * std",
        "test_initial_weights",
    ),
    "an activation that cannot be pickled": Defect(
        "ffn",
        "self.activation = activation",
        "self.activation = lambda x: activation(x)",
        "test_built_on_meta",
    ),
    "a width that is rounded down": Defect(
        "ffn",
        "(d_model + 12) // 24",
        "d_model // 24",
        "test_default_d_ff_is_the_multiple_of_64_nearest_to_8_thirds",
    ),
    "an activation that is ignored": Defect(
        "ffn",
        "self.activation(self.w1(x))",
        "F.gelu(self.w1(x))",
        "test_equation",
    ),
    "a function that detaches its result": Defect(
        "ffn",
        "return F.silu(x)",
        "return F.silu(x).detach()",
        "test_equation",
    ),
    "a little noise in training": Defect(
        "ffn",
        "F.silu(self.w1(x)) * self.w3(x)",
        "F.silu(self.w1(x)) * self.w3(x) * (1 + 1e-6 * self.training)",
        "test_calls_change_nothing",
    ),
    "a wrong path for some strides": Defect(
        "rope",
        "numbers = torch.complex(*pairs.unbind(-1))",
        "numbers = torch.complex(*pairs.unbind(-1)).conj()",
        "test_any_strides",
    ),
    "a table in the state dict": Defect(
        "rope",
        "persistent=False",
        "persistent=True",
        "test_built_on_meta",
    ),
    "a table that is not reset": Defect(
        "rope",
        "self.cos_sin.copy_(self._compute_table())",
        "pass",
        "test_reset_parameters",
    ),
    "angles in float32": Defect(
        "rope",
        "torch.stack((angles.cos(), angles.sin()), dim=-1).float()",
        "torch.stack((angles.float().cos(), angles.float().sin()), dim=-1)",
        "test_table_is_exact_at_far_positions",
    ),
    "negative positions that count from the end of the table": Defect(
        "rope",
        "F.embedding(token_positions, table.flatten(1))",
        "table.flatten(1)[token_positions]",
        "test_rejects_positions_out_of_range_and_not_integers",
    ),
    "positions of int32 that raise an error": Defect(
        "rope",
        "        if token_positions is None:\n            seq",
        "        assert token_positions is None or token_positions.dtype == torch.int64\n"
        "        if token_positions is None:\n"
        "            seq",
        "test_equation",
    ),
    "norms of heads that ignore eps": Defect(
        "attention",
        "HeadNorm(d_head, eps, ",
        "HeadNorm(d_head, 1e-5, ",
        "test_equation",
    ),
    "an output projection that requires heads of d_model / num_heads": Defect(
        "attention",
        "self.output_proj = Linear(q_width, d_model",
        "self.output_proj = Linear(d_model, d_model",
        "test_equation",
    ),
    "queries that are taken for the first tokens among the keys": Defect(
        "attention",
        "elif mask is None and query == 1:",
        "elif mask is None:",
        "test_attend_takes_queries_of_the_last_tokens",
    ),
    "keys that RoPE may return in another shape": Defect(
        "attention",
        "k = _require_shape_of(k, rope(k, token_positions))",
        "k = rope(k, token_positions)",
        "test_rejects_a_rope_that_changes_the_shape",
    ),
    "a warning under autocast": Defect(
        "attention",
        "F.rms_norm(x.to(wide), ",
        "F.rms_norm(x, ",
        "test_equation_under_autocast",
    ),
    "a NotImplementedError, which is not left to write in a copy": Defect(
        "rmsnorm",
        "        weight = self.weight  #",
        "        raise NotImplementedError\n        weight = self.weight  #",
        "test_equation",
    ),
    "an error that does not show the value": Defect(
        "attention",
        "at least 1, got {d_head}",
        "at least 1",
        "test_rejects_options",
    ),
    "a TypeError in place of a ValueError": Defect(
        "rope",
        'raise ValueError(f"max_seq_len must',
        'raise TypeError(f"max_seq_len must',
        "test_rejects_options",
    ),
    "a table that must not be full": Defect(
        "rope",
        "if seq > self.max_seq_len:",
        "if seq >= self.max_seq_len:",
        "test_equation",
    ),
    "frequencies that cannot be overridden": Defect(
        "rope",
        "self.frequencies().view(",
        "RotaryPositionalEmbedding.frequencies(self).view(",
        "test_frequencies_may_be_overridden",
    ),
    "queries in another dtype": Defect(
        "attention",
        "self.q_proj = Linear(d_model, q_width, bias=False, **factory)",
        "self.q_proj = Linear(d_model, q_width, bias=False, device=device)",
        "test_built_on_meta",
    ),
    "one position for all tokens": Defect(
        "attention",
        '"... seq -> ... 1 seq", seq=x.shape[-2]',
        '"... seq -> ... 1 seq"',
        "test_rejects_one_position_for_all_tokens",
    ),
    "weights of another distribution after a reset": Defect(
        "ffn",
        "        reset()\n",
        "        reset()\n"
        "        if isinstance(layer, Linear):\n"
        "            nn.Linear.reset_parameters(layer)\n",
        "test_reset_parameters",
    ),
    "a table that all instances share": Defect(
        "rope",
        "        table = self._compute_table()\n",
        "        cls = type(self)\n"
        "        cls.table_of_all = getattr(cls, 'table_of_all', self._compute_table())\n"
        "        table = cls.table_of_all if theta == 50 else self._compute_table()\n",
        "test_each_instance_has_its_own_table",
    ),
    "NaN for a query without keys": Defect(
        "attention",
        "weights = weights.masked_fill(~mask, 0)",
        "pass",
        "test_equation",
    ),
    "positions that must be passed": Defect(
        "attention",
        "        if token_positions is not None:  #",
        "        if token_positions is None and x.ndim == 3:\n"
        "            raise ValueError('positions')\n"
        "        if token_positions is not None:  #",
        "test_positions_are_0_1_2_if_none_are_passed",
    ),
    "layers inside others that are not reset": Defect(
        "attention",
        "            _reset(inner)",
        "            pass",
        "test_reset_parameters",
    ),
    "a feed-forward layer of another shape": Defect(
        "block",
        'x + _require_shape_of(x, self.ffn(self.ln2(x)), "ffn")',
        "x + self.ffn(self.ln2(x))",
        "test_rejects_a_part_that_changes_the_shape",
    ),
    "more tokens than max_seq_len, without RoPE": Defect(
        "transformer",
        "x.shape[-2] > self.max_seq_len:",
        "x.shape[-2] > 10**9:",
        "test_rejects_a_sequence_longer_than_max_seq_len",
    ),
    "a copy of the table of the blocks": Defect(
        "transformer",
        "        self.rope = rope\n",
        "        import copy\n\n        self.rope = copy.deepcopy(rope)\n",
        "test_one_table_for_all_blocks",
    ),
    "a theta that is ignored": Defect(
        "transformer",
        "RotaryPositionalEmbedding(theta, ",
        "RotaryPositionalEmbedding(10000.0 if theta else theta, ",
        "test_equation",
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_the_contract_notices(name, tmp_path):
    assert copies.main(["add", *LAYERS, "--to", str(tmp_path)]) == 0
    DEFECTS[name].require_failure(tmp_path)
