"""A model that recomputes its blocks against one that does not."""

import copy
import re

import checkpointing
import torch
from checkpointing import recompute, saved_bytes

from tinyblock import Transformer


def test_checkpointing_gives_the_same_gradients():
    model = Transformer(3, d_model=64, num_heads=4, max_seq_len=128)
    plain = copy.deepcopy(model)
    recompute(model)
    assert model.state_dict().keys() == plain.state_dict().keys()
    x = torch.randn(2, 9, 64)
    positions = torch.arange(1, 10)
    mask = torch.rand(2, 9, 9) < 0.5
    for each in (model, plain):
        each(x, positions, mask=mask).square().sum().backward()
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=0, atol=0)


def test_recompute_twice_checkpoints_a_block_once():
    model = Transformer(2, d_model=64, num_heads=4, max_seq_len=128)
    recompute(model)
    once = [block.forward for block in model.layers]
    recompute(model)
    assert [block.forward for block in model.layers] == once


def test_checkpointing_saves_one_input_more_for_each_block():
    x = torch.randn(2, 9, 64)
    saved = []
    for layers in (1, 3):
        model = Transformer(layers, d_model=64, num_heads=4, max_seq_len=128)
        recompute(model)
        saved.append(saved_bytes(model, x))
    assert saved[1] - saved[0] == 2 * x.nbytes


def test_saved_bytes_of_a_product_are_those_of_its_factors():
    x = torch.randn(3, 5, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(3, 5))

    class Product(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = weight

        def forward(self, x):
            return (x * self.weight).exp()

    result = 3 * 5 * 4  # exp saves its result, and the product x
    assert saved_bytes(Product(), x) == x.nbytes + result


def test_checkpointing_main(capsys):
    checkpointing.main()
    out = capsys.readouterr().out
    before, after = map(int, re.findall(r"\d+", out))
    assert after < before / 10
