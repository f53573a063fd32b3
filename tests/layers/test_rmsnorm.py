"""RMSNorm beyond its contract: its repr, and that torch's own operation does the work."""

import torch

from tinyblock import RMSNorm


def test_rms_norm_shows_its_size_and_eps():
    assert repr(RMSNorm(5, 1e-6)) == "RMSNorm(5, eps=1e-06)"


def test_rms_norm_is_one_operation_of_torch():
    targets = [str(node.target) for node in torch.export.export(RMSNorm(8), (torch.randn(3, 8),)).graph.nodes]
    assert targets == ["p_weight", "x", "aten.rms_norm.default", "output"]
