"""What is read from torch.profiler, whose events are made up here."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from profiling import kernels
from profiling.kernels import record_run


def event(name, microseconds, device="CUDA", is_user_annotation=False):
    return SimpleNamespace(
        name=name,
        device_type=SimpleNamespace(name=device),
        is_user_annotation=is_user_annotation,
        time_range=SimpleNamespace(elapsed_us=lambda: microseconds),
    )


def memory(at, size, name="[memory]"):
    return SimpleNamespace(name=lambda: name, start_ns=lambda: at, nbytes=lambda: size)


@pytest.fixture
def profiled(monkeypatch):
    """Return a function that records a run with these events."""

    def profiled(events=(), changes=(), trace=None):
        session: Any = Mock()
        session.events.return_value = events
        session.profiler.kineto_results.events.return_value = changes
        profile = Mock()
        profile.return_value.__enter__ = lambda _: session
        profile.return_value.__exit__ = lambda *_: None
        monkeypatch.setattr(kernels, "profile", profile)
        recording = record_run(lambda: None, trace)
        return recording, session, profile.call_args.kwargs

    return profiled


def test_launches_of_a_kernel_add_up_and_the_longest_comes_first(profiled):
    events = [event("a", 1.0), event("b", 5.0), event("a", 1.0)]
    recording, _, _ = profiled(events)
    found = [(each.name, each.launches) for each in recording.kernels]
    assert found == [("b", 1), ("a", 2)]
    seconds = [each.total_s for each in recording.kernels]
    assert seconds == pytest.approx([5e-6, 2e-6])
    assert recording.busy_s == pytest.approx(7e-6)


def test_labels_and_operations_of_the_cpu_are_no_kernels(profiled):
    label = event("attn", 9.0, is_user_annotation=True)
    recording, _, _ = profiled([label, event("aten::mm", 9.0, device="CPU")])
    assert recording.kernels == []


def test_peak_is_the_most_that_is_allocated_at_a_time(profiled):
    """The changes add up in the order of their times: 5, 3, 9, 2 bytes."""
    changes = [memory(3, 6), memory(1, 5), memory(2, -2), memory(4, -7)]
    changes.append(memory(1, 99, name="aten::empty"))
    recording, _, _ = profiled(changes=changes)
    assert recording.peak_added_bytes == 9


def test_peak_of_a_run_that_only_releases_is_zero(profiled):
    recording, _, _ = profiled(changes=[memory(1, -5)])
    assert recording.peak_added_bytes == 0


def test_each_run_is_finished_on_the_gpu_before_the_step_ends(monkeypatch):
    order = Mock()
    monkeypatch.setattr(kernels, "clock", order.wait)
    monkeypatch.setattr(kernels, "profile", order)
    order.return_value.__enter__ = lambda _: order
    order.return_value.__exit__ = lambda *_: None
    order.events.return_value = ()
    order.profiler.kineto_results.events.return_value = ()
    record_run(order.run)
    names = [name for name, _, _ in order.mock_calls]
    passes = [name for name in names if name in ("run", "wait", "step")]
    assert passes == ["run", "wait", "step"] * 2  # a warm-up, and what is recorded


def test_trace_is_written_with_the_modules_of_the_stack(profiled):
    _, session, options = profiled(trace=Path("file.json"))
    session.export_chrome_trace.assert_called_once_with("file.json")
    assert options["with_stack"]


def test_without_a_trace_no_stack_is_recorded_which_would_take_time(profiled):
    _, session, options = profiled()
    session.export_chrome_trace.assert_not_called()
    assert not options["with_stack"]
