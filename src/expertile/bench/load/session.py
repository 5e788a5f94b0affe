"""From an endpoint and the loads wanted to rows: ask what is served, fit the prompts, warm up, measure, write."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from ...errors import ExpertileError
from .. import rows
from .client import Client, Sample
from .drive import Load, drive
from .figures import failures, figures
from .lengths import Lengths
from .prompts import Ids, Words, fitted, words

PROBES = 16, 128  # words of the prompts that the server counts for us
BENCH = "load"


class Interrupted(Exception):
    """Ctrl-C or SIGTERM before there was anything to report."""


@dataclass(frozen=True)
class Request:
    """What is to be measured.

    prompts      Ids, or None for text that is fitted to the server's own count
    warm_up      requests before each load that count nowhere
    slo, slo_text   bounds in seconds, and as they were given
    labels       fields of the rows that the endpoint need not be asked for
    """

    loads: tuple[Load, ...]
    lengths: Lengths
    model: str | None
    prompts: Ids | None
    warm_up: int
    seed: int
    slo: Mapping[str, float]
    slo_text: str
    labels: Mapping[str, str]


@dataclass
class Outcome:
    """What came of it; signal is the one that interrupted, or 0."""

    rows: list[dict] = field(default_factory=list)
    failed: int = 0
    signal: int = 0


class Progress:
    """What is told while it runs; the command shows it, tests may not care."""

    def say(self, text: str) -> None: ...
    def begin(self, load: Load) -> None: ...
    def seen(self, sample: Sample) -> None: ...
    def end(self, row: dict, reasons: list[tuple[str, int]]) -> None: ...


async def measure(client: Client, request: Request, out: Callable[[dict], Path], progress: Progress) -> Outcome:
    """Runs all loads. `out` is called with each row, as soon as there is one.

    Interrupted when nothing had been measured; ExpertileError when the endpoint does not answer as it should.
    """
    outcome, interrupted = Outcome(), asyncio.Event()
    with _signals(interrupted, outcome):
        async with client:
            model, impl = await _or_interrupted(_served(client, request.model), interrupted)
            client.body.setdefault("model", model)
            prompts = request.prompts or await _or_interrupted(_fitted(client, progress), interrupted)
            for number, load in enumerate(request.loads):
                name = f"{request.seed}-{number}"
                warm = Load(load.concurrency, 0.0, request.warm_up, load.seconds, load.drain)
                if request.warm_up:
                    ask = _asking(client, request.lengths, prompts, f"warm-up-{name}")
                    await drive(warm, ask, interrupted, random.Random(name))
                if interrupted.is_set():
                    break
                progress.begin(load)
                ask = _asking(client, request.lengths, prompts, name)
                samples, seconds = await drive(load, ask, interrupted, random.Random(name), progress.seen)
                found = figures(samples, seconds, request.slo)
                outcome.failed += found["failed"]
                row = _row(client, request, load, model, impl, found)
                out(row)
                outcome.rows.append(row)
                progress.end(row, failures(samples))
                if interrupted.is_set():
                    break
    if outcome.signal and not outcome.rows:
        raise Interrupted
    return outcome


def _row(client: Client, request: Request, load: Load, model: str, impl: str, found: dict) -> dict:
    what = {"impl": impl, "problem": model, **request.labels}
    shared = {name: what.pop(name) for name in ("date", "commit", "gpu", "driver", "torch", "triton")}
    slo = {"slo": request.slo_text} if request.slo else {}
    return rows.make(
        BENCH, shared, **what, endpoint=shown(client.url), api=client.api, lengths=request.lengths.text,
        arrival=load.name, concurrency=load.concurrency, rate=load.rate, **found, **slo,
    )  # fmt: skip


def shown(url: str) -> str:
    """Without a user's name and password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


async def _served(client: Client, model: str | None) -> tuple[str, str]:
    """(model, impl): the first model of the endpoint unless one is named, and who serves it."""
    listed = await client.facts("/v1/models")
    models = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(models, list) or not all(isinstance(each, dict) and each.get("id") for each in models):
        raise ExpertileError(f"GET {client.url}/v1/models: the answer lists no models; is this an OpenAI endpoint?")
    found = next((each for each in models if model in (None, each["id"])), None)
    if found is None:
        names = ", ".join(str(each["id"]) for each in models) or "nothing"
        raise ExpertileError(f"model={model!r} is not served here, but {names}")
    impl = str(found.get("owned_by") or "endpoint")
    if impl == "vllm":
        with contextlib.suppress(ExpertileError, KeyError, TypeError):
            impl = f"vllm-{(await client.facts('/version'))['version']}"
    return str(found["id"]), impl


async def _fitted(client: Client, progress: Progress) -> Words:
    """Words for a number of tokens, after two prompts that the server counts; they also show that it answers."""
    counts = []
    for number in PROBES:
        sample = await client.ask(words(number, random.Random(number)), 1, Sample(0))
        if sample.error:
            raise ExpertileError(f"POST {client.url}: {sample.error}")
        counts.append(sample.input_tokens)
    if not all(counts):
        progress.say("the server does not say how many tokens a prompt has: one word is taken for one token")
        return Words()
    return fitted(PROBES, (counts[0], counts[1]))


def _asking(client: Client, lengths: Lengths, prompts: Ids | Words, seed: str):
    """The `ask` of drive. Lengths and prompts follow from the seed and the request's number."""

    def ask(number: int) -> tuple[Sample, Callable[[], Awaitable]]:
        chance = random.Random(f"{seed}-{number}")
        given, made = lengths.draw(chance)
        sample = Sample(given)
        return sample, partial(client.ask, prompts.prompt(given, chance), made, sample)

    return ask


async def _or_interrupted(question: Awaitable, interrupted: asyncio.Event):
    """The answer; Interrupted when that comes first."""
    answer, halt = asyncio.ensure_future(question), asyncio.ensure_future(interrupted.wait())
    await asyncio.wait({answer, halt}, return_when=asyncio.FIRST_COMPLETED)
    halt.cancel()
    if answer.done():
        return answer.result()
    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)
    raise Interrupted


@contextlib.contextmanager
def _signals(interrupted: asyncio.Event, outcome: Outcome):
    """The first SIGINT or SIGTERM ends the measurement, a second one the program, as ever."""
    loop = asyncio.get_running_loop()
    known = (signal.SIGINT, signal.SIGTERM)

    def stop(number: int) -> None:
        outcome.signal = number
        interrupted.set()
        remove()

    def remove() -> None:
        for number in known:
            loop.remove_signal_handler(number)

    for number in known:
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    finally:
        remove()
