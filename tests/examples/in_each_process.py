"""What each of several processes runs: its slice of a sequence, and the examples."""

import os
from functools import partial

import context_parallel
import parallel
import torch
import torch.distributed as dist
from context_parallel import ContextParallelAttention, own_slice
from torch.distributed.device_mesh import init_device_mesh

from tinyblock import Transformer, parallelize

mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("dp",))
build = partial(
    Transformer,
    num_layers=2,
    d_model=32,
    num_heads=4,
    num_kv_heads=2,
    max_seq_len=24,
    dtype=torch.float64,
)
torch.manual_seed(0)
one = build()
model = build(attention=partial(ContextParallelAttention, mesh=mesh))
model.load_state_dict(one.state_dict())
parallelize(model, mesh)
x, target = torch.randn(2, 3, 24, 32, dtype=torch.float64)
mask = torch.rand(3, 24, 24) < 0.7
expected = one(x, mask=mask)
(expected * target).mean().backward()

own = own_slice(torch.arange(24), mesh)
out = model(x[:, own], mask=mask[:, own])
(out * target[:, own]).mean().backward()
torch.testing.assert_close(out, expected[:, own], rtol=0, atol=1e-12)
for found, whole in zip(model.parameters(), one.parameters(), strict=True):
    torch.testing.assert_close(
        found.grad.full_tensor(), whole.grad, rtol=1e-9, atol=1e-15
    )
print("outputs and gradients are equal")

context_parallel.main()
parallel.main()
dist.destroy_process_group()
