"""The launches of a call, recorded, and made again for the next call of the same plan with other addresses.

Between a call and its kernels lies Python: checks, views of the scratch memory, tensor descriptors, Triton's binding
and specialisation of every argument. For an engine that runs tens of layers a step this is time to first token
whenever the step is no CUDA graph. All of it follows from the plan, strides, dtypes and alignments; what varies are
addresses, so the compiled kernels are started with new ones: by the CUDA driver directly where runtime/direct.py knows
how, else by Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Lock
from typing import Any

import torch
from triton import knobs
from triton.runtime.driver import driver

from .direct import Direct, Moving, direct

MOST = 512  # recorded calls that are kept; the oldest goes


@dataclass(frozen=True, eq=False)
class Launch:
    """One compiled kernel on its grid.

    arguments   in the kernel's order; those in `moving` are filled in
    moving      position -> the address of that tensor, or of that tensor descriptor's
    direct      the same launch as the driver takes it
    """

    start: Callable[..., None]
    arguments: Sequence[Any]
    moving: Mapping[int, Moving]
    direct: Direct | None = None

    def __call__(self, addresses: Sequence[int]) -> None:
        arguments = list(self.arguments)
        for position, each in self.moving.items():
            address, view = addresses[each.source] + each.offset, arguments[position]
            arguments[position] = address if view is None else _moved(view, address)
        self.start(*arguments)


@dataclass(frozen=True, eq=False)
class Recorded:
    """A call's launches in order. `plan` is kept so that no other plan can have its identity."""

    plan: Any
    launches: Sequence[Launch]
    lock: Any = field(default_factory=Lock)

    def __call__(self, addresses: Sequence[int]) -> None:
        if any(launch.direct is None for launch in self.launches) or _watched():
            for launch in self.launches:
                launch(addresses)
            return
        stream = driver.active.get_current_stream(driver.active.get_current_device())
        with self.lock:
            for launch in self.launches:
                if not launch.direct(addresses, stream):
                    launch(addresses)  # by Triton, which says what is wrong or mends it: a thread without a context


@dataclass(eq=False)
class Recorder:
    """Starts kernels as `kernels.tiles.launch` does, and remembers them."""

    started: list[tuple[Any, Any, tuple, tuple, dict]] = field(default_factory=list)

    def __call__(self, kernel, grid: tuple, *arguments, **others) -> None:
        self.started.append((kernel, kernel[grid](*arguments, **others), grid, arguments, others))

    def recorded(self, plan, addresses: Sequence[int | None], spans: Sequence[int]) -> Recorded | None:
        """What was started, as a function of its sources' addresses; None if it reads or writes anything else."""
        ranges = [(start or 0, (start or 0) + span) for start, span in zip(addresses, spans, strict=True)]
        taken = sorted(each for each in ranges if each[0] < each[1])
        if any(before[1] > after[0] for before, after in pairwise(taken)):
            return None  # two sources share memory: whose address an argument is cannot be told
        launches = [_launch(started, ranges) for started in self.started]
        return None if None in launches else Recorded(plan, launches)


class Calls:
    """Recorded calls by what they depend on besides addresses. Kept where plans are kept: by a Workspace, a planner."""

    def __init__(self) -> None:
        self._recorded: dict[tuple, Recorded] = {}
        self._lock = Lock()

    def find(self, key: tuple) -> Recorded | None:
        return self._recorded.get(key)

    def keep(self, key: tuple, recorded: Recorded) -> None:
        with self._lock:
            if len(self._recorded) >= MOST:
                del self._recorded[next(iter(self._recorded))]
            self._recorded[key] = recorded

    def __len__(self) -> int:
        return len(self._recorded)

    def __iter__(self) -> Iterator[Recorded]:
        return iter(self._recorded.values())


def span(tensor: torch.Tensor | None) -> int:
    """Bytes from the tensor's first element to the end of its last."""
    if tensor is None or not tensor.numel():
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


@dataclass(frozen=True)
class _Address:
    """Stands for the tensor of a descriptor: all that a launch asks of it."""

    address: int

    def data_ptr(self) -> int:
        return self.address


def _moved(view, address: int):
    """The tensor descriptor at another address."""
    moved = object.__new__(type(view))
    moved.__dict__.update(view.__dict__)
    moved.base = _Address(address)
    return moved


def _watched() -> bool:
    """Whether a profiler wants to hear of launches, which Triton tells it."""
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)


def _launch(started: tuple, ranges: Sequence[tuple[int, int]]) -> Launch | None:
    kernel, compiled, grid, given, others = started
    names = getattr(kernel, "arg_names", None)
    if names is None or not hasattr(compiled, "packed_metadata"):
        return None  # interpreted
    if any(name not in others for name in names[len(given) :]):
        return None  # the kernel has defaults, which only Triton binds
    given = [*given, *(others[name] for name in names[len(given) :])]
    arguments, moving = list(given), {}
    for position, argument in enumerate(given):
        view = _is_descriptor(argument)
        tensor = argument.base if view else argument
        if not isinstance(tensor, torch.Tensor):
            continue
        address = tensor.data_ptr()
        source = next((n for n, (first, end) in enumerate(ranges) if first <= address < end), None)
        if source is None:
            return None
        moving[position] = Moving(source, address - ranges[source][0], address)
        arguments[position] = _moved(argument, 0) if view else None  # else the tensor would live as long as this
    grid = (*grid, 1, 1)[:3]
    return Launch(compiled[grid], arguments, moving, direct(compiled, grid, given, moving))


def _is_descriptor(argument) -> bool:
    return hasattr(argument, "base") and hasattr(argument, "block_shape")
