"""`tinyblock verify` judges edited copies of tinyblock's layers."""

import functools

import pytest
from defects import Defect
from forked import verify

from tinyblock import copies

REJECTS = "test_rejects_positions_out_of_range_and_not_integers"
DEFECTS = {
    "a result on the CPU for meta": Defect(
        1,
        "rmsnorm",
        "weight = self.weight  #",
        "if x.is_meta:\n            return torch.empty(x.shape, dtype=x.dtype)\n"
        "        weight = self.weight  #",
        r"test_built_on_meta, 1 of 1, .*: the result must be on meta, got cpu$",
    ),
    "gains on the CPU by default": Defect(
        1,
        "rmsnorm",
        "        eps: float = 1e-5,\n        device: torch.device | str | None = None",
        "        eps: float = 1e-5,\n        device: torch.device | str | None = 'cpu'",
        r"test_built_on_the_default_device, 1 of 1, .*: weight must be on torch's default",
    ),
    "an eps that may be infinite": Defect(
        1,
        "rmsnorm",
        "if not 0 < eps < math.inf:",
        "if not 0 < eps:",
        r"test_rejects_option, 1 of 4, first \[two batch axes-eps-inf\]: DID NOT RAISE",
    ),
    "gains that are not trained": Defect(
        1,
        "rmsnorm",
        "torch.empty(d_model, device=device, dtype=dtype))",
        "torch.empty(d_model, device=device, dtype=dtype), False)",
        r"test_initial_weights, 1 of 1, .*: weight must require a gradient$",
    ),
    "an eps that the function ignores": Defect(
        1,
        "rmsnorm",
        "torch.rsqrt(mean_square + eps)",
        "torch.rsqrt(mean_square + 1e-5)",
        r"test_equation, 1 of 5, first \[function, float64\]: result in float64 at",
    ),
    "gains that are rounded to the dtype of x": Defect(
        1,
        "rmsnorm",
        "wide = torch.promote_types(x.dtype, weight.dtype)",
        "wide = x.dtype",
        r"test_gains_of_another_dtype, 4 of 10, first \[where eps matters-torch.float16-",
    ),
    "weights that are cut at 2 sigma": Defect(
        1,
        "ffn",
        "a=-3 * std, b=3 * std",
        "a=-2 * std, b=2 * std",
        r"test_initial_weights, 2 of 2, first \[SwiGLU\]: w1.weight must start with the",
    ),
    "an activation that cannot be pickled": Defect(
        1,
        "ffn",
        "self.activation = activation",
        "self.activation = lambda x: activation(x)",
        r"test_built_on_meta, 1 of 2, first \[GELU\]: .*pickle",
    ),
    "a width that is rounded down": Defect(
        1,
        "ffn",
        "(d_model + 12) // 24",
        "d_model // 24",
        r"test_default_d_ff_is_the_multiple_of_64_\w+, 1 of 3, first \[61-192\]: assert",
    ),
    "an activation that is ignored": Defect(
        1,
        "ffn",
        "self.activation(self.w1(x))",
        "F.gelu(self.w1(x))",
        r"test_equation, 1 of 11, first \[SiLU, float64\]: result in float64 at",
    ),
    "a function that detaches its result": Defect(
        1,
        "ffn",
        "return F.silu(x)",
        "return F.silu(x).detach()",
        r"test_equation, 1 of 11, first \[silu, float64\]: the result has no gradient: de",
    ),
    "a little noise in training": Defect(
        1,
        "ffn",
        "F.silu(self.w1(x)) * self.w3(x)",
        "F.silu(self.w1(x)) * self.w3(x) * (1 + 1e-6 * self.training)",
        r"test_calls_change_nothing, 3 of 11, .*: the second result must be the same",
    ),
    "a wrong path for some strides": Defect(
        1,
        "rope",
        "numbers = torch.complex(*pairs.unbind(-1))",
        "numbers = torch.complex(*pairs.unbind(-1)).conj()",
        r"test_any_strides, 11 of 14, .*: result for an x that is not contiguous at",
    ),
    "a table in the state dict": Defect(
        1,
        "rope",
        "persistent=False",
        "persistent=True",
        r"test_built_on_meta, 1 of 1, .*: the state dict must have \[\], got \['cos_sin'\]$",
    ),
    "a table that is not reset": Defect(
        1,
        "rope",
        "self.cos_sin.copy_(self._compute_table())",
        "pass",
        r"test_reset_parameters, 1 of 1, .*: reset_parameters must fill cos_sin$",
    ),
    "angles in float32": Defect(
        1,
        "rope",
        "torch.stack((angles.cos(), angles.sin()), dim=-1).float()",
        "torch.stack((angles.float().cos(), angles.float().sin()), dim=-1)",
        r"test_table_is_exact_at_far_positions, 1 of 1: torch.float32 at",
    ),
    "positions that count from the end": Defect(
        1,
        "rope",
        "F.embedding(token_positions, table.flatten(1))",
        "table.flatten(1)[token_positions]",
        rf"{REJECTS}, 2 of 10, first \[-1-torch.float64\]: DID NOT RAISE",
    ),
    "positions that must be of int64": Defect(
        1,
        "rope",
        "        if token_positions is None:\n            seq",
        "        assert token_positions is None or token_positions.dtype == torch.int64\n"
        "        if token_positions is None:\n            seq",
        r"test_equation, 1 of 14, first \[positions of int32, float64\]: AssertionError$",
    ),
    "another eps for heads": Defect(
        1,
        "attention",
        "HeadNorm(d_head, eps, ",
        "HeadNorm(d_head, 1e-5, ",
        r"test_equation, 1 of 22, first \[normalized, another eps, float64\]: result in fl",
    ),
    "an output projection for one head size": Defect(
        1,
        "attention",
        "self.output_proj = Linear(q_width, d_model",
        "self.output_proj = Linear(d_model, d_model",
        r"test_equation, 1 of 22, first \[all options, float64\]: RuntimeError: mat1 and",
    ),
    "queries of the first tokens": Defect(
        1,
        "attention",
        "elif mask is not None or query > 1:",
        "elif mask is not None:",
        r"test_attend_takes_queries_of_the_last_tokens, 1 of 6, first \[3-False\]",
    ),
    "keys of another shape": Defect(
        1,
        "attention",
        "k = _require_shape_of(k, rope(k, token_positions))",
        "k = rope(k, token_positions)",
        r"test_rejects_a_rope_that_changes_the_shape, 1 of 2, first \[of keys\]: DID NOT",
    ),
    "a warning under autocast": Defect(
        1,
        "attention",
        "F.rms_norm(x.to(wide), ",
        "F.rms_norm(x, ",
        r"test_equation_under_autocast, 1 of 22, .*\[normalized, another eps\]: UserWarn",
    ),
    "an error that is no task": Defect(
        1,
        "attention",
        'raise ValueError(\n            "mask must',
        'raise NotImplementedError(\n            "mask must',
        r"test_rejects_a_wrong_mask_\w+, 1 of 9, first \[additive\]: NotImplementedError",
    ),
    "an error without the value": Defect(
        1,
        "attention",
        "at least 1, got {d_head}",
        "at least 1",
        r"test_rejects_option, 2 of 10, first \[plain-d_head-0\]: Regex pattern did not m",
    ),
    "a width that may be 0": Defect(
        1,
        "ffn",
        "if min(d_model, d_ff) < 1:",
        "if d_model < 1:",
        r"test_rejects_option, 2 of 4, first \[SwiGLU-d_ff-0\]: DID NOT RAISE",
    ),
    "an error of another type": Defect(
        1,
        "rope",
        'raise ValueError(f"max_seq_len must',
        'raise TypeError(f"max_seq_len must',
        r"test_rejects_option, 1 of 6, first \[.*-max_seq_len-0\]: TypeError: max_seq_len",
    ),
    "a table that must not be full": Defect(
        2,
        "rope",
        "if seq > self.max_seq_len:",
        "if seq >= self.max_seq_len:",
        r"test_equation, 1 of 14, first \[no positions, a table that is full, float64\]",
    ),
    "frequencies that cannot be overridden": Defect(
        1,
        "rope",
        "self.frequencies().view(",
        "RotaryPositionalEmbedding.frequencies(self).view(",
        r"test_frequencies_may_be_overridden, 1 of 1: Tensor-likes are not close",
    ),
    "queries in another dtype": Defect(
        1,
        "attention",
        "self.q_proj = Linear(d_model, q_width, bias=False, **factory)",
        "self.q_proj = Linear(d_model, q_width, bias=False, device=device)",
        r"test_built_on_meta, 2 of 2, .*: q_proj.weight must be on meta, in bfloat16: meta, "
        r"torch.float32$",
    ),
    "one position for all tokens": Defect(
        1,
        "attention",
        '"... seq -> ... 1 seq", seq=x.shape[-2]',
        '"... seq -> ... 1 seq"',
        r"test_rejects_one_position_for_all_tokens, 1 of 1: DID NOT RAISE",
    ),
    "other weights after a reset": Defect(
        2,
        "ffn",
        "        reset()\n",
        "        reset()\n"
        "        if isinstance(layer, Linear):\n"
        "            nn.Linear.reset_parameters(layer)\n",
        r"test_reset_parameters, 2 of 2, .*: w1.weight must start with the standard dev",
    ),
    "a table for all head sizes": Defect(
        2,
        "rope",
        "        table = self._compute_table()\n",
        "        cls = type(self)\n"
        "        cls.table_of_all = getattr(cls, 'table_of_all', self._compute_table())\n"
        "        table = cls.table_of_all if theta == 50 else self._compute_table()\n",
        r"test_each_instance_has_its_own_table, 1 of 3, first \[d_k\]: ",
    ),
    "NaN for a query without keys": Defect(
        2,
        "attention",
        "weights = weights.masked_fill(~mask, 0)",
        "pass",
        r"test_equation, 1 of 22, first \[function, a query without keys, .*: got nan",
    ),
    "positions that must be passed": Defect(
        2,
        "attention",
        "        if token_positions is not None:  #",
        "        if token_positions is None and x.ndim == 3:\n"
        "            raise ValueError('positions')\n"
        "        if token_positions is not None:  #",
        r"test_positions_are_0_1_2_if_none_are_passed, 1 of 1: ValueError: positions$",
    ),
    "layers inside others that are not reset": Defect(
        2,
        "attention",
        "            _reset(inner)",
        "            pass",
        r"test_reset_parameters, 2 of 2, .*: reset_parameters must fill added.0.0.weight",
    ),
    "a feed-forward layer of another shape": Defect(
        2,
        "block",
        'x + _require_shape_of(x, self.ffn(self.ln2(x)), "ffn")',
        "x + self.ffn(self.ln2(x))",
        r"test_rejects_a_part_that_changes_the_shape, 1 of 2, first \[ffn-ffn\]: DID NOT",
    ),
    "a stack of no layers": Defect(
        2,
        "transformer",
        '"num_layers": num_layers,',
        "",
        r"test_rejects_option, 1 of 5, first \[default theta-num_layers-0\]: DID NOT RAISE",
    ),
    "more tokens than max_seq_len, without RoPE": Defect(
        2,
        "transformer",
        "x.shape[-2] > self.max_seq_len:",
        "x.shape[-2] > 10**9:",
        r"test_rejects_a_sequence_longer_than_max_seq_len, 1 of 1: DID NOT RAISE",
    ),
    "a copy of the table of the blocks": Defect(
        2,
        "transformer",
        "        self.rope = rope\n",
        "        import copy\n\n        self.rope = copy.deepcopy(rope)\n",
        r"test_one_table_for_all_blocks, 1 of 1: assert 2 == 1",
    ),
    "a theta that is ignored": Defect(
        2,
        "transformer",
        "RotaryPositionalEmbedding(theta, ",
        "RotaryPositionalEmbedding(10000.0 if theta else theta, ",
        r"test_equation, 1 of 6, first \[another theta, a table of 7 positions, float64\]",
    ),
}
LAYERS = {
    1: ["rmsnorm", "ffn", "rope", "attention"],
    2: ["ffn", "rope", "attention", "block", "transformer"],
}
# The equation in one dtype, and no compilation, which takes long.
TESTS = {
    1: "not float16 and not float32 and not compiles or gains or rejects",
    2: "equation and float64 or reset or instance or positions_are_0 or one_table "
    "or changes_the_shape or longer or rejects_option",
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Return a function that returns the report of a run, which it starts once."""

    @functools.cache
    def report_of(run):
        folder = tmp_path_factory.mktemp("project") / "layers"
        copies.main(["add", *LAYERS[run], "--to", str(folder)])
        for defect in DEFECTS.values():
            if defect.run == run:
                defect.put_into(folder)
        _, report = verify(folder, *LAYERS[run], "-k", TESTS[run])
        return report

    return report_of


@pytest.mark.parametrize("name", DEFECTS)
def test_the_report_names_a_defect(name, reports):
    DEFECTS[name].require_in(reports(DEFECTS[name].run))
