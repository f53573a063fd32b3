"""Examples of several processes compute what one process computes."""

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


@pytest.fixture(scope="module")
def printed():
    """What the examples print in four processes, which compare their parts, too."""
    failed, printed = run(Path(__file__).with_name("in_each_process.py"), processes=4)
    assert not failed, printed
    return printed


def numbers(pattern, text):
    return [float(number) for number in re.findall(pattern, text)]


def test_slices_of_a_sequence_have_the_loss_and_the_gradients_of_the_whole(printed):
    torch.manual_seed(0)
    model = LanguageModel(50, 2, 64, 4, max_seq_len=128)
    # The example draws a second model before the text. Only then the texts are equal.
    LanguageModel(50, 2, 64, 4, max_seq_len=128)
    text = torch.randint(50, (129,))
    losses = F.cross_entropy(model(text[:-1]), text[1:], reduction="none")
    for rank, part in enumerate(losses.chunk(4)):
        own = numbers(rf"rank {rank}: (\d\.\d+)", printed)
        assert own == [pytest.approx(part.mean().item(), abs=2e-4)], printed
    loss = losses.mean().item()
    for name in ("mean", "one process"):
        found = numbers(rf"{name} (\d\.\d+)", printed)
        assert found == [pytest.approx(loss, abs=2e-4)] * 4, printed
    differences = numbers(r"gradients differ by (\de-\d+)", printed)
    assert len(differences) == 4, printed
    assert max(differences) < 1e-5


def test_pairs_of_processes_train_like_one(printed):
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
            found = numbers(rf"rank {rank}, step {step}: loss (\d\.\d+)", printed)
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
