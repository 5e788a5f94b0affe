"""Runs a program under the guard and collects what its processes saw: the outside half of `expertile watch`."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import ExpertileError
from .sealing import MODES
from .watching import FOLDER, MODE, mark_ready

INJECTED = Path(__file__).parent / "inject"
LONGEST_LINE = 1 << 16  # bytes of a line that are looked at
QUIET_MS = 200  # after which the beginning of a line is taken for all of it, as of a prompt
GRACE_S = 2.0  # for output that grandchildren still hold open when the program has ended


@dataclass(frozen=True)
class Watched:
    """exit_code as a shell gives it; ready {"by", "time"}, None when it never was; processes: those that had Triton."""

    command: list[str]
    exit_code: int
    ready: dict | None
    processes: list[dict]
    events: list[dict]


def watch(
    command: Sequence[str], *, mode: str = "count", ready_line: str | None = None, ready_after: float | None = None
) -> Watched:
    """Runs the command to its end with every Python process in it under the guard.

    ready_line   a regular expression: armed from the first line of stdout or stderr that it is found in; a line that
                 is not ended counts when nothing follows it for a moment
    ready_after  seconds from the start
    Without either the program itself has to call `expertile.guard.ready()`, and may in any case.

    Signals: Ctrl-C reaches the program, and the result is still returned. Raises ExpertileError when it cannot start.
    """
    _check(command, mode, ready_after)
    pattern = _compiled(ready_line)
    with tempfile.TemporaryDirectory(prefix="expertile-watch-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        environment = _environment(folder, mode, unbuffered=pattern is not None)
        pipe = subprocess.PIPE if pattern else None
        try:
            process = subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ExpertileError(f"cannot run {command[0]!r}: {reason}") from None
        ends = [(process.stdout, sys.stdout), (process.stderr, sys.stderr)] if pattern else []
        pumps = [_pump(source, sink, pattern, folder) for source, sink in ends]
        with _marking(folder, ready_after), _signals_to(process):
            code = process.wait()
        for pump in pumps:
            pump.join(GRACE_S)
        return Watched(list(command), code if code >= 0 else 128 - code, *_collected(folder))


def _check(command: Sequence[str], mode: str, ready_after: float | None) -> None:
    if isinstance(command, str) or not command or not all(isinstance(each, (str, os.PathLike)) for each in command):
        raise ExpertileError(f"command={command!r}: give a list, the program and its arguments")
    if mode not in MODES:
        raise ExpertileError(f"mode={mode!r} is not known: use one of {', '.join(MODES)}")
    if ready_after is None:
        return
    most = threading.TIMEOUT_MAX
    if not isinstance(ready_after, (int, float)) or not 0 <= ready_after <= most:  # NaN is not either
        raise ExpertileError(
            f"ready_after={ready_after!r}: give seconds from the start, at least 0 and at most {most:.0f}"
        )


def _compiled(ready_line: str | None) -> re.Pattern | None:
    try:
        return re.compile(os.fsdecode(ready_line)) if ready_line is not None else None
    except (re.error, TypeError) as error:
        raise ExpertileError(f"ready_line={ready_line!r} is not a regular expression: {error}") from None


def _environment(folder: Path, mode: str, unbuffered: bool) -> dict[str, str]:
    found = {**os.environ, FOLDER: str(folder), MODE: mode}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, (str(INJECTED), os.environ.get("PYTHONPATH"))))
    return found | ({"PYTHONUNBUFFERED": "1"} if unbuffered else {})  # a line must come when it is printed


@contextmanager
def _marking(folder: Path, ready_after: float | None):
    """Marks the program ready after so many seconds, if it runs that long."""
    if ready_after is None:
        yield
        return
    timer = threading.Timer(ready_after, mark_ready, (folder, f"{ready_after:g} s"))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _pump(source, sink, pattern: re.Pattern, folder: Path) -> threading.Thread:
    """Copies the program's output to ours, at once, and looks for the readiness line in it."""

    def copy() -> None:
        poll, rest, looking, writing, waiting = select.poll(), b"", True, True, None
        poll.register(source, select.POLLIN)
        while True:
            quiet = not poll.poll(waiting)
            chunk = b"" if quiet else os.read(source.fileno(), 1 << 16)
            if writing and chunk:
                writing = _write(sink, chunk)
            if looking:
                *lines, rest = re.split(rb"[\r\n]", rest + chunk)
                rest = rest[-LONGEST_LINE:]
                lines += [rest] if rest and not chunk else []
                if any(pattern.search(line.decode(errors="replace")) for line in lines):
                    mark_ready(folder, "a line of output")
                    looking = False
            waiting = QUIET_MS if looking and rest and chunk else None
            if not (quiet or chunk):
                return

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    return thread


def _write(sink, chunk: bytes) -> bool:
    """False when nobody reads our output any more; the program's is read on, so that it does not block."""
    try:
        stream = getattr(sink, "buffer", None)
        (stream or sink).write(chunk if stream else chunk.decode(errors="replace"))
        sink.flush()
    except (OSError, ValueError):
        return False
    return True


@contextmanager
def _signals_to(process):
    """SIGTERM and SIGHUP go on to the program; so does SIGINT, unless it is Ctrl-C: the terminal tells both itself."""

    def forward(number, frame):
        if number != signal.SIGINT or not _at_terminal():
            process.send_signal(number)

    before = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, forward)
    except ValueError:  # not in the main thread: signals are its affair
        pass
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _at_terminal() -> bool:
    """Whether we are the terminal's foreground group, as the program then is as well."""
    try:
        with open("/dev/tty") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _collected(folder: Path) -> tuple[dict | None, list[dict], list[dict]]:
    marker = folder / "ready"
    ready = _lines(marker) if marker.exists() else []
    processes = [each for path in sorted(folder.glob("process-*.json")) for each in _lines(path)]
    events = [event for path in sorted(folder.glob("events-*.jsonl")) for event in _lines(path)]
    return (ready[0] if ready else None), processes, sorted(events, key=lambda event: event["time"])


def _lines(path: Path) -> list[dict]:
    """What one process wrote; a last line that was cut off when it was killed is left out."""
    found = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
