"""A tuning run in a process of its own: a kernel that takes the GPU or the process down costs its turn, no more."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import ExpertileError

REFUSED = 0  # what supervise returns where the worker said that its input is wrong (exit code 2)
AGAIN = 75  # a worker's exit code when its GPU is unusable and another process may go on
MOST_STARTS = 30


def supervise(command: Sequence[str], journal: Path, report: Callable[[dict], None]) -> int:
    """Runs the worker until it ends well, starting it again after a crash as long as each start gets further.

    command   prints one JSON object a line, which `report` is told; what else it prints is passed on
    Returns how often it was started, or REFUSED. ExpertileError where it failed otherwise, or got nowhere.
    """
    for start in range(1, MOST_STARTS + 1):
        before = journal.stat().st_size if journal.is_file() else 0
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                _pass_on(line, report)
        if process.returncode == 0:
            return start
        after = journal.stat().st_size if journal.is_file() else 0
        code = process.returncode
        if code == 2:
            return REFUSED
        if code > 0 and code != AGAIN:
            raise ExpertileError(f"measuring ended with exit code {code}; what was measured is in {journal}")
        if after == before:
            raise ExpertileError(f"the measuring process died (exit code {code}) before it measured anything")
    raise ExpertileError(f"the measuring process died {MOST_STARTS} times; what was measured is in {journal}")


def _pass_on(line: str, report: Callable[[dict], None]) -> None:
    try:
        event = json.loads(line)
    except json.JSONDecodeError:
        print(line, end="")
        return
    report(event)
