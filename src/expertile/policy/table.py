"""What was measured: for each device a JSON file of winners, looked up by problem and nearest in log(tokens).

    {"device": {"name", "sms", "memory_gib"}, "runs": [{"date", "driver", "torch", "triton", ...}], "entries": [...]}

One entry: {"hidden", "inter", "experts", "top_k", "label", "gated", "activation", "tokens", "routing", "gemm1": [fields
of GemmConfig in order], "gemm2": [...], "stream", "fuse_quant", "time_us", "run": its place in "runs", "others":
{backend: {"time_us", "version"}}}. `others` are other libraries' times in the same cell. Without "routing" it was
uniform, without "activation" any with as many halves; older files have one run as "measured_with".
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..errors import ShapeError
from ..plans import Backend, GemmConfig, Stream
from ..problem import Problem
from . import json_file
from .histogram import UNIFORM, mean_rows
from .json_values import Take, flag, one_of, size, taken, text, tile_in_order, time, wrong

#: How much a factor in hidden, and in inter, counts beside the same factor in rows an expert, where no entry has the
#: very sizes. With each layer of the H200's table left out in turn, its neighbours by this distance have the winner's
#: kind and token tile more often, and lose less time, than by rows alone or than fixed tiles (left_out.py).
HIDDEN_WEIGHT, INTER_WEIGHT = 0.25, 0.75
MOST_TRIED = 4


@dataclass(frozen=True)
class Entry:
    """A measured winner, as it counts for the problem that was looked up.

    exact      measured for these sizes; else for another problem with nearly as many rows an expert
    ends       (tokens, time_us) of the nearest measured on both sides of the problem's tokens; one when they are those
               very tokens, none beyond the first and the last
    others     (backend, time over ours, version): at the problem's tokens, between the ends in log(tokens)
    """

    tokens: int
    gemm1: GemmConfig
    gemm2: GemmConfig
    stream: Stream
    fuse_quant: bool
    time_us: float
    exact: bool
    routing: str = UNIFORM
    sizes: tuple[int, int, int, int] = (0, 0, 0, 0)
    ends: tuple[tuple[int, float], ...] = ()
    others: tuple[tuple[Backend, float, str], ...] = ()

    @property
    def source(self) -> str:
        return f"T={self.tokens}" if self.exact else f"another problem at T={self.tokens}"


@lru_cache(maxsize=8)
def load(device: str) -> dict:
    """The shipped table of that device; an empty one where none was measured."""
    path = files("expertile.policy") / "tables" / f"{device}.json"
    return json.loads(path.read_text()) if path.is_file() else {"entries": []}


@lru_cache(maxsize=32)
def load_file(path: str) -> dict:
    """A table that `expertile tune` wrote; ShapeError names a file that is none."""
    return read_file(Path(path))


def read_file(path: Path) -> dict:
    """The same as the file is now."""
    found = json_file.read(path, "table")
    if not isinstance(found.get("entries"), list):
        raise ShapeError(f"table {path} has no list of entries: give a file that `expertile tune` wrote")
    for name, kind in (("device", dict), ("runs", list)):
        if not isinstance(found.get(name, kind()), kind):
            raise wrong(f"table {path}: {name}", found[name], "give a file that `expertile tune` wrote")
    for place, entry in enumerate(found["entries"]):
        where = f"table {path}: entries[{place}]"
        taken(entry, _OF_ENTRY, f"{where}.", more=("run",))
        if missing := [name for name in _OF_ENTRY if name not in entry and name not in _MAY_LACK]:
            raise wrong(where, entry, f"it has no {missing[0]}")
    return found


def _others(value: Any, where: str) -> None:
    """Other libraries' times: each is called what its Backend is."""
    taken(value, {each.value: _other for each in Backend}, f"{where}.")


def _other(value: Any, where: str) -> None:
    kinds: dict[str, Take] = {"time_us": time, "version": text}
    if taken(value, kinds, f"{where}.").keys() != kinds.keys():
        raise wrong(where, value, "give time_us and version")


_OF_ENTRY: dict[str, Take] = {
    **dict.fromkeys(("hidden", "inter", "experts", "top_k", "tokens"), size),
    **dict.fromkeys(("label", "activation", "routing"), text),
    **dict.fromkeys(("gated", "fuse_quant"), flag),
    **dict.fromkeys(("gemm1", "gemm2"), tile_in_order),
    "stream": one_of(Stream),
    "time_us": time,
    "others": _others,
}
_MAY_LACK = ("activation", "routing", "others")


def tables(device: str, paths: tuple[str, ...] = ()) -> list[dict]:
    """The tables that count on a device, in the order in which they do: files for another device are left out."""
    own = [load_file(path) for path in paths]
    return [found for found in own if found.get("device", {}).get("name", device) == device] + [load(device)]


def key(problem: Problem) -> tuple:
    return (problem.hidden, problem.inter, problem.experts, problem.top_k, problem.label, problem.activation.gated)


def sizes_of(entry: Mapping) -> tuple[int, int, int, int]:
    return (entry["hidden"], entry["inter"], entry["experts"], entry["top_k"])


def alike(entry: Mapping, problem: Problem) -> bool:
    """Weights of as many bits, with a gate or both without: tiles carry over. Formats of fp8 differ in scales only."""
    fp8 = entry["label"].startswith("fp8_") and problem.label.startswith("fp8_")
    return (fp8 or entry["label"] == problem.label) and entry["gated"] == problem.activation.gated


def same(entry: Mapping, problem: Problem) -> bool:
    """Measured for this very layer, at some number of tokens."""
    return (
        alike(entry, problem)
        and entry["label"] == problem.label
        and sizes_of(entry) == key(problem)[:4]
        and problem.total_experts == problem.experts
        and entry.get("activation") in (None, problem.activation.name)
    )


def distance(
    entry: Mapping, problem: Problem, weights: tuple[float, float] = (HIDDEN_WEIGHT, INTER_WEIGHT),
    rows: float | None = None,
) -> float:  # fmt: skip
    """How far an entry of another layer is: in log of rows an expert, of hidden and of inter.

    rows   an expert's, where they are not rows_per_expert: under skewed routing most rows are at experts with more
    """
    there = entry["tokens"] * entry["top_k"] / entry["experts"]
    hidden, inter = (abs(math.log(entry[name] / getattr(problem, name))) for name in ("hidden", "inter"))
    return abs(math.log(there / (rows or problem.rows_per_expert))) + weights[0] * hidden + weights[1] * inter


Able = Callable[[Entry], bool]


def nearest(
    problem: Problem, device: str, routing: str = UNIFORM, paths: tuple[str, ...] = (), able: Able = lambda entry: True
) -> Entry | None:  # fmt: skip
    """The entry for these sizes nearest in log T; else, of like weights, the grouped one nearest by `distance`.

    Entries that were measured with this routing come first, then those with uniform. Streamed ones are no guide to
    other sizes: whether to stream hangs on the very sizes.
    able   whether an entry's tiles can run the problem: of the MOST_TRIED nearest the first that can is taken, or the
           nearest where none can
    """
    if problem.tokens == 0:
        return None
    members, pool = _of_these_sizes(problem.with_tokens(1), routing, _Tables(tables(device, paths)))
    if members:
        return _exact(problem, members, able)
    rows = math.sqrt(problem.rows_per_expert * mean_rows(problem, routing))  # half thick experts, half the others
    return _first(sorted(pool, key=lambda e: distance(e, problem, rows=rows)), able, lambda e: _entry(e, False))


class _Tables(tuple):
    """Tables that are the same when they are the same objects: what they hold is not compared."""

    def __hash__(self) -> int:
        return hash(tuple(map(id, self)))

    def __eq__(self, other) -> bool:
        return len(self) == len(other) and all(mine is its for mine, its in zip(self, other, strict=True))


@lru_cache(maxsize=256)
def _of_these_sizes(problem: Problem, routing: str, found: _Tables) -> tuple[list, list]:
    """(entries of this layer with the routing that comes first, else nothing; grouped ones of all like it). Its tokens
    do not matter: a server asks for every number of them."""
    for wanted in dict.fromkeys((routing, UNIFORM)):
        for one in found:
            members = [e for e in one["entries"] if e.get("routing", UNIFORM) == wanted and same(e, problem)]
            if members:
                return members, []
    return [], [e for one in found for e in one["entries"] if alike(e, problem) and _grouped(e)]


def _first(members: list[dict], able: Able, make: Callable[[dict], Entry]) -> Entry | None:
    made = [make(entry) for entry in members[:MOST_TRIED]]
    return next((entry for entry in made if able(entry)), made[0] if made else None)


def _grouped(entry: Mapping) -> bool:
    return entry["stream"] == Stream.NO.value and entry.get("routing", UNIFORM) == UNIFORM


def _exact(problem: Problem, members: list[dict], able: Able) -> Entry | None:
    def off(entry: dict) -> float:
        return abs(math.log(entry["tokens"] / problem.tokens))

    nearby = sorted(members, key=off)
    low = max((e for e in members if e["tokens"] <= problem.tokens), key=lambda e: e["tokens"], default=None)
    high = min((e for e in members if e["tokens"] >= problem.tokens), key=lambda e: e["tokens"], default=None)
    if low is None or high is None:
        return _first(nearby, able, lambda e: _entry(e, True))
    others = {}
    for name in low.get("others", {}).keys() & high.get("others", {}).keys():
        ends = low["others"][name], high["others"][name]
        if ends[0]["version"] == ends[1]["version"]:
            ratios = [end["time_us"] / e["time_us"] for end, e in zip(ends, (low, high), strict=True)]
            others[name] = (between(problem.tokens, low["tokens"], high["tokens"], *ratios), ends[0]["version"])
    cells = dict.fromkeys((end["tokens"], end["time_us"]) for end in (low, high))
    return _first(nearby, able, lambda e: _entry(e, True, tuple(cells), others))


def between(at: int, low: int, high: int, first: float, second: float) -> float:
    """The straight line between two points of a double logarithmic plot.

    >>> round(between(2, 1, 4, 10.0, 40.0), 6)
    20.0
    """
    if low == high:
        return first
    part = math.log(at / low) / math.log(high / low)
    return first * (second / first) ** part


def _entry(entry: dict, exact: bool, ends=(), others=None) -> Entry:
    return Entry(
        entry["tokens"],
        GemmConfig(*entry["gemm1"]),
        GemmConfig(*entry["gemm2"]),
        Stream(entry["stream"]),
        entry["fuse_quant"],
        entry["time_us"],
        exact,
        entry.get("routing", UNIFORM),
        sizes_of(entry),
        ends,
        tuple((Backend(name), ratio, version) for name, (ratio, version) in sorted((others or {}).items())),
    )
