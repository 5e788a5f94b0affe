"""How well a table carries over to layers that it does not have: each of its layers is left out in turn; and what
today's choice loses where all candidates were measured (`expertile bench policy`).

Three ways to find tiles are compared: `fixed` (tiles.choose_tiles), `rows` (the nearest entry in rows an expert) and
`sizes` (by table.distance, as decide does). What is compared with the measured winner is the kind of product and the
token tile, and, where a plan of that kind was measured in the cell, what time it loses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..hardware import DEVICES, Hardware
from ..plans import GemmConfig, Stream
from ..problem import Problem, named_problem
from . import decide, table
from .candidates import candidates
from .histogram import UNIFORM
from .rules import tile_reasons
from .settings import DEFAULT, Settings
from .tiles import choose_tiles

WAYS = ("fixed", "rows", "sizes")


Kind = tuple[str, int]  # product, token tile


@dataclass(frozen=True)
class Found:
    """One cell, by one way. regret: time of that kind over the fastest, less 1; None where it was not measured."""

    cell: tuple
    way: str
    kind: Kind
    right: bool
    regret: float | None = None


def left_out(
    entries: Sequence[Mapping], hardware: Hardware, times: Mapping[tuple, Mapping[Kind, float]] | None = None
) -> list[Found]:  # fmt: skip
    """Each grouped entry that has another layer like it, with its layer left out, by each of WAYS.

    times   what measured_times makes: without it, of each cell only the winner's time is known
    """
    entries = [e for e in entries if e["stream"] == Stream.NO.value and e.get("routing", UNIFORM) == UNIFORM]
    times, found = times or measured_times(entries), []
    for entry in entries:
        problem = problem_of(entry)
        others = [e for e in entries if table.alike(e, problem) and table.sizes_of(e) != table.sizes_of(entry)]
        cell = cell_of(problem)
        for way in WAYS if others else ():
            kind = kind_of(_predict(way, problem, hardware, others)[0])
            regret = times[cell][kind] / min(times[cell].values()) - 1 if kind in times[cell] else None
            found.append(Found(cell, way, kind, kind == kind_of(GemmConfig(*entry["gemm1"])), regret))
    return found


def summary(found: Iterable[Found]) -> dict[str, dict]:
    """way -> {"cells", "right", "timed", "mean_regret", "worst_regret"}; of times only cells that all ways have."""
    found = list(found)
    timed = [{f.cell for f in found if f.way == way and f.regret is not None} for way in WAYS]
    common = set.intersection(*timed)
    made = {}
    for way in WAYS:
        of_way = [f for f in found if f.way == way]
        regrets = [f.regret for f in of_way if f.cell in common]
        made[way] = dict(
            cells=len(of_way), right=sum(f.right for f in of_way), timed=len(regrets),
            mean_regret=sum(regrets) / len(regrets) if regrets else None, worst_regret=max(regrets, default=None),
        )  # fmt: skip
    return made


def judged(found: Iterable[Mapping], settings: Settings = DEFAULT) -> list[tuple[Mapping, str, float | None]]:
    """(row, today's choice, its time over the fastest less 1) of each row of `bench policy` with all times.

    Of a cell that was measured more than once the last row counts. Only plans count that are candidates today; None
    where the choice was not measured.
    """
    rows = (r for r in found if r["bench"] == "policy" and r["impl"] == "expertile" and "times_us" in r)
    last = {tuple(row[name] for name in ("gpu", "problem", "quant", "routing", "tokens")): row for row in rows}
    made = []
    for row in last.values():
        hardware, routed = DEVICES[row["gpu"]], replace(settings, routing=row["routing"])
        static = row["quant"] == "fp8_tensor"
        problem = named_problem(row["problem"], row["tokens"], row["quant"], static_scale=static)
        chosen = decide(problem, hardware, None, routed)
        today = {plan.name for plan in (chosen, *candidates(problem, hardware, row["routing"]))}
        times = {name: us for name, us in row["times_us"].items() if name in today or not name.startswith("triton[")}
        us = times.get(chosen.name)
        made.append((row, chosen.name, us and us / min(times.values()) - 1))
    return made


def measured_times(entries: Iterable[Mapping], rows: Iterable[Mapping] = ()) -> dict[tuple, dict[Kind, float]]:
    """cell -> kind -> the least time_us: of a table's grouped winners, and of benchmark rows of uniform routing."""
    made: dict[tuple, dict[Kind, float]] = {}

    def add(problem: Problem, kind: Kind, time_us: float) -> None:
        cell = made.setdefault(cell_of(problem), {})
        cell[kind] = min(time_us, cell.get(kind, time_us))

    for entry in entries:
        add(problem_of(entry), kind_of(GemmConfig(*entry["gemm1"])), entry["time_us"])
    for row in rows:
        name = _TILE.match(str(row.get("plan", "")))
        if name and row["bench"] == "experts" and row.get("routing") == UNIFORM and "+pdl" in row["plan"]:
            problem = named_problem(row["problem"], row["tokens"], row["quant"])
            add(problem, (name[1], int(name[2])), row["time_us"])
    return made


_TILE = re.compile(r"triton\[(specialized|swap|plain)(?:-tma)?(?: g\d+)? (\d+)x")  # the name of a plan, up to its tile


def kind_of(tile: GemmConfig) -> Kind:
    return "specialized" if tile.specialized else "swap" if tile.swap else "plain", tile.block_m


def cell_of(problem: Problem) -> tuple:
    return (*table.key(problem), problem.tokens)


def problem_of(entry: Mapping) -> Problem:
    name = "{hidden},{inter},{experts},{top_k}".format(**entry)
    act = entry.get("activation") or ("silu" if entry["gated"] else "relu2")
    static = entry["label"] == "fp8_tensor"
    fields = {} if "/" in act or "=" in act else {"activation": act}
    return named_problem(name, entry["tokens"], entry["label"], static_scale=static, **fields)


def _predict(way: str, problem: Problem, hardware: Hardware, others: Sequence[Mapping]):
    if way == "fixed":
        return choose_tiles(problem, hardware)
    weights = (0.0, 0.0) if way == "rows" else (table.HIDDEN_WEIGHT, table.INTER_WEIGHT)
    near = min(others, key=lambda e: table.distance(e, problem, weights))
    tiles = GemmConfig(*near["gemm1"]), GemmConfig(*near["gemm2"])
    if any(tile_reasons(tile, problem, hardware) for tile in tiles):
        return choose_tiles(problem, hardware)
    return tiles


__all__ = ["Found", "judged", "left_out", "measured_times", "summary"]
