"""Benchmark `cold`: what a layer's first calls cost when nothing is compiled yet, each way in a process of its own.

expertile              as it is called: a call compiles what it needs
expertile:specialised  the same kernels with every argument specialised, as @triton.jit does by default
expertile:warm         `guard.warm` and `expertile.warm` before the first call
expertile:packed       the same, with the compile cache unpacked from one file (made from the one before)

Rows of a stream   first_ms, steady_ms: all calls of a pass over the token counts, each waited for, the first time and
                   the second; compiles: of the first pass
Rows of a start    first_ms: warming; steady_ms: warming again, nothing left to compile; compiles: of the first
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.table import Table

from ..errors import ExpertileError
from . import rows

COLD = "cold"
PLAIN, SPECIALISED, WARM, PACKED = "expertile", "expertile:specialised", "expertile:warm", "expertile:packed"
IMPLEMENTATIONS = (PLAIN, SPECIALISED, WARM, PACKED)
CHILD_S = 900.0


def stream(most: int) -> list[int]:
    """Token counts of a server's steps: every one up to 256, then every 37th.

    >>> stream(3), stream(300)[-2:]
    ([1, 2, 3], [256, 293])
    """
    return [*range(1, min(most, 256) + 1), *range(293, most + 1, 37)]


def run(
    problem: str, quant: str, most: int, chosen: Sequence[str], shared: Mapping[str, str], *, device: str = "cuda"
) -> Iterator[tuple[str, dict | None, str]]:
    """(impl, row, what went wrong) as they come; packed needs warm, whose cache it packs."""
    for name in chosen:
        if name not in IMPLEMENTATIONS:
            raise ExpertileError(f"impl={name!r} is not known: use some of {', '.join(IMPLEMENTATIONS)}")
    if PACKED in chosen and WARM not in chosen:
        raise ExpertileError(f"{PACKED} unpacks the cache that {WARM} fills: measure both")
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "cache.tar.gz"
        for name in sorted(chosen, key=IMPLEMENTATIONS.index):
            ask = dict(problem=problem, quant=quant, most=most, impl=name, archive=str(archive), device=device)
            found, error = _child(ask, Path(folder) / name.replace(":", "-"))
            if error:
                yield name, None, error
                continue
            for what, part in (("start: warm", found.get("start")), ("stream of", found["stream"])):
                if part is not None:
                    yield name, _row(shared, name, problem, quant, f"{what} T=1-{most}", part), ""


def _row(shared, impl: str, problem: str, quant: str, what: str, part: Mapping[str, float]) -> dict:
    return rows.make(
        COLD, shared, impl=impl, problem=problem, quant=quant, what=what, first_ms=round(part["first_ms"], 3),
        steady_ms=round(part["steady_ms"], 3), compiles=part["compiles"],
    )  # fmt: skip


def _child(ask: Mapping, cache: Path) -> tuple[dict, str]:
    """What one process with an empty compile cache found, or why it did not."""
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "expertile.bench.cold_child", json.dumps(ask)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=CHILD_S)
    except subprocess.TimeoutExpired:
        return {}, f"no answer in {CHILD_S:.0f} s"
    if done.returncode:
        return {}, (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
    return json.loads(done.stdout.splitlines()[-1]), ""


def table(found: Sequence[Mapping]) -> Table:
    made = Table(title="first calls, nothing compiled", title_justify="left")
    for heading in ("problem", "what", "impl"):
        made.add_column(heading)
    for heading in ("first, ms", "again, ms", "compiles"):
        made.add_column(heading, justify="right")
    for row in found:
        made.add_row(
            row["problem"],
            row["what"],
            row["impl"],
            f"{row['first_ms']:.0f}",
            f"{row['steady_ms']:.0f}",
            str(row["compiles"]),
        )
    return made


__all__ = ["IMPLEMENTATIONS", "run", "stream", "table"]
