"""The host never waits for the device: nothing is read back, forward or backward, with positions given or not."""

import warnings
from contextlib import contextmanager

import pytest
import torch
from on_device.comparing import draw
from torch.utils._python_dispatch import TorchDispatchMode

from tinyblock import Block, RotaryPositionalEmbedding, Transformer

pytestmark = pytest.mark.cuda


class RefusesToRead(TorchDispatchMode):
    """Stands on a CPU for what CUDA refuses: operations whose result, or its shape, depends on a tensor's values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*func.tags}:
            raise RuntimeError(f"{func} is synchronizing")
        return func(*args, **(kwargs or {}))


@contextmanager
def waiting_refused(device):
    if device.type != "cuda":
        with RefusesToRead():
            yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this mode of torch's is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("read", [torch.Tensor.item, torch.nonzero, bool], ids=lambda f: f.__name__)
def test_reading_back_is_refused(read, device):
    x = torch.ones(1, device=device)
    with pytest.raises(RuntimeError, match="synchronizing"), waiting_refused(device):
        read(x)


@pytest.mark.parametrize("given", ["", "positions", "positions and mask"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model", ["Block", "Transformer"])
def test_forward_and_backward_never_wait(model, dtype, given, device, sizes):
    options = {"num_kv_heads": sizes.kv_heads, "qk_norm": True, "device": device, "dtype": dtype}
    rope = RotaryPositionalEmbedding(1e4, sizes.d_model // sizes.heads, sizes.longest, device=device)
    made: torch.nn.Module
    if model == "Block":
        made = Block(sizes.d_model, sizes.heads, rope=rope, **options)
    else:
        made = Transformer(2, sizes.d_model, sizes.heads, max_seq_len=sizes.longest, rope=rope, **options)
    x = draw(2, sizes.seq, sizes.d_model).to(device, dtype).requires_grad_()
    positions = torch.arange(sizes.seq, device=device) + 3 if given else None
    mask = torch.ones(sizes.seq, sizes.seq, dtype=torch.bool, device=device) if "mask" in given else None

    def run():
        out = made(x, positions, mask)
        out.backward(torch.ones_like(out))

    run()  # libraries start, which may take their time
    with waiting_refused(device):
        run()
