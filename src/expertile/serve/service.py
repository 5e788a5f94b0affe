"""Loads, warms and seals in the background, while the server already answers that it is not ready."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections.abc import Callable

from ..errors import ExpertileError
from .engine import Delivery, Engine
from .errors import ApiError
from .metrics import Metrics
from .model import LanguageModel, warm_up
from .plans import GroupPlan, plans_in_use
from .settings import Settings

log = logging.getLogger("expertile.serve")
SOON = 5  # seconds: Retry-After while the model is loaded


class Service:
    """The engine of one server, from its start to its end.

    state     loading, warming, ready or failed
    failure   the exception that loading ended with
    guard     sealed at readiness; None while it is not, or where there is nothing to compile
    """

    def __init__(self, settings: Settings, load: Callable[[Settings], LanguageModel] = LanguageModel.load):
        self.settings, self._load = settings, load
        self.metrics = Metrics()
        self.state, self.failure, self.guard = "loading", None, None
        self.engine: Engine | None = None
        self.model: LanguageModel | None = None
        self.plans: list[GroupPlan] = []
        self.started = time.time()

    def start(self, loop: asyncio.AbstractEventLoop, on_failure: Callable[[], None] = lambda: None) -> None:
        self._loop, self._on_failure = loop, on_failure
        threading.Thread(target=self._prepare, name="expertile-load", daemon=True).start()

    def stop(self) -> None:
        if self.engine:
            self.engine.stop()
        if self.guard:
            self.guard.unseal()

    def cut(self) -> None:
        """Ends what is under way, without waiting for it: everybody gets an error."""
        if self.engine:
            self.engine.stop(timeout=0)

    @property
    def ready(self) -> bool:
        return self.state == "ready" and not self.engine.broken

    def require(self) -> Engine:
        """The engine. ApiError 503 while there is none."""
        if self.state in ("loading", "warming"):
            raise ApiError(503, f"the model is {self.state}", code="not_ready", retry_after=SOON)
        if not self.ready:
            raise ApiError(503, self.engine.broken if self.engine else "the model could not be loaded", code="broken")
        return self.engine

    def gauges(self) -> None:
        """Brings what is a state rather than an event up to date."""
        engine, metrics = self.engine, self.metrics
        metrics.ready.set(self.ready)
        metrics.running.set(engine.running if engine else 0)
        metrics.waiting.set(len(engine.waiting) if engine else 0)
        metrics.compiles.set(self.guard.compiles if self.guard else 0)

    def _prepare(self) -> None:
        try:
            self._load_and_warm()
        except Exception as error:
            self.state, self.failure = "failed", error
            log.error("the model could not be loaded: %s", error, exc_info=not isinstance(error, ExpertileError))
            self._loop.call_soon_threadsafe(self._on_failure)

    def _load_and_warm(self) -> None:
        settings, since = self.settings, time.perf_counter()
        log.info("loading %s", settings.model)
        model = self._load(settings)
        self.state = "warming"
        most = max(settings.max_seqs, min(settings.prefill_chunk, model.context))
        warm_up(model, most)
        self.plans = plans_in_use(model, sorted({1, settings.max_seqs, most}))
        for each in self.plans:
            self.metrics.plan.labels(each.layers, each.problem, each.tokens, each.backend, each.plan).set(1)
        self.guard = self._sealed()
        self.model = model
        self.engine = Engine(
            model, self.metrics, self._deliver, max_queue=settings.max_queue, prefill_chunk=settings.prefill_chunk
        )
        self.engine.start()
        gc.collect()
        gc.freeze()  # full collections, which wait for a share of all objects to be new, then come in time for requests
        self.state = "ready"
        log.info("ready on %s after %.1f s: %s", model.device, time.perf_counter() - since, settings.name)

    def _sealed(self):
        """From here on a compilation is seen. Where no Triton can compile anything there is nothing to watch."""
        if self.settings.guard == "off":
            return None
        from ..guard import seal

        try:
            return seal(self.settings.guard)
        except ExpertileError as error:
            log.warning("compilations are not watched: %s", error)
            return None

    def _deliver(self, events: Delivery) -> None:
        """From the engine's thread into the event loop's, once a step."""
        try:
            self._loop.call_soon_threadsafe(_emit, events)
        except RuntimeError:  # the loop has ended before the engine: nobody listens any more
            log.debug("%d events came after the end", len(events))


def _emit(events: Delivery) -> None:
    for sequence, event in events:
        sequence.emit(event)
