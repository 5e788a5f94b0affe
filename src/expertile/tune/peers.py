"""Other libraries' times out of benchmark rows, for tables that were measured without them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ..plans import Backend, Plan
from ..problem import Problem, named_problem
from . import tables

_IMPL = re.compile(r"(vllm|flashinfer)-(\d[\w.]*)-(\w+)")


def add(table: dict, rows: Iterable[Mapping]) -> int:
    """Puts the times of `experts` rows of other libraries beside the entries of their cells; returns how many.

    Where ours ran under the entry's plan in the same file and cell, a row's time is taken as a multiple of ours there,
    times the entry's; else as it is. Of several rows of a cell the last counts.
    """
    rows = list(rows)
    ours = {_cell(row): row for row in rows if row["bench"] == "experts" and row["impl"] == "expertile"}
    entries = {tables.key({**entry, "activation": ""}): entry for entry in table["entries"]}
    count = 0
    for row in rows:
        found = _IMPL.fullmatch(row["impl"])
        if row["bench"] != "experts" or not found:
            continue
        library, version, kind = found.groups()
        p = named_problem(row["problem"], row["tokens"], row["quant"])
        sizes = (p.hidden, p.inter, p.experts, p.top_k, p.label, p.activation.gated)
        entry = entries.get((*sizes, "", p.tokens, row["routing"]))
        backend = f"{library}-{kind}"
        if entry is None or backend not in [member.value for member in Backend]:
            continue
        beside = ours.get(_cell(row))
        drift = entry["time_us"] / beside["time_us"] if beside and beside["plan"] == _name(entry, p) else 1.0
        time_us = round(row["time_us"] * drift, 2)
        entry.setdefault("others", {})[backend] = {"time_us": time_us, "version": version}
        count += 1
    return count


def _name(entry: Mapping, problem: Problem) -> str:
    """The name of the entry's plan, as a row has it."""
    return tables.plan(entry, Plan(problem, "", Backend.TRITON, pdl=True)).name


def _cell(row: Mapping) -> tuple:
    return row["problem"], row["quant"], row["tokens"], row["routing"], row["gpu"]
