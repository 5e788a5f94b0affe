"""Many requests: so many at once, or arriving at random; bounded in count and time, stopped by an interruption."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from itertools import repeat
from time import perf_counter

from .client import Sample


@dataclass(frozen=True)
class Load:
    """How requests arrive.

    concurrency   requests under way at most; 0: no bound
    rate          requests a second, by a Poisson process; 0: the next is sent as soon as there is room
    requests      how many
    seconds       after that no more are sent
    drain         seconds that those under way then have to finish
    """

    concurrency: int
    rate: float
    requests: int
    seconds: float
    drain: float

    @property
    def name(self) -> str:
        bound = f"{self.concurrency} at once" if self.concurrency else "all at once"
        if self.rate:
            return f"{self.rate:g} requests/s" + (f", at most {bound}" if self.concurrency else "")
        return bound


def arrivals(load: Load, chance: random.Random) -> Iterable[float]:
    """Seconds from the start at which requests are due; their mean rate is exactly the wanted one."""
    if not load.rate:
        return repeat(0.0, load.requests)
    due, found = 0.0, []
    for _ in range(load.requests):
        due += chance.expovariate(load.rate)
        found.append(due)
    return [each * load.requests / load.rate / due for each in found]


async def drive(
    load: Load,
    ask: Callable[[int], tuple[Sample, Callable[[], Awaitable]]],
    interrupted: asyncio.Event,
    chance: random.Random,
    seen: Callable[[Sample], None] = lambda sample: None,
) -> tuple[list[Sample], float]:
    """Runs the load; the samples in the order in which they were sent, and the seconds that it took.

    ask    request number -> its sample, and what sends it and fills the sample in
    seen   called with each sample when its request is over
    """
    samples: list[Sample] = []
    under_way: set[asyncio.Task] = set()
    room = asyncio.Semaphore(load.concurrency or load.requests)
    began = perf_counter()

    async def follow(sample: Sample, answer: Callable[[], Awaitable]) -> None:
        try:
            await answer()
        finally:
            room.release()
        seen(sample)

    async def send() -> None:
        for number, due in enumerate(arrivals(load, chance)):
            if (wait := began + due - perf_counter()) > 0:
                await asyncio.sleep(wait)
            await room.acquire()
            sample, answer = ask(number)
            samples.append(sample)
            task = asyncio.create_task(follow(sample, answer))
            under_way.add(task)
            task.add_done_callback(under_way.discard)

    sender, halt = asyncio.create_task(send()), asyncio.create_task(interrupted.wait())
    try:
        await asyncio.wait({sender, halt}, timeout=load.seconds, return_when=asyncio.FIRST_COMPLETED)
        if sender.done():
            sender.result()  # what went wrong in it is not to be lost
        sender.cancel()
        left = max(0.0, began + load.seconds - perf_counter()) + load.drain
        await _all_or(halt, set(under_way), left)
    finally:
        rest = [sender, halt, *under_way]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
    return samples, perf_counter() - began


async def _all_or(halt: asyncio.Task, tasks: set[asyncio.Task], seconds: float) -> None:
    """Until all tasks are done, or halt is, or the time is over."""
    if not tasks or halt.done():
        return
    done = asyncio.ensure_future(asyncio.wait(tasks))
    await asyncio.wait({done, halt}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    done.cancel()
