"""What compare.py compares is equal, and its report has what was measured."""

import os
import sys
from typing import Any

import pytest
import torch
from compare import (
    Case,
    cases_on,
    count_kept_bytes,
    difference,
    in_a_new_process,
    in_mode,
    main,
    prepare,
)
from lab.sizes import Size
from lab.timing import Clock
from peers import Peer, control, installed, make_block
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from tinyblock import Block, RotaryPositionalEmbedding

CPU = torch.device("cpu")
X = torch.randn(2, 5, 32)
TRAINING = Case("training", Size(), torch.float32, train=True, mode="eager")

# Other projects warn when they are imported, and in their layers.
pytestmark = pytest.mark.filterwarnings("ignore")


def build_block():
    """A Block with no option at the default of another project."""
    rope = RotaryPositionalEmbedding(100.0, 16, max_seq_len=5)
    block: Any = Block(32, 4, 48, rope=rope, num_kv_heads=2, d_head=16, eps=0.1)
    for norm in (block.ln1, block.ln2):
        norm.weight.data += 0.1 * torch.randn(32)
    return block


def test_each_project_computes_the_block_with_its_own_weights():
    pytest.importorskip("transformers", reason="requires the extra examples")
    for name, make_peer in installed(CPU).items():
        block = build_block()
        peer = make_peer(block)
        weights = {weight.data_ptr() for weight in block.parameters()}
        assert weights.isdisjoint(each.data_ptr() for each in peer.parameters), name
        ours, theirs = (prepare(each, X, TRAINING) for each in (control(block), peer))
        assert difference(ours, theirs, TRAINING.tolerance) < 2e-6, name


class Ticks(Clock, TorchDispatchMode):
    """A clock that operations advance.

    A product takes 10 ms times the pace, and a sum 1 us for each number. The pace is that
    of a process times that of a round, and 1 before the rounds.
    """

    def __init__(self):
        super().__init__()
        self.time = 0.0
        self.of_process = 1.0
        self.of_round = 1.0

    def now(self):
        return self.time

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.mm.default:
            self.time += 0.01 * self.of_process * self.of_round
        if function is torch.ops.aten.sum.default:
            self.time += 1e-6 * args[0].numel()
        return function(*args, **(kwargs or {}))


@pytest.fixture
def clock():
    """A clock. The process has two threads, as where torch has started."""
    torch.set_num_threads(2)
    clock = Ticks()
    with clock:
        yield clock
    torch.set_num_threads(1)
    sys.modules.pop("tinyblock_against", None)


@pytest.fixture
def run(clock, capsys):
    """Return a function that runs the command, and returns its exit code and output.

    The rounds have the paces 1, 3 and 1/3, and the processes 1, 4 and 1/4.
    """

    def run(*typed, peers):
        of_rounds = {"": 1.0, "1": 1.0, "2": 3.0, "3": 1 / 3}
        of_processes = iter((1.0, 1.0, 4.0, 0.25))  # the first is that of training

        def call(measure, case):
            torch.set_num_threads(2)  # as a new process has several
            clock.of_process = next(of_processes)
            return measure(case)

        def progress(doing):
            _, _, number = doing.partition("round ")
            clock.of_round = of_rounds[number[:1]]

        code = main(
            ["--rounds", "3", *typed],
            cases_on=lambda device: [
                Case("train", Size(2, 5, 32, 2, d_ff=48), torch.float32, True, "eager"),
                Case(
                    "token", Size(1, 1, 32, 2, d_ff=48), torch.bfloat16, False, "eager"
                ),
            ],
            peers_on=lambda device: peers,
            clock=clock,
            call=call,
            progress=progress,
        )
        return code, capsys.readouterr().out

    return run


def late(block, clock):
    """A layer that takes 70 ms more than the Block, and keeps a MiB more for backward.

    It is right, but for an error of 2^-17 in the gradient, or of 2^-9 times the pace of
    the process in bfloat16.
    """
    peer = control(block)

    def layer(x):
        assert torch.get_num_threads() == 1
        clock.time += 0.07
        out = peer.layers["Block"](x)
        if x.dtype == torch.bfloat16:
            return out.float() * (1 + 2**-9 * clock.of_process)
        out = out + torch.zeros(2**18, requires_grad=True).square().mean()
        out.register_hook(lambda gradient: (1 + 2**-17) * gradient)
        return out, "and a cache"

    return Peer(peer.parameters, {"Block": layer})


def wrong(block):
    """A layer whose gradient is 1% too large."""
    peer = control(block)

    def layer(x):
        out = peer.layers["Block"](x)
        if out.requires_grad:
            out.register_hook(lambda gradient: 1.01 * gradient)
        return out

    return Peer(peer.parameters, {"Block": layer})


AGAINST = """\
import tinyblock

RotaryPositionalEmbedding = tinyblock.RotaryPositionalEmbedding

class Block(tinyblock.Block):
    def forward(self, x):
        super().forward(x)
        return super().forward(x)
"""

# A Block has 7 products: 4 in attention, and 3 in SwiGLU. In training each has two more in
#   backward, so a run takes 210 ms times the pace: 210, 630 and 70 ms. One token takes 70 ms
#   times the paces of round and process. Samples repeat it until they take 200 ms.
# late: 280, 700 and 140 ms in training, so ratios of 0.75, 0.90 and 0.50. The median round
#   of a process has the pace of the process: 70, 280 and 17.5 ms, and 70 ms more for `late`,
#   so 140, 350 and 87.5 ms, and ratios of 0.50, 0.80 and 0.20. 2^-17 is 8e-6, and the
#   largest error in bfloat16 is 4 x 2^-9, 8e-3.
# reading: 4 x 32 x 32 weights of attention, 3 x 32 x 48 of SwiGLU and 64 of norms. In
#   bfloat16, two are read as a number: 4,384 numbers take 4.384 ms at any pace. The Block's
#   70, 280 and 17.5 ms are 15.97, 63.87 and 3.99 times that.
# The Block keeps less than 0.05 MiB.
TABLES = """\
| Block's time / other layer's |          control |             late |            wrong |            reading |
| ---------------------------- | ---------------: | ---------------: | ---------------: | -----------------: |
| train                        | 1.00 (1.00-1.00) | 0.75 (0.50-0.90) |           failed |                    |
| token                        | 1.00 (1.00-1.00) | 0.50 (0.20-0.80) | 1.00 (1.00-1.00) | 15.97 (3.99-63.87) |

|                | Block ms | other ms | differ by | Block keeps MiB | other keeps MiB |
| -------------- | -------: | -------: | --------: | --------------: | --------------: |
| train: control |      210 |      210 |     0e+00 |             0.0 |             0.0 |
| train: late    |      210 |      280 |     8e-06 |             0.0 |             1.0 |
| token: control |     70.0 |     70.0 |     0e+00 |                 |                 |
| token: late    |     70.0 |      140 |     8e-03 |                 |                 |
| token: wrong   |     70.0 |     70.0 |     0e+00 |                 |                 |
| token: reading |     70.0 |     4.38 |     0e+00 |                 |                 |"""
FAILURE = (
    'train: wrong failed: RuntimeError("outputs and gradients must be within 2e-05 of the '
    "Block's, got relative errors of 0.0e+00, 1.0e-02\")"
)


def test_report(run, clock):
    peers = {"late": lambda block: late(block, clock), "wrong": wrong}
    code, printed = run(peers=peers)
    first, command, text = printed.split("\n\n", 2)
    assert text == f"{TABLES}\n\n{FAILURE}\n", text
    assert code == 1
    assert f", 1 of {os.cpu_count()} threads, " in first
    assert command.endswith("; `scripts/compare.py --rounds 3`")


def test_merged_weights_take_four_products_in_place_of_seven(clock, capsys):
    """q, k and v are one, and so are both parts of the gate; the control has seven."""
    size = Size(1, 1, 32, 2, d_ff=48)
    case = Case("token-merged-eager", size, torch.float32, False, "eager")
    code = main(
        ["--processes", "1"],
        cases_on=lambda device: [case],
        peers_on=lambda device: {},
        clock=clock,
        call=lambda measure, case: measure(case),
    )
    assert code == 0
    printed = capsys.readouterr().out
    assert "| token-merged-eager           | 0.57 (0.57-0.57) |" in printed, printed


def test_another_checkout_is_compared_in_the_cases_that_match(run, tmp_path):
    """Its forward has 14 products, so training has 28 for the Block's 21."""
    (tmp_path / "tinyblock").mkdir()
    (tmp_path / "tinyblock" / "__init__.py").write_text(AGAINST)
    code, printed = run("--cases", "tr*", "--against", str(tmp_path), peers={})
    ratios, times = printed.split("\n\n")[2:]
    assert code == 0
    assert ratios.endswith("| 1.00 (1.00-1.00) | 0.75 (0.75-0.75) |")
    assert "\n| train: against |      210 |      280 |" in times


def test_a_crash_does_not_lose_the_cases_before_it(run, capsys):
    def crash(block):
        if block.ln1.weight.dtype == torch.bfloat16:
            raise KeyboardInterrupt
        return control(block)

    with pytest.raises(KeyboardInterrupt):
        run(peers={"crash": crash})
    assert "\n| train: crash   |      210 |" in capsys.readouterr().out


def test_layers_and_inputs_are_on_the_device_that_was_typed(capsys):
    devices = set()

    def watched(block):
        def layer(x):
            devices.add(x.device.type)
            return block(x)

        return Peer(list(block.parameters()), {"Block": layer})

    code = main(
        ["--device=meta", "--cases=*-tiny-token-eager", "--processes=1", "--rounds=1"],
        peers_on=lambda device: {"watched": watched, device.type: watched},
        call=lambda measure, case: measure(case),
    )
    assert devices == {"meta"}
    assert code == 1  # no numbers can be compared
    assert "-eager: meta failed: " in capsys.readouterr().out


def test_options_that_name_nothing_are_errors_before_anything_is_measured(tmp_path):
    for typed in (
        ["--cases", "token"],
        ["--against", str(tmp_path)],
        ["--rounds", "0"],
        ["--processes", "0"],
    ):
        with pytest.raises(SystemExit, match="2"):
            main(typed, call=lambda measure, case: pytest.fail("it measures"))


def test_the_blocks_of_llama_are_measured_on_cuda_alone():
    on_cpu, on_cuda = cases_on(CPU), cases_on(torch.device("cuda"))
    assert on_cuda[: len(on_cpu)] == on_cpu
    assert not any("llama" in case.name or "graphs" in case.name for case in on_cpu)
    size = Size(1, 8192, 4096, 32, 8, 128, 14336)
    name = "train-bf16-llama-8b-long-compiled"
    assert Case(name, size, torch.bfloat16, True, "compiled") in on_cuda


def test_each_case_is_measured_in_a_process_that_has_measured_nothing():
    assert in_a_new_process(os.getpid) != os.getpid()


def test_a_block_is_the_same_each_time_and_its_norm_weights_differ():
    """Otherwise a layer without these weights would be measured as right."""
    (one, x), (other, y) = (make_block(Size(), torch.float32, CPU) for _ in range(2))
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)
    assert torch.equal(x, y)
    for norm in (one.ln1, one.ln2):
        assert 0.08 < norm.weight.std() < 0.12


@pytest.mark.parametrize("factor", [1.0001, float("nan")])
def test_other_outputs_are_an_error(factor):
    peer = control(build_block())
    wrong = Peer(peer.parameters, {"Block": lambda x: factor * peer.layers["Block"](x)})
    ours, theirs = (prepare(each, X, TRAINING) for each in (peer, wrong))
    with pytest.raises(RuntimeError, match="must be within 2e-05"):
        difference(ours, theirs, TRAINING.tolerance)


def test_kept_bytes_count_each_storage_once_and_no_weight():
    """x.square keeps x, and the product keeps x.square and the weight."""
    x = torch.randn(5, requires_grad=True)
    weight = torch.randn(5, requires_grad=True)
    _, kept = count_kept_bytes(lambda: x.square() * weight, [weight])
    assert kept == 2 * 5 * 4


class TwoProjections(nn.Module):
    """A layer of three products, two of which have the same input, where it is compiled."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(32, 8, bias=False)
        self.k = nn.Linear(32, 8, bias=False)

    def forward(self, x):
        q = self.q(x)
        return q @ self.k(x).mT if torch.compiler.is_compiling() else q


@pytest.mark.parametrize(
    ("mode", "products", "reads_weights", "asks_for_cuda_graphs"),
    [
        ("eager", 0, True, False),
        ("compiled", 3, True, False),
        ("frozen", 2, False, False),  # the projections are one, of constants
        ("graphs", 3, True, True),
    ],
)
def test_modes(mode, products, reads_weights, asks_for_cuda_graphs):
    """On a CPU, torch notes that CUDA graphs were asked for, and makes none."""
    layer, x = TwoProjections(), X[0].clone()
    options = {"freezing": False, "cpp.enable_concat_linear": False}
    counters.clear()
    with torch._inductor.config.patch(options), torch.no_grad():
        run = in_mode(mode, layer, [x])
        before = run(x).clone()
        layer.q.weight.mul_(2)
        assert torch.equal(run(x), before) != reads_weights
        assert counters["inductor"]["extern_calls"] == products
        run(x[1:])
    assert before.shape == ((5, 5) if products else (5, 8))
    # Sizes are constants of the code.
    assert counters["stats"]["unique_graphs"] == (2 if products else 0)
    assert bool(counters["inductor"]["cudagraph_skips"]) == asks_for_cuda_graphs
    # Otherwise each replay of a graph copies x.
    assert hasattr(x, "_dynamo_static_input_type") == asks_for_cuda_graphs


def test_a_case_runs_in_its_mode():
    layer = TwoProjections()
    case = Case("token", Size(), torch.float32, train=False, mode="compiled")
    with torch.no_grad():
        token = prepare(Peer(list(layer.parameters()), {"Block": layer}), X[0], case)
    assert token.run().shape == token.results[0].shape == (5, 5)
