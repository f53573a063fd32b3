"""Whole reports of small models, by a clock that operations advance.

Each figure is derived by hand in a comment. The machine computes 1,000 FLOPs, copies 4,000
bytes, and calls 100 operations on one number in a second. All inputs are 2 sequences of 5
tokens of width 4, so 10 tokens, and 160 bytes.
"""

from collections import OrderedDict

import jaxtyping  # noqa: F401  so the report says whether its checks ran
import torch
from profiling.report import actions, losses, report
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8, bias=False)
        self.down = nn.Linear(8, 4, bias=False)
        # AdamW is fused, because it gets no weight of integers.
        codes = torch.ones(8, dtype=torch.int8)
        self.codes = nn.Parameter(codes, requires_grad=False)

    def forward(self, x):
        relu = nn.ReLU()  # it belongs to its caller
        return x + self.down(relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.register_buffer("table", torch.zeros(100))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return {"x": x}


class Mixed(nn.Module):
    """Changes its input, shares a weight, has a spare one, and calls what has no formula."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(250, 4)
        self.scale = torch.ones(50, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.again = nn.Linear(4, 4, bias=False)
        self.again.weight = self.tied.weight
        self.spare = nn.Linear(4, 4)

    def forward(self, x):
        x += self.embed(torch.arange(5))
        x = x * self.scale[:5]
        return self.again(self.tied(x)) + torch.fft.rfft(x, n=6).real


def body(profile):
    """Return the report without the machine's name and without its last line."""
    return report(profile).partition("\n")[2].rpartition("\n\n")[0]


# up, in both layers: a product in forward and two in backward take 1 s each, and the sum of
#   x's two gradients 0.125 s, so 2 x 3.125 s. Each product has 2 x 10 x 4 x 8 FLOPs, and 6 of
#   them take 3.84 s at the rate: 61.4%. The sum, the products, and for each product 3 or 4
#   views are 13 operations. It keeps x for backward: 160 bytes, in the second layer also,
#   where x is made by the first. Its 64 parameters are 2 x 4 x 8.
# down: the same without the sum. What it keeps is relu's result, which relu keeps, too.
# layers.*: relu 0.5 s, the sum 0.125 s and relu's backward 0.25 s, twice. Relu reads and
#   writes 320 bytes each, the sum 2 x 160 and 160, backward 2 x 320 and 320: 4,160 bytes take
#   1.04 s. Relu's results are kept: 2 x 320 bytes.
#   It has 2 x 8 integers of a byte.
# AdamW: 7 s in one operation, and a sum for the counters. It must read weights, gradients
#   and two states of 512 bytes, write three of them, and read and write 4 counters of 4
#   bytes: 3,616 bytes take 0.904 s. Both operations read the counters: 3,632 bytes, 13% of
#   its time.
# total: 14 + 7 s. 7,680 FLOPs take 7.68 s, 36.6% of it; the least times are 2 x 3.84 + 1.04 +
#   0.904 s, 45.8%. 8, 6 and 6 computations of the model, besides views, and 2 of AdamW
#   take 10 ms each. 10 tokens in 21 s.
# Memory: 528 bytes of weights, a table of 400, two states and counters of 1,040. At
#   the peak, in backward of the second layer, there are these, x, both relu's results, the
#   results of both layers, the gradient of the last weight, and the gradients of relu's
#   result and argument: 2,128 + 2 x 320 + 2 x 160 + 128 + 2 x 320.
STEP = """\
a model: 2 x 5 tokens, d_model 4; float32, step, eager, training mode
Measured in the same rounds: float32 matmul 1.00 kFLOP/s, memory copy 4.00 kB/s, an operation on one number 10.0 ms

Time: 21.0 s (p20 to p80: 21.0 s to 21.0 s), 476 m tokens/s. The roofline (the least time) is 45.8% of it
MFU: its FLOPs would take 36.6% of the time at the matmul rate
Memory: peak 3.86 kB. Sizes, not all at one time: parameters 528 B, buffers 400 B, other tensors 0 B, gradients 512 B,
  AdamW 1.04 kB, kept for backward 960 B
Rest, which no part explains: 0% of the time. It varies by 0% of the time
Overhead: calling 22 operations besides views takes at least 220 ms, 1.0% of the time
Shape checks: on (JAXTYPING_DISABLE=1 turns them off)

Most time lost against the roofline, and why:
  AdamW: loses 6.10 s of its 7.00 s, 29.0% of the total
    Its operations are slow: at the machine's rates, what they read and write (3.63 kB) takes 13% of the time.
    2 operations: _fused_adamw_ x 1 (100%)
  layers.*.up: loses 2.41 s of its 6.25 s, 11.5% of the total
    Computing takes 61% of the time. Try fewer FLOPs, or a dtype whose matmuls are faster.
    26 operations: mm x 6 (96%, 4 of them in backward), add x 2 (4.0%, backward)
  layers.*.down: loses 2.16 s of its 6.00 s, 10.3% of the total
    Computing takes 64% of the time. Try fewer FLOPs, or a dtype whose matmuls are faster.
    24 operations: mm x 6 (100%, 4 of them in backward)

part           calls  ops  params  forward ms  total ms  share  roofline    limit   kept
layers.*.up        2   26      64        2000      6250  29.8%     61.4%  compute  320 B
layers.*.down      2   24      64        2000      6000  28.6%     64.0%  compute
layers.*           2    6      16        1250      1750  8.33%     59.4%   memory  640 B
AdamW                   2                   0      7000  33.3%     12.9%   kernel
rest                                                  0     0%
total                  58     144        5250     21000   100%     45.8%           960 B"""


def test_training_step(profile_of, clock):
    clock.takes = {"mm": 1.0, "relu": 0.5, "threshold_backward": 0.25, "add": 0.125}
    clock.takes["_fused_adamw_"] = 7.0
    assert body(profile_of(Stack(), "step")) == STEP


# An operation on one number takes 0.25 s: a multiplication.
# embed: 5 positions of 8 bytes; 5 rows of 16 bytes are read and written: 200 bytes, 0.05 of
#   0.25 s. An operation on one number takes as long, so the rest of the time is Python's.
# tied, again: 2 x 10 x 4 x 4 FLOPs take 0.32 of 1 s, 0.25 s of which is any call's. x, weight
#   and result have 384 bytes, 0.096 s. The weight counts in the first. The 16 + 4 weights of
#   `spare`, which is not called, are a row.
# Mixed itself: 4 s of the Fourier transform and 0.25 s of the product. In turns, it writes 40 bytes
#   of positions; reads x, the embedded positions and 5 rows of the scale, and writes x and
#   the product, 160 + 80 + 80 + 2 x 160 bytes; reads the product and again's result, and
#   writes the sum, 3 x 160 bytes: 1,160 bytes, 0.29 of 4.25 s. Its operations are arange,
#   add_, slice, mul, constant_pad_nd, _fft_r2c, view_as_real, select and add.
# rest: the model changes x, so each run copies it, in 0.5 s.
# total: 7 s. 640 FLOPs take 0.64 s, 9.14%; the least times are 0.05 + 2 x 0.32 + 0.29 s.
#   All but tied's and again's 2 x 3 views and 3 of Mixed's are 9 computations. The whole
#   is forward, with what no part explains.
# Memory: 1,036 weights with 20 spare ones, a scale of 800 bytes. At the peak there are these,
#   x and its copy, the product, again's result, and the padded argument (6 numbers for each
#   token) and the result (4 complex numbers) of the transform: 5,104 + 3 x 160 + 240 + 320.
FORWARD = """\
a model: 2 x 5 tokens, d_model 4; float32, forward, eager, eval mode
Measured in the same rounds: float32 matmul 1.00 kFLOP/s, memory copy 4.00 kB/s, an operation on one number 10.0 ms

Time: 7.00 s (p20 to p80: 7.00 s to 7.00 s), 1.43 tokens/s. The roofline (the least time) is >= 14.0% of it
MFU: its FLOPs would take >= 9.14% of the time at the matmul rate
Memory: peak 6.14 kB. Sizes, not all at one time: parameters 4.14 kB, buffers 0 B, other tensors 800 B, gradients 0 B,
  AdamW 0 B, kept for backward 0 B
Rest, which no part explains: 7.1% of the time. It varies by 0% of the time
Overhead: calling 9 operations besides views takes at least 90 ms, 1.3% of the time
FLOPs of aten._fft_r2c are unknown, so figures that follow from them have >= or <=
Shape checks: on (JAXTYPING_DISABLE=1 turns them off)

Most time lost against the roofline, and why:
  Mixed: loses <= 3.96 s of its 4.25 s, <= 56.6% of the total
    Operations whose FLOPs are unknown (aten._fft_r2c) take 88% of the time.
    9 operations: _fft_r2c x 1 (88%)
  tied: loses 680 ms of its 1.00 s, 9.71% of the total
    Its operations are slow: at the machine's rates, their FLOPs take 32% of the time, and what they read and write (384
      B) takes 9.6% of the time.
    4 operations: mm x 1 (75%)
  again: loses 680 ms of its 1.00 s, 9.71% of the total
    Its operations are slow: at the machine's rates, their FLOPs take 32% of the time, and what they read and write (384
      B) takes 9.6% of the time.
    4 operations: mm x 1 (75%)

part                calls  ops  params  forward ms  total ms  share  roofline    limit  kept
embed                   1    1  1.00 k         250       250  3.57%     20.0%   Python
tied                    1    4      16        1000      1000  14.3%     32.0%   kernel
again                   1    4                1000      1000  14.3%     32.0%   kernel
Mixed                   1    9                4250      4250  60.7%  >= 6.82%  unknown
weights of no part                  20                     0     0%
rest                                                     500  7.14%
total                       18  1.04 k        7000      7000   100%  >= 14.0%"""


def test_forward_with_an_unknown_operation(profile_of, clock):
    clock.takes = {"mm": 1.0, "embedding": 0.25, "_fft_r2c": 4.0, "mul": 0.25}
    clock.takes["clone"] = 0.5
    assert body(profile_of(Mixed(), "forward")) == FORWARD


# In three rounds, all operations and the matmul rate take 1, 2 and 6 times as long, so the
# median is twice, p20 1.4 times, and p80 4.4 times: they vary by 150%.
# up: products of 1 s, one in forward and two in backward: 6 s. 3 x 2 x 10 x 4 x 4
#   FLOPs take 1.92 s. It reads x, weight and bias, and writes the result, 160 + 64 + 16 +
#   160 bytes; in backward it reads a gradient, the weight and x, and writes three gradients,
#   160 + 64 + 160 and 160 + 64 + 16. The products and the sum of the bias move 400 + 384 +
#   384 + 176 bytes. Half of its operations' 6 s is what they took when they were noted.
# relu, gelu: 0.02 s each. Forward reads and writes 320 bytes, backward reads 320 and writes
#   160: 0.2 s each. Relu keeps its result, gelu its input: 160 bytes each.
# rest: relu changes the input, so each run copies it, in 0.5, 1 and 3 s. The range from 0.7
#   to 2.2 s is more than the median, and 21% of the total.
#   They take less, so they count with their own time in the least time of the total.
# total: 2 x 3.52 s, of which FLOPs take 27%, and the least times 1.92 + 2 x 0.02 s, 28%. 4 and
#   2 x 2 computations.
# Memory: 20 weights and x. At the peak, in backward of up, there are these, the
#   copy of x, the result, and the gradients of gelu's argument, of up's, of the
#   weight and of the bias: 240 + 4 x 160 + 64 + 16.
NOISY = """\
a model: 2 x 5 tokens, d_model 4; float32, train, eager, training mode
Measured in the same rounds: float32 matmul 500 FLOP/s, memory copy 4.00 kB/s, an operation on one number 10.0 ms

Time: 7.0 s (p20 to p80: 4.9 s to 15 s), 1.4 tokens/s. The roofline (the least time) is 28% of it
MFU: its FLOPs would take 27% of the time at the matmul rate
Memory: peak 960 B. Sizes, not all at one time: parameters 80.0 B, buffers 0 B, other tensors 0 B, gradients 80.0 B,
  AdamW 0 B, kept for backward 320 B
Rest, which no part explains: 14% of the time. It varies by 21% of the time, so it is noise
Overhead: calling 8 operations besides views takes at least 80 ms, 1.1% of the time
Shape checks: on (JAXTYPING_DISABLE=1 turns them off)
NOISY: matmul float32 by 150%, up by 150%, total by 150%, rest by 21% of the total (p20 to p80); close other programs

Most time lost against the roofline, and why:
  up: loses 4.1 s of its 6.0 s, 58% of the total
    Its time varies by 150%, so the reason may be wrong. Close other programs, and measure again.
    Its operations are slow: at the machine's rates, their FLOPs take 32% of the time, and what they read and write
      (1.34 kB, of which 1.02 kB must be moved) takes 5.6% of the time.
    14 operations: mm x 2 (33%, backward), addmm x 1 (17%)

part                calls  ops  params  forward ms  total ms   share  roofline   limit   kept
up                      1   14      20        2000      6000     85%       32%  kernel
2 parts below 0.5%      2    4                40.0      40.0  0.568%                    320 B
rest                                                    1000     14%             noise
total                       18      20        2000      7000    100%       28%          320 B"""


def test_noisy_times(profile_of, clock):
    clock.takes = {"mm": 1.0, "addmm": 1.0, "relu_": 0.01, "gelu": 0.01, "clone": 0.5}
    layers = {"relu": nn.ReLU(inplace=True), "up": nn.Linear(4, 4), "gelu": nn.GELU()}
    model = nn.Sequential(OrderedDict(layers))
    assert body(profile_of(model, paces=(1, 2, 6))) == NOISY


# The three rows that lose the most, and AdamW, for which there is nothing to try.
ACTIONS = """\
What to try first:
  1. layers.*.up: fewer FLOPs, or a dtype whose matmuls are faster
  2. layers.*.down: fewer FLOPs, or a dtype whose matmuls are faster
  3. layers.*: a smaller dtype, or more tokens if most of it are weights"""


# Of two layers and a sum around them: a product in forward and two in backward each.
BUSY = """\
Other programs took 37% of the time, or the model waited without working. Limits and reasons would be wrong: measure
  again. The slowest operations of the slowest parts:
  AdamW: 2 operations: _fused_adamw_ x 1 (100%)
  layers.*.up: 26 operations: mm x 6 (96%, 4 of them in backward), add x 2 (4.0%, backward)
  layers.*.down: 24 operations: mm x 6 (100%, 4 of them in backward)"""


def test_a_report_ends_with_what_to_try_unless_other_programs_took_the_time(
    profile_of, clock
):
    clock.takes = {"mm": 1.0, "relu": 0.5, "threshold_backward": 0.25, "add": 0.125}
    clock.takes["_fused_adamw_"] = 7.0
    assert report(profile_of(Stack(), "step")).endswith(ACTIONS)
    # What varies by more than half may have another reason.
    assert actions(profile_of(Stack(), "step", paces=(1, 2, 6))) == ""
    clock.others = 0.37
    disturbed = profile_of(Stack(), "step")
    assert actions(disturbed) == ""
    assert losses(disturbed) == BUSY
    assert not any(row.limit for row in disturbed.rows)


class Promotes(nn.Module):
    """Computes one of its products in the dtype of its table."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.eye(4, dtype=torch.float64))
        self.up = nn.Linear(4, 12, bias=False)

    def forward(self, x):
        return self.up((x.double() @ self.table).float())


def test_flops_in_another_dtype_have_a_line(profile_of, clock):
    clock.takes = {"mm": 1.0}
    text = " ".join(report(profile_of(Promotes(), "forward")).split())
    # 4 x 4 of 4 x 4 + 4 x 12 products of each token: 320 FLOPs take 0.32 of 2 s.
    line = (
        "float64: 25% of the FLOPs are not in float32, most of them in Promotes. At the "
        "matmul rate, they take 16% of the time"
    )
    assert line in text
