"""How long something takes: CUDA-graph replays, implementations alternating, medians. All timing is done here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Microseconds a call: the median over replays, and the tenth and ninetieth percentile."""

    median: float
    p10: float
    p90: float


@dataclass(frozen=True)
class Replay:
    """A batch of calls that can be run again at once: one launch of a CUDA graph, or a plain loop on the CPU."""

    run: Callable[[], object]
    calls: int
    cuda: bool


def capture(calls: Sequence[Callable[[], object]], cuda: bool | None = None) -> Replay:
    """All calls in one CUDA graph, after each has run once for itself (compilation, tuning and handles stay out of it).

    cuda   False times on the CPU by the wall clock; None: where there is a GPU, a graph
    """
    if not calls:
        raise ValueError("nothing to time: calls is empty")
    if cuda is None:
        cuda = torch.cuda.is_available()
    if not cuda:
        return Replay(lambda: [call() for call in calls], len(calls), False)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()  # a result dies here, so that the next call may have its memory
    return Replay(graph.replay, len(calls), True)


def time_us(
    calls: Sequence[Callable[[], object]], replays: int = 15, warmup: int = 3, *, cuda: bool | None = None
) -> Timing:
    """Time of one of `calls`, when all run one after the other. Give each its own input, and weights come from HBM.

    >>> time_us([lambda: sum(range(1000))], replays=3, cuda=False).median > 0
    True
    """
    return interleave({"": calls}, replays, warmup, cuda=cuda)[""]


def pass_ms(calls: Iterable[Callable[[], object]]) -> float:
    """Milliseconds of one pass through the calls, each waited for: what a host sees that uses every answer."""
    start = time.perf_counter()
    for call in calls:
        call()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def interleave(
    work: Mapping[str, Sequence[Callable[[], object]] | Replay],
    replays: int = 15,
    warmup: int = 3,
    *,
    cuda: bool | None = None,
) -> dict[str, Timing]:
    """Times of several implementations, replayed in turn (A B A B ...), so that clocks and heat drift alike for all.

    work   name -> the calls, or a Replay that `capture` made of them
    """
    ready = {name: item if isinstance(item, Replay) else capture(item, cuda) for name, item in work.items()}
    if not ready:
        return {}
    samples: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(warmup):
        for replay in ready.values():
            replay.run()
    for _ in range(replays):
        for name, time_in_us in _round(ready).items():
            samples[name].append(time_in_us / ready[name].calls)
    return {name: _timing(values) for name, values in samples.items()}


def _round(ready: Mapping[str, Replay]) -> dict[str, float]:
    """Microseconds of one replay of each, in order."""
    if not next(iter(ready.values())).cuda:
        return {name: _wall_us(replay.run) for name, replay in ready.items()}
    events = {name: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for name in ready}
    # An untimed replay goes ahead: the GPU is busy while the others are queued, so no launch latency is timed.
    list(ready.values())[-1].run()
    for name, (start, end) in events.items():
        start.record()
        ready[name].run()
        end.record()
    torch.cuda.synchronize()
    return {name: start.elapsed_time(end) * 1e3 for name, (start, end) in events.items()}


def _wall_us(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6


def _timing(values: list[float]) -> Timing:
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[round(share * (len(ordered) - 1))]

    return Timing(median=at(0.5), p10=at(0.1), p90=at(0.9))
