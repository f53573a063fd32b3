"""parallel.py computes on four processes what one process computes."""

import re
from pathlib import Path

import parallel
import pytest
import torch
import torch.nn.functional as F
from language_model import LanguageModel
from processes import run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard


def test_pairs_of_processes_train_like_one():
    """in_each_process.py compares gradients, and then calls parallel.py."""
    failed, printed = run(Path(__file__).with_name("in_each_process.py"), processes=4)
    assert not failed, printed
    torch.manual_seed(0)
    model = LanguageModel(50, 2, 64, 4, max_seq_len=128, tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generators = [torch.Generator().manual_seed(rank) for rank in (0, 1)]
    for step in range(3):
        starts = [torch.randint(50, (8, 1), generator=each) for each in generators]
        tokens = (torch.cat(starts) + torch.arange(17)) % 50
        logits = model(tokens[:, :-1]).flatten(0, 1)
        losses = F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="none")
        for rank in range(4):
            shown = rf"rank {rank}, step {step}: loss (\d\.\d+)"
            found = [float(number) for number in re.findall(shown, printed)]
            of_pair = losses.chunk(2)[rank // 2].mean().item()
            assert found == [pytest.approx(of_pair, abs=1e-3)], printed
        losses.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.usefixtures("fake_processes")
def test_the_embedding_is_on_all_axes_of_the_data():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp"))
    model = LanguageModel(50, 1, 8, 2, max_seq_len=9)
    parallel.distribute(model, mesh)
    weight = model.token_embeddings.weight
    assert weight.device_mesh.mesh_dim_names == ("dp_replicate", "dp")
    assert weight.placements == (Replicate(), Shard(0))
