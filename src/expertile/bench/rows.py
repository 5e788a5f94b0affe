"""Benchmark rows: which fields each benchmark's rows have, made, checked, written and read here. Needs no torch.

A row is one JSON line; the fields are those of benchmarks/README.md.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterable, Mapping
from datetime import date
from importlib import metadata
from pathlib import Path

from ..errors import ExpertileError

TEXT, MAYBE_EMPTY, COUNT, POSITIVE, NUMBER = "text", "text, may be empty", "integer >= 0", "number > 0", "number >= 0"
TIMES = "name -> number > 0"

ALWAYS = {
    **dict.fromkeys(("date", "commit", "gpu", "driver", "torch", "triton", "bench", "impl", "problem", "quant"), TEXT)
}
_KERNEL = {"tokens": COUNT, "time_us": POSITIVE, "floor_us": POSITIVE, "err": NUMBER, "plan": MAYBE_EMPTY}
_LAYER = {
    "tokens": COUNT,
    "routing": TEXT,
    "experts_hit": NUMBER,
    "time_us": POSITIVE,
    "floor_us": POSITIVE,
    "err": NUMBER,
    "plan": MAYBE_EMPTY,
}
#: bench -> the fields its rows have beside ALWAYS.
BENCHES = {
    "experts": _LAYER,
    "layer": _LAYER,
    **dict.fromkeys(("router", "quant", "gemm1", "gemm2", "combine"), _KERNEL),
    "policy": {
        "tokens": COUNT,
        "routing": TEXT,
        "chosen": TEXT,
        "chosen_us": POSITIVE,
        "best": TEXT,
        "best_us": POSITIVE,
        "regret": NUMBER,
    },
    "cold": {"what": TEXT, "first_ms": NUMBER, "steady_ms": NUMBER, "compiles": COUNT},
    "serve": {
        "engine": TEXT,
        **dict.fromkeys(("batch", "input", "output", "requests"), COUNT),
        **dict.fromkeys(("output_tokens_per_s", "ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50"), NUMBER),
        "run": COUNT,
    },
    "load": {
        **dict.fromkeys(("endpoint", "api", "lengths", "arrival"), TEXT),
        "concurrency": COUNT,
        "rate": NUMBER,
        **dict.fromkeys(("requests", "failed", "cut", "input_tokens", "output_tokens"), COUNT),
        "seconds": POSITIVE,
        **dict.fromkeys(("requests_per_s", "output_tokens_per_s", "tokens_per_s"), NUMBER),
        **{
            f"{time}_ms_{of}": NUMBER
            for time in ("ttft", "tpot", "itl", "e2el")
            for of in ("mean", "p50", "p90", "p99")
        },
    },
}
#: What a row may have beside them: the spread of its replays, the router of a layer, the bounds of a
#: load and how many requests a second were within them, the time of every candidate of a choice.
OPTIONAL = {
    "p10_us": POSITIVE,
    "p90_us": POSITIVE,
    "router": TEXT,
    "tpot_ms_p99": NUMBER,
    "slo": TEXT,
    "goodput_per_s": NUMBER,
    "times_us": TIMES,
}


def environment(gpu: str, commit: str | None = None) -> dict[str, str]:
    """The fields that all rows of one run share. `gpu` is the Hardware's name."""
    import torch  # its own version string says more ("+cu130") than the package's

    return {
        "date": date.today().isoformat(),
        "commit": commit or commit_of_source(),
        "gpu": gpu,
        "driver": "none" if gpu == "cpu" else _driver(),
        "torch": str(torch.__version__),
        "triton": version("triton") or "none",
    }


def version(package: str) -> str | None:
    """Installed version without a local part, or None."""
    try:
        return metadata.version(package).split("+")[0]
    except metadata.PackageNotFoundError:
        return None


def make(bench: str, shared: Mapping[str, str], **fields) -> dict:
    """A checked row, its fields in the order of the tables above."""
    given = {**shared, "bench": bench, **fields}
    order = [*ALWAYS, *BENCHES.get(bench, ()), *OPTIONAL]
    row = {name: given[name] for name in order if name in given}
    row.update(given)
    check(row)
    return row


def faults(row: Mapping) -> list[str]:
    """What is wrong with a row: nothing, when it may be written."""
    bench = row.get("bench")
    if not isinstance(bench, str) or bench not in BENCHES:
        return [f"bench={bench!r} is not one of {', '.join(BENCHES)}"]
    needed = {**ALWAYS, **BENCHES[bench]}
    found = [f"{name} is missing" for name in needed if name not in row]
    for name, value in row.items():
        kind = needed.get(name) or OPTIONAL.get(name)
        if kind is None:
            found.append(f"{name} is not a field of bench {bench!r}")
        elif not _is(kind, value):
            found.append(f"{name}={value!r} is not a {kind}")
    return found


def check(row: Mapping) -> None:
    """Raises ExpertileError when the row must not be written."""
    found = faults(row)
    if found:
        raise ExpertileError(f"bad benchmark row: {'; '.join(found)}")


def write(path: str | Path, rows: Iterable[Mapping]) -> int:
    """Appends the rows, all or none of them; returns how many."""
    rows = list(rows)
    for row in rows:
        check(row)
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    except OSError as error:
        raise ExpertileError(f"{path} cannot be written: {error.strerror or error}") from None
    return len(rows)


def read(path: str | Path) -> list[dict]:
    """The rows of a file, checked; the error names the line."""
    rows = []
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a zero byte
        reason = getattr(error, "strerror", None) or f"it is no text ({getattr(error, 'reason', error)})"
        raise ExpertileError(f"{path} cannot be read: {reason}; give rows as `expertile bench` writes them") from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            found = faults(row) if isinstance(row, dict) else ["not an object"]
        except (ValueError, RecursionError) as error:
            found = [f"not JSON: {error}"]
        if found:
            raise ExpertileError(f"{path}:{number}: {'; '.join(found)}")
        rows.append(row)
    return rows


def default_path(shared: Mapping[str, str], what: str) -> Path:
    """benchmarks/results/<date>-<gpu>-<what>.jsonl"""
    gpu = "-".join(shared["gpu"].replace("/", " ").split())
    return Path("benchmarks") / "results" / f"{shared['date']}-{gpu}-{what}.jsonl"


def _is(kind: str, value) -> bool:
    if kind == TIMES:
        return isinstance(value, dict) and bool(value) and all(_is(POSITIVE, each) for each in value.values())
    if kind in (TEXT, MAYBE_EMPTY):
        return isinstance(value, str) and bool(value or kind == MAYBE_EMPTY)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return False
    if kind == COUNT:
        return isinstance(value, int) and value >= 0
    return value > 0 if kind == POSITIVE else value >= 0


def commit_of_source() -> str:
    """Commit of the checkout this file is part of, "-dirty" when it was changed; else the installed version."""
    here = Path(__file__).resolve()
    if _output("git", "-C", str(here.parent), "ls-files", "--error-unmatch", here.name):
        return _output("git", "-C", str(here.parent), "describe", "--always", "--dirty", "--abbrev=12") or "unknown"
    return version("expertile") or "unknown"


def _driver() -> str:
    lines = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return lines[0].strip() if lines else "unknown"


def _output(*command: str) -> str:
    """What a command printed; nothing when it is not there or failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
