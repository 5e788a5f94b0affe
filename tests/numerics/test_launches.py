"""Recorded calls: the same kernels with other addresses. What is compiled is stood in for, so this runs anywhere."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from expertile.plans import Backend, Plan
from expertile.problem import named_problem
from expertile.runtime import execute
from expertile.runtime.launches import MOST, Calls, Recorder, span


class Compiled:
    """What a launch returns: started again by its grid, with addresses."""

    packed_metadata = ()

    def __init__(self, log):
        self.log = log

    def __getitem__(self, grid):
        return lambda *arguments: self.log.append((grid, arguments))


@dataclass
class Kernel:
    log: list = field(default_factory=list)
    arg_names = ("x_ptr", "n", "y_ptr", "SIZE")

    def __getitem__(self, grid):
        return lambda *arguments, **others: Compiled(self.log)


@dataclass
class Descriptor:
    base: torch.Tensor
    block_shape: list
    shape: list


def recorded(recorder, *sources):
    """What the recorder makes of a call with these sources."""
    addresses = [None if source is None else source.data_ptr() for source in sources]
    return recorder.recorded("plan", addresses, [span(source) for source in sources])


def record(kernel, x, y, *, view=None):
    recorder = Recorder()
    recorder(kernel, (3,), view or x[1:], 7, y, SIZE=16, num_warps=4)
    return recorder


def test_addresses_move_and_the_rest_stays():
    kernel, x, y = Kernel(), torch.zeros(4, 8), torch.zeros(5)
    found = recorded(record(kernel, x, y), x, None, y)
    found([1000, None, 2000])
    assert kernel.log == [((3, 1, 1), (1000 + 8 * 4, 7, 2000, 16))]


def test_a_descriptor_is_moved_without_touching_the_recorded_one():
    kernel, x, y = Kernel(), torch.zeros(4, 8), torch.zeros(5)
    view = Descriptor(x[2:], [2, 8], [2, 8])
    found = recorded(record(kernel, x, y, view=view), x, y)
    for start in (4096, 8192):
        found([start, 0])
        moved = kernel.log[-1][1][0]
        assert moved.base.data_ptr() == start + 2 * 8 * 4 and (moved.block_shape, moved.shape) == ([2, 8], [2, 8])
    assert view.base is not moved.base and view.base.data_ptr() == x[2:].data_ptr()


def test_no_memory_of_the_recorded_call_is_held():
    kernel, x, y = Kernel(), torch.zeros(4, 8), torch.zeros(5)
    alive = [weakref.ref(x), weakref.ref(y)]
    views = record(kernel, x, y, view=Descriptor(x, [2, 8], [4, 8])), record(kernel, x, y)
    found = [recorded(recorder, x, y) for recorder in views]
    del x, y, views
    gc.collect()
    assert all(found) and [ref() for ref in alive] == [None, None]


def test_a_kernel_whose_defaults_are_not_given_is_not_recorded():
    kernel, x, y = Kernel(), torch.zeros(4, 8), torch.zeros(5)
    recorder = Recorder()
    recorder(kernel, (3,), x, 7, y, num_warps=4)
    assert recorded(recorder, x, y) is None


def test_a_tensor_that_came_from_nowhere_is_not_recorded():
    x, y = torch.zeros(4, 8), torch.zeros(5)
    assert recorded(record(Kernel(), x.clone(), y), x, y) is None


@pytest.mark.parametrize("overlap", ["same", "part"])
def test_sources_that_share_memory_are_not_recorded(overlap):
    x = torch.zeros(4, 8)
    y = x if overlap == "same" else x[3]
    assert recorded(record(Kernel(), x, y), x, y) is None


def test_what_is_interpreted_is_not_recorded():
    class Interpreted(Kernel):
        def __getitem__(self, grid):
            return lambda *arguments, **others: None

    x, y = torch.zeros(4, 8), torch.zeros(5)
    assert recorded(record(Interpreted(), x, y), x, y) is None


def test_the_span_of_a_strided_tensor_ends_with_its_last_element():
    x = torch.zeros(4, 8)
    assert span(x[:, :3]) == (3 * 8 + 3) * 4 and span(None) == span(x[:0]) == 0


def test_calls_are_bounded():
    calls = Calls()
    for key in range(MOST + 5):
        calls.keep((key,), key)
    assert len(calls) == MOST and calls.find((0,)) is None and calls.find((MOST + 4,)) == MOST + 4


def test_a_call_runs_on_its_tensors_device(monkeypatch):
    class OnSecond:
        is_cuda, device = True, "cuda:1"

        def get_device(self):
            return 1

    current = [0]

    @contextmanager
    def device(name):
        current.append(int(name[-1]))
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setitem(execute.RUNNERS, Backend.TORCH, lambda *call: current[-1])
    plan = Plan(named_problem("qwen3-30b-a3b", 1, "bf16"), "h200", Backend.TORCH)
    assert execute.run(plan, OnSecond(), None, None, None, None) == 1 and current == [0]
