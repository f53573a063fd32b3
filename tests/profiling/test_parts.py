"""The parts, against the block that they are cut from."""

import pytest
import torch
from lab.sizes import Size
from profiling.parts import block_steps, run_steps, timed_parts, whole
from torch.nn import functional as F


def parts_of(num_layers=None, qk_norm=True, dtype=torch.float32):
    """Return a model, its input, the gradient of its output, and its parts by name."""
    model = Size(2, 5, 12, 6, 2, 4, 20, qk_norm=qk_norm, num_layers=num_layers).build(
        "cpu", dtype
    )
    x = torch.randn(2, 5, 12, dtype=dtype, requires_grad=True)
    gradient = torch.randn_like(x)
    return (
        model,
        x,
        gradient,
        {part.name: part for part in timed_parts(block_steps(model), x, gradient)},
    )


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_compute_the_block_bit_for_bit(qk_norm, dtype):
    block, x, _, parts = parts_of(qk_norm=qk_norm, dtype=dtype)
    assert torch.equal(run_steps(block_steps(block), x), block(x))
    assert torch.equal(parts["residual sums"].forward()[-1], block(x))


def test_parts_have_the_gradients_of_the_whole():
    stack, x, gradient, parts = parts_of(num_layers=1)
    gradients = whole(stack, x, gradient).train()
    expected = dict(zip((x, *stack.parameters()), gradients, strict=True))
    weights = [weight for part in parts.values() for weight in part.weights]
    # Each weight belongs to one part.
    assert len(weights) == len(set(weights)) == len(expected) - 1
    for part in parts.values():
        of_weights = part.train()[len(part.inputs) :]
        for weight, found in zip(part.weights, of_weights, strict=True):
            torch.testing.assert_close(found, expected[weight])


def test_residual_sums_add_the_gradients_of_both_ways_of_x():
    stack, x, gradient, parts = parts_of(num_layers=1)
    of_input, *_ = whole(stack, x, gradient).train()
    adds = parts["residual sums"]
    # The first sum takes x and a branch, and gives x and y. The second one takes y and a branch, and gives y and z.
    of_given_x, of_y, of_given_y, of_z = adds.gradients
    assert torch.equal(of_given_x, of_input)
    of_x_taken, of_branch, of_y_taken, of_second_branch = adds.train()
    assert torch.equal(of_x_taken, of_given_x + of_y)
    assert torch.equal(of_branch, of_y)
    assert torch.equal(of_y_taken, of_given_y + of_z)
    assert torch.equal(of_second_branch, of_z)
    assert torch.equal(of_z, parts["final norm"].train()[0])


def test_parts_have_the_strides_of_the_block(monkeypatch):
    block, x, _, parts = parts_of()
    seen, attend = [], F.scaled_dot_product_attention

    def spy(q, k, v, **options):
        seen.append([t.stride() for t in (q, k, v)])
        return attend(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    block(x)
    parts["attention"].forward()
    in_block, in_part = seen
    assert in_part == in_block


def test_parts_without_gradient_record_no_graph():
    block = parts_of()[0]
    with torch.no_grad():
        parts = timed_parts(block_steps(block), torch.randn(1, 3, 12))
        assert not any(
            t.requires_grad for part in parts for t in (*part.inputs, *part.forward())
        )
    assert not any(part.gradients for part in parts)
