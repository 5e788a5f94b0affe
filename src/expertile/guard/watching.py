"""Inside a program under `expertile watch`: the guard is sealed when Triton is imported and armed once it is ready.

The watcher and all processes of the program share a folder, named by EXPERTILE_WATCH: `ready` exists from the readiness
marker on, `process-PID.json` says who is watched, `events-PID.jsonl` holds a process's events.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

FOLDER, MODE = "EXPERTILE_WATCH", "EXPERTILE_WATCH_MODE"


def ready() -> bool:
    """Tells `expertile watch` that the program is warm; False when nobody watches. May be called more than once."""
    folder = os.environ.get(FOLDER)
    return bool(folder) and mark_ready(Path(folder), "the program's call")


def mark_ready(folder: Path, by: str) -> bool:
    """The first mark counts. False when the folder is gone."""
    try:
        with open(folder / "ready", "x") as file:
            json.dump({"by": by, "time": time.time()}, file)
    except FileExistsError:
        return True
    except OSError:
        return False
    return True


def watch_this_process() -> None:
    """Called by the injected sitecustomize once Triton is imported. Never raises: the program runs as without it."""
    folder = Path(os.environ[FOLDER])
    try:
        import triton

        from .sealing import Guard

        guard = Guard(
            os.environ.get(MODE, "count"), json_log=folder / "events-{pid}.jsonl", counters=False, armed=_Marker(folder)
        )
        guard.watching = True
        guard.seal()
        said = {"pid": os.getpid(), "command": sys.orig_argv, "triton": triton.__version__, "error": ""}
    except Exception as error:
        said = {"pid": os.getpid(), "command": sys.orig_argv, "triton": "", "error": f"{type(error).__name__}: {error}"}
    with suppress(OSError):  # the watcher is gone; the program goes on
        (folder / f"process-{os.getpid()}.json").write_text(json.dumps(said))


class _Marker:
    """Whether the readiness marker exists. Asked only when something is compiled."""

    def __init__(self, folder: Path):
        self.path, self.seen = str(folder / "ready"), False

    def __call__(self) -> bool:
        self.seen = self.seen or os.path.exists(self.path)
        return self.seen
