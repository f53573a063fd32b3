"""What each of four processes runs: a comparison with one process, and parallel.py."""

import copy
import warnings

import parallel
import torch
import torch.distributed as dist
import torch.nn.functional as F
from language_model import LanguageModel
from torch.distributed.device_mesh import init_device_mesh

TOLERANCE = 2**7 * torch.finfo(torch.float32).eps  # sums may lose 7 of 24 bits


def compare_gradients(tied):
    """Compare the gradients of two pairs, each with half of a batch, with one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    # The sizes of parallel.py, because DTensor plans each shape once, which takes time.
    one = LanguageModel(50, 1, 64, 4, max_seq_len=128, tied=tied)
    model = copy.deepcopy(one)
    parallel.distribute(model, mesh)
    tokens = torch.randint(50, (16, 17))
    own_tokens = tokens.chunk(2)[mesh["dp"].get_local_rank()]
    for each, batch in ((one, tokens), (model, own_tokens)):
        logits = each(batch[:, :-1]).flatten(0, 1)
        F.cross_entropy(logits, batch[:, 1:].flatten()).backward()
    for (name, weight), expected in zip(
        model.named_parameters(), one.parameters(), strict=True
    ):
        error = (weight.grad.full_tensor() - expected.grad).norm()
        assert error < TOLERANCE * expected.grad.norm(), f"gradient of {name}"


warnings.simplefilter("error")
dist.init_process_group("gloo")
for tied in (False, True):
    compare_gradients(tied)
parallel.main()
dist.destroy_process_group()
