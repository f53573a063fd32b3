"""Counting bytes, against tensors whose bytes are known."""

from pathlib import Path

import pytest
import torch
from lab.memory import SavedBytes, is_out_of_memory, peak_added_bytes, peak_of_trace


def test_saved_bytes_counts_a_storage_once():
    x = torch.randn(8, 16, requires_grad=True)
    saved = SavedBytes()
    assert saved.of(lambda: x * x)[1] == 8 * 16 * 4  # saves x twice
    assert saved.of(lambda: x.T.sin())[1] == 0  # a view of what was saved
    out, count = saved.of(lambda: (x + 1).exp())
    assert count == 8 * 16 * 4  # exp saves its result
    assert torch.equal(out, (x + 1).exp())
    big = torch.randn(100, 4)
    first = big[:1].requires_grad_()
    assert saved.of(lambda: first.sin())[1] == big.nbytes  # all of it is kept alive
    y = torch.randn(16, requires_grad=True)
    assert SavedBytes([x]).of(lambda: x * y)[1] == y.nbytes  # x is there anyway


def test_saved_bytes_does_not_mistake_a_new_storage_for_one_that_is_gone():
    saved = SavedBytes()
    x = torch.randn(2**18, requires_grad=True)
    for _ in range(
        20
    ):  # would each free its result, the next one could lie at the same address
        assert saved.of(lambda: (x + 1).sin())[1] == x.nbytes


def test_peak_of_trace_adds_up_what_lives_at_a_time():
    changes = {3: -10, 1: 10, 2: 5, 4: 7, 5: -12}
    events = [
        {"name": "[memory]", "ts": time, "args": {"Bytes": change}}
        for time, change in changes.items()
    ]
    assert peak_of_trace([*events, {"name": "aten::mm", "ts": 0}]) == 15
    assert peak_of_trace(events[:1]) == peak_of_trace([]) == 0


def test_peak_added_bytes_sees_what_is_released_within():
    x = torch.randn(1000)
    added = peak_added_bytes(
        lambda: x + 1 + 1 + 1, torch.device("cpu")
    )  # of three sums, two live at a time
    assert added == pytest.approx(
        2 * 4000, abs=100
    )  # torch adds a few bytes for each scalar


def test_trace_that_is_cut_off_is_an_error_of_the_disk(monkeypatch):
    def write_half(profiler, path):
        Path(path).write_text('{"traceEvents": [')

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", write_half)
    x = torch.randn(1000)
    with pytest.raises(OSError, match=r"trace.json: free some space, or set TMPDIR$"):
        peak_added_bytes(lambda: x + 1, torch.device("cpu"))


def test_is_out_of_memory_knows_every_message_and_what_torch_raises():
    for message in (
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "backend='inductor' raised:\nOutOfMemoryError: Tried to allocate 2.00 GiB",
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes",
        "DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes.",
    ):
        assert is_out_of_memory(RuntimeError(message)), message
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50)
    assert is_out_of_memory(raised.value)
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("can't allocate memory"))
