"""Graphs of steps by name, with a stand-in for CUDA's that runs the work again. On a GPU: test_engine_cuda.py."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import Tensor

from dtgpt.inference.captured.graphs import WARM_UP, StepGraphs
from dtgpt.util.errors import UserError


@pytest.fixture
def cuda(monkeypatch):
    for name in ("graph_pool_handle", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, mock.Mock())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", mock.Mock)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: nullcontext())


def test_what_prepares_a_capture_is_made_once_and_inputs_are_those_of_the_call(cuda):
    seen, idle = [], mock.Mock(return_value=(torch.full((3,), 9),))

    def work(slots: Tensor) -> Tensor:
        seen.append(slots)
        return slots

    graphs = StepGraphs()
    for first in range(3):
        result = graphs.run("decode", work, (torch.arange(first, first + 3),), idle)
        assert result.tolist() == [first, first + 1, first + 2]
    assert idle.call_count == 1 and len(seen) == WARM_UP + 1
    graphs.release()
    graphs.run("decode", work, (torch.arange(3),), idle)
    assert idle.call_count == 2


def test_a_capture_that_fails_is_one_sentence(cuda):
    def work(slots: Tensor) -> Tensor:
        calls.append(slots)
        if len(calls) > WARM_UP:
            raise RuntimeError("not in a capture\nmore")
        return slots

    calls: list[Tensor] = []
    with pytest.raises(UserError, match=r"CUDA graph \(not in a capture\); use device=cpu$"):
        StepGraphs().run("decode", work, (torch.zeros(2),), lambda: (torch.zeros(2),))
