"""A model of a few lines: the next token is the last one plus 1. For the engine without a network or weights."""

from __future__ import annotations

import threading

import torch

from expertile.serve.engine import Engine
from expertile.serve.metrics import Metrics
from expertile.serve.sampling import Sampling
from expertile.serve.sequences import Event, Sequence

POISON, VOCABULARY = 666, 1000


class CountingCache:
    def __init__(self, rows: int):
        self.rows = rows
        self.seen: list[list[int]] = [[] for _ in range(rows)]

    def move(self, source: int, target: int, length: int) -> None:
        self.seen[target] = self.seen[source][:length]


class Counting:
    """Checks on the way that each row has been given the tokens of one sequence in their order, none left out."""

    def __init__(self, rows: int = 4):
        self.cache, self.batches = CountingCache(rows), []
        self.gate = threading.Event()
        self.gate.set()

    def decode(self, ids: list[int]) -> str:
        return "".join(f"<{each}>" for each in ids)

    def step(self, first_row: int, ids: list[list[int]], starts: list[int]) -> torch.Tensor:
        assert self.gate.wait(20)
        if any(POISON in each for each in ids):
            raise RuntimeError("poisoned")
        logits = torch.zeros(len(ids), VOCABULARY)
        for row, (tokens, start) in enumerate(zip(ids, starts, strict=True), first_row):
            seen = self.cache.seen[row][:start]
            assert len(seen) == start
            self.cache.seen[row] = seen + tokens
            assert self.cache.seen[row] == list(
                range(self.cache.seen[row][0], self.cache.seen[row][0] + start + len(tokens))
            )
            logits[row - first_row, tokens[-1] + 1] = 9.0
        self.batches.append(len(ids))
        return logits


class Heard:
    """Collects the events of one sequence."""

    def __init__(self):
        self.events: list[Event] = []
        self.ended = threading.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if event.finish:
            self.ended.set()

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    def finish(self, seconds: float = 20) -> str:
        assert self.ended.wait(seconds), self.events
        return self.events[-1].finish


def counting_from(first: int, *, prompt: int = 3, tokens: int = 5, stops=(), ends=frozenset()) -> Sequence:
    ids = list(range(first, first + prompt))
    return Sequence(ids, tokens, Sampling(temperature=0.0), tuple(stops), frozenset(ends), Heard())


def started(model: Counting, max_queue: int = 100, prefill_chunk: int = 8) -> Engine:
    def deliver(out):
        for sequence, event in out:
            sequence.emit(event)

    engine = Engine(model, Metrics(), deliver, max_queue=max_queue, prefill_chunk=prefill_chunk)
    engine.start()
    return engine
