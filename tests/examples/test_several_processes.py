"""parallel.py trains on four processes as on one."""

import re
from pathlib import Path

import parallel
import pytest
from language_model import LanguageModel
from processes import run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard


def test_pairs_of_processes_have_the_gradients_of_one_and_train_with_equal_losses():
    """in_each_process.py compares the gradients, and then calls parallel.py."""
    failed, printed = run(Path(__file__).with_name("in_each_process.py"), processes=4)
    assert not failed, printed
    losses = [
        re.findall(rf"rank {rank}, step \d: loss (\d\.\d+)", printed)
        for rank in range(4)
    ]
    assert losses[0] == losses[1] != losses[2] == losses[3], printed
    for first, _, last in losses:
        assert float(last) < float(first), printed


@pytest.mark.usefixtures("fake_processes")
def test_the_embedding_is_on_all_axes_of_the_data():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp"))
    model = LanguageModel(50, 1, 8, 2, max_seq_len=9)
    parallel.distribute(model, mesh)
    weight = model.token_embeddings.weight
    assert weight.device_mesh.mesh_dim_names == ("dp_replicate", "dp")
    assert weight.placements == (Replicate(), Shard(0))
