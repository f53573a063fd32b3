"""Examples of several processes compute what one process computes."""

import re
from pathlib import Path
from statistics import mean

import pytest
import torch
import torch.nn.functional as F
from language_model import LanguageModel
from processes import run


@pytest.fixture(scope="module")
def printed():
    """Return what four processes print that run all of these examples."""
    failed, text = run(Path(__file__).with_name("in_each_process.py"), processes=4)
    assert not failed, text
    return text


def numbers(pattern, text):
    return [float(number) for number in re.findall(pattern, text)]


def test_pairs_of_processes_train_like_one(printed):
    torch.manual_seed(0)
    model = LanguageModel(50, 2, 64, 4, max_seq_len=128, tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generators = [torch.Generator().manual_seed(rank) for rank in (0, 1)]
    for step in range(11):
        starts = [torch.randint(50, (8, 1), generator=each) for each in generators]
        tokens = (torch.cat(starts) + torch.arange(17)) % 50
        logits = model(tokens[:, :-1]).flatten(0, 1)
        loss = F.cross_entropy(logits, tokens[:, 1:].flatten())
        if step % 5 == 0:
            found = numbers(rf"rank \d, step {step}: loss (\d\.\d+)", printed)
            assert (len(found), len(set(found))) == (4, 2)
            assert mean(found) == pytest.approx(loss.item(), abs=2e-3)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def test_slices_of_a_sequence_have_the_outputs_and_gradients_of_the_whole(printed):
    assert printed.count("outputs and gradients are equal") == 4
    means = numbers(r"mean (\d\.\d+)", printed)
    one_process = numbers(r"one process (\d\.\d+)", printed)
    differences = numbers(r"gradients differ by (\de-\d+)", printed)
    assert len(means) == len(differences) == 4
    assert means == one_process
    assert max(differences) < 1e-5
