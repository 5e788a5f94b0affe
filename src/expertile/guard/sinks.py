"""Where events go besides the guard's own list: JSON lines and, where prometheus-client is installed, counters."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from ..errors import ExpertileError
from .events import Event


class JsonLines:
    """Appends each event as one line. `{pid}` in the path becomes the number of the process, forked ones included.

    Raises    ExpertileError where no file can be: it would be noticed at the first event only
    """

    def __init__(self, path: str | os.PathLike):
        self.path = os.fspath(path)
        try:
            place = self._place()
            wrong = "it is a folder" if place.is_dir() else "" if place.parent.is_dir() else "there is no such folder"
        except (OSError, ValueError, TypeError) as error:
            wrong = getattr(error, "strerror", None) or str(error)
        if wrong:
            raise ExpertileError(f"json_log={self.path!r}: {wrong}: name a file to write")

    def __call__(self, event: Event) -> None:
        append(self._place(), json.dumps(event.to_dict(), default=str) + "\n")

    def _place(self) -> Path:
        return Path(self.path.replace("{pid}", str(os.getpid())))


def append(path: Path, text: str) -> None:
    """One write to the end of the file, so that lines of several processes do not mix."""
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(number, text.encode())
    finally:
        os.close(number)


@lru_cache  # a registry takes each name once
def prometheus() -> Callable[[Event], None] | None:
    """Counts events and lost seconds in prometheus-client's default registry; None where that is not installed."""
    try:
        from prometheus_client import Counter
    except ImportError:
        return None
    labels = ("kind", "kernel", "argument")
    events = Counter("expertile_guard_events", "Compilations, loads and tunings after sealing", labels)
    seconds = Counter("expertile_guard_lost_seconds", "Time that they took", labels)

    def count(event: Event) -> None:
        values = (event.kind, event.kernel, event.blame)
        events.labels(*values).inc()
        seconds.labels(*values).inc((event.ms or 0.0) / 1e3)

    return count
