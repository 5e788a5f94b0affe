"""`seal`: from here on a compilation is an event, and in mode `error` an exception instead."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from ..errors import ExpertileError
from .events import Event
from .intercept import INTERCEPTION
from .sinks import JsonLines, prometheus

MODES = ("error", "warn", "count")
LOGGER = logging.getLogger("expertile.guard")


class Guard:
    """Sees every compilation in this process from `seal` to `unseal`, whoever's kernel it is and whichever thread's.

    events   in the order in which they ended
    causes   the first event of each cause
    """

    watching = False  # made by `expertile watch`: not the program's own, which unseal() looks for

    def __init__(
        self, mode: str = "error", *, json_log: str | os.PathLike | None = None, counters: bool = True,
        armed: Callable[[], bool] = lambda: True,
    ):  # fmt: skip
        if mode not in MODES:
            raise ExpertileError(f"mode={mode!r} is not known: use one of {', '.join(MODES)}")
        self.mode, self.armed = mode, armed
        self.events: list[Event] = []
        self.causes: dict[str, Event] = {}
        self._sinks = [JsonLines(json_log)] if json_log is not None else []
        if counters and prometheus():
            self._sinks.append(prometheus())

    @property
    def compiles(self) -> int:
        """How many events were more than a load from disk."""
        return sum(event.kind != "load" for event in self.events)

    @property
    def lost_ms(self) -> float:
        return sum(event.ms or 0.0 for event in self.events)

    def record(self, event: Event) -> None:
        self.events.append(event)
        if self.causes.setdefault(event.cause, event) is event and self.mode == "warn":
            LOGGER.log(logging.INFO if event.kind == "load" else logging.WARNING, "%s", event.text)
        for sink in tuple(self._sinks):
            try:
                sink(event)
            except Exception as error:  # a full disk must not stop the launch; it is said once
                self._sinks.remove(sink)
                LOGGER.warning("events are no longer written by %s: %s", type(sink).__name__, error)

    def seal(self) -> Guard:
        INTERCEPTION.add(self)
        return self

    def unseal(self) -> None:
        INTERCEPTION.remove(self)

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *error) -> None:
        self.unseal()


def seal(mode: str = "error", *, json_log: str | os.PathLike | None = None) -> Guard:
    """Arms a guard over every Triton and Gluon kernel of this process and returns it; `with seal():` disarms it again.

    mode      error: what would be compiled or tuned raises Recompiled before it is; warn: logs each cause once, to the
              logger `expertile.guard`; count: only counts. A kernel found compiled on disk is an event of kind `load`
              in every mode and never raises
    json_log  file that gets each event as one line of JSON; {pid} in its name becomes the process's number

    Guards may overlap: each sees everything, and one in mode error is enough to raise. Counters for Prometheus are kept
    where prometheus-client is installed (extra `guard`).
    Raises    ExpertileError on an unknown mode, on a json_log that cannot be written, without Triton, or with a Triton
              that the guard does not know
    """
    return Guard(mode, json_log=json_log).seal()


def unseal() -> Guard | None:
    """Disarms the guard that was sealed last and returns it; None when nothing is sealed."""
    sealed = [guard for guard in INTERCEPTION.guards if not guard.watching]
    if not sealed:
        return None
    sealed[-1].unseal()
    return sealed[-1]
