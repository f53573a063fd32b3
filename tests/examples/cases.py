"""What four processes check together: each case raises, on any of them, where it finds a difference."""

import importlib.util
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path

import context_parallel
import parallel
import pipeline
import torch
import torch.distributed as dist
from context_parallel import ContextParallelAttention, own_slice
from language_model import LanguageModel
from parallel import NextTokenLoss, distribute, matrices_then_gains, train_step
from parallelize.cases import data_rank, seeded
from torch.distributed.device_mesh import init_device_mesh

from tinyblock import Transformer, parallelize

PROCESSES = 4
CASES = {}
NEED_PEFT = set()
peft_is_installed = importlib.util.find_spec("peft") is not None


def run_cases():
    """Run all cases in one of the processes, and note which have passed."""
    warnings.simplefilter("error")
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    for name, case in CASES.items():
        if name in NEED_PEFT and not peft_is_installed:
            continue
        case()
        dist.barrier()
        if dist.get_rank() == 0:
            with Path("passed").open("a") as passed:
                print(name, file=passed)
    dist.destroy_process_group()


def case(function):
    CASES[function.__name__.replace("_", " ")] = function
    return function


def mesh_of(sizes, axes):
    return init_device_mesh("cpu", sizes, mesh_dim_names=axes)


def assert_gradients_equal(model, reference, rtol, atol):
    pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
    for (name, parameter), expected in pairs:
        torch.testing.assert_close(
            {name: parameter.grad.full_tensor()},
            {name: expected.grad},
            rtol=rtol,
            atol=atol,
        )


def language_model(tied):
    model = LanguageModel(
        50, 2, 32, 4, max_seq_len=16, tied=tied, dtype=torch.float64, qk_norm=True
    )
    return NextTokenLoss(model)


def _gradients_of_a_language_model(tied, sizes, axes):
    mesh = mesh_of(sizes, axes)
    loss, one = (seeded(partial(language_model, tied)) for _ in range(2))
    distribute(loss, mesh)
    rank, count = data_rank(mesh)
    tokens, targets = torch.randint(50, (2, count, 3, 9))
    loss(tokens[rank], targets[rank]).backward()
    one(tokens.flatten(0, 1), targets.flatten(0, 1)).backward()
    assert_gradients_equal(loss, one, rtol=1e-9, atol=1e-14)
    same = loss.model.lm_head.weight is loss.model.token_embeddings.weight
    assert same == tied


for _sizes, _axes in (
    ((4,), ("tp",)),
    ((2, 2), ("dp", "tp")),
    ((2, 2), ("dp_replicate", "dp")),
):
    CASES[f"a tied language model over {_axes} is like one process"] = partial(
        _gradients_of_a_language_model, True, _sizes, _axes
    )
CASES["a language model with a separate head is like one process"] = partial(
    _gradients_of_a_language_model, False, (2, 2), ("dp", "tp")
)


@case
def tensor_and_data_parallelism_trains_like_one_process():
    mesh = mesh_of((2, 2), ("dp", "tp"))
    loss, one = (seeded(partial(language_model, True)) for _ in range(2))
    distribute(loss, mesh)
    optimizer = torch.optim.AdamW(matrices_then_gains(loss), fused=True)
    expected_optimizer = torch.optim.AdamW(one.parameters(), fused=True)
    for _ in range(3):
        tokens = torch.randint(50, (2, 3, 10))
        train_step(loss, optimizer, tokens[mesh["dp"].get_local_rank()])
        train_step(one, expected_optimizer, tokens.flatten(0, 1))
    trained = {
        name: weight.full_tensor().clone() for name, weight in loss.named_parameters()
    }
    for name, expected in one.named_parameters():
        torch.testing.assert_close(trained[name], expected, rtol=0, atol=1e-9)

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(loss(tokens[0][:, :-1], tokens[0][:, 1:])).backward()
    if dist.get_rank() == 3:
        w2 = loss.model.transformer.layers[0].ffn.w2
        w2.weight.grad.to_local()[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1.0  # on every process
    for name, weight in loss.named_parameters():
        assert torch.equal(weight.full_tensor(), trained[name]), name


def _context_parallelism(sizes, axes, masked, recompute=False):
    mesh = mesh_of(sizes, axes)
    build = partial(
        Transformer,
        num_layers=2,
        d_model=32,
        num_heads=4,
        num_kv_heads=2,
        max_seq_len=24,
        qk_norm=True,
        dtype=torch.float64,
    )
    attention = partial(ContextParallelAttention, mesh=mesh["dp"])
    build_distributed = partial(build, attention=attention)
    model = parallelize(seeded(build_distributed), mesh, recompute=recompute)
    one = seeded(build)

    count, rank = 1, 0
    if "dp_replicate" in axes:
        count = mesh["dp_replicate"].size()
        rank = mesh["dp_replicate"].get_local_rank()
    torch.manual_seed(1)
    x, target = torch.randn(2, count, 3, 24, 32, dtype=torch.float64)
    mask = torch.rand(count, 3, 24, 24) < 0.7 if masked else None
    expected = one(x, mask=mask)
    (expected * target).mean().backward()

    own = own_slice(torch.arange(24), mesh["dp"])
    own_mask = None if mask is None else mask[rank][:, own]
    out = model(x[rank][:, own], own, own_mask)
    (out * target[rank][:, own]).mean().backward()
    # Matrix products of fewer rows, and sums over "tp", may be rounded in another order.
    torch.testing.assert_close(out, expected[rank][:, own], rtol=0, atol=1e-13)
    assert_gradients_equal(model, one, rtol=1e-12, atol=1e-16)


CASES["context parallelism without a mask is like one process"] = partial(
    _context_parallelism, (4,), ("dp",), masked=False
)
for _axes in (("dp_replicate", "dp"), ("dp", "tp")):
    CASES[f"context parallelism with a mask over {_axes} is like one process"] = (
        partial(_context_parallelism, (2, 2), _axes, masked=True, recompute=True)
    )


@case
def a_pipeline_has_the_losses_of_one_process():
    losses = pipeline.train(mesh_of((4,), ("pp",)))
    assert len(losses) == (2 if dist.get_rank() == 3 else 0)
    torch.manual_seed(0)
    one = Transformer(4, d_model=64, num_heads=4, max_seq_len=128)
    optimizer = torch.optim.AdamW(one.parameters())
    torch.manual_seed(1)
    for loss in losses:
        x = torch.randn(8, 16, 64)
        expected = (one(x) - x).square().mean()
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)


@case
def adapters_over_processes_are_those_of_one_process():
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # the imports of peft warn
        import parallel_lora
        from lora import add_adapters, trained_parameters
        from peft import PeftModel

    model, adapters = parallel_lora.train(mesh_of((4,), ("dp",)))
    torch.manual_seed(0)
    one = add_adapters(Transformer(2, d_model=64, num_heads=4, max_seq_len=128))
    optimizer = torch.optim.AdamW(trained_parameters(one))
    generators = [torch.Generator().manual_seed(seed) for seed in range(4)]
    for _ in range(2):
        batches = [torch.randn(4, 16, 64, generator=each) for each in generators]
        x = torch.cat(batches)
        (one(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {
        name: weight.detach()
        for name, weight in one.named_parameters()
        if weight.requires_grad
    }
    torch.testing.assert_close(adapters, expected, rtol=1e-4, atol=1e-5)

    if dist.get_rank() == 0:
        parallel_lora.save(model, adapters, "adapters")
        torch.manual_seed(0)
        fresh = Transformer(2, d_model=64, num_heads=4, max_seq_len=128)
        loaded = PeftModel.from_pretrained(fresh, "adapters")
        with torch.no_grad():
            torch.testing.assert_close(loaded(x), one(x), rtol=1e-4, atol=1e-5)


NEED_PEFT.add("adapters over processes are those of one process")


@case
def each_main_runs():
    parallel.main()
    context_parallel.main()
    pipeline.main()
    if peft_is_installed:
        import parallel_lora

        parallel_lora.main()
