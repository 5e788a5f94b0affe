"""From what Triton is about to do to events: the state that one compilation or tuning has between begin and end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter

from ..errors import Recompiled
from .events import Difference, Event
from .keys import compiled_keys, key_of, nearest, short
from .stack import Call, look


@dataclass
class Open:
    """A compilation that has begun; its event is delivered when it ends."""

    source: object
    event: Event | None
    guards: tuple
    start: float


@dataclass
class Tuning:
    """An autotuner's measurements for one key; `left` configurations are still to come."""

    tuner: object
    left: int
    event: Event | None = None
    guards: tuple = ()
    ms: float = 0.0
    compiles: int = 0


class _Here(threading.local):
    """What this thread is in the middle of."""

    open: Open | None = None
    planned: Tuning | None = None  # configurations are chosen, the next of them is not being measured yet
    tuning: Tuning | None = None  # one of them is being measured: whatever is compiled now is part of that
    call: Call | None = None  # of the thread that submitted this compilation
    busy = False  # in a guard's own code: a logging handler may launch kernels itself


class Observer:
    """The sealed guards of this process, and what they are told. Raises Recompiled where one of them has mode error."""

    def __init__(self):
        self.guards: tuple = ()
        self._here = _Here()

    def compile_begins(self, source) -> None:
        here = self._here
        if here.busy:
            return
        self.compile_failed(late=True)
        armed, event = self._armed(), None
        if here.tuning:
            here.tuning.compiles += 1
        elif armed:
            event = self._describe("compile", source)
            self._refuse(event, armed)
        here.open = Open(source, event, armed, perf_counter())

    def compile_failed(self, late: bool = False) -> None:
        """The compilation that is open in this thread, if any, will not end; late: that was so for an unknown time."""
        opened, self._here.open = self._here.open, None
        if opened and opened.event:
            ms = None if late else _since(opened.start)
            self._deliver(replace(opened.event, ms=ms, failed=True), opened.guards)

    def kernel_made(self, source, load_ms: float) -> None:
        """A CompiledKernel exists: compiled if its compilation began here, else read from disk in load_ms."""
        here = self._here
        if here.open and here.open.source is not source:
            self.compile_failed(late=True)
        opened, here.open = here.open, None
        if here.busy or here.tuning:
            return
        if opened:
            if opened.event:
                self._deliver(replace(opened.event, ms=_since(opened.start)), opened.guards)
        elif armed := self._armed():
            self._deliver(replace(self._describe("load", source), ms=load_ms), armed)

    def submitted(self, compile_fn: Callable, known: bool, on_disk: Callable[[Call], bool]) -> Callable:
        """compile_fn for another thread, so that the event there has the call site here; refused here if at all."""
        here, call, armed = self._here, look(), self._armed()
        strict = not known and not here.busy and any(guard.mode == "error" for guard in armed)
        if strict and call.source is not None and not on_disk(call):
            self._refuse(self._describe("compile", call.source, call), armed)

        def compile_elsewhere():
            self._here.call = call
            try:
                return compile_fn()
            finally:
                self._here.call = None

        return compile_elsewhere

    def tuning_planned(self, tuner, configurations: int) -> None:
        self._here.planned = Tuning(tuner, configurations)

    @contextmanager
    def measuring(self, tuner, arguments: dict):
        """Around the measurement of one configuration; the event comes with the last of them."""
        here, outer = self._here, self._here.tuning
        tuning = here.planned if here.planned and here.planned.tuner is tuner else Tuning(tuner, 1)
        if tuning.event is None and outer is None and not here.busy and (armed := self._armed()):
            tuning.event, tuning.guards = self._describe_tuning(tuner, arguments), armed
            self._refuse(tuning.event, armed)
        here.tuning, start = outer or tuning, perf_counter()
        try:
            yield
        except BaseException:
            tuning.left = 1
            raise
        finally:
            here.tuning, tuning.left, tuning.ms = outer, tuning.left - 1, tuning.ms + _since(start)
            if tuning.left <= 0:
                here.planned = None
                if tuning.event:
                    self._deliver(replace(tuning.event, ms=tuning.ms, compiles=tuning.compiles), tuning.guards)

    @contextmanager
    def building(self):
        """Around the C compiler that makes a kernel's launcher (Triton 3.6 has one for each signature)."""
        call, armed = look(), self._armed()
        source = getattr(call.loading, "src", None)
        if source is None or not armed or self._here.busy or self._here.tuning:
            yield
            return
        event = Event("launcher", _name(source), (_NO_LAUNCHER,), site=call.site)
        self._refuse(event, armed)
        start = perf_counter()
        yield
        self._deliver(replace(event, ms=_since(start)), armed)

    def _armed(self) -> tuple:
        return tuple(guard for guard in self.guards if guard.armed())

    def _refuse(self, event: Event, armed: tuple) -> None:
        if any(guard.mode == "error" for guard in armed):
            self._deliver(event, armed)
            error = Recompiled(event.text)
            error.event = event
            raise error

    def _deliver(self, event: Event, guards: tuple) -> None:
        self._here.busy = True
        try:
            for guard in guards:
                guard.record(event)
        finally:
            self._here.busy = False

    def _describe(self, kind: str, source, call: Call | None = None) -> Event:
        call = call or self._here.call or look()
        try:
            key, others = key_of(source, call.key, call.device), compiled_keys(getattr(source, "fn", None))
            best, differences = nearest(key, others, call.values)
        except Exception as error:  # a guard never breaks the launch that it watches
            best, others = None, []
            differences = (Difference("", "unknown", f"not known: {type(error).__name__} {error}"),)
        text = best.text if best else ""
        return Event(kind, _name(source), differences, call.key, text, len(others), call.device, call.site)

    def _describe_tuning(self, tuner, arguments: dict) -> Event:
        try:
            key, known = _tuning_key(tuner, arguments), [tuple(map(str, each)) for each in tuner.cache]
            differences, nearest_key = _tuning_differences(key, known)
        except Exception as error:
            key, known, nearest_key = [], [], ()
            differences = (Difference("", "unknown", f"not known: {type(error).__name__} {error}"),)
        text = str(tuple(value for _, value in key))
        before = str(nearest_key) if nearest_key else ""
        base = tuner.base_fn
        name = f"{base.__module__}.{base.__qualname__}"
        return Event("autotune", name, differences, text, before, len(known), site=look().site)


_NO_LAUNCHER = Difference("", "launcher", "no kernel with this signature was launched before")


def _name(source) -> str:
    fn = getattr(source, "fn", None)
    return f"{fn.__module__}.{fn.__qualname__}" if fn is not None else str(getattr(source, "path", source))


def _since(start: float) -> float:
    return (perf_counter() - start) * 1e3


def _tuning_key(tuner, arguments: dict) -> list[tuple[str, str]]:
    """The key as Autotuner.run makes it, with the argument that each part comes from."""
    given = {name: value for name, value in {**(tuner.nargs or {}), **arguments}.items() if name in tuner.arg_names}
    found = [(name, str(given[name])) for name in tuner.keys if name in given]
    return found + [(name, str(value.dtype)) for name, value in given.items() if hasattr(value, "dtype")]


def _tuning_differences(key: list[tuple[str, str]], known: list[tuple]) -> tuple[tuple[Difference, ...], tuple]:
    if not known:
        return (Difference("", "untuned", "no key of this kernel was tuned before"),), ()
    best, fewest = (), None
    for other in known:
        found = tuple(
            Difference(name, "autotune_key", short(now), short(before))
            for (name, now), before in zip(key, other, strict=False)
            if now != before
        )
        if fewest is None or len(found) <= len(fewest):
            best, fewest = other, found
    return fewest or (Difference("", "again", "this key was tuned before"),), best
