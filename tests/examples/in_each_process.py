"""What each of several processes runs: its slice of a sequence, and the examples."""

import copy
from functools import partial

import context_parallel
import parallel
import torch
import torch.distributed as dist
import torch.nn.functional as F
from context_parallel import ContextParallelAttention, own_slice
from language_model import LanguageModel
from torch.distributed.device_mesh import init_device_mesh


def build(**options):
    return LanguageModel(
        37, 1, 32, 4, num_kv_heads=2, max_seq_len=24, dtype=torch.float64, **options
    )


def assert_gradients_are_equal(found, whole):
    for (name, weight), expected in zip(
        found.named_parameters(), whole.parameters(), strict=True
    ):
        error = (weight.grad.full_tensor() - expected.grad).norm()
        assert error < 1e-9 * expected.grad.norm(), f"gradient of {name}"


def compare_slices(tied):
    """Compare slices of a sequence, and all gradients, with the whole sequence."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    one = build(tied=tied)
    model = build(tied=tied, attention=partial(ContextParallelAttention, mesh=mesh))
    model.load_state_dict(one.state_dict())
    parallel.distribute(model, mesh)
    tokens = torch.randint(37, (3, 24))
    target = torch.randn(3, 24, 37, dtype=torch.float64)
    mask = torch.rand(3, 24, 24) < 0.7
    expected = one.logits(one.transformer(one.token_embeddings(tokens), mask=mask))
    (expected * target).mean().backward()

    # The mask reaches attention as the model's caller passes it.
    own = own_slice(torch.arange(24), mesh)
    model.transformer.register_forward_pre_hook(
        lambda _, arguments: (arguments[0], None, mask[:, own])
    )
    out = model(tokens[:, own])
    (out * target[:, own]).mean().backward()
    torch.testing.assert_close(out, expected[:, own], rtol=0, atol=1e-12)
    assert_gradients_are_equal(model, one)


def compare_batches(axes, shape, tied):
    """Compare all gradients of a distributed model with the model on one process."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    torch.manual_seed(0)
    one = build(tied=tied)
    model = copy.deepcopy(one)
    parallel.distribute(model, mesh)
    tokens = torch.randint(37, (4, 13))
    groups = [mesh[axis] for axis in axes if axis != "tp"]
    part, parts = 0, 1
    for group in groups:
        part = part * group.size() + group.get_local_rank()
        parts *= group.size()
    for each, batch in ((one, tokens), (model, tokens.chunk(parts)[part])):
        logits = each(batch[:, :-1]).flatten(0, 1)
        F.cross_entropy(logits, batch[:, 1:].flatten()).backward()
    assert_gradients_are_equal(model, one)


dist.init_process_group("gloo")
world = dist.get_world_size()
compare_slices(tied=True)
compare_batches(("dp",), (world,), tied=True)
compare_batches(("dp", "tp"), (world // 2, 2), tied=True)
compare_batches(("dp", "tp"), (world // 2, 2), tied=False)
print("outputs and gradients are equal")

context_parallel.main()
parallel.main()
dist.destroy_process_group()
