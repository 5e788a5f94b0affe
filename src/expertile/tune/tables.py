"""Measured cells -> entries of a table, and tables -> files. Which entry wins is decided here, noise included."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path

from ..errors import ExpertileError, ShapeError
from ..plans import Backend, GemmConfig, Plan, Stream
from ..policy.histogram import UNIFORM
from ..policy.table import read_file

MARGIN = 0.01  # a challenger must be this much faster at least than what is kept without it
MOST_NOISE = 0.05
KEY = ("hidden", "inter", "experts", "top_k", "label", "gated", "activation", "tokens", "routing")


def winner(plans: Sequence[Plan], measured: Mapping[str, Mapping], incumbent: str | None = None) -> Plan | None:
    """The plan that a table should have: the fastest, unless it beats a safer one by no more than noise.

    The safer one is what an earlier run found (incumbent), else the plan without a table, plans[0]. Noise is half the
    spread between a plan's tenth and ninetieth percentile, of both, from 1 to 5 %.
    measured   plan name -> time_us, p10_us, p90_us
    """
    ours = {plan.name: plan for plan in plans if plan.backend is Backend.TRITON and plan.name in measured}
    if not ours:
        return None
    best = min(ours, key=lambda name: measured[name]["time_us"])
    for safe in (incumbent, plans[0].name):
        if safe in ours:
            least = measured[safe]["time_us"] / (1 + _noise(measured[safe], measured[best]))
            return ours[best if measured[best]["time_us"] < least else safe]
    return ours[best]


def _noise(*lines: Mapping) -> float:
    spread = [(line.get("p90_us", 0.0) - line.get("p10_us", 0.0)) / line["time_us"] / 2 for line in lines]
    return min(max(MARGIN, *spread), MOST_NOISE)


def entry(plan: Plan, measured: Mapping[str, Mapping], versions: Mapping[str, str], run: int = 0) -> dict:
    """A table's entry for the plan's problem, with the times of other libraries in the same cell.

    versions   backend -> the version that was measured
    """
    p = plan.problem
    others = {
        name: {"time_us": round(measured[name]["time_us"], 2), "version": versions[name]}
        for name in sorted(measured)
        if name in versions
    }
    return dict(
        hidden=p.hidden, inter=p.inter, experts=p.experts, top_k=p.top_k, label=p.label, gated=p.activation.gated,
        activation=p.activation.name, tokens=p.tokens, routing=plan.routing, gemm1=list(astuple(plan.gemm1)),
        gemm2=list(astuple(plan.gemm2)), stream=plan.stream.value, fuse_quant=plan.fuse_quant,
        time_us=round(measured[plan.name]["time_us"], 2), run=run, **({"others": others} if others else {}),
    )  # fmt: skip


def read(path: Path) -> dict:
    """A table, in today's form whatever its age; empty where there is no file."""
    if not path.is_file():
        return {"device": {}, "runs": [], "entries": []}
    found = read_file(path)
    runs = found.get("runs") or [found.get("measured_with", {})]
    return {"device": found.get("device", {}), "runs": runs, "entries": found["entries"]}


def key(entry: Mapping) -> tuple:
    """What two entries that replace one another have in common. Older ones say no activation, and uniform routing."""
    defaults = {"activation": "", "routing": UNIFORM}
    return tuple(entry.get(name, defaults.get(name)) for name in KEY)


def check_device(path: Path, table: Mapping, device: Mapping) -> None:
    """ShapeError where the table holds another device's entries."""
    for name, value in device.items():
        if table["device"].get(name, value) != value:
            was = table["device"][name]
            raise ShapeError(f"{path} was measured on {name}={was!r}, this is {value!r}: give another --out")


def write(path: Path, entries: Sequence[Mapping], run: Mapping[str, str], device: Mapping | None = None) -> None:
    """Adds entries of one run to a table; one for the same layer, tokens and routing replaces the old.

    run      date, driver and versions that they were measured with
    device   name, sms, memory_gib. ShapeError where the file holds another device's
    """
    if not entries:
        raise ExpertileError(f"nothing was measured: {path} is left as it is")
    old = read(path)
    check_device(path, old, device or {})
    runs = [*old["runs"]] if dict(run) in old["runs"] else [*old["runs"], dict(run)]
    place = runs.index(dict(run))
    merged = {key(each): each for each in old["entries"]}
    for each in entries:
        merged.pop((*key(each)[:6], "", *key(each)[7:]), None)  # an older one that says no activation
        merged[key(each)] = {**each, "run": place}
    entries = [merged[each] for each in sorted(merged)]
    save(path, {"device": {**old["device"], **(device or {})}, "runs": runs, "entries": entries})


def save(path: Path, table: Mapping) -> None:
    """The table as a file, an entry a line."""
    body = ",\n    ".join(json.dumps(entry) for entry in table["entries"])
    head = f'"device": {json.dumps(table["device"])},\n  "runs": {json.dumps(table["runs"])}'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{\n  {head},\n  "entries": [\n    {body}\n  ]\n}}\n', encoding="utf-8")


def plan(entry: Mapping, base: Plan) -> Plan:
    """The entry's plan for the problem of `base`."""
    return replace(
        base,
        gemm1=GemmConfig(*entry["gemm1"]),
        gemm2=GemmConfig(*entry["gemm2"]),
        stream=Stream(entry["stream"]),
        fuse_quant=entry["fuse_quant"],
    )


def find(table: Mapping, plan: Plan) -> dict | None:
    """The table's entry for the plan's problem and routing, or None."""
    p = plan.problem
    sizes = (p.hidden, p.inter, p.experts, p.top_k, p.label, p.activation.gated)
    wanted = {(*sizes, name, p.tokens, plan.routing) for name in (p.activation.name, "")}
    return next((each for each in table["entries"] if key(each) in wanted), None)
