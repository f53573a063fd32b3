"""Compiled code that counts itself."""

from functools import partial

import pytest
import torch


class Counted:
    """A backend of torch.compile that counts graphs, and their runs."""

    def __init__(self):
        self.graphs = self.runs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1

        def run(*arguments):
            self.runs += 1
            return graph.forward(*arguments)

        return run


@pytest.fixture
def counting():
    return Counted()


@pytest.fixture
def counted(counting, monkeypatch):
    """Let torch.compile generate no code, which takes most of its time, but count."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counting))
    return counting
