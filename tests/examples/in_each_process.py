"""What each of several processes runs: comparisons with one process, and the examples."""

import copy
import warnings
from functools import partial

import context_parallel
import parallel
import torch
import torch.distributed as dist
import torch.nn.functional as F
from context_parallel import ContextParallelAttention, own_slice
from language_model import LanguageModel
from torch.distributed.device_mesh import init_device_mesh

from tinyblock import CausalMultiHeadSelfAttention

TOLERANCE = 2**7 * torch.finfo(torch.float32).eps  # sums may lose 7 of 24 bits


def build(**options):
    """Build a model with the sizes and dtype of parallel.py.

    DTensor plans each shape once, which takes most of the time.
    """
    return LanguageModel(50, 1, 64, 4, max_seq_len=128, **options)


def assert_gradients_are_equal(found, whole):
    for (name, weight), expected in zip(
        found.named_parameters(), whole.parameters(), strict=True
    ):
        error = (weight.grad.full_tensor() - expected.grad).norm()
        assert error < TOLERANCE * expected.grad.norm(), f"gradient of {name}"


def compare_slices():
    """Compare slices of a sequence, and all gradients, with the whole sequence."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    one = build(num_kv_heads=2, tied=True)
    attention = partial(ContextParallelAttention, mesh=mesh)
    model = build(num_kv_heads=2, tied=True, attention=attention)
    model.load_state_dict(one.state_dict())
    parallel.distribute(model, mesh)
    tokens = torch.randint(50, (3, 24))
    positions = torch.randperm(24)
    target = torch.randn(3, 24, 50)
    mask = torch.rand(3, 24, 24) < 0.7
    x = one.token_embeddings(tokens)
    expected = one.logits(one.transformer(x, positions, mask))
    (expected * target).mean().backward()

    # Positions and mask reach attention as the model's caller passes them.
    own = own_slice(torch.arange(24), mesh)
    model.transformer.register_forward_pre_hook(
        lambda _, arguments: (arguments[0], positions[own], mask[:, own])
    )
    out = model(tokens[:, own])
    (out * target[:, own]).mean().backward()
    torch.testing.assert_close(out, expected[:, own])
    assert_gradients_are_equal(model, one)


def compare_slices_without_rope():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    one = CausalMultiHeadSelfAttention(64, 4)
    layer = ContextParallelAttention(64, 4, mesh=mesh)
    layer.load_state_dict(one.state_dict())
    x = torch.randn(3, 24, 64)
    own = own_slice(torch.arange(24), mesh)
    torch.testing.assert_close(layer(x[:, own]), one(x)[:, own])


def compare_batches(tied):
    """Compare the gradients of two pairs, each with half of a batch, with one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    one = build(tied=tied)
    model = copy.deepcopy(one)
    parallel.distribute(model, mesh)
    tokens = torch.randint(50, (16, 17))
    own_tokens = tokens.chunk(2)[mesh["dp"].get_local_rank()]
    for each, batch in ((one, tokens), (model, own_tokens)):
        logits = each(batch[:, :-1]).flatten(0, 1)
        F.cross_entropy(logits, batch[:, 1:].flatten()).backward()
    assert_gradients_are_equal(model, one)


warnings.simplefilter("error")
dist.init_process_group("gloo")
compare_slices()
compare_slices_without_rope()
context_parallel.main()
compare_batches(tied=True)
compare_batches(tied=False)
parallel.main()
dist.destroy_process_group()
